"""`fit`: the one loop, from a config to a finished run directory.

Row 10 of the data path. Everything it does is a call into another room; what it owns is the order of things.
"""

import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.checkpoint import Checkpoints
from flaxformer_mt.config import Config
from flaxformer_mt.config_checks import validate
from flaxformer_mt.corpus.reader import cache_dir
from flaxformer_mt.data.loader import Position, train_batches
from flaxformer_mt.data.store import TokenStore
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.monitor import TrainingLog
from flaxformer_mt.optim import Schedule, make_optimizer, make_schedule
from flaxformer_mt.parallel import Parallel, enable_compilation_cache
from flaxformer_mt.prepare import Prepared, prepare
from flaxformer_mt.progress import Progress
from flaxformer_mt.report import describe_report, make_report
from flaxformer_mt.run_directory import IMPORTED_STEP, check_run, read_report, write_report
from flaxformer_mt.shapes import Batch
from flaxformer_mt.signals import StopRequest
from flaxformer_mt.state import TrainState, init_state
from flaxformer_mt.steps import StepMetrics, add_sums, make_gradient_step, make_train_step, make_update
from flaxformer_mt.tracking import Tracker
from flaxformer_mt.validation import Evaluation

# One update: the state and its microbatches in, the state after and what to log out.
TrainStep = Callable[[TrainState, list[Batch]], tuple[TrainState, StepMetrics]]


class _Setup(NamedTuple):
    """What the loop works with, made from the config alone."""

    parallel: Parallel
    prepared: Prepared
    model: Any
    schedule: Schedule
    train_step: TrainStep
    state: TrainState
    parameters: int


def fit(config: Config, run_dir: Path) -> dict[str, Any]:
    """Trains what the config describes, or goes on where the run in `run_dir` stopped; returns its report.

    Ends the process with 128 + signal, after saving, when it is asked to stop.

    Raises:
      UserError: a config, data or run directory that cannot be, or training that no longer produces numbers.
    """
    validate(config)
    check_run(run_dir, config)
    report = read_report(run_dir)
    if report is not None and (report["step"] >= config.train.steps or report["stopped_early"]):
        print(f"{run_dir} is finished, at step {report['step']} of {config.train.steps}.", file=sys.stderr)
        print(describe_report(report, run_dir), file=sys.stderr)
        return report

    setup = _set_up(config, run_dir)
    checkpoints = Checkpoints(
        run_dir, keep_last=config.train.keep_checkpoints, best_metric=config.train.best_metric
    )
    state, progress = _resume(checkpoints, setup.state)
    tracker = Tracker(
        run_dir,
        total_steps=config.train.steps,
        start_step=progress.step,
        tensorboard=config.train.tensorboard,
    )
    with tracker:
        _announce(tracker, config, setup, progress)
        if checkpoints.warning:
            tracker.message(f"warning: {checkpoints.warning}")
        try:
            _train(config, setup, state, progress, checkpoints, tracker)
        finally:
            checkpoints.wait()  # whatever ended training, what it saved is on the disk
        del state
        if config.train.average_last:
            trained = sum(step > IMPORTED_STEP for step in checkpoints.steps())
            checkpoints.average(min(config.train.average_last, trained))
        tracker.message("scoring the test set")
    report = make_report(
        config,
        run_dir,
        setup.prepared,
        progress,
        parameters=setup.parameters,
        hardware=setup.parallel.describe(),
    )
    write_report(run_dir, report)
    print(describe_report(report, run_dir), file=sys.stderr)
    return report


def _set_up(config: Config, run_dir: Path) -> _Setup:
    parallel = Parallel(config)
    enable_compilation_cache(cache_dir(config.data) / "compiled")
    prepared = prepare(config, run_dir)
    _check_splits(config, prepared)
    vocabs = prepared.vocabs
    model = make_model(config.model, source_size=vocabs.source.size, target_size=vocabs.target.size)
    schedule = make_schedule(config.optim, model_dim=config.model.model_dim, total_steps=config.train.steps)
    optimizer = make_optimizer(config.optim, schedule)
    params = init_params(model, jax.random.key(config.seed))
    return _Setup(
        parallel,
        prepared,
        model,
        schedule,
        _compile_train_step(model, optimizer, config, parallel),
        parallel.place(init_state(params, optimizer, ema=config.optim.ema_decay > 0)),
        sum(x.size for x in jax.tree.leaves(params)),
    )


def _train(
    config: Config,
    setup: _Setup,
    state: TrainState,
    progress: Progress,
    checkpoints: Checkpoints,
    tracker: Tracker,
) -> None:
    """The loop: batch, update, log, and evaluation and checkpoint when due; until done or asked to stop."""
    train = config.train
    evaluate = None
    if setup.prepared.valid_pairs is not None:
        evaluate = Evaluation(config, setup.prepared, setup.model, setup.parallel)
    log = TrainingLog(tracker, setup.schedule, config, progress.log)
    clock = time.monotonic() - progress.train_seconds
    with StopRequest() as stop, _open_batches(config, setup.prepared, progress) as batches:
        while not _is_done(config, progress):
            position, microbatches = _take(batches, config.optim.accumulation)
            state, metrics = setup.train_step(state, [setup.parallel.put(batch) for batch in microbatches])
            progress.move(position, sum(int(np.count_nonzero(b.target_mask)) for b in microbatches))
            log.add(progress.step, metrics, microbatches, position.epoch)
            last = progress.step == train.steps
            if evaluate is not None and (last or progress.step % train.evaluate_every == 0):
                log.pause()
                values = evaluate(state.inference_params)
                progress.note(values, best_metric=train.best_metric)
                tracker.log(progress.step, "valid", values)
                log.go_on()
            due = last or bool(progress.metrics) or progress.step % train.checkpoint_every == 0
            if due or stop.received:
                log.pause()
                progress.interim = not due
                progress.train_seconds = time.monotonic() - clock
                progress.log = log.to_dict()
                checkpoints.save(progress.step, _to_trees(state), progress.to_dict())
                log.go_on()
            if stop.received and not _is_done(config, progress):
                checkpoints.wait()
                tracker.message(
                    f"stopped at step {progress.step} and saved; the same command goes on from there"
                )
                raise SystemExit(stop.exit_status)
    log.flush(progress.step)  # the rest, where training ended early


@contextlib.contextmanager
def _open_batches(
    config: Config, prepared: Prepared, progress: Progress
) -> Iterator[Iterator[tuple[Position, Batch]]]:
    """The batches from where `progress` is; ends the threads behind them when training ends."""
    vocab = prepared.vocabs.target
    batches = train_batches(
        prepared.train,
        config.data,
        seed=config.seed,
        pad_id=vocab.pad_id,
        bos_id=vocab.bos_id,
        start=progress.position,
    )
    try:
        yield batches
    finally:
        batches.close()
        prepared.train.close()


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


def _resume(checkpoints: Checkpoints, state: TrainState) -> tuple[TrainState, Progress]:
    step = checkpoints.newest_good()
    if step is None:
        return state, Progress()
    if step == IMPORTED_STEP:  # parameters alone: everything else begins here
        trees, _ = checkpoints.restore(step, {"params": state.params})
        ema_params = None if state.ema_params is None else jax.tree.map(jnp.copy, trees["params"])
        return dataclasses.replace(state, params=trees["params"], ema_params=ema_params), Progress()
    trees, values = checkpoints.restore(step, _to_trees(state))
    return TrainState(**({"ema_params": None} | trees.pop("counters") | trees)), Progress.from_dict(values)


def _to_trees(state: TrainState) -> dict[str, Any]:
    """The state by name, as a checkpoint holds it: without a moving average there is no tree of that name."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    if state.ema_params is None:
        del fields["ema_params"]
    counters = {name: fields.pop(name) for name in ("step", "skipped", "skipped_in_a_row")}
    return {**fields, "counters": counters}


def _announce(tracker: Tracker, config: Config, setup: _Setup, progress: Progress) -> None:
    vocabs = setup.prepared.vocabs
    sizes = f"{vocabs.source.size:,}" if vocabs.joint else f"{vocabs.source.size:,} + {vocabs.target.size:,}"
    source, target = config.data.source_language, config.data.target_language
    tracker.message(
        f"{config.data.dataset} {f'{source}-{target}' if source else target}: "
        f"{len(setup.prepared.train.base):,} {'pairs' if source else 'sentences'}, "
        f"{sizes} {config.vocab.kind} pieces; "
        f"{setup.parameters:,} parameters on {setup.parallel.describe()}"
    )
    tracker.message(_describe_batches(setup.prepared.report["batches"]))
    if progress.step:
        tracker.message(f"goes on from step {progress.step} of {config.train.steps}")


def _describe_batches(plan: dict[str, Any]) -> str:
    axes = {"rows": "rows", "source": "source", "target": "target"}
    noun = "pairs"
    if not any(shape["source"] for shape in plan["shapes"]):  # a language model's
        axes, noun = {"rows": "rows", "target": "tokens"}, "sentences"
    shapes = ", ".join("x".join(str(shape[axis]) for axis in axes) for shape in plan["shapes"])
    skipped = f"; {plan['skipped']:,} {noun} are too long and left out" if plan["skipped"] else ""
    return (
        f"{plan['batches']:,} batches an epoch, {plan['padding']:.1%} padding, "
        f"{len(plan['shapes'])} shapes ({' x '.join(axes.values())}): {shapes}{skipped}"
    )


def _is_done(config: Config, progress: Progress) -> bool:
    out_of_patience = 0 < config.train.patience <= progress.without_gain
    return progress.step >= config.train.steps or out_of_patience


def _take(batches: Iterator[tuple[Position, Batch]], count: int) -> tuple[Position, list[Batch]]:
    taken = list(itertools.islice(batches, count))
    return taken[-1][0], [batch for _, batch in taken]


def _compile_train_step(model: Any, optimizer: Any, config: Config, parallel: Parallel) -> TrainStep:
    """One program an update; with accumulation three: gradient, sum, update."""
    if config.optim.accumulation == 1:
        step = parallel.compile(make_train_step(model, optimizer, config), donate=(0,))
        return lambda state, batches: step(state, batches[0])
    gradient = parallel.compile(make_gradient_step(model, config))
    add = parallel.compile(add_sums, donate=(0,))
    # The sums are not donated: no result is there to take their memory, and JAX would say so.
    update = parallel.compile(make_update(optimizer, config), donate=(0,))

    def accumulated(state: TrainState, batches: list[Batch]) -> tuple[TrainState, StepMetrics]:
        sums = gradient(state.params, state.step, batches[0], np.int32(0))
        for number, batch in enumerate(batches[1:], start=1):
            sums = add(sums, gradient(state.params, state.step, batch, np.int32(number)))
        return update(state, sums)

    return accumulated
