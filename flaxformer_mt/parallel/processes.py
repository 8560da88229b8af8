"""Several processes in one job: connection, messages, barriers and common decisions.

Contains the connection through jax.distributed. watchdog.py ends this process when another one has died. With
one process, all functions return without communication.
"""

import atexit
import contextlib
import ctypes
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO, TypeVar

import jax
import numpy as np

from flaxformer_mt.errors import TrainingInterrupted, UserError
from flaxformer_mt.parallel.devices import find_devices

# Seconds between two heartbeats of a process.
HEARTBEAT_INTERVAL = 1.0
# Seconds without a heartbeat after which a process counts as dead; the variable overrides the default.
HEARTBEAT_TIMEOUT = float(os.environ.get("FLAXFORMER_MT_PROCESS_TIMEOUT", "30"))

_FOLDER = "flaxformer_mt/alive"


class Heartbeats:
    """The heartbeats of a job as one process sees them; contains no thread and no clock."""

    def __init__(self, client: Any, index: int, count: int) -> None:
        """Store the arguments.

        Args:
          client: the client of the key-value store of `jax.distributed`.
          index: index of this process.
          count: number of processes.
        """
        self._client, self._index, self._count = client, index, count
        # Process -> its last heartbeat, and when this process first saw it.
        self._seen: dict[int, tuple[int, float]] = {}
        self._beat = 0
        self._lost = ""
        self._last_contact: float | None = None

    def exchange(self, now: float) -> str:
        """Write and read heartbeats at time `now`, in seconds; return which process has died, "" if none.

        Process 0 returns the message again at each call, and sends it with its heartbeats.
        """
        self._beat += 1
        if self._last_contact is None:
            self._last_contact = now
        try:
            self._write()
            beats = self._read_all() if self._index == 0 else self._read_first()
            self._last_contact = now
        except jax.errors.JaxRuntimeError:
            silence = now - self._last_contact
            # Process 0 stores the heartbeats.
            return _describe(0, self._count, silence) if silence > HEARTBEAT_TIMEOUT / 3 else ""
        if self._lost:
            return self._lost
        for process in range(self._count) if self._index == 0 else [0]:
            if process == self._index:
                continue
            beat = beats.get(process, 0)
            if process not in self._seen or self._seen[process][0] != beat:
                self._seen[process] = (beat, now)
            elif now - self._seen[process][1] > HEARTBEAT_TIMEOUT:
                self._lost = _describe(process, self._count, now - self._seen[process][1])
                break
        if self._lost and self._index == 0:
            self._write()
        return self._lost

    def _write(self) -> None:
        value = json.dumps([self._beat, self._lost])
        self._client.key_value_set(f"{_FOLDER}/{self._index}", value, allow_overwrite=True)

    def _read_all(self) -> dict[int, int]:
        """Return the last heartbeat of each process that has sent one."""
        found = self._client.key_value_dir_get(_FOLDER)
        return {int(key.rpartition("/")[2]): json.loads(value)[0] for key, value in found}

    def _read_first(self) -> dict[int, int]:
        """Return the last heartbeat of process 0; keeps what it says about the others."""
        try:
            beat, self._lost = json.loads(self._client.key_value_try_get(f"{_FOLDER}/0"))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):  # no heartbeat has been written yet
                return {}
            raise
        return {0: beat}


def _describe(process: int, count: int, silence: float) -> str:
    return f"process {process} of {count} has sent no heartbeat for {silence:.0f} s"


class Watchdog:
    """Thread that exchanges heartbeats, and ends this process when another one has died."""

    def __init__(self, client: Any, end: Callable[[str], object]) -> None:
        """Store the client of the key-value store, and what ends this process, given who has died."""
        self._index, self._count = jax.process_index(), jax.process_count()
        self._client = client
        self._heartbeats = Heartbeats(client, self._index, self._count)
        self._end = end
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch-processes", daemon=True)

    def start(self) -> None:
        """Start the thread; heartbeats stop when the interpreter exits, so others notice exceptions here."""
        atexit.register(self._stop)
        self._thread.start()

    def finish(self) -> None:
        """Leave the job in order; process 0 is the last, since the other processes depend on it."""
        self._stop()
        if self._index == 0:
            self._client.get_live_nodes(list(range(self._count)))  # returns when only this process is left
        jax.distributed.shutdown()

    def _stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(HEARTBEAT_INTERVAL):
            if lost := self._heartbeats.exchange(time.monotonic()):
                if self._index == 0:  # the others read the message before their coordinator ends
                    time.sleep(3 * HEARTBEAT_INTERVAL)
                self._end(lost)


T = TypeVar("T")

# Seconds that processes wait for one that is still working: if it dies, the watchdog ends them sooner.
_BARRIER_TIMEOUT = 24 * 3600.0
# The exit status of a process that ends because another one has died.
LOST_PROCESS_STATUS = 75


def connect(
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    detect: bool = False,
) -> None:
    """Join the processes of a job; do nothing if no argument is given. Call it before any computation.

    `coordinator` is HOST:PORT of process 0. With `detect`, JAX finds the three values, on Slurm, GKE, TPU
    pods and under Open MPI.
    """
    given = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given) and not detect:
        return
    if missing and not detect:
        raise UserError(
            f"{' and '.join(missing)} missing: several processes need --coordinator=HOST:PORT, --processes=N "
            "and --process=I, or --distributed where Slurm, GKE or a TPU pod sets all three"
        )
    if processes is not None and not 0 <= (process or 0) < processes:
        raise UserError(
            f"--process={process} of --processes={processes}: it must be from 0 to {processes - 1}"
        )
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise UserError(f"--coordinator={coordinator} has no port; give HOST:PORT, as {coordinator}:12345")
    _reserve_standard_output()
    with contextlib.suppress(AttributeError):  # JAX versions without this option
        # The watchdog explains what happened; JAX would end the process with a stack trace.
        jax.config.update("jax_enable_recoverability", True)
    try:
        jax.distributed.initialize(coordinator, processes, process, initialization_timeout=120)
    except (ValueError, RuntimeError) as error:
        if detect:
            raise UserError(
                f"--distributed found no job of several processes here ({_first_line(error)}); give "
                "--coordinator=HOST:PORT, --processes=N and --process=I"
            ) from error
        raise UserError(
            f"process {process} of {processes} could not join the job at {coordinator} within 120 s "
            f"({_first_line(error)}); start all processes, with process 0 at that address"
        ) from error
    if jax.process_count() > 1:
        global _watchdog
        # The current stream: sys.stderr may be redirected later.
        _watchdog = Watchdog(_client(), functools.partial(_end_this_process, sys.stderr))
        _watchdog.start()
        if not is_first():
            _explain_aborts()


def _explain_aborts() -> None:
    """Print an explanation when JAX aborts this process, as it does as soon as process 0 has died.

    The abort comes from a C++ thread, in which Python's own signal handlers do not run.
    """
    stream, index = sys.stderr, jax.process_index()

    def explain(_: int) -> None:
        print(
            f"error: JAX has ended process {index}, as it does when process 0, the coordinator of the job, "
            "has died (messages of JAX are above). To resume from the last checkpoint, start the same "
            "command again with as many processes as are available",
            file=stream,
            flush=True,
        )
        os._exit(LOST_PROCESS_STATUS)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(explain)
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)
    _callbacks.append(handler)


# Callbacks that C code refers to; the list protects them from garbage collection.
_callbacks: list[Any] = []


def _end_this_process(stream: TextIO, lost: str) -> NoReturn:
    """End this process at once, since its main thread may wait for the dead process forever."""
    print(
        f"error: {lost}: it or its machine has died, so this process ends too. "
        "To resume from the last checkpoint, start the same command again with as many processes as are "
        "available",
        file=stream,
        flush=True,
    )
    os._exit(LOST_PROCESS_STATUS)


def _reserve_standard_output() -> None:
    """Reserve standard output for results: the libraries below JAX print there when processes connect.

    File descriptor 1 becomes standard error, and `sys.stdout` a copy of the original standard output.
    """
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, newline="\n")
    os.dup2(2, 1)
    sys.stdout = own


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def is_first() -> bool:
    """Process 0 writes files and prints messages."""
    return process_index() == 0


def process_index() -> int:
    find_devices()
    return jax.process_index()


def process_count() -> int:
    find_devices()
    return jax.process_count()


def exchange(message: bytes) -> list[bytes]:
    """The messages of all processes, by process index; all processes call it together."""
    if jax.process_count() == 1:
        return [message]
    from jax.experimental import multihost_utils

    sizes = multihost_utils.process_allgather(np.int32(len(message)))
    padded = np.zeros(max(1, int(sizes.max())), np.uint8)
    padded[: len(message)] = np.frombuffer(message, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def any_process(value: bool) -> bool:
    """Whether the value is true in any process; all processes call it together."""
    return any(message == b"1" for message in exchange(b"1" if value else b"0"))


def decide_once(decide: Callable[[], T]) -> T:
    """In all processes the JSON values that `decide` returns in process 0; all processes call it together.

    Other processes do not call `decide`: what they would read from a shared disk may be older or newer.
    """
    if process_count() == 1:
        return decide()
    decision: dict[str, Any] = {}
    if is_first():
        try:
            decision = {"value": decide()}
        except UserError as error:
            decision = {"error": str(error)}
    decision = json.loads(exchange(json.dumps(decision).encode())[0])
    if "error" in decision:
        raise UserError(decision["error"])
    return decision["value"]


def work_in_all(work: Callable[[], T], *, what: str) -> T:
    """Return `work()`, once it has succeeded in all processes: "process 1 of 2 cannot WHAT: ...".

    All processes call it together.
    """
    if process_count() == 1:
        return work()
    made, report = None, {}
    try:
        made = work()
    except UserError as error:
        report = {"problem": str(error)}
    reports = [json.loads(message) for message in exchange(json.dumps(report).encode())]
    for process, each in enumerate(reports):
        if "problem" in each:
            raise UserError(f"process {process} of {len(reports)} cannot {what}: {each['problem']}")
    return made  # type: ignore[return-value]


def wait_for_all(name: str, *, seconds: float = _BARRIER_TIMEOUT) -> None:
    """Block until all processes have reached this barrier; `name` distinguishes barriers."""
    if jax.process_count() > 1:
        barrier = f"flaxformer_mt/{name}/{_count_visit(name)}"
        _client().wait_at_barrier(barrier, timeout_in_ms=int(1000 * seconds))


def let_first_conclude(name: str, report: str, conclude: Callable[[list[str]], str]) -> str:
    """Return, in all processes, what `conclude` makes of the reports of all processes in process 0.

    Uses no device: a thread of each process may call it while the processes compute. `name` distinguishes
    calls of different kinds, and those of one kind are in the same order in all processes.
    """
    if process_count() == 1:
        return conclude([report])
    client, timeout = _client(), int(1000 * _BARRIER_TIMEOUT)
    visit = _count_visit(f"{name}/conclusion")
    folder = f"flaxformer_mt/{name}/{visit}"
    if not is_first():
        client.key_value_set(f"{folder}/{process_index()}", report)
        return json.loads(client.blocking_key_value_get(f"{folder}/conclusion", timeout))
    others = [
        client.blocking_key_value_get(f"{folder}/{process}", timeout) for process in range(1, process_count())
    ]
    # All processes have read the conclusion before this one.
    client.key_value_delete(f"flaxformer_mt/{name}/{visit - 1}/")
    conclusion = conclude([report, *others])
    client.key_value_set(f"{folder}/conclusion", json.dumps(conclusion))
    return conclusion


_barrier_visits: dict[str, int] = {}


def _count_visit(name: str) -> int:
    """How many times this process has reached a barrier: each barrier can be passed only once."""
    _barrier_visits[name] = _barrier_visits.get(name, 0) + 1
    return _barrier_visits[name]


def first_then_others(make: Callable[[], T], *, name: str) -> T:
    """Return `make()`; process 0 calls it first and alone, so that the others find what it has written."""
    if is_first():
        made = make()
        wait_for_all(name)
        return made
    wait_for_all(name)
    return make()


@contextlib.contextmanager
def work_together() -> Iterator[None]:
    """Run the body as one job of several processes: process 0 prints, and all processes end together.

    Standard error of the other processes is discarded; their exceptions are still raised.
    """
    with _quiet(not is_first()):
        try:
            yield
        except jax.errors.JaxRuntimeError:
            if process_count() > 1:  # time for the watchdog to end this process if another one has died
                time.sleep(HEARTBEAT_TIMEOUT + 3 * HEARTBEAT_INTERVAL)
            raise
        except TrainingInterrupted:  # all processes have agreed to stop
            _leave()
            raise
        except UserError:  # in all processes, or in this one: then the watchdog ends the others
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                _leave(seconds=HEARTBEAT_INTERVAL * 5)
            raise
    _leave()


def _leave(seconds: float = _BARRIER_TIMEOUT) -> None:
    """Leave the job in order, if all other processes do so within this time."""
    wait_for_all("end", seconds=seconds)
    if _watchdog is not None:
        _watchdog.finish()


@contextlib.contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    if not quiet:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def _client() -> Any:
    from jax._src import distributed  # the key-value store has no public name

    return distributed.global_state.client


_watchdog: Watchdog | None = None
