"""Several processes on one job: how they find each other, agree, and notice that one has died.

Owns the connection through jax.distributed, messages between processes, and the watch that ends this process
when another one is gone. Knows nothing of arrays or of training. With one process everything here is free.
"""

import atexit
import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO, TypeVar

import jax
import numpy as np

from flaxformer_mt.errors import UserError

T = TypeVar("T")

# A process writes a sign of life so often, in seconds.
_SIGN_EVERY = 1.0
# And is given up after so long without one, unless this variable says otherwise.
_GIVEN_UP_AFTER = float(os.environ.get("FLAXFORMER_MT_PROCESS_TIMEOUT", "30"))
# How long processes wait for one that is at work, in seconds: the watch ends them sooner if it dies.
_LONG = 24 * 3600.0
# The exit status of a process that ends because another one has.
LOST_PROCESS_STATUS = 75


def connect(
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    detect: bool = False,
) -> None:
    """Joins the processes of a job; does nothing if no argument is given. Call it before any computation.

    Args:
      coordinator: HOST:PORT at which process 0 can be reached.
      processes: how many there are.
      process: which one this is, from 0.
      detect: let JAX find the three out, on Slurm, GKE, TPU pods and under Open MPI.

    Raises:
      UserError: arguments that do not go together, or processes that do not find each other in time.
    """
    given = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given) and not detect:
        return
    if missing and not detect:
        raise UserError(
            f"{' and '.join(missing)} missing: several processes need --coordinator=HOST:PORT, --processes=N "
            "and --process=I, or --distributed where Slurm, GKE or a TPU pod says all three"
        )
    if processes is not None and not 0 <= (process or 0) < processes:
        raise UserError(
            f"--process={process} of --processes={processes}: it must be from 0 to {processes - 1}"
        )
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise UserError(f"--coordinator={coordinator} has no port; give HOST:PORT, as {coordinator}:12345")
    _keep_standard_output()
    with contextlib.suppress(AttributeError):  # a version of JAX without it
        # Our own watch says what happened; JAX would end the process with a trace of its own.
        jax.config.update("jax_enable_recoverability", True)
    try:
        jax.distributed.initialize(coordinator, processes, process, initialization_timeout=120)
    except (ValueError, RuntimeError) as error:
        if detect:
            raise UserError(
                f"--distributed finds no job of several processes here ({_first_line(error)}); give "
                "--coordinator=HOST:PORT, --processes=N and --process=I"
            ) from error
        raise UserError(
            f"process {process} of {processes} could not join the job at {coordinator} within 120 s "
            f"({_first_line(error)}); start all processes, with process 0 at that address"
        ) from error
    if jax.process_count() > 1:
        global _watch
        _watch = _Watch()
        _watch.start()
        if not is_first():
            _explain_aborts()


def _explain_aborts() -> None:
    """Adds a line for the human where JAX aborts this process, as it does at once when process 0 is gone.

    Abort comes from a thread of C++, where no handler of Python's own would run.
    """
    stream, me = sys.stderr, jax.process_index()

    def explain(_: int) -> None:
        print(
            f"error: JAX has ended process {me}, as it does when process 0, which holds the job together, "
            "has died (its own words are above). The same command, on as many processes as there are, "
            "goes on from the last checkpoint",
            file=stream,
            flush=True,
        )
        os._exit(LOST_PROCESS_STATUS)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(explain)
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)
    _kept.append(handler)


# What C code holds on to, and Python must not throw away.
_kept: list[Any] = []


def _end_for(process: int, what: str, stream: TextIO) -> NoReturn:
    """Ends this process at once: its main thread may wait for the lost one forever."""
    print(
        f"error: process {process} {what}: it or its machine has died, so this process ends too. The same "
        "command, on as many processes as there are, goes on from the last checkpoint",
        file=stream,
        flush=True,
    )
    os._exit(LOST_PROCESS_STATUS)


def _keep_standard_output() -> None:
    """Leaves standard output to results: the libraries below JAX print there when processes meet."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, newline="\n")
    os.dup2(2, 1)
    sys.stdout = own


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def is_first() -> bool:
    """Whether this is the process that writes files and speaks to the human."""
    return jax.process_index() == 0


def process_index() -> int:
    """The number of this process, from 0."""
    return jax.process_index()


def process_count() -> int:
    """How many processes share the job."""
    return jax.process_count()


def exchange(message: bytes) -> list[bytes]:
    """The messages of all processes, by their number; all of them call it together."""
    if jax.process_count() == 1:
        return [message]
    from jax.experimental import multihost_utils

    sizes = multihost_utils.process_allgather(np.int32(len(message)))
    padded = np.zeros(max(1, int(sizes.max())), np.uint8)
    padded[: len(message)] = np.frombuffer(message, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def agree(value: bool) -> bool:
    """Whether any process says so; all of them call it together."""
    return any(message == b"1" for message in exchange(b"1" if value else b"0"))


def wait_for_all(name: str, *, seconds: float = _LONG) -> None:
    """Returns when all processes have come here; `name` tells places apart.

    Raises:
      jax.errors.JaxRuntimeError: not all have come in time.
    """
    if jax.process_count() > 1:
        place = f"flaxformer_mt/{name}/{_visits(name)}"
        _client().wait_at_barrier(place, timeout_in_ms=int(1000 * seconds))


_visited: dict[str, int] = {}


def _visits(name: str) -> int:
    """How many times this process has been at a place: a barrier can be passed only once."""
    _visited[name] = _visited.get(name, 0) + 1
    return _visited[name]


def first_then_others(make: Callable[[], T], *, name: str) -> T:
    """What `make` returns; with several processes the first makes it alone, and the others find it made."""
    if is_first():
        made = make()
        wait_for_all(name)
        return made
    wait_for_all(name)
    return make()


@contextlib.contextmanager
def work_together() -> Iterator[None]:
    """What several processes do as one job: the first speaks, and none leaves before all are through.

    What the others say on standard error goes nowhere; their errors are raised all the same.
    """
    with _quiet(not is_first()):
        try:
            yield
        except jax.errors.JaxRuntimeError:
            if process_count() > 1:  # if another process has died, the watch says so and ends this one
                time.sleep(_GIVEN_UP_AFTER + 3 * _SIGN_EVERY)
            raise
        except SystemExit:  # all were asked to stop, and have agreed
            _leave()
            raise
        except UserError:  # a mistake that all of them see, or this one alone: then the watch ends the others
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                _leave(seconds=_SIGN_EVERY * 5)
            raise
    _leave()


def _leave(seconds: float = _LONG) -> None:
    """Leaves in good order, if all others come to do so within that time."""
    wait_for_all("end", seconds=seconds)
    if _watch is not None:
        _watch.finish()


@contextlib.contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    if not quiet:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def _client() -> Any:
    from jax._src import distributed  # the store of keys has no public name

    return distributed.global_state.client


class _Watch:
    """Signs of life of this process, and a look at those of the others, in a thread."""

    def __init__(self) -> None:
        self._me, self._count = jax.process_index(), jax.process_count()
        self._stream = sys.stderr  # as it is now: it may be redirected when there is something to say
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch-processes", daemon=True)

    def start(self) -> None:
        """Begins; signs stop when the interpreter ends, so that an exception here is noticed elsewhere."""
        atexit.register(self._stop)
        self._thread.start()

    def finish(self) -> None:
        """Leaves the job in good order: process 0, without which no other can live, is the last."""
        self._stop()
        if self._me == 0:
            _client().get_live_nodes(list(range(self._count)))  # returns when there is none but this
        jax.distributed.shutdown()

    def _stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        seen: dict[int, tuple[str, float]] = {}
        number = 0
        heard = time.monotonic()
        while not self._ended.wait(_SIGN_EVERY):
            number += 1
            now = time.monotonic()
            try:
                self._write(str(number))
                signs = {i: self._read(i) for i in range(self._count) if i != self._me}
                heard = now
            except jax.errors.JaxRuntimeError:
                if now - heard > _GIVEN_UP_AFTER / 3:  # process 0 keeps the signs
                    _end_for(0, f"has not been heard of for {now - heard:.0f} s", self._stream)
                continue
            for i, sign in signs.items():
                if i not in seen or seen[i][0] != sign:
                    seen[i] = (sign, now)
                elif now - seen[i][1] > _GIVEN_UP_AFTER:
                    silence = f"has not been heard of for {now - seen[i][1]:.0f} s"
                    _end_for(i, f"of {self._count} {silence}", self._stream)

    def _write(self, sign: str) -> None:
        _client().key_value_set(_key(self._me), sign, allow_overwrite=True)

    def _read(self, process: int) -> str:
        try:
            return _client().key_value_try_get(_key(process))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):  # it has not begun to write
                return ""
            raise


@functools.cache
def _key(process: int) -> str:
    return f"flaxformer_mt/alive/{process}"


_watch: _Watch | None = None
