"""The running log of training: what its lines are means of, and that a stop anywhere changes none."""

import json
import math
from typing import Any

import numpy as np
import pytest

from flaxformer_mt.config import Config, TrainConfig
from flaxformer_mt.monitor import TrainingLog
from flaxformer_mt.shapes import Batch
from flaxformer_mt.steps import StepMetrics

CLOCKS = {"tokens_per_second", "steps_per_second"}
TOKENS, TRUE = np.ones((2, 3), np.int32), np.ones((2, 3), bool)
BATCH = Batch(TOKENS, TOKENS, TOKENS, TRUE, TRUE)


class Lines(list):
    """A tracker that keeps what it is told, apart from the clocks."""

    def log(self, step: int, split: str, values: dict[str, Any]) -> None:
        self.append((step, split, {name: v for name, v in values.items() if name not in CLOCKS}))


def make_config(**train: Any) -> Config:
    return Config(train=TrainConfig(**{"steps": 1000, "log_every": 4, "log_accuracy": True} | train))


def make_log(lines: Lines, config: Config, gathered: dict[str, Any] | None = None) -> TrainingLog:
    return TrainingLog(lines, lambda step: 0.5, config, gathered)


def metrics(loss: float, weight: float, correct: float | None) -> StepMetrics:
    one = np.float32(1.0)
    counted = None if correct is None else np.float32(correct)
    return StepMetrics(np.float32(loss), np.float32(weight), one, np.int32(0), np.int32(0), counted)


def run(
    log: TrainingLog, updates: list[tuple[float, float, float | None]], epochs: list[int], first: int = 0
):
    for step, (update, epoch) in enumerate(zip(updates, epochs, strict=True), start=first + 1):
        log.add(step, metrics(*update), [BATCH], epoch)


UPDATES = [(6.0, 2.0, 1.0), (4.0, 2.0, 0.0), (9.0, 3.0, 3.0), (5.0, 5.0, 1.0), (1.0, 1.0, 1.0)]


def test_each_epoch_ends_with_the_means_over_its_tokens():
    """Epochs of 3 and 2 updates, a line of the log every 4."""
    lines = Lines()
    run(make_log(lines, make_config()), UPDATES, [0, 0, 1, 1, 2])
    assert [(step, split) for step, split, _ in lines] == [(3, "epoch"), (4, "train"), (5, "epoch")]
    assert lines[0][2] == {"epoch": 1, "loss": 19 / 7, "accuracy": 4 / 7, "target_tokens": 7}
    assert lines[2][2] == {"epoch": 2, "loss": 6 / 6, "accuracy": 2 / 6, "target_tokens": 6}
    assert (lines[1][2]["loss"], lines[1][2]["accuracy"]) == (24 / 12, 5 / 12)


def test_accuracy_is_logged_only_where_it_is_counted():
    lines = Lines()
    updates = [(loss, weight, None) for loss, weight, _ in UPDATES]
    run(make_log(lines, make_config(log_accuracy=False)), updates, [0, 0, 1, 1, 2])
    assert lines[0][2] == {"epoch": 1, "loss": 19 / 7, "target_tokens": 7}
    assert not any("accuracy" in values for _, _, values in lines)


def test_an_update_of_several_epochs_ends_them_all_with_one_line():
    lines = Lines()
    run(make_log(lines, make_config()), UPDATES[:3], [0, 3, 3])
    assert [(step, split, values["epoch"]) for step, split, values in lines] == [(2, "epoch", 3)]
    assert lines[0][2]["loss"] == 10 / 4


def test_a_loss_that_is_no_number_voids_a_line_but_not_the_epoch():
    lines = Lines()
    run(make_log(lines, make_config(log_every=2)), [UPDATES[0], (math.nan, 7.0, 0.0), UPDATES[2]], [0, 0, 1])
    assert [split for _, split, _ in lines] == ["train", "epoch"]
    assert math.isnan(lines[0][2]["loss"])
    assert lines[1][2] == {"epoch": 1, "loss": 15 / 5, "accuracy": 4 / 5, "target_tokens": 5}


def random_updates(count: int) -> list[tuple[float, float, float]]:
    """Losses whose sum in float64 depends on the order of addition."""
    random = np.random.default_rng(0)
    return [(float(np.float32(loss)), 7.0, 3.0) for loss in 10 ** random.uniform(-12, 12, count)]


@pytest.mark.parametrize("stop", range(1, 24))
def test_a_stop_anywhere_changes_no_line(stop):
    """Bit for bit, whether it falls on the end of a line, of an epoch, or between."""
    config, updates = make_config(log_every=9), random_updates(24)
    epochs = [step // 11 for step in range(1, 25)]
    undisturbed, before, after = Lines(), Lines(), Lines()
    run(make_log(undisturbed, config), updates, epochs)
    assert [split for _, split, _ in undisturbed] == ["train", "epoch", "train", "epoch"]
    log = make_log(before, config)
    run(log, updates[:stop], epochs[:stop])
    gathered = json.loads(json.dumps(log.to_dict()))
    run(make_log(after, config, gathered), updates[stop:], epochs[stop:], first=stop)
    assert before + after == undisturbed
