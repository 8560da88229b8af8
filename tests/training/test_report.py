"""The report of training: what it says at the end of a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from flaxformer_mt.config import Config, TrainConfig
from flaxformer_mt.errors import FlaxformerWarning
from flaxformer_mt.tracking import Tracker
from flaxformer_mt.training.final_report import make_report
from flaxformer_mt.training.resume_position import TrainProgress


def test_the_end_of_training_says_that_the_best_model_is_the_one_it_started_from():
    """Without a test set; with one, its evaluation loads that model and says so."""
    prepared = SimpleNamespace(test_pairs=None, report=dict.fromkeys(("train", "valid", "test")))
    progress = TrainProgress(step=50, best_step=0, best_value=0.0)
    parallel = SimpleNamespace(describe=lambda: "a CPU")
    setup = SimpleNamespace(prepared=prepared, progress=progress, parallel=parallel, parameters=1)
    setup.config, setup.run_dir = Config(), Path("runs/a")
    tracker = Tracker(None, total_steps=50)
    with pytest.warns(FlaxformerWarning, match=r"runs/a is step 0, .*--checkpoint=last takes step 50"):
        report = make_report(setup, tracker)
    assert report["best"] == {"step": 0, "bleu": 0.0}
    setup.config = Config(train=TrainConfig(final_checkpoint="last"))  # the start is not used
    make_report(setup, tracker)
    setup.config, progress.best_step = Config(), 50
    make_report(setup, tracker)
