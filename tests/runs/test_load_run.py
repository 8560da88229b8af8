"""The choice of the checkpoint that a run is loaded from, by one process and by several."""

import shutil

import pytest

from flaxformer_mt.errors import UserError
from flaxformer_mt.parallel import processes
from flaxformer_mt.runs.checkpoints import write_checkpoint
from flaxformer_mt.runs.load_run import load_trained, name_checkpoint
from flaxformer_mt.trees import flatten_tree


def test_all_processes_load_the_checkpoint_that_the_first_one_chose(tiny_run, tmp_path, monkeypatch):
    """The newest one when process 0 looked, although training has written another one since; or its error."""
    run, later = tmp_path / "run", tmp_path / "48"
    shutil.copytree(tiny_run, run)
    (run / "checkpoints" / "48").rename(later)
    sent = []
    monkeypatch.setattr(processes, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "exchange", lambda message: [message, sent.append(message) or b"{}"])
    first = load_trained(run, checkpoint="last")
    assert (first.checkpoint, first.progress["step"]) == ("last", 32)
    with pytest.raises(UserError, match="there is no checkpoint 48; the nearest is 32"):
        load_trained(run, checkpoint="48")
    later.rename(run / "checkpoints" / "48")
    assert load_trained(run, checkpoint="last").progress["step"] == 48
    monkeypatch.setattr(processes, "is_first", lambda: False)
    answers = iter(sent)
    monkeypatch.setattr(processes, "exchange", lambda message: [next(answers), message])
    other = load_trained(run, checkpoint="last")
    assert (other.checkpoint, other.progress["step"]) == ("last", 32)
    with pytest.raises(UserError, match="there is no checkpoint 48; the nearest is 32"):
        load_trained(run, checkpoint="48")


def test_the_model_that_training_started_from_is_not_taken_in_silence(tiny_run, tmp_path):
    """Step 0, whose BLEU no later checkpoint has reached, and the trained run: one line, and what to do."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    trained = load_trained(tiny_run, checkpoint="last")
    write_checkpoint(
        run / "checkpoints" / "0",
        {"params": flatten_tree(trained.params)},
        {"step": 0, "metrics": {"bleu": 100.0, "loss": 0.1}},
    )
    told = []
    found = load_trained(run, warn=told.append)
    assert (found.checkpoint, found.progress["step"]) == ("best", 0)
    (line,) = told
    assert line == (
        f"the best checkpoint of {run} is step 0, the model that training started from; --checkpoint=last "
        "takes step 48"
    )
    for named in ("last", "0", "48"):
        load_trained(run, checkpoint=named, warn=told.append)
    load_trained(tiny_run, warn=told.append)
    assert len(told) == 1
    for folder in (run / "checkpoints").iterdir():
        shutil.rmtree(folder) if folder.name != "0" else None
    load_trained(run, warn=told.append)  # an import that was not trained
    assert len(told) == 1


def test_a_checkpoint_is_named_with_its_step():
    assert name_checkpoint("best", 1250) == "best (step 1,250)"
    assert name_checkpoint("1250", 1250) == "1250" and name_checkpoint("best", None) == "best"
