"""`new`: a config for a corpus that trains as it stands, with a reason for each choice; mistakes are told."""

import ast
import dataclasses
import json
import random
import re
import shlex
from pathlib import Path

import pytest

from flaxformer_mt.commands.flag_parser import parse_flags
from flaxformer_mt.commands.main import COMMANDS, main
from flaxformer_mt.commands.new_config import find_corpus, format_config
from flaxformer_mt.commands.new_sizing import (
    Choice,
    Corpus,
    Machine,
    choose_held_out,
    choose_lengths,
    choose_model,
    choose_training,
    choose_vocabulary,
)
from flaxformer_mt.config import CleanConfig, Config
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.files import flatten, load_config
from flaxformer_mt.convert.formats import find_format
from flaxformer_mt.corpus import read_pairs
from flaxformer_mt.data.prepare import prepare
from flaxformer_mt.errors import UserError

WORDS = [first + second for first in "bdfgklmn" for second in ("a", "e", "ilo", "uram", "os")]


def write_text(folder, split, pairs, seed):
    """Different sentences of made-up words; a translation is the same words backwards, with an x."""
    rng = random.Random(seed)
    sources = [rng.choices(WORDS, k=rng.randint(4, 9)) for _ in range(pairs)]
    targets = [[f"{word}x" for word in reversed(source)] for source in sources]
    for name, side in (("xx", sources), ("yy", targets)):
        (folder / f"{split}.{name}").write_text("".join(" ".join(words) + "\n" for words in side))


CPU = Machine("a CPU", "cpu", 1, None, False)
GPUS = Machine("a GPU", "gpu", 8, 80 << 30, True)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """600 pairs in corpus.xx and corpus.yy, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLAXFORMER_MT_CACHE", str(tmp_path / "cache"))
    write_text(tmp_path, "corpus", 600, seed=1)
    return tmp_path


def test_the_config_trains_as_it_stands(corpus, capfd):
    assert main(["new", "corpus.xx", "corpus.yy", "--run=runs/xx_yy"]) == 0
    result, shown = capfd.readouterr()
    found = json.loads(result)
    assert found["config"] == "runs/xx_yy.py" and "train --config=runs/xx_yy.py --run=runs/xx_yy" in shown
    config = load_config("runs/xx_yy.py")
    validate(config)
    text = Path("runs/xx_yy.py").read_text()
    epochs, updates = map(int, re.search(r"About (\d+) epochs of (\d+) steps", text).groups())
    assert updates == prepare(config).report["batches"]["batches"], "an epoch is as long as in training"
    assert abs(epochs - config.train.steps / updates) <= 0.5
    assert re.findall(r"(\d+) steps per epoch", text) in ([str(updates)], [])
    numbers = [
        int(number) for number in re.findall(r"\b\d+(?= for| that)", text[text.index("The others:") :])
    ]
    assert sum(numbers[:3]) + found["pairs"]["train"] + sum(found["problems"].values()) == 600
    pairs = {split: list(read_pairs(config.data, split)) for split in ("train", "valid", "test")}
    assert {split: len(own) for split, own in pairs.items()} == found["pairs"]
    assert len(pairs["valid"]) == len(pairs["test"]) == 600 // 20
    assert not set(pairs["train"]) & {*pairs["valid"], *pairs["test"]}
    # A smaller network compiles sooner; all else is as written.
    smaller = {"num_encoder_layers": 1, "num_decoder_layers": 1, "model_dim": 8, "ffn_dim": 8}
    flags = [f"--config.model.{name}={value}" for name, value in smaller.items()]
    flags += ["--config.data.num_shapes=1", "--config.train.steps=2", "--config.search.beam_size=1"]
    flags += ["--config.parallel.data=1"]
    assert main(["train", "--config=runs/xx_yy.py", "--run=runs/xx_yy", *flags]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["step"] == 2 and report["test"]["sentences"] == 30


# Of a teacher and a student, so that both train in seconds.
FEW = ["--config.train.steps=2", "--config.data.num_shapes=1", "--config.parallel.data=1"]
SMALL = {
    "_teacher": [*FEW, "--config.model.num_encoder_layers=1", "--config.model.num_decoder_layers=1"],
    "": [*FEW, "--config.model.num_encoder_layers=1", "--config.search.max_length_ratio=1"],
}


FORMATS = {"browser": "bergamot", "cpu": "ctranslate2"}


def write_student(goal, capfd):
    assert main(["new", "corpus.xx", "corpus.yy", "--run=runs/a", f"--for={goal}"]) == 0
    result = json.loads(capfd.readouterr().out)
    return result, [shlex.split(command.split("flaxformer_mt ")[1]) for command in result["commands"]]


@pytest.mark.parametrize("goal", FORMATS)
def test_a_student_has_a_teacher_and_the_fields_of_its_engine(corpus, goal, capfd):
    result, commands = write_student(goal, capfd)
    teacher, student = load_config(result["teacher"]), load_config(result["config"])
    assert find_format(FORMATS[goal]).problems(student) == []
    assert student.model.model_dim == max(64, teacher.model.model_dim // 2)
    # The teacher translates what it learns, and the student is scored on the pairs that were held out.
    for split, file in (("train", "original"), ("valid", "valid"), ("test", "test")):
        sides = [
            Path(f"runs/a_distilled/{file}.{side}").read_text().split("\n")[:-1] for side in ("xx", "yy")
        ]
        assert list(zip(*sides, strict=True)) == list(read_pairs(teacher.data, split))
    head = ast.get_docstring(ast.parse(Path("runs/a.py").read_text()))
    for name, *flags in commands:
        assert f"python -m flaxformer_mt {shlex.join([name, *flags])}\n" in head
        flags = [flag for flag in flags if not flag.startswith("--run=")]
        parse_flags(COMMANDS[name].options, [*flags, "--run=b"], prog=name)
    assert main(["new", "corpus.xx", "corpus.yy", "--run=runs/a", "--for=phone"]) == 2
    assert capfd.readouterr().err == "error: --for is 'phone' (allowed: browser, cpu)\n"


@pytest.mark.slow
@pytest.mark.parametrize("goal", FORMATS)
def test_the_commands_of_a_student_end_in_an_export(corpus, goal, capfd):
    pytest.importorskip("ctranslate2" if goal == "cpu" else "numpy")
    for command in write_student(goal, capfd)[1]:
        if command[0] == "train":
            command += SMALL["_teacher" if "--run=runs/a_teacher" in command else ""]
        assert main(command) == 0, command
    stored = json.loads(Path(f"runs/a_{goal}/config.json").read_text())
    assert stored["flaxformer_mt"]["format"] == FORMATS[goal]
    assert Path(f"runs/a_{goal}", "vmap.txt" if goal == "cpu" else "lex.xxyy.s2t.bin").is_file()
    assert len(Path("runs/a_test.yy").read_text().split("\n")) == 31
    assert "lines/s" in capfd.readouterr().err


def test_every_choice_has_its_reason(corpus):
    assert main(["new", "--run", "here", "corpus.xx", "corpus.yy"]) == 0
    lines = (corpus / "here.py").read_text().split("\n")
    chosen = [number for number, line in enumerate(lines) if re.match(r" {12}\w+=", line)]
    assert len(chosen) > 20
    # A field without a comment follows one that shares it.
    assert all(re.match(r" {12}(# |\w+=)", lines[number - 1]) for number in chosen)
    assert sum("# " in lines[number - 1] for number in chosen) > 15
    assert max(map(len, lines)) <= 110


def test_files_with_other_names_get_links(corpus):
    for name, other in (("corpus.xx", "one.txt"), ("corpus.yy", "two.txt")):
        (corpus / name).rename(corpus / other)
    with pytest.raises(UserError, match="source language is not in the name one.txt; give --source_language"):
        find_corpus(["one.txt", "two.txt"], (None, None), corpus / "links")
    languages = ["--source_language=fr", "--target_language=en"]
    assert main(["new", "one.txt", "two.txt", "--run=a", *languages]) == 0
    assert (corpus / "a_text" / "train.fr").resolve() == corpus / "one.txt"
    assert len(read_pairs(load_config("a.py").data, "train")) > 500
    assert main(["new", "one.txt", "two.txt", "--run=a", *languages]) == 2
    assert main(["new", "one.txt", "two.txt", "--run=a", "--overwrite", *languages]) == 0


def test_a_table_of_json_objects_is_a_corpus(corpus):
    sides = [(corpus / f"corpus.{language}").read_text().split("\n")[:-1] for language in ("xx", "yy")]
    rows = [json.dumps({"xx": source, "yy": target}) for source, target in zip(*sides, strict=True)]
    (corpus / "table.xx-yy.jsonl").write_text("\n".join(rows))
    assert main(["new", "table.xx-yy.jsonl", "--run=json"]) == 0
    pairs = read_pairs(load_config("json.py").data, "train")
    assert len(pairs) == 600 - 2 * 30 and set(pairs) < set(zip(*sides, strict=True))


def test_names_of_files(tmp_path):
    for name in "c.fr c.en fr.txt en.txt t.tsv a.fr-en.jsonl.zst c.fr.gz d.zh_Hant d.en t.txt".split():
        (tmp_path / name).write_text("x\n")

    def find(*names, languages=(None, None)):
        return find_corpus([str(tmp_path / name) for name in names], languages, tmp_path / "links")

    assert find("c.fr", "c.en") == (tmp_path, "c", "fr", "en", {})
    assert find("d.zh_Hant", "d.en") == (tmp_path, "d", "zh_Hant", "en", {})
    assert find("t.tsv", languages=("fr", "en")) == (tmp_path, "t", "fr", "en", {})
    assert find("a.fr-en.jsonl.zst") == (tmp_path, "a.fr-en", "fr", "en", {})
    named = {"train.fr": tmp_path / "fr.txt", "train.en": tmp_path / "en.txt"}
    assert find("fr.txt", "en.txt") == (tmp_path / "links", "train", "fr", "en", named)
    assert find("c.fr.gz", "d.en").links == {
        "train.fr.gz": tmp_path / "c.fr.gz",
        "train.en": tmp_path / "d.en",
    }
    assert find("c.fr", "c.en", languages=("de", None)).links["train.de"] == tmp_path / "c.fr"
    assert find("t.txt", languages=("fr", "en")).links == {"train.tsv": tmp_path / "t.txt"}
    for names, languages, message in (
        ((), (None, None), "0 files are given"),
        (("c.fr", "c.fr"), (None, None), "both files are"),
        (("c.fr", "absent"), (None, None), "absent does not exist"),
        (("c.fr", ""), (None, None), "is a folder; give the files of the corpus, as in corpus.fr corpus.en"),
        (("c.en", "d.en"), (None, None), "both languages are en"),
        (
            ("t.tsv",),
            (None, None),
            "the languages of .*t.tsv are unknown; of a corpus of two files, give both",
        ),
        (("c.fr", "c.en"), ("f r", None), "--source_language is 'f r'"),
    ):
        with pytest.raises(UserError, match=message):
            find(*names, languages=languages)


def shorten(folder):
    (folder / "corpus.yy").write_text("x\n" * 599)


def spoil(folder):
    (folder / "corpus.xx").write_bytes(b"\xff\n" * 600)


def leave_few(folder):
    write_text(folder, "corpus", 90, seed=1)


def test_a_file_that_was_given_is_named_and_not_the_link_to_it(corpus, capfd):
    (corpus / "corpus.xx").rename(corpus / "other.xx")
    shorten(corpus)
    assert main(["new", "other.xx", "corpus.yy", "--run=a"]) == 2
    named = f"{corpus / 'other.xx'} has 600 lines, but {corpus / 'corpus.yy'} has 599"
    assert named in capfd.readouterr().err
    found = {"config": "a.py", "pairs": {"train": 9}, "problems": {}, "train": "train a.py"}
    assert COMMANDS["new"].summarize(found) == "pairs\n  train  9"  # what standard error has not said


def write_config(folder):
    (folder / "a.py").write_text("")


def write_run(folder):
    (folder / "a").mkdir()
    (folder / "a" / "config.json").write_text("")


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        (shorten, [], "corpus.yy has 599; correct them, or .* --drop_invalid"),
        (spoil, [], "600 pairs are refused: not UTF-8 .* --drop_invalid"),
        (leave_few, [], "90 pairs after cleaning; a model needs at least 500"),
        (write_config, [], "a.py exists; give --overwrite"),
        (write_run, [], "a is a run already"),
        (lambda folder: (folder / "a_teacher.py").write_text(""), ["--for=cpu"], "a_teacher.py exists; give"),
        (lambda folder: None, ["--bogus=1"], "unknown flag --bogus"),
    ],
)
def test_mistakes_are_told(corpus, change, flags, message, capfd):
    change(corpus)
    assert main(["new", "corpus.xx", "corpus.yy", "--run=a", *flags]) == 2
    error = capfd.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1, error
    assert "--config.data.clean" not in error


def test_a_config_is_not_written_to_a_copy_of_a_store(corpus, capfd):
    assert main(["new", "corpus.xx", "corpus.yy", "--run=memory://bucket/a"]) == 2
    assert "--run=memory://bucket/a is in an object store" in capfd.readouterr().err
    assert not list(corpus.rglob("a.py"))


def test_what_cannot_be_read_is_left_out_on_request(corpus):
    lines = (corpus / "corpus.xx").read_bytes().split(b"\n")
    (corpus / "corpus.xx").write_bytes(b"\n".join([b"\xff", *lines]))
    assert main(["new", "corpus.xx", "corpus.yy", "--run=a", "--drop_invalid"]) == 0
    clean = load_config("a.py").data.clean
    assert clean == CleanConfig(duplicates="drop", unequal_lines="drop", invalid_utf8="drop")


def test_own_validation_files_are_used(corpus):
    write_text(corpus, "valid", 20, seed=2)
    assert main(["new", "corpus.xx", "corpus.yy", "--run=a"]) == 0
    data = load_config("a.py").data
    assert (data.valid_pairs, data.test_pairs) == (0, 30) and len(read_pairs(data, "valid")) == 20


def test_a_text_of_few_words_gets_a_small_vocabulary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng, words = random.Random(1), "ab cd ef gh ij kl mn op qr st".split()
    for language in ("xx", "yy"):
        text = "".join(f"{' '.join(rng.choices(words, k=8))}\n" for _ in range(700))
        (tmp_path / f"c.{language}").write_text(text)
    assert main(["new", "c.xx", "c.yy", "--run=a", "--cache_dir=cache"]) == 0
    config = load_config("a.py")
    assert config.vocab.size < 2000 and "at most" in (tmp_path / "a.py").read_text()
    assert config.data.cache_dir == str(tmp_path / "cache")


@pytest.mark.parametrize("machine", [CPU, GPUS], ids=["cpu", "gpus"])
@pytest.mark.parametrize("pairs", [500, 5000, 50_000, 400_000, 3_000_000, 50_000_000])
@pytest.mark.parametrize("length", [12, 60, 400])
def test_configs_are_valid_at_every_size(machine, pairs, length):
    corpus = Corpus(pairs, pairs * length // 2, length, length + 3)
    vocabulary = choose_vocabulary(pairs, 120, ("Latin", "Latin"))
    limits = choose_lengths(corpus)
    model = choose_model(corpus, machine, joint=True)
    width = next(choice.value for choice in model if choice.name == "model.model_dim")
    longest = max(choice.value for choice in limits)

    def count(fields):
        return max(1, round(1.1 * corpus.tokens / fields["batch_tokens"]))

    training = choose_training(
        corpus, machine, longest=longest, width=width, row_multiple=8, count_updates=count
    )
    held = [choose_held_out(pairs, split) for split in ("valid", "test")]
    config = Config()
    for choice in (*held, *vocabulary, *limits, *model, *training):
        section, field = choice.name.split(".")
        changed = dataclasses.replace(getattr(config, section), **{field: choice.value})
        config = dataclasses.replace(config, **{section: changed})
    validate(config)
    assert 2 * (config.data.valid_pairs + config.data.test_pairs) <= pairs
    assert config.train.steps >= 1000 and config.train.evaluate_every * 4 <= config.train.steps
    assert config.optim.warmup_steps <= config.train.steps // 5


def test_scripts_and_characters_decide_the_vocabulary():
    def values(*arguments):
        return {choice.name: choice.value for choice in choose_vocabulary(*arguments)}

    assert values(5000, 100, ("Latin", "Latin"))["vocab.joint"]
    apart = values(5000, 100, ("Cyrillic", "Latin"))
    assert not apart["vocab.joint"] and apart["vocab.size"] == 2000
    chinese = values(5000, 3500, ("Cjk", "Latin"))
    assert chinese["vocab.size"] >= 7300 and chinese["vocab.character_coverage"] < 1


def test_a_small_corpus_has_few_programs():
    sizes = {"longest": 16, "width": 256, "row_multiple": 8, "count_updates": lambda fields: 100}
    for pairs, is_few in ((19_999, True), (20_000, False)):
        choices = choose_training(Corpus(pairs, pairs * 12, 12, 15), CPU, **sizes)
        assert ("data.num_shapes" in [choice.name for choice in choices]) == is_few


def test_text_of_a_config_is_python(tmp_path):
    odd = 'a "quoted" \\ back\\slash \u2028 é'
    choices = [
        Choice("data.text_dir", odd, "x " * 80),
        Choice("data.batch_tokens", 16_384, ""),
        Choice("data.clean", CleanConfig(duplicates="drop", max_length_ratio=4.0), 'say """'),
        Choice("vocab.joint", False, ""),
    ]
    file = tmp_path / "config.py"
    file.write_text(format_config(odd.replace("\u2028", ""), 'c:\\new """x"""', choices), encoding="utf-8")
    fields = flatten(load_config(file))
    assert fields["data.text_dir"] == odd and fields["data.batch_tokens"] == 16_384
    assert fields["data.clean.max_length_ratio"] == 4.0 and fields["vocab.joint"] is False
