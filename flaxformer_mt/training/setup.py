"""Set up training: everything that the loop needs, made from the config and the newest checkpoint.

Puts together devices, data, model, optimizer and state, and maps a checkpoint's trees to the training state.
"""

import dataclasses
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import Config
from flaxformer_mt.config.directions import find_directions
from flaxformer_mt.corpus.mixture_weights import format_shares
from flaxformer_mt.corpus.tfds_cache import cache_dir, compiled_dir
from flaxformer_mt.cpu import slow_bfloat16_reason
from flaxformer_mt.data.batch_array import BatchArray, RowShare, make_empty_batch
from flaxformer_mt.data.buckets import Shape
from flaxformer_mt.data.curriculum import format_stages
from flaxformer_mt.data.prepare import Prepared, prepare
from flaxformer_mt.data.token_store import TokenStore
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.kernels.attention_kernels import explain_attention
from flaxformer_mt.losses import AlignmentSums
from flaxformer_mt.model import Model, init_params
from flaxformer_mt.model.lora import FACTORS, has_factors, without_factors
from flaxformer_mt.parallel import (
    Parallel,
    check_compiler_options,
    enable_compilation_cache,
    make_parallel,
)
from flaxformer_mt.parallel.processes import decide_once, first_then_others, is_first, work_in_all
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.run_directory import IMPORTED_STEP
from flaxformer_mt.tracking import Tracker
from flaxformer_mt.tracking.progress_display import SILENT, WorkProgress
from flaxformer_mt.training.checkpoint_trees import TrainProgress, restore_state, restore_trees
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
from flaxformer_mt.training.frozen import check_patterns, describe_frozen, select_trained
from flaxformer_mt.training.optimizers import Hyperparameters, make_hyperparameters, warmup_updates
from flaxformer_mt.training.state import TrainState, init_state, init_training_params, make_training_model
from flaxformer_mt.training.update import (
    LossTerm,
    StepMetrics,
    Sums,
    add_sums,
    make_gradient_step,
    make_train_step,
    make_update,
)
from flaxformer_mt.workers.worker_pool import NO_POOL, PoolOptions

COMPILING_AHEAD = "compiling the update for all batch shapes"
SCORING = "scoring the test set"
NO_TEST_SET = "there is no test set to score; hold one out with data.test_pairs=N"


def announce_training(tracker: Tracker, config: Config, setup: Any) -> None:
    """Say what is trained, on what, and how."""
    vocabs, progress = setup.prepared.vocabs, setup.progress
    sizes = f"{vocabs.source.size:,}" if vocabs.joint else f"{vocabs.source.size:,} + {vocabs.target.size:,}"
    directions = ", ".join(direction.name for direction in find_directions(config.data))
    tracker.message(
        f"{config.data.dataset} {directions}: "
        f"{len(setup.prepared.train.base):,} {'pairs' if config.data.source_language else 'sentences'}, "
        f"{sizes} {config.vocab.kind} pieces; "
        f"{setup.parameters:,} parameters on {setup.parallel.describe()}"
    )
    if shares := setup.prepared.report.get("mixture"):
        tracker.message(format_shares(shares))
    for line in format_stages(setup.prepared.report.get("stages", [])):
        tracker.message(line)
    tracker.message(describe_attention(config, setup.parallel))
    tracker.message(f"layers: {setup.layers}")
    if frozen := describe_frozen(setup.state.params, config.optim):
        tracker.message(frozen)
    if setup.parallel.device_count > 1:
        tracker.message("\n".join([f"{setup.parallel.layout.describe()}", *setup.placements]))
    if config.data.row_multiple % setup.parallel.layout.row_parts:
        tracker.message(
            f"batches get rows of padding: data.row_multiple {config.data.row_multiple} is not divisible by "
            f"the {setup.parallel.layout.row_parts} devices that share the rows"
        )
    tracker.message(describe_batches(setup.prepared.report["batches"]))
    if long_warmup := describe_long_warmup(config):
        tracker.message(long_warmup)
    if progress.step:
        tracker.message(f"resuming at step {progress.step} of {config.train.steps}")


def describe_batches(plan: dict[str, Any]) -> str:
    """Describe the batches of an epoch, as `plan_summary` returns them."""
    axes = {"rows": "rows", "source": "source", "target": "target"}
    noun = "pairs"
    if not any(shape["source"] for shape in plan["shapes"]):  # a language model
        axes, noun = {"rows": "rows", "target": "tokens"}, "sentences"
    shapes = ", ".join("x".join(str(shape[axis]) for axis in axes) for shape in plan["shapes"])
    skipped = f"; {plan['skipped']:,} {noun} are too long and left out" if plan["skipped"] else ""
    return (
        f"{plan['batches']:,} batches an epoch, {plan['padding']:.1%} padding, "
        f"{len(plan['shapes'])} shapes ({' x '.join(axes.values())}): {shapes}{skipped}"
    )


def describe_import(checkpoints: Checkpoints) -> str:
    """Describe the imported model that a run starts from."""
    _, stored = checkpoints.restore(IMPORTED_STEP, {})
    origin = stored.get("imported_from") or {}
    names = ", ".join(str(origin[name]) for name in ("format", "path") if name in origin)
    return (
        f"starting from the imported model{f' ({names})' if names else ''} with a new optimizer state; "
        f"checkpoint {IMPORTED_STEP} keeps the imported parameters"
    )


def describe_attention(config: Config, parallel: Parallel) -> str:
    """Tell which kernel computes attention in the longest batches, and why."""
    data = config.data
    lengths = (data.max_source_length if data.source_language else 0, data.max_target_length)
    source, target = (-(-length // data.length_multiple) * data.length_multiple for length in lengths)
    kernel, reason = explain_attention(
        config.model, parallel.platform, lengths=(source, target), tensor=parallel.layout.tensor
    )
    return f"attention: {kernel} ({reason})"


def warn_of_slow_dtype(config: Config, platform: str) -> None:
    """Warn in the first process if this CPU computes faster in float32 than in the chosen dtype."""
    if config.model.dtype != "bfloat16" or platform != "cpu" or not is_first():
        return
    if reason := slow_bfloat16_reason():
        warn_user(
            f"model.dtype bfloat16 is no faster than float32 on this CPU, since {reason}; "
            "--config.model.dtype=float32 is more exact"
        )


def warn_of_short_training(config: Config) -> None:
    """Warn in the first process if the warm-up is shorter than the config says."""
    asked, steps = config.optim.warmup_steps, config.train.steps
    taken = warmup_updates(config.optim, total_steps=steps)
    if taken != asked and is_first():
        warn_user(
            f"optim.warmup_steps {asked} is not below train.steps {steps}, at which schedule "
            f"{config.optim.schedule} ends; the warm-up is shortened to {taken} updates"
        )


def describe_long_warmup(config: Config) -> str:
    """Return what a warm-up beyond the last update does to the learning rate; "" if it ends before."""
    steps = config.train.steps
    warmup = warmup_updates(config.optim, total_steps=steps)
    told = (
        f"optim.warmup_steps {warmup} goes beyond train.steps {steps}: the learning rate rises to the end, "
    )
    return "" if warmup <= steps else told + f"where it is {steps / warmup:.0%} of the highest"


def describe_stage_end(config: Config, step: int, ended: int, stage: int) -> str:
    """Describe the end of a stage, by the numbers of the stage that ended and of the next one."""
    stages = config.data.stages
    following = "the last one" if stage == len(stages) else f"then stage {stages[stage].name}"
    return f"update {step} ends stage {stages[ended].name}, {following}"


class TrainStep:
    """One update: from a state and its microbatches to the next state and the metrics to log."""

    def __init__(
        self,
        by_shape: ProgramsByShape,
        arguments_of: Callable[[Any, Any, Any], tuple[Any, ...]],
        run: Callable[[TrainState, Hyperparameters, list[BatchArray]], tuple[TrainState, StepMetrics]],
        *,
        of_sums: tuple[Any, ...] = (),
    ) -> None:
        """Store the arguments.

        Args:
          by_shape: the program that reads a batch.
          arguments_of: its arguments, from a state, numbers and a batch.
          run: the update, which calls it.
          of_sums: with gradient accumulation, the programs that add two sums and update the state by one.
        """
        self.by_shape, self.arguments_of, self._run, self.of_sums = by_shape, arguments_of, run, of_sums

    def __call__(
        self, state: TrainState, numbers: Hyperparameters, batches: list[BatchArray]
    ) -> tuple[TrainState, StepMetrics]:
        """Compute the update; donates the state."""
        return self._run(state, numbers, batches)


class TrainingSetup(NamedTuple):
    """What the training loop needs; `state` and `progress` are those of the newest checkpoint, or initial."""

    parallel: Parallel
    prepared: Prepared
    model: Model
    # The numbers of the config on the devices.
    numbers: Hyperparameters
    train_step: TrainStep
    state: TrainState
    progress: TrainProgress
    parameters: int
    # The sharding of each parameter, as lines for the log; empty where parameters are replicated.
    placements: list[str]
    # Sizes of batches without padding, by their shapes with it; none: batches keep their padding.
    unpadded: UnpaddedSizes
    # Whether the program scans over the layers, and why.
    layers: str = ""

    @property
    def row_share(self) -> RowShare:
        """The rows of a batch that this process loads."""
        return RowShare(self.parallel.layout.row_parts, self.parallel.row_share)

    def put(self, batch: BatchArray) -> BatchArray:
        """Transfer a batch to the devices, as one array; returns before they have it."""
        return self.parallel.put(dataclasses.replace(batch, unpadded=fitting_sizes(batch, self.unpadded)))


def set_up_training(
    config: Config,
    run_dir: Path,
    checkpoints: Checkpoints,
    *,
    progress: WorkProgress = SILENT,
    pool: PoolOptions = NO_POOL,
    loss_terms: Sequence[LossTerm] = (),
    allow_changed_data: bool = False,
) -> TrainingSetup:
    """Prepare data, model and state; the state is initialized on its devices, or restored onto them.

    A checkpoint of any device layout is restored onto the layout of this config.

    Args:
      loss_terms, allow_changed_data: see `fit`.
    """
    parallel = make_parallel(config)
    check_compiler_options(parallel.compiler_options)
    enable_compilation_cache(compiled_dir())
    own_store = None if is_first() else cache_dir(config.data) / "tokens" / f"process-{jax.process_index()}"
    prepared = first_then_others(
        lambda: prepare(config, run_dir, own_store=own_store, progress=progress, pool=pool), name="prepare"
    )
    _check_splits(config, prepared)
    vocabs = prepared.vocabs
    model, layers = make_training_model(config, parallel, sizes=(vocabs.source.size, vocabs.target.size))
    numbers = parallel.place(make_hyperparameters(config))
    warn_of_short_training(config)
    warn_of_slow_dtype(config, parallel.platform)
    if config.optim.freeze or config.optim.lora.rank:
        shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
        check_patterns(shapes, config.optim)

    def make_state() -> TrainState:
        placement = {"sharding_of": parallel.sharding_of}
        params = init_training_params(model, config, config.seed, **placement)
        return parallel.init(lambda params: init_state(params, config.optim), params, donate=(0,))

    state, reached = load_state(checkpoints, parallel, make_state)
    pairs = filter(None, (prepared.train.pairs, prepared.valid_pairs))
    texts = {text: name for part in pairs for text, name in part.name_texts().items()}
    if not allow_changed_data:
        _check_texts(reached, texts, run_dir)
    reached.texts = texts
    return TrainingSetup(
        parallel,
        prepared,
        model,
        numbers,
        compile_train_step(model, config, parallel, loss_terms=loss_terms),
        state,
        reached,
        sum(x.size for x in jax.tree.leaves(without_factors(state.params))),
        parallel.describe_parameters(state.params),
        find_unpadded_sizes(config, parallel, [plan["shapes"] for plan in _epoch_plans(prepared)]),
        layers,
    )


def compile_shapes(config: Config, setup: TrainingSetup, say: Callable[[str], object]) -> None:
    """Compile the update for all batch shapes that are left, before the first one, if the config says so."""
    parallel, vocab, step = setup.parallel, setup.prepared.vocabs.target, setup.train_step
    store = setup.prepared.train.base
    shapes = shapes_left(config, setup)
    if not shapes or not compiles_ahead(config, parallel.platform):
        return
    state, numbers = shapes_of((setup.state, setup.numbers))  # the first update donates the arrays

    def arguments_of(shape: Shape) -> tuple[BatchArray, tuple[Any, ...]]:
        parts = parallel.layout.row_parts
        whole = shape._replace(rows=-(-shape.rows // parts) * parts)
        packed = config.data.batching == "pack"
        array = make_empty_batch(
            whole, store.columns, packed=packed, pad_id=vocab.pad_id, bos_id=vocab.bos_id
        )
        array = dataclasses.replace(array, unpadded=setup.unpadded.get(shape))
        batch = parallel.put_shapes(array)
        return batch, step.arguments_of(state, numbers, batch)

    compile_ahead(step.by_shape, shapes, arguments_of, config=config, parallel=parallel, say=say)


def shapes_left(config: Config, setup: TrainingSetup) -> list[Shape]:
    """Return the batch shapes that the remaining updates will use, the one with the most work first."""
    updates = config.train.steps - setup.progress.step
    plans = _epoch_plans(setup.prepared)[setup.progress.stage :]
    shapes = {shape for plan in plans for shape in find_shapes(config, plan, updates=updates)}
    return sorted(shapes, key=lambda shape: -shape.work)


def _epoch_plans(prepared: Prepared) -> list[dict[str, Any]]:
    """Return the summaries of the first epoch, or of the first epochs of all stages."""
    return [stage["batches"] for stage in prepared.report.get("stages", [prepared.report])]


def _check_texts(reached: TrainProgress, now: dict[str, str], run_dir: Path) -> None:
    """Refuse other text than that of the updates so far; earlier versions did not record it."""
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
        names = [
            f"{split}.{language}" for language in (data.source_language, data.target_language) if language
        ]
        files = f" (no {' and '.join(names)} in {data.text_dir})" if data.dataset == "parallel_text" else ""
        raise UserError(
            f"{data.dataset} has no split {split}{files}, but a validation set is required by "
            f"{' and '.join(needs)}; hold out pairs of the training set with --config.data.valid_pairs=500, "
            "name a split with data.valid_split, or set train.final_checkpoint=last and train.patience=0"
        )


def _check_positions(config: Config, valid: TokenStore) -> None:
    """Check that the model has positions for every validation pair: validation uses all pairs uncut."""
    if config.model.architecture == "decoder_only":
        longest = int((valid.source_lengths + valid.target_lengths).max(initial=0))
    else:
        longest = int(max(valid.source_lengths.max(initial=0), valid.target_lengths.max(initial=0)))
    bound = config.model.longest_input
    if bound is not None and longest > bound:
        raise UserError(
            f"the longest pair of the validation set has {longest} tokens, but model.max_positions is "
            f"{bound}; raise model.max_positions, or remove the longer pairs from the validation set"
        )


def load_state(
    checkpoints: Checkpoints, parallel: Parallel, make_state: Callable[[], TrainState]
) -> tuple[TrainState, TrainProgress]:
    """Return the newest checkpoint's state on the devices of `parallel`, or the initial one.

    The checkpoint may have been saved from any device layout. Process 0 chooses it for all processes, and all
    of them read it or none.
    """
    step = decide_once(checkpoints.newest_undamaged)
    if step is None:
        return make_state(), TrainProgress()
    return work_in_all(
        lambda: _restore_state(checkpoints, parallel, make_state, step),
        what=f"read checkpoint {step}, from which process 0 resumes training",
    )


def _restore_state(
    checkpoints: Checkpoints, parallel: Parallel, make_state: Callable[[], TrainState], step: int
) -> tuple[TrainState, TrainProgress]:
    if step == IMPORTED_STEP:  # an imported model has parameters only
        state = make_state()
        targets = {"params": without_factors(state.params)}
        params = restore_trees(checkpoints, IMPORTED_STEP, targets)[0]["params"]
        params |= {FACTORS: state.params[FACTORS]} if has_factors(state.params) else {}
        ema_params = None if state.ema_params is None else jax.tree.map(jnp.copy, params)
        return dataclasses.replace(state, params=params, ema_params=ema_params), TrainProgress()
    target = parallel.place_shapes(jax.eval_shape(make_state))
    state, values = restore_state(checkpoints, step, target)
    return state, TrainProgress.from_dict(values)


def compile_train_step(
    model: Any, config: Config, parallel: Parallel, *, loss_terms: Sequence[LossTerm] = ()
) -> TrainStep:
    """Compile the update: one program, or with gradient accumulation three (gradient, sum, update).

    Each group of devices adds the gradients of its own rows over the microbatches; the groups are added once.

    Args:
      loss_terms: see `fit`.
    """
    config = _select_for_programs(config)
    dependencies, devices = [model.config, config], list(parallel.mesh.devices.flat)

    def keep_on_disk(results: Callable[..., Any]) -> DiskCache | None:
        # The code of further loss terms is no part of what a kept program is found by.
        return None if loss_terms else DiskCache(dependencies, devices, results)

    scalar: Any = 0
    correct = scalar if config.train.log_accuracy else None
    alignment = AlignmentSums(scalar, scalar) if config.model.alignment.weight else None
    if config.optim.accumulation == 1:
        metrics = StepMetrics(scalar, scalar, scalar, scalar, scalar, scalar, correct, alignment)
        train_step = make_train_step(model, config, parallel, loss_terms=loss_terms)
        step = parallel.compile(train_step, donate=(0,))
        on_disk = keep_on_disk(lambda state, numbers, batch: (state, metrics))
        by_shape = ProgramsByShape(step, batch=2, on_disk=on_disk)
        return TrainStep(
            by_shape,
            lambda state, numbers, batch: (state, numbers, batch),
            lambda state, numbers, batches: by_shape(state, numbers, batches[0]),
        )
    gradient_step = make_gradient_step(model, config, loss_terms=loss_terms)
    gradient_step = parallel.over_rows(gradient_step, batch=3, partial=True)
    gradient = parallel.compile(gradient_step, partial=True)

    def results_of(params: Any, *_: Any) -> Sums:
        return Sums(select_trained(params, config.optim), scalar, scalar, correct, alignment)

    by_shape = ProgramsByShape(gradient, batch=3, on_disk=keep_on_disk(results_of))
    add = parallel.compile(add_sums, donate=(0,), partial=True)
    # The sums are not donated: no result has their shapes, and JAX would warn about it.
    apply = make_update(config, platform=parallel.platform)
    update = parallel.compile(
        lambda state, numbers, sums: apply(state, numbers, parallel.sum_parts(sums)), donate=(0,)
    )

    def accumulated(
        state: TrainState, numbers: Hyperparameters, batches: list[BatchArray]
    ) -> tuple[TrainState, StepMetrics]:
        sums = by_shape(state.params, numbers, state.step, batches[0], np.int32(0))
        for number, batch in enumerate(batches[1:], start=1):
            sums = add(sums, by_shape(state.params, numbers, state.step, batch, np.int32(number)))
        return update(state, numbers, sums)

    return TrainStep(
        by_shape,
        lambda state, numbers, batch: (state.params, numbers, state.step, batch, np.int32(0)),
        accumulated,
        of_sums=(add, update),
    )


def _select_for_programs(config: Config) -> Config:
    """Return a config with what the programs of an update depend on, without their `Hyperparameters`.

    All else is absent, so that a program that reads it fails instead of taking a default.
    """
    optim = dataclasses.replace(config.optim, learning_rate=1.0, schedule="constant", warmup_steps=0)
    names = ("label_smoothing", "loss_chunk_tokens", "log_accuracy")
    train: Any = types.SimpleNamespace(**{name: getattr(config.train, name) for name in names})
    absent: dict[str, Any] = {"data": None, "vocab": None, "search": None}
    return dataclasses.replace(config, optim=optim, train=train, seed=0, **absent)
