"""A worker that is a process of this machine, and the code that runs inside any worker."""

import contextlib
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from flaxformer_mt.errors import FlaxformerWarning, UserError, name_signal


class Answer(NamedTuple):
    """The answer of a worker to one block: its result or error, and warnings (text, category, file, line)."""

    result: Any = None
    error: Exception | None = None
    warnings: tuple[tuple[str, type[Warning], str, int], ...] = ()


class WorkerLost(Exception):
    """Raised if a worker ends before it answers; the message says how, as in "was ended by SIGKILL"."""


class BlockFunction:
    """Runs inside a worker: calls the function for a block, and returns an `Answer`."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        self._made = _call(make)

    def answer(self, block: Any) -> Answer:
        made = self._made
        answer = made if made.error is not None else _call(made.result, block)
        return answer._replace(warnings=made.warnings + answer.warnings)


def _call(function: Callable[..., Any], *arguments: Any) -> Answer:
    result: Any = None
    error: Exception | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FlaxformerWarning)
        try:
            result = function(*arguments)
        except UserError as problem:
            error = UserError(str(problem))
        except Exception:  # if it ended the worker, its block would be tried by others
            error = RuntimeError(f"in a worker:\n{traceback.format_exc()}")
    texts = ((str(one.message), one.category, one.filename, one.lineno) for one in caught)
    return Answer(result, error, tuple(texts))


class WorkerProcess:
    """A worker process; `place` is the number of the worker and of its accelerator."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]], place: int) -> None:
        spawn = multiprocessing.get_context("spawn")  # JAX has threads, which a fork would lose
        resource_tracker.ensure_running()  # started with the first process, it would unblock SIGINT again
        self._pipe, other_end = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(other_end, place), daemon=True)
        # Ctrl-C reaches all processes of a terminal: this one stops the workers, which inherit the mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other_end.close()  # so that the pipe ends with the process
        with contextlib.suppress(OSError):  # it has died already, as is seen when it is asked
            self._pipe.send(make)

    def ask(self, block: Any) -> Answer:
        """Send a block and wait for its answer; raise WorkerLost if the process ends before it answers."""
        try:
            self._pipe.send(block)
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            status = self._process.exitcode or 0
            loss = f"was ended by {name_signal(-status)}" if status < 0 else f"ended with {status}"
            raise WorkerLost(loss) from None

    def stop(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, place: int) -> None:
    """Answer blocks until the pipe is closed, which also happens if the parent process is killed."""
    # Set before `make` imports JAX, which looks for devices; without such devices, they have no effect.
    os.environ |= {
        "JAX_CUDA_VISIBLE_DEVICES": str(place),
        "TPU_VISIBLE_CHIPS": str(place),
        "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
        "TPU_HOST_BOUNDS": "1,1,1",
    }
    with contextlib.suppress(EOFError, OSError):
        function = BlockFunction(pipe.recv())
        while True:
            pipe.send(function.answer(pipe.recv()))
