"""Sets up training: devices, data, model, optimizer and state, from the config and the newest checkpoint."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxformer_mt.config import Config
from flaxformer_mt.corpus.tfds_cache import cache_dir, compiled_dir
from flaxformer_mt.data.batch_array import BatchArray, RowShare, make_empty_batch
from flaxformer_mt.data.buckets import Shape
from flaxformer_mt.data.prepare import Prepared, prepare
from flaxformer_mt.data.token_store import TokenStore
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import Model, init_params
from flaxformer_mt.model.lora import without_factors
from flaxformer_mt.parallel import Parallel, enable_compilation_cache, make_parallel
from flaxformer_mt.parallel.processes import first_then_others, is_first
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.tracking.progress_display import SILENT, WorkProgress
from flaxformer_mt.training.checkpoint_trees import load_state
from flaxformer_mt.training.compile_ahead import (
    DiskCache,
    ProgramsByShape,
    UnpaddedSizes,
    compile_ahead,
    compiles_ahead,
    find_shapes,
    find_unpadded_sizes,
    fitting_sizes,
    shapes_of,
)
from flaxformer_mt.training.optimizers import Hyperparameters, make_hyperparameters
from flaxformer_mt.training.resume_position import TrainProgress
from flaxformer_mt.training.state import TrainState, init_state, init_training_params, make_training_model
from flaxformer_mt.training.trained_parameters import check_patterns, select_trained
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
from flaxformer_mt.workers.worker_pool import NO_POOL, PoolOptions


@dataclass(frozen=True)
class TrainStep:
    """Compiled programs that compute the new state and metrics of a step from a state and microbatches.
    by_shape: the program of the whole step or, with gradient accumulation, of the gradient of one microbatch;
    it is compiled for each batch shape.
    add, update: only with gradient accumulation; `add` adds the sums of two microbatches, and `update`
    updates the state with the total.
    """

    by_shape: ProgramsByShape
    add: Callable[[Sums, Sums], Sums] = add_sums
    update: Callable[[TrainState, Hyperparameters, Sums], tuple[TrainState, StepMetrics]] | None = None

    def __call__(
        self, state: TrainState, numbers: Hyperparameters, batches: Sequence[BatchArray]
    ) -> tuple[TrainState, StepMetrics]:
        """Run the step; the memory of `state` is donated, so `state` cannot be used afterwards."""
        if self.update is None:
            return self.by_shape(state, numbers, batches[0])
        sums = (
            self.by_shape(*self.arguments_of(state, numbers, batch, number))
            for number, batch in enumerate(batches)
        )
        return self.update(state, numbers, functools.reduce(self.add, sums))

    def arguments_of(self, state: Any, numbers: Any, batch: Any, number: int = 0) -> tuple[Any, ...]:
        """Return the arguments with which `by_shape` is called for microbatch `number` of a step."""
        if self.update is None:
            return state, numbers, batch
        return state.params, numbers, state.step, batch, np.int32(number)


class TrainingSetup(NamedTuple):
    """The inputs of the training loop; `state` and `progress` are new or from the newest checkpoint."""

    config: Config
    run_dir: Path
    checkpoints: Checkpoints
    parallel: Parallel
    prepared: Prepared
    model: Model
    # Whether the program scans over the layers, and why.
    layers: str
    # The numbers of the config on the devices.
    numbers: Hyperparameters
    train_step: TrainStep
    state: TrainState
    progress: TrainProgress
    parameters: int
    # Sizes of batches without padding, by their shapes with it; none: batches keep their padding.
    unpadded: UnpaddedSizes

    @property
    def row_share(self) -> RowShare:
        return RowShare(self.parallel.layout.row_parts, self.parallel.row_share)

    def put(self, batch: BatchArray) -> BatchArray:
        """Start to transfer a batch to the devices as one array; do not wait until the transfer ends."""
        return self.parallel.put(dataclasses.replace(batch, unpadded=fitting_sizes(batch, self.unpadded)))


def set_up_training(
    config: Config,
    run_dir: Path,
    *,
    progress: WorkProgress = SILENT,
    pool: PoolOptions = NO_POOL,
    loss_terms: Sequence[LossTerm] = (),
    allow_changed_data: bool = False,
) -> TrainingSetup:
    """Prepare the data, the model and its state, either new or from the newest checkpoint; see `fit`."""
    train = config.train
    checkpoints = Checkpoints(run_dir, keep_last=train.keep_checkpoints, best_metric=train.metrics[0])
    parallel = make_parallel(config)
    enable_compilation_cache(compiled_dir())
    own_store = None if is_first() else cache_dir(config.data) / "tokens" / f"process-{jax.process_index()}"
    prepared = first_then_others(
        lambda: prepare(config, run_dir, own_store=own_store, progress=progress, pool=pool), name="prepare"
    )
    _check_splits(config, prepared)
    vocabs = prepared.vocabs
    model, layers = make_training_model(config, parallel, sizes=(vocabs.source.size, vocabs.target.size))
    if config.optim.freeze or config.optim.lora.rank:
        check_patterns(jax.eval_shape(lambda: init_params(model, jax.random.key(0))), config.optim)

    def make_state() -> TrainState:
        params = init_training_params(model, config, config.seed, sharding_of=parallel.sharding_of)
        return parallel.init(lambda params: init_state(params, config.optim), params, donate=(0,))

    state, reached = load_state(checkpoints, parallel, make_state)
    pairs = filter(None, (prepared.train.pairs, prepared.valid_pairs))
    texts = {text: name for part in pairs for text, name in part.name_texts().items()}
    if not allow_changed_data:
        _check_texts(reached, texts, run_dir)
    reached.texts = texts
    return TrainingSetup(
        config,
        run_dir,
        checkpoints,
        parallel,
        prepared,
        model,
        layers,
        parallel.place(make_hyperparameters(config)),
        compile_train_step(model, config, parallel, loss_terms=loss_terms),
        state,
        reached,
        sum(x.size for x in jax.tree.leaves(without_factors(state.params))),
        find_unpadded_sizes(config, parallel, [plan["shapes"] for plan in _epoch_plans(prepared)]),
    )


def compile_shapes(setup: TrainingSetup, say: Callable[[str], object]) -> None:
    """If train.compile_ahead asks for it, compile the step for all batch shapes that will still occur."""
    config, parallel, step = setup.config, setup.parallel, setup.train_step
    vocab, shapes = setup.prepared.vocabs.target, shapes_left(setup)
    if not shapes or not compiles_ahead(config, parallel.platform):
        return
    state, numbers = shapes_of((setup.state, setup.numbers))  # the first update donates the arrays
    packed, columns = config.data.batching == "pack", setup.prepared.train.base.columns

    parts, every = parallel.layout.row_parts, []
    for shape in shapes:
        whole = shape._replace(rows=-(-shape.rows // parts) * parts)
        array = make_empty_batch(whole, columns, packed=packed, pad_id=vocab.pad_id, bos_id=vocab.bos_id)
        batch = parallel.put_shapes(dataclasses.replace(array, unpadded=setup.unpadded.get(shape)))
        every.append(step.arguments_of(state, numbers, batch))
    compile_ahead(step.by_shape, every, config=config, parallel=parallel, say=say)


def shapes_left(setup: TrainingSetup) -> list[Shape]:
    """Return the batch shapes that the remaining steps will use, sorted by decreasing work."""
    plans, updates = _epoch_plans(setup.prepared), setup.config.train.steps - setup.progress.step
    return find_shapes(setup.config, plans[setup.progress.stage :], updates=updates)


def _epoch_plans(prepared: Prepared) -> list[dict[str, Any]]:
    """Return the plan summary of the first epoch or, with stages, of the first epoch of each stage."""
    return [stage["batches"] for stage in prepared.report.get("stages", [prepared.report])]


def _check_texts(reached: TrainProgress, now: dict[str, str], run_dir: Path) -> None:
    """Raise UserError if the text has changed since the checkpoint; old checkpoints did not record it."""
    names = now | reached.texts
    changed = sorted({names[text] for text in now.keys() ^ reached.texts.keys()}) if reached.texts else []
    if changed:
        raise UserError(
            f"the text of {run_dir} has changed since step {reached.step}: {'; '.join(changed)}; restore it, "
            "or give --allow_changed_data to continue with it as it is: then the rest of the epoch has other "
            "pairs, and scores of another validation set do not compare with those so far"
        )


def _check_splits(config: Config, prepared: Prepared) -> None:
    if prepared.valid is not None:
        _check_positions(config, prepared.valid)
        return
    needs = [f"train.patience={config.train.patience}"] if config.train.patience else []
    if config.train.final_checkpoint == "best":
        needs.append("train.final_checkpoint=best")
    if needs:
        data, split = config.data, config.data.valid_split
        languages = filter(None, (data.source_language, data.target_language))
        names = " and ".join(f"{split}.{language}" for language in languages)
        files = f" (no {names} in {data.text_dir})" if data.dataset == "parallel_text" else ""
        raise UserError(
            f"{data.dataset} has no split {split}{files}, but a validation set is required by "
            f"{' and '.join(needs)}; hold out pairs of the training set with --config.data.valid_pairs=500, "
            "name a split with data.valid_split, or set train.final_checkpoint=last and train.patience=0"
        )


def _check_positions(config: Config, valid: TokenStore) -> None:
    """Check that the model has enough positions for all validation pairs, which are never truncated."""
    one_sequence = config.model.architecture == "decoder_only"
    join = np.add if one_sequence else np.maximum
    longest = int(join(valid.source_lengths, valid.target_lengths).max(initial=0))
    bound = config.model.longest_input
    if bound is not None and longest > bound:
        raise UserError(
            f"the longest pair of the validation set has {longest} tokens, but model.max_positions is "
            f"{bound}; raise model.max_positions, or remove the longer pairs from the validation set"
        )


def compile_train_step(
    model: Model, config: Config, parallel: Parallel, *, loss_terms: Sequence[LossTerm] = ()
) -> TrainStep:
    """Make the training step: one program, or three (gradient, sum, update) with gradient accumulation.

    With accumulation, each group of devices adds up the gradients of its own rows over all microbatches; the
    sums of the groups are added only once per step.
    """
    selected = UpdateConfig.of(config)
    dependencies, devices = [model.config, selected, config.parallel], list(parallel.mesh.devices.flat)

    def compile_by_shape(jitted: Any, batch: int, results: Callable[..., Any]) -> ProgramsByShape:
        # Cached programs are not looked up by the code of further loss terms.
        on_disk = None if loss_terms else DiskCache(dependencies, devices, results)
        return ProgramsByShape(jitted, batch=batch, on_disk=on_disk)

    if config.optim.accumulation == 1:
        train_step = make_train_step(model, selected, parallel, loss_terms=loss_terms)
        step = parallel.compile(train_step, donate=(0,))
        metrics = StepMetrics._make(StepMetrics._fields)  # names in place of arrays
        return TrainStep(compile_by_shape(step, 2, lambda state, *_: (state, metrics)))
    gradient_step = make_gradient_step(model, selected, loss_terms=loss_terms)
    gradient_step = parallel.over_rows(gradient_step, batch=3, partial=True)
    gradient = parallel.compile(gradient_step, partial=True)
    add = parallel.compile(add_sums, donate=(0,), partial=True)
    # The sums are not donated: no result has their shapes, and JAX would warn about it.
    apply = make_update(selected, platform=parallel.platform)
    update = parallel.compile(
        lambda state, numbers, sums: apply(state, numbers, parallel.sum_parts(sums)), donate=(0,)
    )

    def results_of(params: Any, *_: Any) -> Sums:
        return Sums._make([select_trained(params, config.optim), *Sums._fields[1:]])

    return TrainStep(compile_by_shape(gradient, 3, results_of), add, update)
