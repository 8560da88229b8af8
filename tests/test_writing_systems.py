"""Scripts and blank text, against what Unicode says of characters."""

import sys
import unicodedata

import pytest
import regex

from flaxformer_mt.unicode_text import count_scripts, find_main_script, find_script, is_blank, lacks_spaces

# Article 1 of the Universal Declaration of Human Rights begins so, in the translations of the OHCHR.
WITHOUT_SPACES = {
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกัน", "Lao": "ມະນຸດທຸກຄົນເກີດມາມີສິດເສລີພາບ",
    "Khmer": "មនុស្សទាំងអស់កើតមកមានសេរីភាព", "Burmese": "လူတိုင်းသည် တူညီ လွတ်လပ်သော ဂုဏ်သိက္ခာဖြင့်",
    "Tibetan": "འགྲོ་བ་མིའི་རིགས་རྒྱུད་ཡོངས་ལ་སྐྱེས་ཙམ་ཉིད་ནས་", "Chinese": "人人生而自由，在尊严和权利上一律平等。",
    "Japanese": "すべての人間は、生まれながらにして自由であり", "Yi": "ꊿꂷꃅꄿꐨꐥ",
}  # fmt: skip
WITH_SPACES = {
    "English": "All human beings are born free and equal in dignity and rights.",
    "Korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "Hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता",
    "Amharic": "የሰው ልጅ ሁሉ ሲወለድ ነጻና በክብርና በመብትም እኩልነት ያለው ነው",
    "Persian": "تمام افراد بشر آزاد به دنیا می‌آیند",
    "numbers": "12 345 !",
    "nothing": "",
}


@pytest.mark.parametrize("name", [*WITHOUT_SPACES, *WITH_SPACES])
def test_languages_without_spaces(name):
    text = WITHOUT_SPACES.get(name) or WITH_SPACES[name]
    assert lacks_spaces([text]) == (name in WITHOUT_SPACES)


def test_scripts_are_those_of_unicode_names():
    names = {
        "a": "LATIN", "ß": "LATIN", "Ж": "CYRILLIC", "λ": "GREEK", "漢": "CJK",
        "の": "HIRAGANA", "한": "HANGUL",
    }  # fmt: skip
    assert {character: find_script(character) for character in names} == names
    assert [find_script(character) for character in "1 .…\u00a0\u0301Ａ\u200d"] == [""] * 8
    assert count_scripts(["ab Ж", "a漢"]) == {"LATIN": 3, "CYRILLIC": 1, "CJK": 1}
    assert find_main_script(["Жa", "b 漢"]) == "LATIN" and find_main_script(["1 ."]) == ""


@pytest.mark.parametrize(
    "text",
    ["", " ", "\t\r", "\ufeff", "\u200e", "\u200b \u200b", "\u00a0\u3000", "\u2060\u00ad", "\u200c\u200d",
     "\u3164", "\ufe0f", "\x00\x07", "\U000e0001"], ids=ascii,
)  # fmt: skip
def test_what_nobody_sees_is_blank(text):
    assert is_blank(text)
    assert not is_blank(f"{text}a") and not is_blank(f"\u4e00{text}")


def test_every_character_with_a_picture_is_text():
    """No letter, digit, mark of punctuation or symbol is blank, but for the fillers of Hangul."""
    seen = {
        chr(c)
        for c in range(sys.maxunicode + 1)
        if unicodedata.category(chr(c))[0] in "LNPS" and is_blank(chr(c))
    }
    assert seen == set("\u115f\u1160\u3164\uffa0")


def test_signs_around_numbers_are_text():
    """Characters that are drawn with the digits after them are format characters, which are else blank."""
    drawn = [
        chr(c) for c in range(sys.maxunicode + 1) if regex.match(r"\p{Prepended_Concatenation_Mark}", chr(c))
    ]
    assert "\u0600" in drawn and len(drawn) > 10
    assert not any(map(is_blank, drawn))
