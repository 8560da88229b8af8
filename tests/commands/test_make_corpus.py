"""`backtranslate` and `distil`: the pairs and filters, resuming, and what is refused; no model is run."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import FakeBackend, fake_engine

from flaxformer_mt.commands import make_corpus
from flaxformer_mt.commands.main import main
from flaxformer_mt.commands.options import BacktranslateOptions
from flaxformer_mt.commands.translate import choose_search
from flaxformer_mt.config import Config, SearchConfig
from flaxformer_mt.config.files import read_config, save_config
from flaxformer_mt.scoring import metrics
from flaxformer_mt.text_io.pair_table import PairRules, count_repetitions
from flaxformer_mt.translation.result import Translation
from flaxformer_mt.translation.translator import Translator


class Reversing(FakeBackend):
    """Translates words into their reversals, without a model; ends at the given window as a kill does."""

    ran = 0
    last = 1 << 30

    def __init__(self, search):
        super().__init__(self._reverse, description={"search": dataclasses.asdict(search)})

    def step(self, *, more=False):
        if Reversing.ran == Reversing.last:
            raise KeyboardInterrupt
        Reversing.ran += 1
        return super().step()

    def _reverse(self, request):
        line = request.text
        texts = [line[::-1], line.upper(), f"x {line} ||| y"][: request.n_best]
        best, *others = [Translation(text, -1.0 - n, -1.0, (5, 2)) for n, text in enumerate(texts)]
        return dataclasses.replace(best, alternatives=tuple(others))


@pytest.fixture(autouse=True)
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    save_config(Config(search=SearchConfig(beam_size=3)), Path("run/config.json"))

    def load(run, options, **more):
        return SimpleNamespace(engine=lambda: fake_engine(Reversing(options.search)))

    monkeypatch.setattr(Translator, "load", load)
    monkeypatch.setattr(Reversing, "ran", 0)
    return "run"


def write(path, lines):
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


def files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


LINES = ["the dog\tbarks", "", "anna", "a cat", "no no no no", "l" * 60, "we  read a book ."]
COMMAND = ["backtranslate", "--run=run", "--input=in", "--max_characters=50"]


def test_pairs_are_translations_with_a_tag_and_the_original_text(capfd):
    write("in", LINES)
    assert main([*COMMAND, "--output=out", "--weight=0.5"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["lines"], report["pairs"], report["tag"]) == (7, 3, "<BT>")
    assert report["dropped"] == {"empty": 1, "too_long": 1, "length_ratio": 0, "copies": 1, "repeated": 1}
    assert Path("out/train.tsv").read_text(encoding="utf-8").split("\n") == [
        "<BT> skrab god eht\tthe dog barks\t0.5",
        "<BT> tac a\ta cat\t0.5",
        "<BT> . koob a daer  ew\twe  read a book .\t0.5",
        "",
    ]
    assert json.loads(Path("out/report.json").read_text()) == report
    assert main([*COMMAND, "--output=plain", "--tag=", "--copies", "--max_repetitions=4"]) == 0
    rows = Path("plain/train.tsv").read_text(encoding="utf-8").split("\n")
    assert rows[1] == "anna\tanna" and rows[3] == "on on on on\tno no no no" and len(rows) == 6


def test_an_interrupted_command_resumes_with_the_same_bytes_wherever_it_stopped(monkeypatch, capfd):
    write("in", [f"line {number}" for number in range(10)])
    command = [*COMMAND, "--window=2"]
    assert main([*command, "--output=whole"]) == 0
    for stop in range(5):
        monkeypatch.setattr(Reversing, "ran", 0)
        monkeypatch.setattr(Reversing, "last", stop)
        again = [*command, "--output=out", "--resume"]
        assert main(again) == 130
        monkeypatch.setattr(Reversing, "last", 1 << 30)
        assert main(again) == 0
        assert Reversing.ran == 5  # nothing is translated twice
        found = files("out")
        assert found == files("whole")
        # A third time, nothing is translated; a lost table is written again, also beside a stale record.
        Path("out/train.tsv").unlink()
        Path("out/translations.txt.partial.json").write_text("{}")
        assert main(again) == 0
        assert Reversing.ran == 5 and files("out") == found
        for name in found:
            Path("out", name).unlink()
    capfd.readouterr()
    # A finished output is neither overwritten nor taken for that of another command, input or text.
    assert main([*command, "--output=whole"]) == 2
    assert "whole/translations.txt exists; give --resume" in capfd.readouterr().err
    assert main([*command, "--output=whole", "--resume", "--beam_size=2"]) == 2
    assert '"beam_size": 2' in capfd.readouterr().err
    for changed in (["x", *[f"line {n}" for n in range(1, 10)]], [f"line {n}" for n in range(11)]):
        write("in", changed)
        assert main([*command, "--output=whole", "--resume"]) == 2
        assert "give the same input, or give --overwrite" in capfd.readouterr().err
    write("in", [f"line {number}" for number in range(10)])
    with open("whole/translations.txt", "a", encoding="utf-8") as file:
        file.write("more\n")
    assert main([*command, "--output=whole", "--resume"]) == 2
    assert "bytes, but its record says" in capfd.readouterr().err
    assert main([*command, "--output=whole", "--overwrite"]) == 0
    assert b"more" not in files("whole")["translations.txt"]


def test_a_full_disk_is_told_with_the_table_which_is_written_when_there_is_space(capfd):
    write("in", ["line one", "line two"])
    Path("out").mkdir()
    Path("out/train.tsv.partial").symlink_to("/dev/full")
    assert main([*COMMAND, "--output=out"]) == 2
    assert "error: out/train.tsv: No space left on device; free" in capfd.readouterr().err
    assert not Path("out/train.tsv").exists() and not Path("out/report.json").exists()
    Path("out/train.tsv.partial").unlink()
    assert main([*COMMAND, "--output=out", "--resume"]) == 0
    assert Path("out/train.tsv").read_text().count("\n") == 2


def test_a_student_gets_the_best_translation_or_the_one_closest_to_the_reference(capfd):
    write("in", ["ab cd", "", "ef gh"])
    write("references", ["AB CD", "", "y ||| x ef gh"])
    command = ["distil", "--run=run", "--input=in", "--copies"]
    assert main([*command, "--output=best"]) == 0
    assert Path("best/train.tsv").read_text() == "ab cd\tdc ba\nef gh\thg fe\n"
    for metric in ("bleu", "chrf"):
        flags = ["--targets=nbest", "--reference=references", f"--metric={metric}"]
        assert main([*command, f"--output={metric}", *flags]) == 0
        assert Path(metric, "train.tsv").read_text() == "ab cd\tAB CD\nef gh\tx ef gh ||| y\n"
    assert json.loads(Path("bleu/report.json").read_text())["dropped"]["empty"] == 1


def test_pairs_are_left_out_by_scores_and_chosen_by_scorers(monkeypatch, capfd):
    """The scorer sees sources without their tag; a share is taken of what the threshold keeps."""
    monkeypatch.setattr(metrics, "_OTHERS", dict(metrics._OTHERS))
    monkeypatch.syspath_prepend(".")
    Path("quality.py").write_text(
        "def size(sources, targets, references):\n"
        "    assert not any('<BT>' in one for one in sources)\n"
        "    return [len(one) for one in targets]\n"
        "def last(sources, targets, references): return [one.startswith('x ') for one in targets]\n"
    )
    write("in", ["a cat", "the dog barks", "on it", "birds sing", "snakes"])
    command = [*COMMAND, "--output=out", "--scorer=quality:size", "--overwrite"]
    for flag, kept in (("size>=6", 3), ("size best 40%", 2), ("size>=6,size best 34%", 1), ("size>=99", 0)):
        assert main([*command, f"--clean_scores={flag}"]) == 0
        report = json.loads(capfd.readouterr().out)
        assert (report["pairs"], report["dropped"]["scores"]) == (kept, 5 - kept)
        rows = Path("out/train.tsv").read_text().splitlines()
        targets = ["the dog barks", "birds sing", "snakes"][:kept]
        assert rows == [f"<BT> {one[::-1]}\t{one}" for one in targets]
        assert report["rules"]["clean_scores"] == flag.split(",")
    write("references", ["x"] * 5)
    distil = [
        "distil",
        "--run=run",
        "--input=in",
        "--output=student",
        "--targets=nbest",
        "--reference=references",
    ]
    assert main([*distil, "--scorer=quality:last", "--metric=last"]) == 0
    targets = [line.split("\t")[1] for line in Path("student/train.tsv").read_text().splitlines()]
    assert targets == [f"x {line} ||| y" for line in Path("in").read_text().splitlines()]
    capfd.readouterr()
    for flags, message in (
        ([*command, "--clean_scores=size>6"], "--clean_scores has 'size>6'; give NAME>=SCORE"),
        ([*COMMAND, "--output=o", "--clean_scores=sice>=3"], "--clean_scores names the score 'sice'"),
        ([*distil, "--metric=blue", "--overwrite"], "--metric names the score 'blue', which is not defined"),
        ([*distil[:4], "--metric=chrf", "--overwrite"], "--metric=chrf has no effect with --targets=best"),
    ):
        assert main(flags) == 2
        (line,) = capfd.readouterr().err.strip().split("\n")
        assert message in line, line


def test_wrong_flags_are_refused_in_one_line(capfd):
    write("in", ["a", "b"])
    write("short", ["a"])
    distil = ["distil", "--run=run", "--input=in", "--output=out"]
    for command, message in (
        (["backtranslate", "--run=run", "--input=absent", "--output=out"], "input absent does not exist"),
        (["backtranslate", "--run=run", "--input=-", "--output=out"], "--input is read twice"),
        (["backtranslate", "--run=absent", "--input=in", "--output=out"], "absent"),
        ([*COMMAND, "--output=in"], "--output=in is a file"),
        ([*COMMAND, "--output=out", "--tag=a b"], "--tag is 'a b'; a tag is one symbol"),
        ([*COMMAND, "--output=out", "--window=0"], "--window is 0; it must be at least 1"),
        ([*COMMAND, "--output=out", "--max_length_ratio=0.5"], "--max_length_ratio is 0.5"),
        ([*COMMAND, "--output=out", "--pair_length_ratio=0.5"], "--pair_length_ratio is 0.5"),
        ([*COMMAND, "--output=out", "--resume", "--overwrite"], "exclude each other"),
        ([*COMMAND, "--output=out", "--beam_size=2", "--method=sample"], "--beam_size=2 has no effect"),
        ([*distil, "--targets=nbest"], "give --reference=FILE"),
        (
            [*distil, "--targets=nbest", "--reference=short"],
            "--reference=short has 1 lines, but --input=in has 2",
        ),
        ([*distil, "--targets=nbest", "--reference=in", "--n_best=9"], "--n_best"),
        ([*distil, "--reference=in"], "--reference=in has no effect with --targets=best"),
    ):
        assert main(command) == 2, command
        error = capfd.readouterr().err
        assert message in error and error.count("\n") == 1, error


def test_the_filter_of_pairs_is_no_option_of_the_search(monkeypatch, capfd):
    write("in", ["a", "the dog barks loudly"])
    seen = []
    monkeypatch.setattr(make_corpus, "translate_file", lambda options, **more: seen.append(options) or 1 / 0)
    for flags, ratio in ([], 4.0), (["--pair_length_ratio=9"], 9.0), (["--max_length_ratio=9"], 9.0):
        told = []
        monkeypatch.setattr(make_corpus, "warn_user", told.append)
        with pytest.raises(ZeroDivisionError):
            main([*COMMAND, "--output=out", "--overwrite", *flags])
        assert choose_search(seen[-1]) == read_config(Path("run/config.json")).search
        assert ["--pair_length_ratio" in line for line in told] == [True] * ("--max" in "".join(flags))
        options = BacktranslateOptions(run=Path("run"), input="in", output=Path("out"), overwrite=True)
        options = dataclasses.replace(options, **{flag[2:-2]: 9.0 for flag in flags})
        assert make_corpus._check(options).pair_length_ratio == ratio
    capfd.readouterr()


def test_rules_of_pairs():
    rules = PairRules(max_characters=20, pair_length_ratio=3.0, max_repetitions=2, copies=False)
    for source, target, problem in (
        ("a", "\u3000", "empty"),
        ("a" * 21, "b" * 20, "too_long"),
        ("a" * 4, "b", "length_ratio"),
        ("A  cat", " a Cat", "copies"),
        ("go go go", "x y z", "repeated"),
        ("go go so", "x y z", None),
    ):
        assert rules.find_problem(source, target) == problem
    repetitions = {
        "": 0,
        "a": 1,
        "a a b": 2,
        "a b a b a b c": 3,
        "a b c d a b c d": 2,
        "a b c d e a b c d e": 1,
    }
    for text, count in repetitions.items():
        assert count_repetitions(text) == count, text
