"""Workers for a map over blocks: processes of this machine, or actors of a Ray cluster (ray_actors.py).

A ProcessPoolExecutor does not serve: when a process dies, it ends all others, does not say whose block it
was, and waits forever for the rest of a result that was being sent.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from flaxformer_mt.errors import UserError, importing, name_signal
from flaxformer_mt.processor import core_count
from flaxformer_mt.workers.block_map import Answer, BlockFunction, WorkerLost, WorkerPool

# Seconds that the head of a Ray cluster gets to accept a connection; Ray itself tries for minutes.
_PATIENCE = 10.0


class PoolOptions(NamedTuple):
    """The number of workers, and the Ray cluster that they run on; without either, there are none."""

    workers: int | None = None
    ray: str | None = None

    def for_work(self, blocks: float, *, least: int) -> "PoolOptions":
        """Return these, or no workers for fewer blocks than `least`: their start would take longer."""
        return NO_POOL if blocks < least else self


NO_POOL = PoolOptions()


def choose_pool(workers: int | None, ray: str | None) -> PoolOptions:
    """Return the workers that flags ask for; without flags, one for each core of this machine."""
    return PoolOptions(core_count() if workers is None and ray is None else workers, ray)


@contextlib.contextmanager
def open_workers(make: Callable[[], Callable[[Any], Any]], pool: PoolOptions) -> Iterator[Any]:
    """Start workers, and end them after the body.

    Yields a function, `map_blocks(blocks, name=...)`, which yields the result of each block, in order; `name`
    returns what messages call a block, as "lines 1 to 9".

    Args:
      make: makes the function of a block, once in each worker; it is sent there as pickle does it.
      pool: without workers, blocks are worked on in this process.
    """
    if pool == NO_POOL:
        function = make()
        yield lambda blocks, *, name: map(function, blocks)
        return
    with contextlib.ExitStack() as stack:
        start: Callable[[int], Any] = _Process
        count = pool.workers
        if pool.ray is not None:
            with importing("ray", what=f"--ray={pool.ray}"):
                from flaxformer_mt.workers.ray_actors import open_cluster
            check_reachable(pool.ray)
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # for messages that Ray prints
            start, count = stack.enter_context(open_cluster(pool.ray, count))
        assert count is not None
        workers = WorkerPool(make, start, count)
        stack.callback(workers.close)
        yield workers.map_blocks


class _Process:
    """A worker that is a process of this machine; `place` is its number, and that of its accelerator."""

    def __init__(self, place: int) -> None:
        self.place = place
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

    def ask(self, message: Any) -> Answer:
        """Send a message, and wait for its answer. Raises WorkerLost if the process ends before."""
        try:
            self._pipe.send(message)
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            status = self._process.exitcode or 0
            loss = f"was ended by {name_signal(-status)}" if status < 0 else f"ended with {status}"
            raise WorkerLost(loss) from None

    def stop(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, place: int) -> None:
    """Run in a process until its pipe is closed: also if the process at the other end was killed."""
    # Before a message imports JAX, which then looks for devices. Without such devices, they have no effect.
    os.environ |= {
        "JAX_CUDA_VISIBLE_DEVICES": str(place),
        "TPU_VISIBLE_CHIPS": str(place),
        "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
        "TPU_HOST_BOUNDS": "1,1,1",
    }
    function = BlockFunction()
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(function.answer(pipe.recv()))


def check_reachable(address: str) -> None:
    """Raise UserError unless somebody answers at HOST:PORT or ray://HOST:PORT.

    What is no such address, as auto and local, is left to Ray.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isascii() and port.isdigit()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(
            f"--ray={address}: nobody answers there ({error}); start a cluster with `ray start --head`, "
            "which prints its address, or give --ray=local for one on this machine"
        ) from error
