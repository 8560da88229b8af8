"""`fit`: the training loop, from a config to a finished run directory.

Contains the order of events; each of them is a call into another module.
"""

import contextlib
import functools
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self, TextIO, cast

import jax

from flaxformer_mt.config import Config
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.files import flatten
from flaxformer_mt.data.batch_array import BatchArray
from flaxformer_mt.data.curriculum import Position
from flaxformer_mt.data.loader import train_batches
from flaxformer_mt.errors import TrainingInterrupted, warn_user
from flaxformer_mt.evaluation.evaluate import try_scorers
from flaxformer_mt.evaluation.run_report.page import report_training
from flaxformer_mt.object_store.remote_runs import open_copy, to_url
from flaxformer_mt.parallel.compilation import CompileClock
from flaxformer_mt.parallel.processes import any_process, decide_once, is_first, process_count
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.run_directory import (
    IMPORTED_STEP,
    check_run,
    is_complete,
    lock_run,
    read_report,
    sweep_run,
    write_report,
)
from flaxformer_mt.tracking import Tracker
from flaxformer_mt.tracking.progress_display import WorkProgress
from flaxformer_mt.tracking.tracking_services import import_service
from flaxformer_mt.training.checkpoint_trees import TrainProgress, has_ended, to_trees
from flaxformer_mt.training.compile_ahead import ProgramsByShape, compiles_ahead, shapes_of
from flaxformer_mt.training.initial_model import check_lora_start, start_run
from flaxformer_mt.training.report import TrainingReport, make_report
from flaxformer_mt.training.setup import (
    COMPILING_AHEAD,
    NO_TEST_SET,
    SCORING,
    TrainingSetup,
    announce_training,
    compile_shapes,
    describe_import,
    describe_stage_end,
    set_up_training,
    shapes_left,
)
from flaxformer_mt.training.state import TrainState
from flaxformer_mt.training.train_log import TrainingLog
from flaxformer_mt.training.update import LossTerm
from flaxformer_mt.training.validation import Validation
from flaxformer_mt.translation.minimum_bayes_risk import check_choice
from flaxformer_mt.workers.worker_pool import PoolOptions

# The number of updates before the trace, during which programs are compiled; fewer if the run is too short.
WARM_UP = 10


class Profile:
    """Record a trace of some updates; a context manager that also stops an unfinished trace on exit.

    Reports the directory of the trace, or that no trace was recorded.
    """

    def __init__(self, directory: Path, updates: int, *, remaining: int, say: Callable[[str], None]) -> None:
        """Store the arguments; recording starts with `begin`.

        Args:
          directory: the directory of the trace, created when recording starts.
          updates: the number of updates to record; 0: record nothing and report nothing.
          remaining: the largest number of updates that the run can still take.
          say: shows a line to the user.
        """
        self._directory = directory
        self._wanted = self._left = updates
        self._skip = min(WARM_UP, max(0, remaining - updates))
        self._say = say
        self._first = self._last = 0
        self._recording = False
        self._annotation: jax.profiler.StepTraceAnnotation | None = None
        self._newest: Any = None

    def begin(self, step: int) -> None:
        """Mark the start of update number `step`, before the loop waits for its batch."""
        if not self._left:
            return
        if self._skip:
            self._skip -= 1
            return
        if not self._recording:
            jax.block_until_ready(self._newest)  # keeps earlier updates out of the trace
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # tracing Python slows down the host and would distort the times
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True, profiler_options=options)
            self._recording, self._first = True, step
        self._last = step
        self._annotation = jax.profiler.StepTraceAnnotation("update", step_num=step)
        self._annotation.__enter__()

    def end(self, step: int, result: Any) -> None:
        """Mark the dispatch of update number `step`; `result` is ready when the devices have finished it."""
        if not self._left:
            return
        self._newest = result
        if self._annotation is None:
            return
        self._annotation.__exit__(None, None, None)
        self._annotation = None
        self._left -= 1
        if not self._left:
            self._stop()

    def _stop(self) -> None:
        try:
            jax.block_until_ready(self._newest)
        finally:
            jax.profiler.stop_trace()
            self._recording, self._left, self._newest = False, 0, None
        traces = sorted((self._directory / "plugins" / "profile").iterdir(), key=lambda p: p.stat().st_mtime)
        self._say(
            f"profile of updates {self._first} to {self._last}: {traces[-1]}; TensorBoard with the profile "
            f"plugin opens {self._directory}, and ui.perfetto.dev opens perfetto_trace.json.gz"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self._recording:
            self._stop()
        elif self._left:
            self._say(f"no profile: training ended before the first of the {self._wanted} updates to record")


class StopRequest:
    """Context manager that records the first SIGTERM or SIGINT; a second one raises KeyboardInterrupt.

    with StopRequest() as stop:
        while stop.received is None: ...

    Outside of the main thread no signal handlers can be installed, and nothing is ever received.
    """

    def __init__(self, *, announce: bool = True) -> None:
        """Install nothing yet.

        Args:
          announce: acknowledge the signal on standard error.
        """
        self.received: signal.Signals | None = None
        self._announce = announce
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._previous[number] = signal.signal(number, self._receive)
            except ValueError:  # not the main thread
                return self
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        if not self._announce:
            return
        # os.write, since print is not reentrant and the signal may have interrupted one.
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, f"\n{self.received.name}: saving after this step; repeat to end at once\n".encode())

    @property
    def exit_status(self) -> int:
        """The exit status that a shell expects of a process ended by this signal: 128 + its number."""
        return 128 + self.received if self.received is not None else 0

    def receive_from_another_process(self) -> None:
        """Record that another process of the same job received a signal."""
        if self.received is None:
            self.received = signal.SIGTERM


def fit(
    config: Config,
    run_dir: str | Path,
    *,
    init: str | None = None,
    new_vocab: bool = False,
    profile: int = 0,
    progress: TextIO | None = None,
    workers: int | None = None,
    loss_terms: Sequence[LossTerm] = (),
    allow_changed_data: bool = False,
) -> TrainingReport:
    """Train the model that a config describes, or resume the run in `run_dir`; return the run's report.

    A finished run is not trained further; its report is returned as it is.

    Args:
      config: data, vocabulary, model and optimization of the run.
      run_dir: the run directory; created if it does not exist.
      init: RUN or RUN@CHECKPOINT, the trained model whose parameters, network and vocabulary the run starts
        from. None: random parameters.
      new_vocab: with `init`, whether a new vocabulary is trained on the data of the config instead.
      profile: the number of updates to record as a trace in RUN/profile/; 0: none.
      progress: the stream that shows progress to a human, such as sys.stderr; None: nothing is shown.
      workers: the number of processes that check and tokenize a large training set, which a program may only
        start below `if __name__ == "__main__":`. None: this process does it.
      loss_terms: further terms of the loss, which are no part of the config: to resume the run, give them
        again.
      allow_changed_data: whether to continue with text that has changed since the last checkpoint.

    Raises:
      UserError: an invalid config, data set or run directory, gradients that stay non-finite, or another
        process that trains this run.
      TrainingInterrupted: SIGTERM or SIGINT arrived; a checkpoint was saved after the step in progress.
    """
    run_dir = open_copy(run_dir)
    if init is not None:
        alone = progress is not None and is_first()
        say = functools.partial(print, file=progress, flush=True) if alone else None
        config = start_run(config, run_dir, init, new_vocab=new_vocab, say=say)
    validate(config)
    check_run(run_dir, config)
    check_lora_start(config, run_dir)
    report = decide_once(lambda: _read_final_report(run_dir, config))
    if report is not None:
        if progress is not None:
            step, steps = report["step"], config.train.steps
            print(f"{to_url(run_dir)} is finished, at step {step} of {steps}.", file=progress, flush=True)
        return report
    # Of several processes, the first one writes, and the others end with it.
    with lock_run(run_dir) if is_first() else contextlib.nullcontext():
        return _fit_alone(
            config,
            run_dir,
            profile=profile,
            progress=progress,
            pool=PoolOptions(workers),
            loss_terms=loss_terms,
            allow_changed_data=allow_changed_data,
        )


def _fit_alone(
    config: Config,
    run_dir: Path,
    *,
    profile: int,
    progress: TextIO | None,
    pool: PoolOptions,
    **how: Any,
) -> TrainingReport:
    """Train the run to its end, while no other training writes to its directory."""
    if is_first():
        for name in config.train.trackers:
            import_service(name)  # a missing package is found before the data are prepared
        sweep_run(run_dir)
    asked = [name for name in config.train.metrics if name != "loss"]
    decide_once(lambda: try_scorers(asked, "train.best_metric"))
    check_choice(config.search)
    checkpoints = Checkpoints(
        run_dir, keep_last=config.train.keep_checkpoints, best_metric=config.train.metrics[0]
    )
    preparation = WorkProgress(progress if is_first() else None)
    setup = set_up_training(config, run_dir, checkpoints, progress=preparation, pool=pool, **how)
    compile_clock = CompileClock()
    tracker = Tracker(
        run_dir if is_first() else None,
        total_steps=config.train.steps,
        start_step=setup.progress.step,
        tensorboard=config.train.tensorboard,
        trackers=config.train.trackers,
        stream=progress,
        clock=compile_clock.working,
    )
    with compile_clock, tracker:
        tracker.log_config(flatten(config))
        announce_training(tracker, config, setup)
        if _starts_from_import(checkpoints, setup.progress):
            tracker.message(describe_import(checkpoints))
        if checkpoints.warning:
            warn_user(checkpoints.warning)
        wanted, remaining = profile if is_first() else 0, config.train.steps - setup.progress.step
        trace = Profile(run_dir / "profile", wanted, remaining=remaining, say=tracker.message)
        try:
            _train(config, setup, checkpoints, tracker, trace, compile_clock, announce=progress is not None)
        finally:
            checkpoints.finish_writing()  # whatever ended training, the saved checkpoint is on disk
        _finish_checkpoints(config, checkpoints)
        tracker.message(SCORING if setup.prepared.test_pairs is not None else NO_TEST_SET)
        facts: dict[str, Any] = {"parameters": setup.parameters, "hardware": setup.parallel.describe()}
        # On a terminal, the line of the tracker alone is updated in place.
        stream = None if progress is None or progress.isatty() or not is_first() else progress
        with tracker.busy(SCORING) if stream is None else contextlib.nullcontext():
            report = make_report(config, run_dir, setup.prepared, setup.progress, stream=stream, **facts)
        if is_first():
            write_report(run_dir, report)
            tracker.log_report(report_training(run_dir))  # training is complete without a page
    return report


def _read_final_report(run_dir: Path, config: Config) -> TrainingReport | None:
    """Read the report of a run that has nothing left to train; None if there is something."""
    report = read_report(run_dir)
    done = report is not None and is_complete(run_dir, config, report)
    return cast(TrainingReport, report) if done else None


def _finish_checkpoints(config: Config, checkpoints: Checkpoints) -> None:
    """Wait until all checkpoints are written, and average the last ones if the config asks for it."""
    checkpoints.wait()
    if config.train.average_last:
        trained = sum(step > IMPORTED_STEP for step in checkpoints.steps())
        checkpoints.average(min(config.train.average_last, trained))
        checkpoints.wait()


def _train(
    config: Config,
    setup: TrainingSetup,
    checkpoints: Checkpoints,
    tracker: Tracker,
    trace: Profile,
    compile_clock: CompileClock,
    *,
    announce: bool,
) -> None:
    """Run the loop to the end or an interruption: batch, update, log, validation and checkpoint when due."""
    train, progress, state = config.train, setup.progress, setup.state
    validate_params = None
    if setup.prepared.valid_pairs is not None:
        validate_params = Validation(config, setup.prepared, setup.model, setup.parallel, like=state.params)
    if validate_params is not None and _starts_from_import(checkpoints, progress):
        # Training may not improve on the imported model, which then stays the best.
        _evaluate(validate_params, state, progress, tracker, train.metrics[0])
        checkpoints.record_metrics(IMPORTED_STEP, progress.metrics)
    clock = time.monotonic() - progress.train_seconds
    with tracker.busy(COMPILING_AHEAD):
        compile_shapes(config, setup, tracker.message)
    beside = compiles_ahead(config, setup.parallel.platform) and process_count() == 1
    if validate_params is not None and beside:
        validate_params.compile_beside(shapes_of(state.inference_params), compile_clock)
    log = TrainingLog(
        tracker,
        config,
        parallel=setup.parallel,
        target_size=setup.prepared.vocabs.target.size,
        gathered=progress.log,
        target_tokens=progress.target_tokens,
        clock=compile_clock.working,
    )
    shapes = len(shapes_left(config, setup))
    with StopRequest(announce=announce) as stop, _open_batches(config, setup) as batches, trace:
        while not _is_finished(config, progress):
            trace.begin(progress.step + 1)
            with log.waiting():
                position, microbatches = _take(batches, config.optim.accumulation)
            on_devices = [setup.put(batch) for batch in microbatches]
            with _tell_of_compiling(tracker, setup.train_step.by_shape, on_devices, shapes):
                state, metrics = setup.train_step(state, setup.numbers, on_devices)
            trace.end(progress.step + 1, metrics)
            _advance(progress, position, config, tracker)
            log.add(progress.step, metrics, microbatches, position.epoch)
            last = progress.step == train.steps or has_ended(config.data, progress)
            if validate_params is not None and (last or progress.step % train.evaluate_every == 0):
                with log.paused():
                    _evaluate(validate_params, state, progress, tracker, train.metrics[0])
            due = last or bool(progress.metrics) or progress.step % train.checkpoint_every == 0
            stopping = _should_stop(stop, at_log_step=progress.step % train.log_every == 0)
            if due or stopping:
                with log.paused():
                    progress.interim = not due
                    progress.train_seconds = time.monotonic() - clock
                    progress.log, progress.target_tokens = log.to_dict(), log.target_tokens
                    checkpoints.save(progress.step, to_trees(state), progress.to_dict())
            if stopping and not _is_finished(config, progress):
                checkpoints.wait()
                tracker.message(f"stopped at step {progress.step} and saved; the same command resumes there")
                raise TrainingInterrupted(progress.step, stop.exit_status)
    log.flush(progress.step)  # the updates since the last line, where training ended early


def _tell_of_compiling(
    tracker: Tracker, programs: ProgramsByShape, batches: list[BatchArray], expected: int
) -> contextlib.AbstractContextManager[None]:
    """Show the number of the program that an update has to wait for, if it is one that must be compiled."""
    if all(batch in programs for batch in batches):
        return contextlib.nullcontext()
    number = len(programs) + 1
    return tracker.busy(f"compiling ({number} of {max(number, expected)} programs)")


def _evaluate(
    validate_params: Validation,
    state: TrainState,
    progress: TrainProgress,
    tracker: Tracker,
    best_metric: str,
) -> None:
    values = validate_params(state.inference_params)
    progress.record_evaluation(values, best_metric=best_metric)
    tracker.log(progress.step, "valid", values)
    tracker.log_samples(progress.step, validate_params.samples)


def _starts_from_import(checkpoints: Checkpoints, progress: TrainProgress) -> bool:
    """Return whether training starts from an imported model: only `import` writes a checkpoint of step 0."""
    return progress.step == IMPORTED_STEP and IMPORTED_STEP in checkpoints.steps()


def _should_stop(stop: StopRequest, *, at_log_step: bool) -> bool:
    """Return whether to stop now; several processes stop together, and ask each other at log steps only."""
    if process_count() == 1:
        return stop.received is not None
    if not at_log_step:
        return False
    if any_process(stop.received is not None):
        stop.receive_from_another_process()
    return stop.received is not None


@contextlib.contextmanager
def _open_batches(config: Config, setup: TrainingSetup) -> Iterator[Iterator[tuple[Position, BatchArray]]]:
    """Return the batches from the run's position on; end the loader's threads when training ends."""
    prepared = setup.prepared
    vocab = prepared.vocabs.target
    batches = train_batches(
        prepared.train,
        config.data,
        seed=config.seed,
        pad_id=vocab.pad_id,
        bos_id=vocab.bos_id,
        start=setup.progress.position,
        share=setup.row_share,
        accumulation=config.optim.accumulation,
    )
    try:
        yield batches
    finally:
        batches.close()
        prepared.train.close()


def _advance(progress: TrainProgress, after: Position, config: Config, tracker: Tracker) -> None:
    """Record an update after which the next batch is `after`, and tells if it was the last of a stage."""
    ended = progress.stage
    progress.advance(after)
    if after.stage != ended:
        tracker.message(describe_stage_end(config, progress.step, ended, after.stage))


def _is_finished(config: Config, progress: TrainProgress) -> bool:
    out_of_patience = 0 < config.train.patience <= progress.evaluations_since_best
    return progress.step >= config.train.steps or out_of_patience or has_ended(config.data, progress)


def _take(batches: Iterator[tuple[Position, BatchArray]], count: int) -> tuple[Position, list[BatchArray]]:
    taken = list(itertools.islice(batches, count))
    return taken[-1][0], [batch for _, batch in taken]
