"""Tags of languages as families of models spell them: codes by hand, and those that transformers lists."""

import pytest

from flaxformer_mt.config import DataConfig
from flaxformer_mt.config.directions import (
    Direction,
    choose_tags,
    choose_target_tag,
    find_direction_problems,
)
from flaxformer_mt.config.tag_styles import _MBART_50, _NLLB, find_language, spell_tag
from flaxformer_mt.errors import UserError


@pytest.mark.parametrize(
    ("style", "source", "target"),
    [
        ("madlad", ("<2fr>",), ""),
        ("t5", ("translate German to French:",), ""),
        ("m2m_100", ("__de__",), "__fr__"),
        ("nllb", ("deu_Latn",), "fra_Latn"),
        ("mbart_50", ("de_DE",), "fr_XX"),
    ],
)
def test_tags_of_both_sides(style, source, target):
    data, direction = DataConfig(tag_style=style), Direction("de", "fr")
    assert (choose_tags(data, direction), choose_target_tag(data, direction)) == (source, target)
    never = DataConfig(tag_style=style, target_tags="never")
    assert (choose_tags(never, direction), choose_target_tag(never, direction)) == ((), "")
    assert choose_tags(data, Direction("", "fr")) == ()


def test_codes_of_a_family_stand_for_themselves():
    assert spell_tag("nllb", "zho_Hant") == "zho_Hant" != spell_tag("nllb", "zh") == "zho_Hans"
    assert spell_tag("mbart_50", "pt_XX") == spell_tag("mbart_50", "pt") == "pt_XX"
    assert (find_language("nllb", "deu_Latn"), find_language("nllb", "zho_Hant")) == ("de", "zho_Hant")


@pytest.mark.parametrize(("style", "example"), [("nllb", "deu_Latn"), ("mbart_50", "de_DE")])
def test_unknown_languages_are_named(style, example):
    with pytest.raises(UserError, match=f"no code for the language 'xx'; .* such as {example}"):
        spell_tag(style, "xx")
    data = DataConfig(tag_style=style, dataset="parallel_text:xx-de,parallel_text:de-en")
    (problem,) = find_direction_problems(data)
    assert "'xx'" in problem


def test_t5_has_learned_four_languages():
    with pytest.raises(UserError, match=r"'fi'; it has en, de, fr, ro: set data.target_tags=never"):
        choose_tags(DataConfig(tag_style="t5"), Direction("fi", "en"))


def test_codes_are_those_of_the_tokenizers():
    nllb = pytest.importorskip("transformers.models.nllb.tokenization_nllb")
    mbart = pytest.importorskip("transformers.models.mbart50.tokenization_mbart50")
    assert set(_NLLB.values()) <= set(nllb.FAIRSEQ_LANGUAGE_CODES)
    assert set(_MBART_50.values()) == set(mbart.FAIRSEQ_LANGUAGE_CODES)
