"""The running log and the progress of training: means, the best evaluation, and that a stop changes none."""

import dataclasses
import json
import math
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_experiment import array_of

from flaxformer_mt.config import Config, ModelConfig, TrainConfig
from flaxformer_mt.data.loader import Position
from flaxformer_mt.errors import UserError
from flaxformer_mt.flops import real_work, training_flops
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training import train_log
from flaxformer_mt.training.resume_position import TrainProgress
from flaxformer_mt.training.train_log import TrainingLog
from flaxformer_mt.training.update import StepMetrics

CLOCKS = {"tokens_per_second", "steps_per_second", "data_wait", "model_flops_per_second", "utilization"}
TOKENS, TRUE = np.ones((2, 3), np.int32), np.ones((2, 3), bool)
BATCH = array_of(Batch(TOKENS, TOKENS, TOKENS, TRUE, TRUE))


class Lines(list):
    """A tracker that keeps what it is told, clocks in a list of their own."""

    def __init__(self) -> None:
        self.clocks: list[dict[str, float]] = []
        self.without_line: list[int] = []

    def start_clock(self) -> None:
        pass

    def end_silence(self, step: int) -> None:
        self.without_line.append(step)

    def log(self, step: int, split: str, values: dict[str, Any]) -> None:
        self.append((step, split, {name: v for name, v in values.items() if name not in CLOCKS}))
        if split == "train":
            self.clocks.append({name: v for name, v in values.items() if name in CLOCKS})


class Devices:
    device_count = 2
    row_factor = 1

    def __init__(self, device_kind: str = "cpu", memory: int | None = None) -> None:
        self.device_kind = device_kind
        self.memory = lambda: memory


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make_config(**train: Any) -> Config:
    return Config(train=TrainConfig(**{"steps": 1000, "log_every": 4, "log_accuracy": True} | train))


def make_log(lines, config, gathered=None, parallel=None, clock=None):
    prepared = SimpleNamespace(vocabs=SimpleNamespace(target=SimpleNamespace(size=11)))
    setup = SimpleNamespace(config=config, parallel=parallel or Devices(), prepared=prepared)
    setup.progress = TrainProgress(log=gathered or {})
    return TrainingLog(lines, setup, clock=clock or Clock())


def metrics(loss: float, weight: float, correct: float = 0, *alignment: float) -> StepMetrics:
    fields = loss, weight, 1.0, 0.5, 0, 0, correct, *(alignment or (0, 0))
    return StepMetrics(*map(np.float32, fields))


def run(log, updates, epochs, first=0):
    for step, (update, epoch) in enumerate(zip(updates, epochs, strict=True), start=first + 1):
        log.add(step, metrics(*update), [BATCH], epoch)
    return json.loads(json.dumps(log.to_dict()))  # reads the last one


UPDATES = [(6.0, 2.0, 1.0), (4.0, 2.0, 0.0), (9.0, 3.0, 3.0), (5.0, 5.0, 1.0), (1.0, 1.0, 1.0)]


def test_each_epoch_ends_with_the_means_over_its_tokens():
    """Epochs of 3 and 2 updates, a line of the log every 4; without the accuracy where it is not counted."""
    lines, without = Lines(), Lines()
    run(make_log(lines, make_config()), UPDATES, [0, 0, 1, 1, 2])
    assert [(step, split) for step, split, _ in lines] == [(3, "epoch"), (4, "train"), (5, "epoch")]
    assert lines.without_line == [1, 2, 3, 5]
    assert lines[0][2] == {"epoch": 1, "loss": 19 / 7, "accuracy": 4 / 7, "target_tokens": 7}
    assert lines[2][2] == {"epoch": 2, "loss": 6 / 6, "accuracy": 2 / 6, "target_tokens": 6}
    assert (lines[1][2]["loss"], lines[1][2]["accuracy"]) == (24 / 12, 5 / 12)
    run(make_log(without, make_config(log_accuracy=False)), UPDATES, [0, 0, 1, 1, 2])
    for _, _, values in lines:
        del values["accuracy"]
    assert without == lines


def test_the_loss_of_alignments_is_a_mean_of_its_own_and_survives_a_stop():
    """Over the aligned tokens; and a checkpoint of an earlier version, without its sums, still loads."""
    lines, config = Lines(), make_config(log_accuracy=False)

    def add(log: TrainingLog, step: int, loss_sum: float, aligned: float) -> None:
        log.add(step, metrics(6.0, 2.0, 0, loss_sum, aligned), [BATCH], 0)

    log = make_log(lines, config)
    add(log, 1, 3.0, 2.0)
    add(log, 2, 0.0, 0.0)
    gathered = json.loads(json.dumps(log.to_dict()))
    older = {**gathered, "line": {"loss_sum": 12.0, "weight": 4.0, "correct_sum": 0.0}}
    for stored, mean in ((gathered, 7.0 / 4.0), (older, 4.0 / 2.0)):
        log = make_log(lines, config, stored)
        add(log, 3, 4.0, 2.0)
        add(log, 4, 0.0, 0.0)
        log.flush(4)
        assert (lines[-1][2]["loss"], lines[-1][2]["alignment_loss"]) == (24 / 8, mean)


def test_several_epochs_end_with_one_line_and_a_loss_that_is_no_number_voids_no_epoch():
    lines = Lines()
    run(make_log(lines, make_config()), UPDATES[:3], [0, 3, 3])
    assert [(step, split, values["epoch"]) for step, split, values in lines] == [(2, "epoch", 3)]
    assert lines[0][2]["loss"] == 10 / 4
    lines = Lines()
    run(make_log(lines, make_config(log_every=2)), [UPDATES[0], (math.nan, 7.0, 0.0), UPDATES[2]], [0, 0, 1])
    assert [split for _, split, _ in lines] == ["train", "epoch"]
    assert math.isnan(lines[0][2]["loss"])
    assert lines[1][2] == {"epoch": 1, "loss": 15 / 5, "accuracy": 4 / 5, "target_tokens": 5}


def random_updates(count: int) -> list[tuple[float, float, float]]:
    random = np.random.default_rng(0)
    return [(float(np.float32(loss)), 7.0, 3.0) for loss in 10 ** random.uniform(-12, 12, count)]


@pytest.mark.parametrize("stop", range(1, 24))
def test_a_stop_anywhere_changes_no_line(stop):
    config, updates = make_config(log_every=9), random_updates(24)
    epochs = [step // 11 for step in range(1, 25)]
    undisturbed, before, after = Lines(), Lines(), Lines()
    run(make_log(undisturbed, config), updates, epochs)
    assert [split for _, split, _ in undisturbed] == ["train", "epoch", "train", "epoch"]
    gathered = run(make_log(before, config), updates[:stop], epochs[:stop])
    run(make_log(after, config, gathered), updates[stop:], epochs[stop:], first=stop)
    assert before + after == undisturbed


def masked_batch(source: list[int], target: list[int]) -> Batch:
    masks = [np.arange(width) < np.asarray(rows)[:, None] for rows, width in ((source, 6), (target, 5))]
    ids = [mask.astype(np.int32) for mask in masks]
    return Batch(ids[0], ids[1], ids[1], *masks)


def test_a_line_counts_real_tokens_padding_and_the_operations_they_need():
    """Two updates, one of two microbatches, in 4 seconds; other devices do not tell all of it."""
    lines, config, clock = Lines(), make_config(log_every=2), Clock()
    config = dataclasses.replace(config, model=ModelConfig(dtype="bfloat16"))
    log = make_log(lines, config, parallel=Devices("NVIDIA H200", memory=3 * 2**29), clock=clock)
    first, second, third = masked_batch([6, 1], [5, 2]), masked_batch([2, 2], [3, 3]), masked_batch([4], [4])
    log.add(1, metrics(1.0, 13.0, 1.0), [array_of(first), array_of(second)], 0)
    clock.now += 4
    log.add(2, metrics(1.0, 4.0, 1.0), [array_of(third)], 0)
    log.flush(2)
    (_, _, values), (clocks,) = lines[0], lines.clocks
    assert (values["source_tokens"], values["target_tokens"], values["shapes"]) == (15, 17, 2)
    assert values["padding"] == pytest.approx(1 - 32 / (5 * 11))
    assert values["device_memory_gib"] == 1.5
    work = [real_work(batch.source_mask, batch.target_mask) for batch in (first, second, third)]
    flops = sum(training_flops(config.model, part, target_size=11) for part in work)
    assert clocks["tokens_per_second"] == 17 / 4 and clocks["steps_per_second"] == 2 / 4
    assert clocks["model_flops_per_second"] == pytest.approx(flops / 4)
    assert clocks["utilization"] == pytest.approx(flops / 4 / (2 * 989.4e12))
    run(make_log(lines, make_config(log_every=1)), UPDATES[:1], [0])  # devices of unknown peak and memory
    assert "utilization" not in lines.clocks[1] and "device_memory_gib" not in lines[1][2]
    assert lines.clocks[1]["model_flops_per_second"] > 0


class Late:
    """A weight of one token that the devices have not computed yet."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def block_until_ready(self) -> "Late":
        assert self.done.wait(timeout=60)
        return self

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return np.asarray(self.block_until_ready() and 1.0, np.float32)

    def copy_to_host_async(self) -> None:
        pass


def dispatch(log: TrainingLog, step: int, epoch: int = 0, *, skipped: int = 0) -> Late:
    """An update of loss `step`; the result finishes it."""
    weight = Late()
    numbers = metrics(step, 1.0)._replace(weight=weight, skipped_in_a_row=np.int32(skipped))
    log.add(step, numbers, [BATCH], epoch)
    return weight


def finish(log: TrainingLog, clock: Clock, now: float, update: Late) -> None:
    clock.now = now
    update.done.set()
    log._watcher.submit(lambda: None).result()


def test_the_devices_have_work_while_an_update_is_read():
    """A line is logged when the update after it has been dispatched, with the rates of its own updates."""
    lines, clock = Lines(), Clock()
    log = make_log(lines, make_config(log_every=2, log_accuracy=False), clock=clock)
    for step, now in enumerate((103, 106, 107, 109, 200), start=1):
        update = dispatch(log, step, epoch=step // 4)
        assert [line[0] for line in lines if line[1] == "train"] == list(range(2, step, 2))
        finish(log, clock, now, update)
        clock.now = 1000 * step
    assert [(step, split) for step, split, _ in lines] == [(2, "train"), (4, "train"), (4, "epoch")]
    assert [values["loss"] for _, _, values in lines] == [1.5, 3.5, 2.5]
    assert [clocks["steps_per_second"] for clocks in lines.clocks] == pytest.approx([2 / 6, 2 / 3])
    assert log.target_tokens == 4


def test_skipped_updates_end_all_processes_at_one_update(monkeypatch):
    """The first process counts the work of all."""
    lines = Lines()
    log = make_log(lines, make_config(log_every=2, log_accuracy=False))
    monkeypatch.setattr(train_log, "_MOST_SKIPPED", 2)
    monkeypatch.setattr(train_log, "process_count", lambda: 2)
    monkeypatch.setattr(train_log, "exchange", lambda message: [message, message])
    log._parallel.counts_rows = True
    for step in (1, 2):
        dispatch(log, step, skipped=step).done.set()
    with pytest.raises(UserError, match="the last 2 steps up to step 2"):
        dispatch(log, 3, skipped=3)
    assert [(step, values["target_tokens"]) for step, _, values in lines] == [(2, 2 * 2 * TOKENS.size)]


def test_waiting_for_data_counts_from_when_the_devices_have_nothing_left():
    """All of 100 to 102, before any update; of 102 to 107 what lies after the end of the update, at 105.

    The wait from 111 to 113 holds nothing up, since the update before it ends at 114.
    """
    lines, clock = Lines(), Clock()
    log = make_log(lines, make_config(log_every=2), clock=clock)
    with log.waiting():
        clock.now = 102
    update = dispatch(log, 1)
    with log.waiting():
        finish(log, clock, 105, update)
        clock.now = 107
    update = dispatch(log, 2)
    finish(log, clock, 110, update)
    update = dispatch(log, 3)
    clock.now = 111
    with log.waiting():
        clock.now = 113
    finish(log, clock, 114, update)
    finish(log, clock, 115, dispatch(log, 4))
    log.flush(4)
    assert [clocks["data_wait"] for clocks in lines.clocks] == pytest.approx([4 / 10, 0])


def test_what_was_waited_before_a_stop_is_in_the_line_after_it():
    """1 of 4 seconds before, none of 6 after."""
    lines, config, clock = Lines(), make_config(log_every=2), Clock()
    log = make_log(Lines(), config, clock=clock)
    with log.waiting():
        clock.now += 1
    clock.now += 3
    log.add(1, metrics(*UPDATES[0]), [BATCH], 0)
    with log.paused():
        gathered = json.loads(json.dumps(log.to_dict()))
        clock.now += 1000
    log = make_log(lines, config, gathered, clock=clock)
    clock.now += 6
    run(log, UPDATES[1:2], [0], first=1)
    assert lines.clocks[0]["data_wait"] == pytest.approx(1 / 10)
    assert lines.clocks[0]["tokens_per_second"] == pytest.approx(2 * 6 / 10)


# ---- train progress ----


@pytest.mark.parametrize(
    ("metric", "values", "gains", "best"),
    [
        # equal is not better; what follows a gain counts from one again
        ("bleu", [1.0, 3.0, 3.0, 2.0, 4.0], [True, True, False, False, True], (5, 4.0)),
        ("loss", [2.0, 2.5, 1.0, 1.0], [True, False, True, False], (3, 1.0)),
        # what is no number is never best, wherever it stands
        ("loss", [math.nan, 3.0, math.nan, 2.0], [False, True, False, True], (4, 2.0)),
        ("loss", [math.inf, 3.0], [False, True], (2, 3.0)),
        ("loss", [math.nan], [False], (None, None)),
        ("bleu", [0.0, 0.0], [True, False], (1, 0.0)),
    ],
)
def test_the_best_evaluation(metric, values, gains, best):
    progress = TrainProgress()
    waits, wait = [], 0
    for step, (value, gain) in enumerate(zip(values, gains, strict=True), start=1):
        progress.advance(Position(0, step))
        assert progress.step == step and progress.metrics == {}  # which were of another step
        assert progress.record_evaluation({metric: value, "other": 9.0}, best_metric=metric) is gain
        assert progress.metrics["other"] == 9.0
        wait = 0 if gain else wait + 1
        waits.append(progress.evaluations_since_best == wait)
    assert all(waits)
    assert (progress.best_step, progress.best_value) == best
