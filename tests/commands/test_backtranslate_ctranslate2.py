"""`backtranslate` and `translate` with `--backend=ctranslate2`: resuming, and wrong flags."""

import itertools
from pathlib import Path

import pytest

pytest.importorskip("ctranslate2")
from flaxformer_mt.commands.main import main
from flaxformer_mt.convert.ctranslate2.backend import CTranslate2Backend
from flaxformer_mt.convert.export_run import export_run


def test_a_file_is_translated_by_an_export_and_resumed(tiny_run, tiny_text, tmp_path, monkeypatch, capfd):
    export_run(tiny_run, format_name="ctranslate2", output=tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    lines = (tiny_text / "train.xx").read_text(encoding="utf-8").split("\n")[:40]
    Path("in").write_text("\n".join(["", *lines]) + "\n", encoding="utf-8")
    command = ["backtranslate", "--run=model", "--backend=ctranslate2", "--input=in", "--window=9"]
    command += ["--method=greedy", "--copies", "--max_repetitions=99"]
    assert main([*command, "--output=whole"]) == 0
    # Ended in the third window, where a search has just begun.
    step, calls = CTranslate2Backend.step, itertools.count()

    def interrupted(self, **more):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return step(self, **more)

    with monkeypatch.context() as patch:
        patch.setattr(CTranslate2Backend, "step", interrupted)
        assert main([*command, "--output=out", "--resume"]) == 130
    assert "translations.txt.partial holds the output of the first 18 lines" in capfd.readouterr().err
    assert len(Path("out/translations.txt.partial").read_text().split("\n")) == 19
    assert main([*command, "--output=out", "--resume"]) == 0
    for path in Path("whole").iterdir():
        assert (Path("out") / path.name).read_bytes() == path.read_bytes()
    texts = Path("whole/translations.txt").read_text().split("\n")
    assert len(texts) == 42 and texts[0] == ""
    assert sum(map(bool, texts)) > 30, "a model of 48 updates may say nothing to a line"
    # The command `translate` takes the same folder, and what this package's search writes beside the text.
    same = ["translate", "--run=model", "--backend=ctranslate2", "--input=in", "--method=greedy"]
    assert main([*same, "--output=texts", "--capitals=never"]) == 0
    assert Path("texts").read_text() == Path("whole/translations.txt").read_text()
    assert main([*same, "--output=scored", "--scores", "--capitals=never"]) == 0
    scored = [line.split("\t") for line in Path("scored").read_text().split("\n")[:-1]]
    assert [text for _, text in scored] == texts[:-1]
    capfd.readouterr()
    for flags, message in (
        (["--json"], "gives no probabilities of tokens"),
        (["--then=model"], "--then has no effect with --backend=ctranslate2"),
        (["--glossary=in"], "--glossary has no effect with --backend=ctranslate2"),
        (["--documents"], "--documents has no effect with --backend=ctranslate2"),
        (["--long_lines=cut"], "--long_lines has no effect with --backend=ctranslate2"),
        (["--prefix=in"], "line 2 has a prefix, required phrases or terms"),
    ):
        assert main([*same, "--output=refused", "--overwrite", *flags]) == 2
        error = capfd.readouterr().err
        assert message in error and error.count("\n") == 1, error
    for flags, message in (
        (["--mbr=chrf"], "--mbr has no effect"),
        (["--method=sample", "--min_p=0.2"], "search.min_p=0.2"),
        (["--mbr_samples=9"], "--mbr_samples has no effect"),
        (["--stopping=exact"], "--stopping has no effect"),
        (["--suppress=nothing_such"], "suppress contains 'nothing_such'"),
        (["--checkpoint=last"], "--checkpoint has no effect with --backend=ctranslate2"),
        (["--workers=2"], "--workers has no effect with --backend=ctranslate2"),
        (["--ray=auto"], "--ray has no effect with --backend=ctranslate2"),
        (["--length_bound=limit"], "--length_bound has no effect"),
        ([f"--run={tiny_run}"], "has no model.bin"),
    ):
        assert main([*command, "--output=refused", *flags]) == 2
        error = capfd.readouterr().err
        assert message in error and error.count("\n") == 1, error
