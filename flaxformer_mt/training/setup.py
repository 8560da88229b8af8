"""One sitting of a run: all that the loop works with, made from the config and the newest checkpoint.

Owns how devices, data, model, optimizer and state come together, and what of a checkpoint goes where. Knows
nothing of the loop.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import Config
from flaxformer_mt.corpus.reader import cache_dir
from flaxformer_mt.data.loader import RowShare
from flaxformer_mt.data.prepare import Prepared, prepare
from flaxformer_mt.data.token_store import TokenStore
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import Model, init_params, make_model
from flaxformer_mt.model.scanned_layers import is_stacked, stack_layers, unstack_layers
from flaxformer_mt.parallel import Parallel, enable_compilation_cache, make_parallel
from flaxformer_mt.parallel.processes import first_then_others, is_first
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.run_directory import IMPORTED_STEP
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training.optimizers import Schedule, make_optimizer, make_schedule
from flaxformer_mt.training.state import TrainState, init_state
from flaxformer_mt.training.train_progress import Progress
from flaxformer_mt.training.update import (
    StepMetrics,
    add_sums,
    make_gradient_step,
    make_train_step,
    make_update,
)

# One update: the state and its microbatches in, the state after and what to log out.
TrainStep = Callable[[TrainState, list[Batch]], tuple[TrainState, StepMetrics]]


class Sitting(NamedTuple):
    """What the loop works with.

    state and progress are the newest checkpoint's, or the beginning's.
    """

    parallel: Parallel
    prepared: Prepared
    model: Model
    schedule: Schedule
    train_step: TrainStep
    state: TrainState
    progress: Progress
    parameters: int
    # How parameters are split over devices, for the log; empty where they are whole.
    placements: list[str]

    @property
    def row_share(self) -> RowShare:
        """The rows of a batch that this process makes."""
        return RowShare(self.parallel.layout.row_parts, self.parallel.row_share)


def begin_sitting(config: Config, run_dir: Path, checkpoints: Checkpoints) -> Sitting:
    """Prepares everything for the loop; a state is born on its devices, or read onto them.

    The layout over devices is this sitting's own: a checkpoint of any other is read all the same.

    Raises:
      UserError: a layout, data, vocabulary or checkpoint that cannot be.
    """
    parallel = make_parallel(config)
    enable_compilation_cache(cache_dir(config.data) / "compiled")
    own_store = None if is_first() else cache_dir(config.data) / "tokens" / f"process-{jax.process_index()}"
    prepared = first_then_others(lambda: prepare(config, run_dir, own_store=own_store), name="prepare")
    _check_splits(config, prepared)
    vocabs = prepared.vocabs
    model = make_model(config.model, source_size=vocabs.source.size, target_size=vocabs.target.size)
    schedule = make_schedule(config.optim, model_dim=config.model.model_dim, total_steps=config.train.steps)
    optimizer = make_optimizer(config.optim, schedule)

    def make_state() -> TrainState:
        params = init_params(model, jax.random.key(config.seed))
        return init_state(params, optimizer, ema=config.optim.ema_decay > 0)

    state, progress = load_state(checkpoints, parallel, make_state)
    return Sitting(
        parallel,
        prepared,
        model,
        schedule,
        _compile_train_step(model, optimizer, config, parallel),
        state,
        progress,
        sum(x.size for x in jax.tree.leaves(state.params)),
        parallel.describe_parameters(state.params),
    )


def _check_splits(config: Config, prepared: Prepared) -> None:
    if prepared.valid is not None:
        _check_positions(config, prepared.valid)
        return
    needs = [f"train.patience={config.train.patience}"] if config.train.patience else []
    if config.train.final_checkpoint == "best":
        needs.append("train.final_checkpoint=best")
    if needs:
        raise UserError(
            f"{' and '.join(needs)} need a validation set, but {config.data.dataset} has no split "
            f"{config.data.valid_split}; name one with data.valid_split, or set train.final_checkpoint=last "
            "and train.patience=0"
        )


def _check_positions(config: Config, valid: TokenStore) -> None:
    """All validation pairs are measured, however long; so the model must have positions for all of them."""
    if config.model.architecture == "decoder_only":
        longest = int((valid.source_lengths + valid.target_lengths).max(initial=0))
    else:
        longest = int(max(valid.source_lengths.max(initial=0), valid.target_lengths.max(initial=0)))
    bound = config.model.longest_input
    if bound is not None and longest > bound:
        raise UserError(
            f"the longest pair of the validation set has {longest} tokens, but model.max_positions is "
            f"{bound}; raise it, or leave such pairs out of the set"
        )


def load_state(
    checkpoints: Checkpoints, parallel: Parallel, make_state: Callable[[], TrainState]
) -> tuple[TrainState, Progress]:
    """The newest checkpoint's state on the devices of `parallel`, whatever it was saved from, or a new one.

    Raises:
      UserError: there are checkpoints, but none is undamaged and of this structure.
    """
    step = checkpoints.newest_good()
    if step is None:
        return parallel.init(make_state), Progress()
    if step == IMPORTED_STEP:  # parameters alone: everything else begins here
        state = parallel.init(make_state)
        params = _restore_imported(checkpoints, parallel, state.params)
        ema_params = None if state.ema_params is None else jax.tree.map(jnp.copy, params)
        return dataclasses.replace(state, params=params, ema_params=ema_params), Progress()
    target = jax.eval_shape(make_state)
    shardings = parallel.shardings(target)
    target = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        target,
        shardings,
    )
    trees, values = checkpoints.restore(step, to_trees(target))
    return TrainState(**({"ema_params": None} | trees.pop("counters") | trees)), Progress.from_dict(values)


def _restore_imported(checkpoints: Checkpoints, parallel: Parallel, like: Any) -> Any:
    """The parameters that `import` wrote, a tree for each layer, in the form and on the devices of `like`."""
    if not is_stacked(like):
        return checkpoints.restore(IMPORTED_STEP, {"params": like})[0]["params"]
    single = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), jax.eval_shape(unstack_layers, like))
    params = stack_layers(checkpoints.restore(IMPORTED_STEP, {"params": single})[0]["params"])
    return parallel.place(params)


def to_trees(state: TrainState) -> dict[str, Any]:
    """The state by name, as a checkpoint holds it: without a moving average there is no tree of that name."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    if state.ema_params is None:
        del fields["ema_params"]
    counters = {name: fields.pop(name) for name in ("step", "skipped", "skipped_in_a_row")}
    return {**fields, "counters": counters}


def _compile_train_step(model: Any, optimizer: Any, config: Config, parallel: Parallel) -> TrainStep:
    """One program an update; with accumulation three: gradient, sum, update."""
    if config.optim.accumulation == 1:
        step = parallel.compile(make_train_step(model, optimizer, config), batch=1, donate=(0,))
        return lambda state, batches: step(state, batches[0])
    gradient = parallel.compile(make_gradient_step(model, config), batch=2)
    add = parallel.compile(add_sums, donate=(0,))
    # The sums are not donated: no result is there to take their memory, and JAX would say so.
    update = parallel.compile(make_update(optimizer, config), donate=(0,))

    def accumulated(state: TrainState, batches: list[Batch]) -> tuple[TrainState, StepMetrics]:
        sums = gradient(state.params, state.step, batches[0], np.int32(0))
        for number, batch in enumerate(batches[1:], start=1):
            sums = add(sums, gradient(state.params, state.step, batch, np.int32(number)))
        return update(state, sums)

    return accumulated
