"""COMET is computed by a program of another environment; what is missing is named with the remedy."""

import os
import sys

import pytest

from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.comet_program import check_comet, score_comet

# A stand-in for the program: the score of a segment is the number of characters of its translation.
PROGRAM = """#!{python}
import argparse, json
parser = argparse.ArgumentParser()
for flag in ("-s", "-t", "-r", "--model", "--gpus", "--to_json"):
    parser.add_argument(flag, required=True)
for flag in ("--only_system", "--quiet"):
    parser.add_argument(flag, action="store_true")
options = parser.parse_args()
lines = [open(name, encoding="utf-8").read().split("\\n")[:-1] for name in (options.s, options.t, options.r)]
assert len(lines[0]) == len(lines[1]) == len(lines[2])
if "fails" in lines[0]:
    raise SystemExit("no such layer")
with open(options.to_json, "w") as file:
    json.dump({{options.t: [{{"COMET": len(line)}} for line in lines[1]]}}, file)
"""


def test_the_mean_of_the_segments_is_returned_and_failures_are_named(tmp_path, monkeypatch):
    model = tmp_path / "model.ckpt"
    with pytest.raises(UserError, match=r"model.ckpt does not exist; give the checkpoint"):
        check_comet(model)
    model.write_bytes(b"")
    with pytest.raises(UserError, match=r"is not a .ckpt file"):
        check_comet(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="comet-score, which is not installed.* pipx install unbabel-comet$"):
        check_comet(model)
    program = tmp_path / "comet-score"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    assert check_comet(model) == model and os.access(program, os.X_OK)
    assert score_comet(model, ["a", "b"], ["xyz", ""], ["x", "y"]) == 1.5
    with pytest.raises(UserError, match="comet-score ends with status 1: no such layer"):
        score_comet(model, ["fails"], ["x"], ["y"])
