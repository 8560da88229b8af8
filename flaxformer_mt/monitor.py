"""What is measured while training: the running log of updates, and evaluations on the validation set.

Owns the arithmetic of speeds, shares and means, and turns them into what `tracking` shows. Knows nothing of
the order of things in the loop.
"""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from flaxformer_mt.config import Config
from flaxformer_mt.data.loader import valid_batches
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluate import evaluate_lines
from flaxformer_mt.metrics import MetricSums
from flaxformer_mt.optim import Schedule
from flaxformer_mt.parallel import Parallel
from flaxformer_mt.prepare import Prepared
from flaxformer_mt.shapes import Batch
from flaxformer_mt.steps import StepMetrics, make_evaluation_step
from flaxformer_mt.tracking import Tracker
from flaxformer_mt.translate import Translator


class TrainingLog:
    """Gathers the metrics of updates on their devices and reads them once every `train.log_every`.

    Between two reads the host never waits for a step.
    """

    def __init__(
        self, tracker: Tracker, schedule: Schedule, config: Config, gathered: dict[str, Any] | None = None
    ) -> None:
        """Starts the clock; `gathered` is the `to_dict` of the sitting that this one goes on from."""
        self._tracker = tracker
        self._schedule = schedule
        self._config = config
        self._sums = MetricSums()
        self._shapes: set[tuple[int, ...]] = set()
        self._newest: StepMetrics | None = None
        self._real = self._slots = self._updates = 0
        self._seconds = 0.0
        if gathered:
            self._sums.add("loss", value_sum=gathered["loss_sum"], weight=gathered["loss_weight"])
            self._shapes.update(tuple(shape) for shape in gathered["shapes"])
            self._real, self._slots = gathered["real"], gathered["slots"]
            self._updates, self._seconds = gathered["updates"], gathered["seconds"]
        self._then = time.monotonic()

    def to_dict(self) -> dict[str, Any]:
        """What has been gathered since the last line, as JSON values, for a checkpoint.

        So the first line after a resume is over the same updates as it would have been without the stop.
        Waits for the newest step.
        """
        totals = self._sums.result()
        return {
            "loss_sum": totals.get("loss_sum", 0.0),
            "loss_weight": totals.get("loss_weight", 0.0),
            "shapes": sorted(self._shapes),
            "real": self._real,
            "slots": self._slots,
            "updates": self._updates,
            "seconds": self._seconds,
        }

    def add(self, step: int, metrics: StepMetrics, batches: list[Batch]) -> None:
        """Takes in update number `step`; logs when one is due.

        Raises:
          UserError: the last train.max_nonfinite_steps updates all had to be skipped.
        """
        self._sums.add("loss", value_sum=metrics.loss_sum, weight=metrics.weight)
        self._newest = metrics
        self._updates += 1
        for batch in batches:
            self._real += int(np.count_nonzero(batch.target_mask))
            self._slots += batch.target_mask.size
            self._shapes.add((*batch.source.shape, batch.target_in.shape[1]))
        if step % self._config.train.log_every == 0 or step == self._config.train.steps:
            self.flush(step)

    def pause(self) -> None:
        """Stops the clock: what follows is no training."""
        if self._newest is not None:
            jax.block_until_ready(self._newest.weight)
        self._seconds += time.monotonic() - self._then

    def go_on(self) -> None:
        """Starts the clock again."""
        self._then = time.monotonic()

    def flush(self, step: int) -> None:
        """Logs what has been gathered since the last time, if anything."""
        if self._newest is None or not self._updates:
            return
        totals = self._sums.result()  # waits for the newest step
        self.pause()
        self.go_on()
        skipped = int(self._newest.skipped)
        rate = float(self._schedule(max(0, step - 1 - skipped)))  # updates left out do not move the schedule
        self._tracker.log(
            step,
            "train",
            {
                "loss": totals["loss_mean"],
                "learning_rate": rate,
                "gradient_norm": float(self._newest.gradient_norm),
                "tokens_per_second": self._real / max(self._seconds, 1e-9),
                "steps_per_second": self._updates / max(self._seconds, 1e-9),
                "padding": 1 - self._real / self._slots,
                "shapes": len(self._shapes),
                "skipped": skipped,
            },
        )
        in_a_row, limit = int(self._newest.skipped_in_a_row), self._config.train.max_nonfinite_steps
        if in_a_row >= limit:
            raise UserError(
                f"the last {in_a_row} updates up to step {step} had gradients that are not finite "
                f"(train.max_nonfinite_steps is {limit}); the learning rate is {rate:.3g}: lower "
                "optim.learning_rate or lengthen optim.warmup_steps. The checkpoints before are good"
            )
        self._sums.reset()
        self._real = self._slots = self._updates = 0
        self._seconds = 0.0


class Evaluation:
    """Loss, accuracy, BLEU and chrF on the validation set, with greedy search."""

    def __init__(self, config: Config, prepared: Prepared, model: Any, parallel: Parallel) -> None:
        assert prepared.valid_pairs is not None and prepared.valid is not None
        vocab = prepared.vocabs.target
        self._config = config
        self._sources = [pair.source for pair in prepared.valid_pairs]
        self._references = [pair.target for pair in prepared.valid_pairs]
        self._batches = valid_batches(prepared.valid, config.data, pad_id=vocab.pad_id, bos_id=vocab.bos_id)
        self._parallel = parallel
        self._step = parallel.compile(make_evaluation_step(model))
        greedy = dataclasses.replace(config.search, method="greedy", beam_size=1)
        quiet: list[str] = []  # lines that are cut are the same at every evaluation: `prepare` reports them
        self._translator = Translator(
            dataclasses.replace(config, search=greedy), None, prepared.vocabs, warn=quiet.append
        )

    def __call__(self, params: Any) -> dict[str, float]:
        """The scores of these parameters, by name."""
        sums = MetricSums()
        for batch in self._batches:
            for name, (value_sum, weight) in self._step(params, self._parallel.put(batch)).items():
                sums.add(name, value_sum=value_sum, weight=weight)
        totals = sums.result()
        train = self._config.train
        evaluation = evaluate_lines(
            self._translator,
            self._sources,
            self._references,
            lowercase=train.lowercase,
            tokenize=train.bleu_tokenize,
            params=params,
        )
        return {
            "loss": totals["loss_mean"],
            "accuracy": totals["accuracy_mean"],
            "bleu": evaluation.scores.bleu,
            "chrf": evaluation.scores.chrf,
            "seconds": evaluation.seconds,
        }
