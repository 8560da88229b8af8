"""Targets keep their text, and characters that nobody sees change no token of sources."""

import dataclasses
import io
import random
import sys

import numpy as np
import pytest
import sentencepiece

from flaxformer_mt.config import VocabConfig
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.data.corpus_diagnostics import describe_lost_text, find_lost_text
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocab, Vocabs, load_vocabs, make_vocabs
from flaxformer_mt.vocab.model_file import read_pieces, read_settings
from flaxformer_mt.vocab.sentencepiece_vocab import leave_out_invisible
from flaxformer_mt.vocab.words_of_pieces import number_pieces

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


def train_model(texts: list[str], size: int, **options) -> bytes:
    model, ids = io.BytesIO(), {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
    options |= ids | {"model_type": "bpe", "byte_fallback": True, "vocab_size": size, "minloglevel": 3}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, **options)
    return model.getvalue()


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
    characters.remove("\ufffd")  # which stands for bytes that are no character
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
        model = train_model([pair.source for pair in pairs], 330, user_defined_symbols=["<BT>"], **options)
        theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
        ours = (tmp_path / "ours" / f"{side}.model").read_bytes()
        assert read_pieces(ours) == read_pieces(model)
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
    with pytest.raises(UserError, match="different subwords, but vocab.joint is True"):
        make_vocabs(VocabConfig(**files), [], tmp_path / "both")


def test_two_vocabularies_of_equal_texts_stay_two(tmp_path):
    pairs = [Pair(line, line) for line in make_lines("de", 300)]
    config = VocabConfig(size=330, joint=False)
    assert not make_vocabs(config, pairs, tmp_path).joint
    assert not make_vocabs(config, [], tmp_path).joint


# ---- invisible characters ----
# Soft hyphen, Arabic letter mark, zero-width space, marks of direction; word joiner, isolates, byte order.
NOBODY_SEES = (
    "\u00ad\u061c\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff"
)
RULES = ("nfkc", "nmt_nfkc", "nmt_nfkc_cf")


PAIRS = [Pair(f"der Hund sieht {i} Häuser", f"the dog sees {i} houses") for i in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vocabs")


@pytest.fixture(scope="module")
def vocabs(folder) -> dict[str, Vocab]:
    """One joint vocabulary for each normalization."""
    return {
        name: make_vocabs(VocabConfig(size=330, normalization=name), PAIRS, folder / name).source
        for name in (*RULES, "identity")
    }


@pytest.mark.parametrize("name", RULES)
def test_tokens_are_those_of_the_text_without_them(vocabs, name):
    vocab, plain = vocabs[name], "der Hund sieht Häuser"
    for mark in NOBODY_SEES:
        for text in (
            *(f"{mark}der Hund sieht Häuser", f"der Hu{mark}nd sieht Häuser"),
            *(f"der{mark} Hund {mark} sieht {mark}Häuser", f"der Hund sieht Häuser{mark}"),
            *(f"{mark} {mark}der Hund sieht Häuser {mark}",),
        ):
            assert vocab.tokenize(text) == vocab.tokenize(plain), ascii(text)
        assert vocab.tokenize(mark) == vocab.tokenize(f" {mark}{mark}") == [vocab.eos_id]
    # In training too, and where a text is segmented at random.
    marked = [plain.replace("u", f"u{mark}") for mark in NOBODY_SEES]
    sampled = vocab.tokenize_all(marked, sampling=0.3, seed=4)
    expected = vocab.tokenize_all([plain] * len(marked), sampling=0.3, seed=4)
    assert all(map(np.array_equal, sampled, expected))
    assert any(not np.array_equal(one, sampled[0]) for one in sampled)


@pytest.mark.parametrize("name", RULES)
def test_joiners_are_letters(vocabs, name):
    """SentencePiece makes the first of them a space, which is a spelling mistake in Persian."""
    for text in ("می\u200cخواهم", "क्\u200dष", "👩\u200d👧"):
        assert vocabs[name].detokenize(vocabs[name].tokenize(text)) == text


@pytest.mark.parametrize("name", RULES)
def test_all_other_characters_and_sequences_are_those_of_sentencepiece(folder, vocabs, name):
    assert vocabs[name]  # written
    model = (folder / name / "source.model").read_bytes()
    ours = sentencepiece.SentencePieceProcessor(model_proto=model)
    theirs = sentencepiece.SentencePieceNormalizer(rule_name=name)
    singles = [chr(c) for c in (*range(1, 0xD800), *range(0xE000, 0x30000)) if c != 0x2581]
    sequences = [text for text, _ in theirs.Decompile()]
    assert len(sequences) > 100_000
    texts = (*singles, *sequences)
    differing = {text for text in texts if ours.normalize(f"a{text}b") != theirs.Normalize(f"a{text}b")}
    joiners = set("\u200c") if name != "nfkc" else set()
    operators = {chr(c) for c in (*range(0x2061, 0x2065), *range(0x206A, 0x2070))}
    assert differing == {*NOBODY_SEES, *operators, *joiners}


def test_a_vocabulary_has_the_name_of_its_rules_and_no_path(folder, vocabs):
    for name in vocabs:
        file = "joint.model" if name == "identity" else "source.model"
        model = (folder / name / file).read_bytes()
        assert read_settings(model).normalization == name
        assert b".tsv" not in model


def test_a_vocabulary_of_an_earlier_version_keeps_its_rules(tmp_path):
    """What a run has trained with stays: its vocabulary has the rules in it."""
    texts = [pair.source for pair in PAIRS]
    vocab = Vocab(train_model(texts, 320, normalization_rule_name="nmt_nfkc"))
    Vocabs(vocab, vocab, joint=True).save(tmp_path)
    found = make_vocabs(dataclasses.replace(VocabConfig(), size=320), [], tmp_path).source
    assert found.tokenize("Hu\u200bnd") == found.tokenize("Hu nd") != found.tokenize("Hund")
    assert found.detokenize(found.tokenize("Hu\u00adnd")) == "Hu\u00adnd"


@pytest.mark.parametrize("name", RULES)
def test_words_keep_their_numbers(vocabs, name):
    """Alignments and markup count the words of the text as it was given, white space between them."""
    vocab = vocabs[name]
    text = "der\u2060 Hu\u00adnd \u200b sieht\ufeff \u202aHäuser\u202c"
    ids = np.array(vocab.tokenize(text)[:-1])
    numbers = number_pieces(vocab, ids, text)
    spelled = {number: "" for number in numbers}
    for piece, number in zip(vocab.pieces(ids), numbers, strict=True):
        spelled[number] += piece.replace("\u2581", "")
    case = str.casefold if name.endswith("_cf") else str
    assert spelled == {0: case("der"), 1: case("Hund"), 3: case("sieht"), 4: case("Häuser")}


# ---- lost text ----
LINES = ["ทำงาน ที่  บ้าน ", "ไม่ มี", "น้ำ กำลัง", "ที่ นี่"] * 25


@pytest.fixture
def vocab_of(tmp_path):
    def make(**fields):
        pairs = [Pair("a b c d", line) for line in LINES]
        return make_vocabs(VocabConfig(**{"size": 290, **fields}), pairs, tmp_path / str(fields)).target

    return make


def test_nothing_is_lost_by_default(vocab_of):
    report = find_lost_text([Pair("", line) for line in (*LINES, "何\u00a0か")], vocab_of())
    assert report == {"lines": 101, "lost": 0, "characters": [], "examples": []}
    assert describe_lost_text(report) == describe_lost_text(None) == []


def test_what_a_normalization_replaces_is_named(vocab_of):
    """NFKC decomposes U+0E33, says Unicode, into U+0E4D U+0E32."""
    vocab = vocab_of(target_normalization="nmt_nfkc")
    report = find_lost_text([Pair("", line) for line in LINES], vocab)
    assert (report["lines"], report["lost"]) == (100, 50)
    assert report["characters"] == [{"character": "U+0E33 THAI CHARACTER SARA AM", "lines": 50}]
    assert report["examples"][1] == {"number": 3, "text": "น้ำ กำลัง", "back": "น้ํา กําลัง"}
    (warning,) = describe_lost_text(report)
    assert "50 of 100 targets of the validation set (50.0%)" in warning
    assert "U+0E33 THAI CHARACTER SARA AM (50)" in warning and "target_normalization=identity" in warning


def test_unknown_characters_are_lost(vocab_of):
    vocab = vocab_of(byte_fallback=False, size=40)
    report = find_lost_text([Pair("", "ที่ นี่"), Pair("", "ที่ Ω")], vocab)
    assert report["lost"] == 1
    assert report["characters"] == [{"character": "U+03A9 GREEK CAPITAL LETTER OMEGA", "lines": 1}]


def test_of_many_lines_some_are_looked_at(vocab_of):
    report = find_lost_text([Pair("", "ที่ นี่")] * 12_000, vocab_of())
    assert report["lines"] == 5000
