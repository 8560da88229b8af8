"""Jobs of several processes with jax.distributed: connection, messages, barriers and common decisions.

With one process, all functions work without communication. If one process dies, JAX ends the others.
"""

import contextlib
import ctypes
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from flaxformer_mt.errors import TrainingInterrupted, UserError, first_line
from flaxformer_mt.parallel.devices import find_devices

# Seconds without a heartbeat after which JAX counts a process as dead; the variable overrides the default.
HEARTBEAT_TIMEOUT = float(os.environ.get("FLAXFORMER_MT_PROCESS_TIMEOUT", "30"))

T = TypeVar("T")

# Seconds that processes wait for one that is still working: if it dies, JAX ends them sooner.
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
    """Connect this process with the others of a job; this must come before any computation.

    `coordinator` is HOST:PORT of process 0, and `process` the number of this process, from 0. With `detect`,
    JAX finds all values on Slurm, GKE, TPU pods or under Open MPI. Raises UserError if an argument is missing
    or invalid, or the connection fails. Without arguments, this does nothing.
    """
    arguments = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    missing = [name for name, value in arguments.items() if value is None]
    if len(missing) == len(arguments) and not detect:
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
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=120,
            heartbeat_timeout_seconds=math.ceil(HEARTBEAT_TIMEOUT),
            shutdown_timeout_seconds=math.ceil(HEARTBEAT_TIMEOUT),
        )
    except (ValueError, RuntimeError) as error:
        if detect:
            raise UserError(
                f"--distributed found no job of several processes here ({first_line(error)}); give "
                "--coordinator=HOST:PORT, --processes=N and --process=I"
            ) from error
        raise UserError(
            f"process {process} of {processes} could not join the job at {coordinator} within 120 s "
            f"({first_line(error)}); start all processes, with process 0 at that address"
        ) from error
    if jax.process_count() > 1:
        _explain_aborts()


def _explain_aborts() -> None:
    """Install a handler that explains why JAX aborts this process after another process of the job has died.

    The handler is a C callback, since the abort comes from a C++ thread, where Python's handlers do not run.
    """
    stream = sys.stderr  # the current one: it may be redirected later

    def explain(_: int) -> None:
        if _failed:  # its own error has been printed, and now the other processes have ended as well
            os._exit(2)
        print(
            "error: a process of this job or its machine has died, so this process ends too. JAX names it "
            "above as unhealthy; if it names none, it is process 0. To resume from the last checkpoint, "
            "start the same command again with as many processes as are available",
            file=stream,
            flush=True,
        )
        os._exit(LOST_PROCESS_STATUS)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(explain)
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)
    _callbacks.append(handler)


# Callbacks that C code refers to; the list protects them from garbage collection.
_callbacks: list[Any] = []
# Whether this process ends by an error of its own.
_failed = False


def _reserve_standard_output() -> None:
    """Reserve standard output for results, since libraries that JAX uses print there when processes connect.

    File descriptor 1 becomes standard error, and `sys.stdout` becomes a copy of the original standard output.
    """
    sys.stdout.flush()
    stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, newline="\n")
    os.dup2(2, 1)
    sys.stdout = stdout


def is_first() -> bool:
    """Return whether this is process 0, which writes files and prints messages."""
    return process_index() == 0


def process_index() -> int:
    find_devices()
    return jax.process_index()


def process_count() -> int:
    find_devices()
    return jax.process_count()


def exchange(message: bytes) -> list[bytes]:
    """Return the messages of all processes, in order of process index; all processes must call this."""
    if jax.process_count() == 1:
        return [message]
    from jax.experimental import multihost_utils

    sizes = multihost_utils.process_allgather(np.int32(len(message)))
    padded = np.zeros(max(1, int(sizes.max())), np.uint8)
    padded[: len(message)] = np.frombuffer(message, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def any_process(value: bool) -> bool:
    """Return whether the value is true in any process; all processes must call this."""
    return any(message == b"1" for message in exchange(b"1" if value else b"0"))


def decide_once(decide: Callable[[], T]) -> T:
    """Call `decide` in process 0 only; return its result, a JSON value, in all processes.

    All processes must call `decide_once`. Other processes do not call `decide`, since on a shared disk
    they might see an older or newer state. A UserError of `decide` is raised in all processes.
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
    """Return `work()` after it has succeeded in all processes, all of which must call this function.

    If it fails in one process, all processes raise a UserError: "process 1 of 2 cannot WHAT: ...".
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
    """Call `conclude` in process 0 with the reports of all processes; return its result in all processes.

    No device is used, so that a thread of each process may call this while the processes compute. `name`
    distinguishes calls of different kinds; calls of one name must have the same order in all processes.
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
    """Return how many times this process has reached a barrier, since JAX needs a new name for each visit."""
    _barrier_visits[name] = _barrier_visits.get(name, 0) + 1
    return _barrier_visits[name]


def first_then_others(make: Callable[[], T], *, name: str) -> T:
    """Return `make()`; process 0 calls `make` first, so that the other processes find the files it writes."""
    if is_first():
        made = make()
        wait_for_all(name)
        return made
    wait_for_all(name)
    return make()


@contextlib.contextmanager
def work_together() -> Iterator[None]:
    """Make all processes of a job leave the body together; each process must run the body.

    The standard error of all processes but process 0 is discarded; their exceptions are still raised.
    """
    with _quiet(not is_first()):
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError):  # what collectives raise
            if process_count() > 1:  # time for JAX to end this process if another one has died
                time.sleep(HEARTBEAT_TIMEOUT + 5)
            raise
        except TrainingInterrupted:  # all processes have agreed to stop
            _leave()
            raise
        except UserError:  # in all processes, or in this one: then JAX ends the others
            global _failed
            _failed = True
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                _leave(seconds=5)
            raise
    _leave()


def _leave(seconds: float = _BARRIER_TIMEOUT) -> None:
    if process_count() > 1:
        wait_for_all("end", seconds=seconds)
        jax.distributed.shutdown()


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
