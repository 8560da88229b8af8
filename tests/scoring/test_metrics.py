"""Scores against values worked out by hand."""

import math
import sys

import pytest

from flaxformer_mt.config import Config
from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.scoring import bleu_tokenizers
from flaxformer_mt.scoring.bleu_tokenizers import choose_tokenizer
from flaxformer_mt.scoring.metrics import score_sentences, score_translations
from flaxformer_mt.scoring.significance import ResamplingOptions, resample_scores

JAPANESE = "彼は東京で本を読んだ。", "彼は京都で本を読んだ。"
KOREAN = "그는 서울에서 책을 읽었다.", "그는 부산에서 책을 읽었다."


def test_bleu_by_hand():
    """Of 6 tokens 5 match, of 5 pairs 4, of 4 triples 3, of 3 fours 2; the reference is two tokens longer."""
    scores = score_translations(["a b c d e x"], ["a b c d e f g h"])
    expected = 100 * math.exp(1 - 8 / 6) * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** (1 / 4)
    assert scores["bleu"] == pytest.approx(expected, rel=1e-9)
    assert "83.3/80.0/75.0/66.7" in scores.bleu_detail
    assert "BP = 0.717 ratio = 0.750 hyp_len = 6 ref_len = 8" in scores.bleu_detail


def test_case_and_tokenizer_count_and_are_signed():
    hypotheses, references = ["The Cat sat, on the mat."], ["the cat sat, on the mat."]
    cased = score_translations(hypotheses, references)
    uncased = score_translations(hypotheses, references, lowercase=True)
    assert cased["bleu"] < uncased["bleu"] == pytest.approx(100)
    assert cased["chrf"] < uncased["chrf"] == pytest.approx(100)
    assert "|case:mixed|" in cased.signatures["bleu"] and "|case:lc|" in uncased.signatures["bleu"]
    assert "|case:mixed|" in cased.signatures["chrf"] and "|case:lc|" in uncased.signatures["chrf"]
    assert "|tok:13a|" in cased.signatures["bleu"] and "|nc:6|nw:0|" in cased.signatures["chrf"]
    assert cased.signatures["bleu"].startswith("nrefs:1|") and "|version:" in cased.signatures["bleu"]

    plain = score_translations(["a b c d, e"], ["a b c d , e"], tokenize="none")
    split = score_translations(["a b c d, e"], ["a b c d , e"], tokenize="13a")
    assert plain["bleu"] < split["bleu"] == pytest.approx(100)
    assert "|tok:none|" in plain.signatures["bleu"]


def test_tokenized_text_is_scored_without_a_word(caplog, capfd):
    score_translations(["a b c d ."] * 200, ["a b c d ."] * 200)
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def test_sets_that_cannot_be_scored():
    with pytest.raises(UserError, match="3 translations cannot be scored against 2 references"):
        score_translations(["a"] * 3, ["a"] * 2)
    with pytest.raises(UserError, match="no translations to score"):
        score_translations([], [])
    with pytest.raises(UserError, match="unknown BLEU tokenizer '13b'; known: 13a, intl, char"):
        score_translations(["a"], ["a"], tokenize="13b")


def score_ter(hypotheses, references):
    found = resample_scores({"": hypotheses}, references, ResamplingOptions(), only=["ter"])
    assert "case:lc|tok:tercom|" in found.plain_signatures["ter"]
    (scores,) = found.systems
    assert scores.keys() == {"ter"} and scores["ter"][1:] == (None, None, None)
    return scores["ter"].score


def test_edit_rate_by_hand():
    """One word is changed, one missing and a phrase of two is shifted: 3 edits for 8 words."""
    assert score_ter(["a b X d h f g"], ["a b c d f g h i"]) == pytest.approx(100 * 3 / 8)
    assert score_ter(["A b"], ["a B"]) == 0
    assert score_ter(["a b c", "d"], ["a b x", ""]) == pytest.approx(100 * 2 / 3)
    with pytest.raises(UserError, match="1 translations cannot be scored against 2 references"):
        score_ter(["a"], ["a", "b"])


def test_sentences_are_scored_by_themselves():
    hypotheses, references = ["the cat", "A dog", ""], ["the cat", "a dog", "a bird"]
    same, capital, empty = score_sentences("chrf", (), hypotheses, references)
    assert (same, empty) == (pytest.approx(100), 0) and 0 < capital < 100
    assert score_sentences("chrf", (), hypotheses, references, lowercase=True)[1] == pytest.approx(100)
    assert score_sentences("chrf", (), [], []) == []


def test_a_tokenizer_that_is_not_installed_is_named_with_its_package(monkeypatch):
    from sacrebleu.tokenizers import tokenizer_ja_mecab

    monkeypatch.setattr(tokenizer_ja_mecab, "MeCab", None)
    with pytest.raises(UserError, match=r"ja-mecab is not installed; .* pip install 'sacrebleu\[ja\]'"):
        score_translations(["あ"], ["あ"], tokenize="ja-mecab")


def hide_mecab(monkeypatch):
    for module in ("MeCab", "mecab_ko"):
        monkeypatch.setitem(sys.modules, module, None)
    for loaded in ("ja_mecab", "ko_mecab"):
        monkeypatch.delitem(sys.modules, f"sacrebleu.tokenizers.tokenizer_{loaded}", raising=False)


def test_the_tokenizer_follows_the_target_language(monkeypatch):
    warnings = []

    def choose(language, tokenize="auto"):
        return choose_tokenizer(language, tokenize, warn=warnings.append)

    assert [choose(code) for code in ("en", "de", "zh", "zh_CN", "cmn-Hans", "ZHO", "th")] == [
        *["13a"] * 2,
        *["zh"] * 4,
        "char",
    ]
    assert (choose("en", "none"), choose("zh", "char"), choose("de", "intl")) == ("none", "char", "intl")
    assert not warnings
    # What names a tokenizer for spaces is kept, with a warning.
    assert (choose("zh", "13a"), choose("ja", "intl"), choose("ko", "13a")) == ("13a", "intl", "13a")
    assert [text.split(";")[0].split(" is ")[1] for text in warnings] == [
        f"{tokenize}, which splits text at spaces, but the target language"
        for tokenize in ("13a", "intl", "13a")
    ]
    assert "--bleu_tokenize=auto), which is zh" in warnings[0]
    warnings.clear()
    # Without the libraries, by another name and by the language.
    hide_mecab(monkeypatch)
    assert (choose("ja"), choose("kor")) == ("char", "char")
    assert "of target language ja compares characters (char)" in warnings[0]
    assert "pip install 'sacrebleu[ja]'" in warnings[0] and "pip install 'sacrebleu[ko]'" in warnings[1]
    with pytest.raises(UserError, match="ja-mecab is not installed"):
        choose("en", "ja-mecab")
    with pytest.raises(UserError, match="unknown BLEU tokenizer 'auto'"):  # it is chosen before
        score_translations(["a"], ["a"], tokenize="auto")


@pytest.mark.parametrize(
    ("code", "text"),
    # The names of Tibetan, Dzongkha and Shan in these languages.
    [
        ("bo", "\u0f56\u0f7c\u0f51\u0f0b\u0f66\u0f90\u0f51\u0f0b"),
        ("dz", "\u0f62\u0fab\u0f7c\u0f44\u0f0b\u0f41\u0f0b"),
        ("shn", "\u1075\u1082\u103a\u1062\u1019\u103a\u1038\u1010\u1086\u1038"),
        ("khm_Khmr", ""),
        ("kac_Mymr", ""),
        ("lao", ""),
    ],
)
def test_languages_without_spaces_compare_characters(code, text):
    assert choose_tokenizer(code, "auto", references=[text], warn=pytest.fail) == "char"
    assert choose_tokenizer(code, "auto", warn=pytest.fail) == "char"


def test_sentences_without_spaces_are_compared_by_characters():
    """sacreBLEU's sentence scores with its tokenizer char; with 13a a sentence would be one wrong word."""
    from sacrebleu.metrics.bleu import BLEU

    pairs = (["ทำงานหนักมาก", "ไม่มีใคร"], ["ทำงานหนักมากๆ", "มีใครไหม"])
    char = BLEU(tokenize="char", effective_order=True)
    expected = [char.sentence_score(one, [other]).score for one, other in zip(*pairs, strict=True)]
    assert score_sentences("bleu", (), *pairs) == pytest.approx(expected) and min(expected) > 20
    # Chinese has sacreBLEU's zh, in which a number is a word: by characters a wrong one scores 80.7.
    number = ["总数为 1234568。"], ["总数为 1234567。"]
    assert score_sentences("bleu", (), *number) == pytest.approx([42.7287], abs=1e-4)
    assert char.sentence_score(number[0][0], [number[1][0]]).score == pytest.approx(80.7056, abs=1e-4)
    english = (["the cat sat"], ["the cat sat down"])
    plain = BLEU(effective_order=True).sentence_score(english[0][0], [english[1][0]]).score
    assert score_sentences("bleu", (), *english) == pytest.approx([plain])


@pytest.mark.parametrize(("tokenize", "texts"), [("ja-mecab", JAPANESE), ("ko-mecab", KOREAN)])
def test_sentences_of_japanese_and_korean_need_mecab_or_compare_characters(monkeypatch, tokenize, texts):
    from sacrebleu.metrics.bleu import BLEU

    pair = ([texts[0]], [texts[1]])
    try:
        expected = BLEU(tokenize=tokenize, effective_order=True).sentence_score(texts[0], [texts[1]]).score
    except RuntimeError:
        pass
    else:
        assert score_sentences("bleu", (), *pair) == pytest.approx([expected])
    hide_mecab(monkeypatch)
    bleu_tokenizers._replace_missing.cache_clear()
    char = BLEU(tokenize="char", effective_order=True).sentence_score(texts[0], [texts[1]]).score
    with pytest.warns(
        FlaxformerWarning, match=rf"compares characters \(char\): .*{tokenize} is not installed"
    ):
        assert score_sentences("bleu", (), *pair) == pytest.approx([char])
    assert score_sentences("bleu", (), *pair) == pytest.approx([char])  # with one warning
    bleu_tokenizers._replace_missing.cache_clear()


def test_a_code_that_says_nothing_leaves_it_to_the_references():
    warnings = []

    def choose(code, references, tokenize="auto"):
        return choose_tokenizer(code, tokenize, references=references, warn=warnings.append)

    thai, mixed = "\u0e44\u0e21\u0e48\u0e21\u0e35", "Thai: \u0e44\u0e21\u0e48"
    assert choose("xx", [thai] * 300) == "char"
    assert "target language xx has the tokenizer char" in warnings.pop()
    assert choose("xx", ["总数为 1234567。"]) == "zh"
    assert "target language xx has the tokenizer zh" in warnings.pop()
    assert choose("xx", [thai], "13a") == "13a"
    assert "13a, which splits text at spaces, but the target language is xx" in warnings.pop()
    # Most letters count; Latin text of Chinese, as its code says, has spaces.
    assert choose("xx", [mixed]) == choose("xx", ["abc", "!"]) == "13a"
    assert choose("zh_Latn", ["w\u01d2 h\u01ceo"]) == "13a"
    assert not warnings


def test_chinese_has_a_score():
    """With the tokenizer for spaces, nine equal characters of ten are one wrong word."""
    pair = (
        ["\u4e00\u53ea\u72d7\u5728\u82b1\u56ed\u91cc\u7761\u89c9\u3002"],
        ["\u4e00\u53ea\u732b\u5728\u82b1\u56ed\u91cc\u7761\u89c9\u3002"],
    )
    tokenize = choose_tokenizer("zh", Config().train.bleu_tokenize, warn=pytest.fail)
    assert score_translations(*pair, tokenize=tokenize)["bleu"] > 50
    scores = score_translations(*pair, tokenize=tokenize, only=["ter"])
    assert scores["ter"] == pytest.approx(100 / 10) and "asian:yes" in scores.signatures["ter"]
    assert score_translations(*pair, tokenize="13a", only=["ter"])["ter"] == 100
