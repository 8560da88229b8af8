"""Scripts and blank text, against what Unicode says of characters; UTF-16 and UTF-32 are refused by name."""

import gzip
import subprocess
import sys
import unicodedata

import pytest
import regex

from flaxformer_mt.config import CleanConfig, DataConfig
from flaxformer_mt.corpus import read_pairs
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.lines import read_lines
from flaxformer_mt.unicode_text import (
    count_scripts,
    find_encoding,
    find_main_script,
    find_script,
    is_blank,
    lacks_spaces,
    normalize,
    spell,
)

# Article 1 of the Universal Declaration of Human Rights begins so, in the translations of the OHCHR.
WITHOUT_SPACES = {
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกัน",
    "Lao": "ມະນຸດທຸກຄົນເກີດມາມີສິດເສລີພາບ",
    "Khmer": "មនុស្សទាំងអស់កើតមកមានសេរីភាព",
    "Burmese": "လူတိုင်းသည် တူညီ လွတ်လပ်သော ဂုဏ်သိက္ခာဖြင့်",
    "Tibetan": "འགྲོ་བ་མིའི་རིགས་རྒྱུད་ཡོངས་ལ་སྐྱེས་ཙམ་ཉིད་ནས་",
    "Chinese": "人人生而自由，在尊严和权利上一律平等。",
    "Japanese": "すべての人間は、生まれながらにして自由であり",
    "Yi": "ꊿꂷꃅꄿꐨꐥ",
}
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
        "a": "LATIN",
        "ß": "LATIN",
        "Ж": "CYRILLIC",
        "λ": "GREEK",
        "漢": "CJK",
        "の": "HIRAGANA",
        "한": "HANGUL",
    }
    assert {character: find_script(character) for character in names} == names
    assert [find_script(character) for character in "1 .…\u00a0\u0301Ａ\u200d"] == [""] * 8
    assert count_scripts(["ab Ж", "a漢"]) == {"LATIN": 3, "CYRILLIC": 1, "CJK": 1}
    assert find_main_script(["Жa", "b 漢"]) == "LATIN" and find_main_script(["1 ."]) == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\t\r",
        "\ufeff",
        "\u200e",
        "\u200b \u200b",
        "\u00a0\u3000",
        "\u2060\u00ad",
        "\u200c\u200d",
        "\u3164",
        "\ufe0f",
        "\x00\x07",
        "\U000e0001",
    ],
    ids=ascii,
)
def test_what_nobody_sees_is_blank(text):
    assert is_blank(text)
    assert not is_blank(f"{text}a") and not is_blank(f"\u4e00{text}")


def test_texts_that_look_alike_have_one_spelling():
    assert spell("\ufeffBu\u0308cher\u00a0\u2009und Hu\u00adnd ") == "Bücher und Hund"
    text = "x\u200eBu\u0308\u00a0 \ufb01"
    plain, spans = normalize(text)
    assert plain == "xBü fi" and [text[start:end] for start, end in spans] == [
        *("x", "B", "u\u0308", "\u00a0 ", "\ufb01", "\ufb01")
    ]
    assert spell("نمی\u200cدانم") == "نمی\u200cدانم"  # joiners are a part of words


def test_every_character_with_a_picture_is_text():
    seen = {
        chr(c)
        for c in range(sys.maxunicode + 1)
        if unicodedata.category(chr(c))[0] in "LNPS" and is_blank(chr(c))
    }
    assert seen == set("\u115f\u1160\u3164\uffa0")


def test_signs_around_numbers_are_text():
    """Characters that are drawn with the digits after them are format characters, which are else blank."""
    drawn = regex.findall(r"\p{Prepended_Concatenation_Mark}", "".join(map(chr, range(sys.maxunicode + 1))))
    assert "\u0600" in drawn and len(drawn) > 10
    assert not any(map(is_blank, drawn))


# The names of iconv and of Python.
ENCODINGS = {
    "UTF-16LE": "utf-16-le",
    "UTF-16BE": "utf-16-be",
    "UTF-32LE": "utf-32-le",
    "UTF-32BE": "utf-32-be",
}
TEXTS = {
    "English": "The dog sleeps in the house.\nIt is late.\n",
    "two letters": "OK",
    "German": "Größe läßt überall grüßen.\r\nSüß!\r\n",
    "Polish": "Zażółć gęślą jaźń.\n",
    "Greek": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι.\n",
    "Russian": "Все люди рождаются свободными и равными.\n",
    "Arabic": "يولد جميع الناس أحراراً متساوين.\n",
    "Hindi": "सभी मनुष्यों को जन्मजात स्वतन्त्रता\n",
    "Thai": "มนุษย์ทั้งหลายเกิดมา\n",
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("language", TEXTS)
def test_it_is_named(encoding, language):
    data = TEXTS[language].encode(ENCODINGS[encoding])
    assert find_encoding(data) == encoding
    assert find_encoding("\ufeff".encode(ENCODINGS[encoding]) + data) == encoding
    assert find_encoding(data * 400) == encoding
    assert find_encoding(TEXTS[language].encode()) == ""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"a",
        b"\n",
        b"\n\n\n\n",
        b"a\nb\nc\nd\n",
        b"\t\n\t\n",
        b"\0",
        b"\0\0\0\0",
        b"ein\0haus\n",
        b"a\0b c\0d\n",
        b"\0\n\0\n",
        b"\xef\xbb\xbfabc\n",
        b"\x04\x05text\n",
        b"1\t2\n3\t4\n",
    ],
    ids=ascii,
)
def test_utf8_is_none_of_them(data):
    assert find_encoding(data) == ""


@pytest.mark.parametrize("name", ["train.de", "train.en", "train.de.gz", "train.tsv", "valid.en"])
@pytest.mark.parametrize("encoding", ["UTF-16LE", "UTF-16BE", "UTF-32LE"])
def test_files_are_refused_whatever_the_rules(name, encoding, tmp_path):
    rules = CleanConfig(invalid_utf8="drop", unequal_lines="drop")
    config = DataConfig(
        dataset="parallel_text", text_dir=str(tmp_path), cache_dir=str(tmp_path / "cache"), clean=rules
    )
    split = name.partition(".")[0]
    languages = () if name.endswith("tsv") else ("de", "en")
    for language in languages:
        (tmp_path / f"{split}.{language}").write_text(TEXTS["English"])
    text = "a dog\tein Hund\n" if name.endswith("tsv") else TEXTS["English"]
    data = text.encode(ENCODINGS[encoding])
    if name.endswith(".gz"):
        (tmp_path / name.removesuffix(".gz")).unlink()
        data = gzip.compress(data)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(
        UserError, match=f"{name} is in {encoding}, not in UTF-8; convert it.*iconv -f {encoding}"
    ):
        read_pairs(config, split)


@pytest.mark.parametrize("invalid_utf8", ["refuse", "replace"])
def test_lines_are_refused(invalid_utf8, tmp_path):
    path = tmp_path / "in.txt"
    for mark in ("", "\ufeff"):
        path.write_bytes((mark + TEXTS["English"]).encode("utf-16-le"))
        with path.open("rb") as stream, pytest.raises(UserError, match="in.txt is in UTF-16LE"):
            list(read_lines(stream, name=str(path), invalid_utf8=invalid_utf8))
    with pytest.raises(UserError, match="^standard input is in UTF-16BE"):
        list(read_lines([TEXTS["English"].encode("utf-16-be")], name="-"))


def test_the_remedy_works(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(TEXTS["German"].encode("utf-16-le"))
    with path.open("rb") as stream, pytest.raises(UserError) as error:
        list(read_lines(stream, name=str(path)))
    command = str(error.value).split("`")[1]
    assert sys.platform != "linux" or subprocess.run(command, shell=True, check=True).returncode == 0
    assert path.with_name("in.txt.utf8").read_bytes() == TEXTS["German"].encode()
