"""The update of a run, compiled: one program, or with gradient accumulation three."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flaxformer_mt.config import Config
from flaxformer_mt.data.batch_array import BatchArray
from flaxformer_mt.model import Model
from flaxformer_mt.parallel import Parallel
from flaxformer_mt.training.compile_ahead import DiskCache, ProgramsByShape
from flaxformer_mt.training.optimizers import Hyperparameters
from flaxformer_mt.training.state import TrainState
from flaxformer_mt.training.update import (
    LossTerm,
    StepMetrics,
    Sums,
    UpdateConfig,
    add_sums,
    make_gradient_step,
    make_train_step,
    make_update,
)


@dataclass(frozen=True)
class TrainStep:
    """One update: from a state and its microbatches to the next state and the metrics to log.

    by_shape: the program that reads a batch: the whole update, or its gradient. add, update: with gradient
    accumulation, the programs that add two sums, and that update the state by one.
    """

    by_shape: ProgramsByShape
    add: Callable[[Sums, Sums], Sums] | None = None
    update: Callable[[TrainState, Hyperparameters, Sums], tuple[TrainState, StepMetrics]] | None = None

    def __call__(
        self, state: TrainState, numbers: Hyperparameters, batches: Sequence[BatchArray]
    ) -> tuple[TrainState, StepMetrics]:
        """Compute the update; donates the state."""
        if self.add is None or self.update is None:
            return self.by_shape(state, numbers, batches[0])
        sums = self.by_shape(*self.arguments_of(state, numbers, batches[0]))
        for number, batch in enumerate(batches[1:], start=1):
            sums = self.add(sums, self.by_shape(*self.arguments_of(state, numbers, batch, number)))
        return self.update(state, numbers, sums)

    def arguments_of(self, state: Any, numbers: Any, batch: Any, number: int = 0) -> tuple[Any, ...]:
        """Return the arguments of the program that reads batch `number` of an update."""
        if self.update is None:
            return state, numbers, batch
        return state.params, numbers, state.step, batch, np.int32(number)


def compile_train_step(
    model: Model, config: Config, parallel: Parallel, *, loss_terms: Sequence[LossTerm] = ()
) -> TrainStep:
    """Compile the update: one program, or with gradient accumulation three (gradient, sum, update).

    Each group of devices adds the gradients of its own rows over the microbatches; the groups are added once.

    Args:
      loss_terms: see `fit`.
    """
    selected = UpdateConfig.of(config)
    # The code of further loss terms is no part of what a kept program is found by.
    dependencies = [model.config, selected, config.parallel]
    on_disk = None if loss_terms else DiskCache(dependencies, list(parallel.mesh.devices.flat))
    if config.optim.accumulation == 1:
        train_step = make_train_step(model, selected, parallel, loss_terms=loss_terms)
        step = parallel.compile(train_step, donate=(0,))
        return TrainStep(ProgramsByShape(step, batch=2, on_disk=on_disk))
    gradient_step = make_gradient_step(model, selected, loss_terms=loss_terms)
    gradient_step = parallel.over_rows(gradient_step, batch=3, partial=True)
    gradient = parallel.compile(gradient_step, partial=True)
    add = parallel.compile(add_sums, donate=(0,), partial=True)
    # The sums are not donated: no result has their shapes, and JAX would warn about it.
    apply = make_update(selected, platform=parallel.platform)
    update = parallel.compile(
        lambda state, numbers, sums: apply(state, numbers, parallel.sum_parts(sums)), donate=(0,)
    )
    return TrainStep(ProgramsByShape(gradient, batch=3, on_disk=on_disk), add, update)
