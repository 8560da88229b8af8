"""The choice of the checkpoint that a run is loaded from, by one process and by several."""

import shutil

import pytest

from flaxformer_mt.errors import UserError
from flaxformer_mt.parallel import processes
from flaxformer_mt.runs.load_run import load_trained


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
