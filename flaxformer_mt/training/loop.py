"""`fit`: the training loop, from a config to a finished run directory.

This module defines the order of events; other modules implement them.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO, cast

import jax

from flaxformer_mt.config import Config
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.directions import find_directions
from flaxformer_mt.config.files import flatten
from flaxformer_mt.data.batch_array import BatchArray
from flaxformer_mt.data.curriculum import Position
from flaxformer_mt.data.loader import train_batches
from flaxformer_mt.errors import TrainingInterrupted, warn_user
from flaxformer_mt.object_store.remote_runs import open_copy, to_url
from flaxformer_mt.parallel.compilation import CompileClock
from flaxformer_mt.parallel.processes import decide_once, is_first
from flaxformer_mt.runs import run_directory
from flaxformer_mt.scoring.metrics import try_scorers
from flaxformer_mt.tracking import Tracker
from flaxformer_mt.tracking.progress_display import WorkProgress
from flaxformer_mt.tracking.tracking_services import import_service
from flaxformer_mt.training import setup_messages
from flaxformer_mt.training.checkpoint_trees import to_trees
from flaxformer_mt.training.compile_ahead import shapes_of
from flaxformer_mt.training.final_report import TrainingReport, make_report
from flaxformer_mt.training.initial_model import check_lora_start
from flaxformer_mt.training.profiling import Profile
from flaxformer_mt.training.resume_position import TrainProgress, has_ended
from flaxformer_mt.training.setup import TrainingSetup, compile_shapes, set_up_training, shapes_left
from flaxformer_mt.training.state import TrainState
from flaxformer_mt.training.stop_request import StopRequest
from flaxformer_mt.training.train_log import TrainingLog
from flaxformer_mt.training.update import LossTerm
from flaxformer_mt.training.validation import Validation
from flaxformer_mt.translation.minimum_bayes_risk import check_choice
from flaxformer_mt.workers.worker_pool import PoolOptions


def fit(
    config: Config,
    run_dir: str | Path,
    *,
    profile: int = 0,
    progress: TextIO | None = None,
    workers: int | None = None,
    loss_terms: Sequence[LossTerm] = (),
    allow_changed_data: bool = False,
    draw_report: Callable[[Path], Path] | None = None,
) -> TrainingReport:
    """Train the model that a config describes, or resume the run in `run_dir`; return the run's report.

    If the run is finished, its existing report is returned. To start from the parameters of another run, call
    `start_run` first.

    Args:
      config: data, vocabulary, model and optimization of the run.
      run_dir: the run directory; created if it does not exist.
      profile: the number of steps to record as a trace in RUN/profile/; 0: none.
      progress: the stream on which progress is shown, such as sys.stderr; None: nothing is shown.
      workers: the number of processes that check and tokenize a large training set; None: this process does
        it. With workers, call `fit` only below `if __name__ == "__main__":`.
      loss_terms: additional terms of the loss. They are not part of the config, so pass them again to resume
        the run.
      allow_changed_data: whether to continue if the text has changed since the last checkpoint.
      draw_report: a function that makes a page about the finished run directory and returns the page's path;
        W&B and MLflow receive the page.

    Raises:
      UserError: the config, data set or run directory is invalid, gradients stay non-finite, or another
        process trains this run.
      TrainingInterrupted: SIGTERM or SIGINT arrived; a checkpoint was saved after the step in progress.
    """
    run_dir = open_copy(run_dir)
    validate(config)
    run_directory.check_run(run_dir, config)
    check_lora_start(config, run_dir)
    report = decide_once(lambda: run_directory.read_final_report(run_dir, config))
    if report is not None:
        if progress is not None:
            finished = f"{to_url(run_dir)} is finished, at step {report['step']} of {config.train.steps}."
            print(finished, file=progress, flush=True)
        return cast(TrainingReport, report)
    # Of several processes, the first one writes, and the others end with it.
    with run_directory.lock_run(run_dir) if is_first() else contextlib.nullcontext():
        _check_services(config, run_dir)
        setup = set_up_training(
            config,
            run_dir,
            progress=WorkProgress(progress if is_first() else None),
            pool=PoolOptions(workers),
            loss_terms=loss_terms,
            allow_changed_data=allow_changed_data,
        )
        if is_first():
            for warning in setup_messages.describe_doubts(config, setup.parallel.platform):
                warn_user(warning)
        return _train_and_report(setup, profile, progress, draw_report)


def _check_services(config: Config, run_dir: Path) -> None:
    """Clean the run directory, and check for missing packages and scorers before the data are prepared."""
    if is_first():
        for name in config.train.trackers:
            import_service(name)
        run_directory.sweep_run(run_dir)
    scores = [name for name in config.train.metrics if name != "loss"]
    direction = find_directions(config.data)[0]
    decide_once(lambda: try_scorers(scores, "train.best_metric", direction=direction))
    check_choice(config.search)


def _train_and_report(
    setup: TrainingSetup,
    profile: int,
    stream: TextIO | None,
    draw_report: Callable[[Path], Path] | None,
) -> TrainingReport:
    """Train to the end, average the last checkpoints, score the test set and write the report."""
    config, run_dir, checkpoints = setup.config, setup.run_dir, setup.checkpoints
    clock, start = CompileClock(), setup.progress.step
    tracker = Tracker(
        run_dir if is_first() else None,
        total_steps=config.train.steps,
        start_step=start,
        tensorboard=config.train.tensorboard,
        trackers=config.train.trackers,
        stream=stream,
        clock=clock.working,
    )
    with clock, tracker:
        tracker.log_config(flatten(config))
        for line in setup_messages.describe_training(setup):
            tracker.message(line)
        if checkpoints.warning:
            warn_user(checkpoints.warning)
        updates = profile if is_first() else 0
        trace = Profile(run_dir / "profile", updates, (start, config.train.steps), say=tracker.message)
        try:
            _train(setup, tracker, trace, clock, announce=stream is not None)
        finally:
            checkpoints.finish_writing()  # whatever ended training, the saved checkpoint is on disk
        checkpoints.wait()
        if config.train.average_last:
            trained = sum(step > run_directory.IMPORTED_STEP for step in checkpoints.steps())
            checkpoints.average(min(config.train.average_last, trained))
            checkpoints.wait()
        report = make_report(setup, tracker, stream)
        if is_first():
            run_directory.write_report(run_dir, report)
            if draw_report is not None:
                tracker.log_report(draw_report(run_dir))  # training is complete without a page
    return report


def _train(
    setup: TrainingSetup, tracker: Tracker, profile: Profile, clock: CompileClock, *, announce: bool
) -> None:
    """Run the training loop until it ends or is interrupted, with validation and checkpoints when due."""
    config, progress, state = setup.config, setup.progress, setup.state
    train, best_metric, count = config.train, config.train.metrics[0], config.optim.accumulation
    validation = None
    if setup.prepared.valid_pairs is not None:
        validation = Validation(config, setup.prepared, setup.model, setup.parallel, like=state.params)
    if validation is not None and setup_messages.starts_from_import(setup.checkpoints, progress.step):
        # Training may not improve on the imported model, which then stays the best.
        _evaluate(validation, state, progress, tracker, best_metric)
        setup.checkpoints.record_metrics(run_directory.IMPORTED_STEP, progress.metrics)
    start = time.monotonic() - progress.train_seconds
    with tracker.busy(setup_messages.COMPILING_AHEAD):
        compile_shapes(setup, tracker.message)
    if validation is not None:
        validation.compile_beside(shapes_of(state.inference_params), clock)
    log = TrainingLog(tracker, setup, clock=clock.working)
    hooks = (profile, log.add)
    shapes = len(shapes_left(setup))
    with StopRequest(announce=announce) as stop, _open_batches(setup) as batches, profile:
        while not _is_finished(config, progress):
            with jax.profiler.StepTraceAnnotation("update", step_num=progress.step + 1):
                with log.waiting():
                    positions, microbatches = zip(*itertools.islice(batches, count), strict=True)
                on_devices = [setup.put(batch) for batch in microbatches]
                with _tell_of_compiling(tracker, setup, on_devices, shapes):
                    state, metrics = setup.train_step(state, setup.numbers, on_devices)
            _advance(progress, positions[-1], config, tracker)
            step = progress.step
            for hook in hooks:
                hook(step, metrics, microbatches, progress.epoch)
            last = step == train.steps or has_ended(config.data, progress)
            if validation is not None and (last or step % train.evaluate_every == 0):
                with log.paused():
                    _evaluate(validation, state, progress, tracker, best_metric)
            due = last or bool(progress.metrics) or step % train.checkpoint_every == 0
            stopping = stop.is_due(at_log_step=step % train.log_every == 0)
            if due or stopping:
                with log.paused():
                    progress.interim = not due
                    progress.train_seconds = time.monotonic() - start
                    progress.log, progress.target_tokens = log.to_dict(), log.target_tokens
                    setup.checkpoints.save(step, to_trees(state), progress.to_dict())
            if stopping and not _is_finished(config, progress):
                setup.checkpoints.wait()
                tracker.message(f"stopped at step {step} and saved; the same command resumes there")
                raise TrainingInterrupted(step, stop.exit_status)
    log.flush(progress.step)  # the updates since the last line, where training ended early


def _tell_of_compiling(
    tracker: Tracker, setup: TrainingSetup, batches: list[BatchArray], expected: int
) -> contextlib.AbstractContextManager[None]:
    programs = setup.train_step.by_shape
    if all(batch in programs for batch in batches):
        return contextlib.nullcontext()
    number = len(programs) + 1
    return tracker.busy(f"compiling ({number} of {max(number, expected)} programs)")


def _evaluate(
    validation: Validation, state: TrainState, progress: TrainProgress, tracker: Tracker, best_metric: str
) -> None:
    values = validation(state.inference_params)
    progress.record_evaluation(values, best_metric=best_metric)
    tracker.log(progress.step, "valid", values)
    tracker.log_samples(progress.step, validation.samples)


@contextlib.contextmanager
def _open_batches(setup: TrainingSetup) -> Iterator[Iterator[tuple[Position, BatchArray]]]:
    """Yield an iterator over the batches from the run's position on; end the loader's threads on exit."""
    config, train, vocab = setup.config, setup.prepared.train, setup.prepared.vocabs.target
    batches = train_batches(
        train,
        config.data,
        seed=config.seed,
        pad_id=vocab.pad_id,
        bos_id=vocab.bos_id,
        start=setup.progress.position,
        share=setup.row_share,
        accumulation=config.optim.accumulation,
    )
    with contextlib.closing(train), contextlib.closing(batches):
        yield batches


def _advance(progress: TrainProgress, after: Position, config: Config, tracker: Tracker) -> None:
    """Record a step after which the next batch is at `after`; show a message if the step ended a stage."""
    ended = progress.stage
    progress.advance(after)
    if after.stage != ended:
        tracker.message(setup_messages.describe_stage_end(config, progress.step, ended, after.stage))


def _is_finished(config: Config, progress: TrainProgress) -> bool:
    out_of_patience = 0 < config.train.patience <= progress.evaluations_since_best
    return progress.step >= config.train.steps or out_of_patience or has_ended(config.data, progress)
