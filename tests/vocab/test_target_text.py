"""Targets keep their text: what a model has learned to write is what its references have, in any language."""

import io
import random
import sys
from typing import NamedTuple

import pytest
import sentencepiece

from flaxformer_mt.config import VocabConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocab, Vocabs, load_vocabs, make_vocabs
from flaxformer_mt.vocab.model_file import read_pieces, read_settings
from flaxformer_mt.vocab.vocabulary import leave_out_invisible

NBSP, NARROW, IDEOGRAPHIC, ZWNJ, ZWSP, RLM = "\u00a0", "\u202f", "\u3000", "\u200c", "\u200b", "\u200f"

# Words, what separates them, and the ends of sentences, with the characters that normalization replaces.
LANGUAGES = {
    "th": ("ทำ น้ำ คำ ทำงาน จำนวน ๑๒ กำลัง บ้าน ไม่ ที่ สำคัญ และ".split(), ["", " ", ZWSP], ["", "ฯลฯ", " ๆ"]),
    "ja": (
        "私 は ﾃｽﾄ カタカナ ２０２４年 「東京」 へ 行きます ㈱ 〜 Ａ 神\ufe00 ﬁ".split(),
        ["", "、", IDEOGRAPHIC],
        ["。", "！", "？"],
    ),
    "zh": (
        "我们 （北京） ２０ ％ 中国，人民 说：“好” 《红楼梦》 ； 喜欢 ｗｔｏ".split(),
        ["", "，", IDEOGRAPHIC],
        ["。", "！", "……"],
    ),
    "fa": (
        f"می{ZWNJ}خواهم کتاب{ZWNJ}ها را خانه{ZWNJ}ای ﷼ ۱۲۳ ك ي ی آن «بله» ﻻ".split(),
        [" ", " ", f" {RLM}", "، "],
        [".", "؟", "…"],
    ),
    "lo": ("ຂ້ອຍ ນໍ້າ ນ້ຳ ຄຳ ທຳ ໜູ ໝາ ຫນ ຫມ ສຳຄັນ ໑໒".split(), ["", " ", ZWSP], ["", "ໆ", "ຯ"]),
    "fr": (
        f"l’été «{NARROW}oui{NARROW}» 10{NARROW}000 cœur n°{NBSP}3 1ᵉʳ ½ m² Ça où naïf ﬂeur".split(" "),
        [" "],
        [f"{NARROW}!", f"{NARROW}?", f"{NBSP}:", "…"],
    ),
    "de": (
        f"Straße „Häuser“ 5{NBSP}€ x² ½ … Über–all Kauf\u00adhaus ﬁnden 20{NARROW}% ẞ n° ‚so‘".split(" "),
        [" "],
        [".", "!", "…"],
    ),
}


class Pair(NamedTuple):
    source: str
    target: str


def make_lines(language: str, number: int) -> list[str]:
    words, separators, ends = LANGUAGES[language]
    rng = random.Random(language)
    lines = []
    for _ in range(number):
        chosen = rng.choices(words, k=rng.randint(2, 12))
        text = chosen[0] + "".join(rng.choice(separators) + word for word in chosen[1:])
        lines.append(text + rng.choice(ends))
    return lines


def make_pairs(language: str, number: int = 500) -> list[Pair]:
    lines = make_lines(language, number)
    return [Pair(f"the house number {i} of ﬁve", line) for i, line in enumerate(lines)]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("joint", [True, False])
def test_no_line_is_lost(language, joint, tmp_path):
    pairs = make_pairs(language)
    vocabs = make_vocabs(
        VocabConfig(size=360, source_size=None if joint else 290, joint=joint), pairs, tmp_path
    )
    texts = [pair.target for pair in pairs]
    assert [vocabs.target.detokenize(ids) for ids in vocabs.target.tokenize_all(texts)] == texts
    # The fault that this is about: the same lines, normalized.
    normalized = make_vocabs(
        VocabConfig(size=360, target_normalization="nmt_nfkc"), pairs, tmp_path / "normalized"
    ).target
    lost = sum(
        normalized.detokenize(ids) != text
        for text, ids in zip(texts, normalized.tokenize_all(texts), strict=True)
    )
    assert lost > 250, lost
    # Sources are normalized, where each way to write a word should be the same to the model.
    assert vocabs.source.tokenize("ﬁve\u00adfold") == vocabs.source.tokenize("fivefold")
    assert vocabs.source.detokenize(vocabs.source.tokenize("น้ำ ２０")) == "น้ํา 20"  # NFKC, as Unicode has it


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "word"])
def test_every_character_survives(kind, tmp_path):
    sizes = {"bpe": 330, "unigram": 330, "char": 0, "word": 300}
    pairs = make_pairs("de", 60)
    target = make_vocabs(VocabConfig(kind=kind, size=sizes[kind]), pairs, tmp_path).target
    characters = [chr(c) for c in range(1, sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    texts = [f"a{''.join(characters[start : start + 50])}b" for start in range(0, len(characters), 50)]
    # A translation is one line, and SentencePiece spells a space as U+2581.
    table = str.maketrans("\n\r\u2581", "   ")
    back = [target.detokenize(ids) for ids in target.tokenize_all(texts)]
    assert back == [" ".join(filter(None, text.translate(table).split(" "))) for text in texts]


def test_white_space(tmp_path):
    """Runs of U+0020 become one, those at the ends go, and every other space is a letter of targets."""
    vocabs = make_vocabs(VocabConfig(size=360), make_pairs("fr"), tmp_path)
    target, source = vocabs.target, vocabs.source

    def back(vocab: Vocab, text: str) -> str:
        return vocab.detokenize(vocab.tokenize(text))

    for text in ("  un   deux ", "un deux", " un deux   "):
        assert back(target, text) == back(source, text) == "un deux"
    for space in (NBSP, NARROW, IDEOGRAPHIC, "\u2009", "\t"):
        assert back(target, f"un{space}deux{space}{space}trois") == f"un{space}deux{space}{space}trois"
        assert back(target, f"{space}un{space}") == f"{space}un{space}"
        assert back(source, f"{space}un{space}{space}deux{space}") == "un deux"
    assert target.tokenize("") == target.tokenize("  ") == [target.eos_id]


def test_pieces_are_those_of_sentencepiece_for_the_same_text(tmp_path):
    """The rules are put into a model after its training, which changes no piece."""
    pairs = [Pair(line, line) for line in make_lines("de", 300)]
    config = VocabConfig(size=330, joint=False, symbols=("<BT>",))
    vocabs = make_vocabs(config, pairs, tmp_path / "ours")
    rules = tmp_path / "rules.tsv"
    plain = sentencepiece.SentencePieceNormalizer(rule_name="nmt_nfkc")
    rules.write_text(
        "".join(
            "\t".join(" ".join(f"{ord(character):X}" for character in text) for text in rule) + "\n"
            for rule in leave_out_invisible(plain.Decompile()).items()
        )
    )
    for side, options in (
        ("source", {"normalization_rule_tsv": str(rules)}),
        ("target", {"normalization_rule_name": "identity"}),
    ):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([pair.source for pair in pairs]),
            model_writer=model,
            vocab_size=330,
            model_type="bpe",
            byte_fallback=True,
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            user_defined_symbols=["<BT>"],
            minloglevel=3,
            **options,
        )
        theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        ours = (tmp_path / "ours" / f"{side}.model").read_bytes()
        assert read_pieces(ours) == read_pieces(model.getvalue())
        texts = [*(pair.source for pair in pairs[:50]), "<BT> Kauf\u00adhaus ２０ ﬁ\u00a0x"]
        assert [ids[:-1].tolist() for ids in getattr(vocabs, side).tokenize_all(texts)] == theirs.encode(
            texts
        )


def test_a_joint_vocabulary_has_one_list_of_pieces_and_two_normalizations(tmp_path):
    vocabs = make_vocabs(VocabConfig(size=360), make_pairs("de"), tmp_path)
    assert vocabs.joint and vocabs.source.pieces(range(360)) == vocabs.target.pieces(range(360))
    names = {
        side: read_settings((tmp_path / f"{side}.model").read_bytes()).normalization
        for side in ("source", "target")
    }
    assert names == {"source": "nmt_nfkc", "target": "identity"}
    again = load_vocabs(tmp_path)
    assert again.joint and again.target.fingerprint == vocabs.target.fingerprint
    # Both files given to another run are the same vocabulary; one of them serves both languages.
    files = {f"{side}_model": str(tmp_path / f"{side}.model") for side in ("source", "target")}
    given = make_vocabs(VocabConfig(size=0, **files), [], tmp_path / "given")
    assert given.joint and given.source.fingerprint == vocabs.source.fingerprint
    assert given.target.fingerprint == vocabs.target.fingerprint
    one = make_vocabs(VocabConfig(source_model=files["source_model"]), [], tmp_path / "one")
    assert one.source is one.target and one.joint
    other = make_vocabs(VocabConfig(size=350), make_pairs("de"), tmp_path / "other")
    assert isinstance(other, Vocabs)
    files["target_model"] = str(tmp_path / "other" / "target.model")
    with pytest.raises(UserError, match="different pieces, but vocab.joint is True"):
        make_vocabs(VocabConfig(**files), [], tmp_path / "both")


def test_two_vocabularies_of_equal_texts_stay_two(tmp_path):
    pairs = [Pair(line, line) for line in make_lines("de", 300)]
    config = VocabConfig(size=330, joint=False)
    assert not make_vocabs(config, pairs, tmp_path).joint
    assert not make_vocabs(config, [], tmp_path).joint


def test_a_language_model_has_one_model_that_keeps_its_text(tmp_path):
    pairs = [Pair("", line) for line in make_lines("th", 300)]
    vocabs = make_vocabs(VocabConfig(size=330), pairs, tmp_path, target_only=True)
    assert [path.name for path in tmp_path.iterdir()] == ["joint.model"]
    assert vocabs.target.detokenize(vocabs.target.tokenize("น้ำ")) == "น้ำ"
