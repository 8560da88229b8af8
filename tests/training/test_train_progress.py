"""Progress: moves with updates, knows the best evaluation, and survives JSON."""

import json
import math

import pytest

from flaxformer_mt.data.loader import Position
from flaxformer_mt.training.checkpoint_trees import TrainProgress


def test_an_update_moves_one_step_to_the_next_batch():
    progress = TrainProgress()
    assert progress.position == Position(0, 0)
    progress.advance(Position(0, 2))
    progress.record_evaluation({"bleu": 1.0}, best_metric="bleu")
    progress.advance(Position(1, 0))
    assert (progress.step, progress.position) == (2, Position(1, 0))
    assert progress.metrics == {}  # of another step


@pytest.mark.parametrize(
    ("metric", "values", "gains", "best"),
    [
        # equal is not better; what follows a gain counts from one again
        ("bleu", [1.0, 3.0, 3.0, 2.0, 4.0], [True, True, False, False, True], (5, 4.0)),
        ("loss", [2.0, 2.5, 1.0, 1.0], [True, False, True, False], (3, 1.0)),
        # what is no number is never best, wherever it stands
        ("loss", [math.nan, 3.0, math.nan, 2.0], [False, True, False, True], (4, 2.0)),
        ("loss", [math.inf, 3.0], [False, True], (2, 3.0)),
        ("bleu", [0.0, 0.0], [True, False], (1, 0.0)),
    ],
)
def test_the_best_evaluation(metric, values, gains, best):
    progress = TrainProgress()
    waits, wait = [], 0
    for step, (value, gain) in enumerate(zip(values, gains, strict=True), start=1):
        progress.advance(Position(0, step))
        assert progress.record_evaluation({metric: value, "other": 9.0}, best_metric=metric) is gain
        assert progress.metrics["other"] == 9.0
        wait = 0 if gain else wait + 1
        waits.append(progress.evaluations_since_best == wait)
    assert all(waits)
    assert (progress.best_step, progress.best_value) == best


def test_without_any_score_there_is_no_best():
    progress = TrainProgress(step=7)
    progress.record_evaluation({"loss": math.nan}, best_metric="loss")
    assert (progress.best_step, progress.best_value, progress.evaluations_since_best) == (None, None, 1)


def test_progress_survives_json():
    progress = TrainProgress(step=5, epoch=1, index=3, train_seconds=1.5, target_tokens=99)
    progress.record_evaluation({"bleu": 12.25, "loss": 2.5}, best_metric="bleu")
    copy = TrainProgress.from_dict(json.loads(json.dumps(progress.to_dict())))
    assert copy == progress
    copy.metrics["bleu"] = 0.0
    assert progress.metrics["bleu"] == 12.25
