"""`fit`: the one loop, from a config to a finished run directory.

Row 10 of the data path. Everything it does is a call into another room; what it owns is the order of things.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flaxformer_mt.config import Config
from flaxformer_mt.config.checks import validate
from flaxformer_mt.data.loader import Position, train_batches
from flaxformer_mt.parallel.processes import agree, is_first, process_count
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.run_directory import IMPORTED_STEP, check_run, read_report, write_report
from flaxformer_mt.shapes import Batch
from flaxformer_mt.tracking import Tracker, make_tracker
from flaxformer_mt.training.profiling import Profile
from flaxformer_mt.training.report import describe_report, make_report
from flaxformer_mt.training.setup import Sitting, begin_sitting, to_trees
from flaxformer_mt.training.signals import StopRequest
from flaxformer_mt.training.train_log import TrainingLog
from flaxformer_mt.training.train_progress import Progress
from flaxformer_mt.training.validation import Evaluation


def fit(config: Config, run_dir: Path, *, profile: int = 0) -> dict[str, Any]:
    """Trains what the config describes, or goes on where the run in `run_dir` stopped; returns its report.

    Ends the process with 128 + signal, after saving, when it is asked to stop.

    Args:
      config: of the run.
      run_dir: made if need be.
      profile: of how many updates a trace is recorded in RUN/profile/; 0: none.

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

    checkpoints = Checkpoints(
        run_dir, keep_last=config.train.keep_checkpoints, best_metric=config.train.best_metric
    )
    sitting = begin_sitting(config, run_dir, checkpoints)
    progress = sitting.progress
    tracker = make_tracker(
        run_dir if is_first() else None,
        total_steps=config.train.steps,
        start_step=progress.step,
        tensorboard=config.train.tensorboard,
    )
    with tracker:
        _announce(tracker, config, sitting)
        if checkpoints.warning:
            tracker.message(f"warning: {checkpoints.warning}")
        wanted, remaining = profile if is_first() else 0, config.train.steps - progress.step
        trace = Profile(run_dir / "profile", wanted, remaining=remaining, say=tracker.message)
        try:
            _train(config, sitting, checkpoints, tracker, trace)
        finally:
            checkpoints.finish_writing()  # whatever ended training, what it saved is on the disk
        checkpoints.wait()
        if config.train.average_last:
            trained = sum(step > IMPORTED_STEP for step in checkpoints.steps())
            checkpoints.average(min(config.train.average_last, trained))
            checkpoints.wait()
        tracker.message("scoring the test set")
    report = make_report(
        config,
        run_dir,
        sitting.prepared,
        progress,
        parameters=sitting.parameters,
        hardware=sitting.parallel.describe(),
    )
    if is_first():
        write_report(run_dir, report)
    print(describe_report(report, run_dir), file=sys.stderr)
    return report


def _train(
    config: Config,
    sitting: Sitting,
    checkpoints: Checkpoints,
    tracker: Tracker,
    trace: Profile,
) -> None:
    """The loop: batch, update, log, and evaluation and checkpoint when due; until done or asked to stop."""
    train, progress, state = config.train, sitting.progress, sitting.state
    evaluate = None
    if sitting.prepared.valid_pairs is not None:
        evaluate = Evaluation(config, sitting.prepared, sitting.model, sitting.parallel)
    log = TrainingLog(
        tracker,
        sitting.schedule,
        config,
        parallel=sitting.parallel,
        target_size=sitting.prepared.vocabs.target.size,
        gathered=progress.log,
        target_tokens=progress.target_tokens,
    )
    clock = time.monotonic() - progress.train_seconds
    with StopRequest() as stop, _open_batches(config, sitting) as batches, trace:
        while not _is_done(config, progress):
            trace.begin(progress.step + 1)
            with log.waiting():
                position, microbatches = _take(batches, config.optim.accumulation)
            on_devices = [sitting.parallel.put(batch) for batch in microbatches]
            state, metrics = sitting.train_step(state, on_devices)
            trace.end(progress.step + 1, metrics)
            progress.move(position)
            log.add(progress.step, metrics, microbatches, position.epoch)
            last = progress.step == train.steps
            if evaluate is not None and (last or progress.step % train.evaluate_every == 0):
                log.pause()
                values = evaluate(state.inference_params)
                progress.note(values, best_metric=train.best_metric)
                tracker.log(progress.step, "valid", values)
                log.go_on()
            due = last or bool(progress.metrics) or progress.step % train.checkpoint_every == 0
            if process_count() > 1 and progress.step % train.log_every == 0 and agree(bool(stop.received)):
                stop.note_elsewhere()
            stopping = bool(stop.received) and (process_count() == 1 or progress.step % train.log_every == 0)
            if due or stopping:
                log.pause()
                progress.interim = not due
                progress.train_seconds = time.monotonic() - clock
                progress.log, progress.target_tokens = log.to_dict(), log.target_tokens
                checkpoints.save(progress.step, to_trees(state), progress.to_dict())
                log.go_on()
            if stopping and not _is_done(config, progress):
                checkpoints.wait()
                tracker.message(
                    f"stopped at step {progress.step} and saved; the same command goes on from there"
                )
                raise SystemExit(stop.exit_status)
    log.flush(progress.step)  # the rest, where training ended early


@contextlib.contextmanager
def _open_batches(config: Config, sitting: Sitting) -> Iterator[Iterator[tuple[Position, Batch]]]:
    """The batches from where the run is; ends the threads behind them when training ends."""
    prepared = sitting.prepared
    vocab = prepared.vocabs.target
    batches = train_batches(
        prepared.train,
        config.data,
        seed=config.seed,
        pad_id=vocab.pad_id,
        bos_id=vocab.bos_id,
        start=sitting.progress.position,
        share=sitting.row_share,
    )
    try:
        yield batches
    finally:
        batches.close()
        prepared.train.close()


def _announce(tracker: Tracker, config: Config, sitting: Sitting) -> None:
    vocabs, progress = sitting.prepared.vocabs, sitting.progress
    sizes = f"{vocabs.source.size:,}" if vocabs.joint else f"{vocabs.source.size:,} + {vocabs.target.size:,}"
    source, target = config.data.source_language, config.data.target_language
    tracker.message(
        f"{config.data.dataset} {f'{source}-{target}' if source else target}: "
        f"{len(sitting.prepared.train.base):,} {'pairs' if source else 'sentences'}, "
        f"{sizes} {config.vocab.kind} pieces; "
        f"{sitting.parameters:,} parameters on {sitting.parallel.describe()}"
    )
    if sitting.parallel.device_count > 1:
        tracker.message("\n".join([f"{sitting.parallel.layout.describe()}", *sitting.placements]))
    tracker.message(_describe_batches(sitting.prepared.report["batches"]))
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
