"""Workers that are processes of this machine, for the map of block_map.py.

They are started anew (spawn): JAX has threads, which a fork would lose. Each has an accelerator of its own,
if there are any and its work uses JAX; workers that only read text do not import it.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from flaxformer_mt.cpu import core_count
from flaxformer_mt.errors import UserError, importing, name_signal, warn_user
from flaxformer_mt.workers.block_map import Answer, Engine, MakeWork, Work, WorkerLost, WorkerPool, WorkPlace


class WorkerProcess:
    """A process that answers through a pipe, which is at its end as soon as the process is."""

    def __init__(self, process: SpawnProcess, pipe: Connection, place: int) -> None:
        self.place, self.pipe, self._process = place, pipe, process

    def send(self, block: Any) -> None:
        """Give it a block."""
        with contextlib.suppress(OSError):  # it has died since: `receive` says so
            self.pipe.send(block)

    def receive(self) -> Answer:
        """Return its answer. Raises WorkerLost if the process has ended, in the middle of one too."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            status = self._process.exitcode or 0
            by = f"was ended by {name_signal(-status)}" if status < 0 else f"ended with {status}"
            raise WorkerLost(by) from None

    def stop(self) -> None:
        """End the process, if it has not ended."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


class WorkerProcesses:
    """Starts processes, and waits for them."""

    def __init__(self, make: MakeWork, count: int) -> None:
        self.count, self._make = count, make
        self._context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # started with the first process, it would unblock SIGINT again

    def start(self, place: int) -> WorkerProcess:
        """Start a process for the accelerator of this number."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self._make, place), daemon=True)
        # Ctrl-C reaches all processes of a terminal: this one stops the workers, which inherit the mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # so that the pipe ends with the worker
        return WorkerProcess(process, ours, place)

    def wait(self, workers: Sequence[WorkerProcess]) -> WorkerProcess:
        """Return one that has answered or ended."""
        ready = wait([worker.pipe for worker in workers])[0]
        return next(worker for worker in workers if worker.pipe is ready)

    def close(self) -> None:
        """Do nothing: the processes end with the pool."""


def _work(pipe: Connection, make: MakeWork, place: int) -> None:
    """Run in a worker, until the pipe is closed: also if the process at its other end was killed."""
    # Before JAX looks for devices. Without such devices, the settings have no effect.
    os.environ |= {
        "JAX_CUDA_VISIBLE_DEVICES": str(place),
        "TPU_VISIBLE_CHIPS": str(place),
        "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
        "TPU_HOST_BOUNDS": "1,1,1",
    }
    if (jax := sys.modules.get("jax")) is not None:  # it came with `make`, and has read the environment
        jax.config.update("jax_cuda_visible_devices", str(place))
    work_place = WorkPlace(make)
    with contextlib.suppress(EOFError, OSError):
        pipe.send(work_place.start())
        while True:
            pipe.send(work_place.answer(pipe.recv()))


class PoolOptions(NamedTuple):
    """The workers of `open_pool`: how many, and the cluster that they run on."""

    workers: int | None = None
    ray: str | None = None

    def for_work(self, blocks: float, *, least: int) -> "PoolOptions":
        """Return these, or no workers for fewer blocks than `least`: their start would take longer."""
        return NO_POOL if blocks < least else self


# Seconds that a head of a cluster gets to accept a connection.
_PATIENCE = 10.0

# The work is done in this process.
NO_POOL = PoolOptions()


def choose_pool(workers: int | None, ray: str | None) -> PoolOptions:
    """Return the workers that flags ask for; without flags, one for each core of this machine."""
    return PoolOptions(core_count() if workers is None and ray is None else workers, ray)


class InProcess:
    """The same work in this process, without workers."""

    def __init__(self, make: MakeWork) -> None:
        # With all that it has besides: its kind is known where it is made.
        self.work: Any = make(warn_user)

    def describe(self) -> dict[str, Any]:
        """Return what results depend on."""
        return self.work.describe()

    def map(self, blocks: Iterable[Any], *, name: Callable[[Any], str]) -> Iterator[Any]:
        """Yield the result of each block; see `WorkerPool.map`. Work may map blocks itself."""
        return getattr(self.work, "map", functools.partial(map, self.work))(blocks)


def factory_of(work: Work) -> MakeWork:
    """For `open_pool`: work that is made already, and travels to the workers as it is."""
    return functools.partial(_give, work)


def _give(work: Work, warn: Callable[[str], None]) -> Work:
    return work


@contextlib.contextmanager
def open_pool(make: MakeWork, *, workers: int | None, ray: str | None) -> Iterator[InProcess | WorkerPool]:
    """Open workers for the work that `make` makes, and end them after the body.

    Args:
      workers: number of workers. None: with Ray, one for each accelerator; without, the work is done here.
      ray: address of a Ray cluster, `auto` or `local`; see `RayActors`. None: processes of this machine.
    """
    if workers is None and ray is None:
        yield InProcess(make)
        return
    with contextlib.ExitStack() as stack:
        engine: Any
        if ray is None:
            assert workers is not None
            engine = WorkerProcesses(make, workers)
        else:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # for messages that Ray prints
            engine = _connect_to_ray(make, workers, ray)
        stack.callback(engine.close)
        worker_pool = WorkerPool(engine)
        stack.callback(worker_pool.close)
        yield worker_pool


def _connect_to_ray(make: MakeWork, workers: int | None, address: str) -> Engine:
    with importing("ray", what=f"--ray={address}"):
        from flaxformer_mt.workers.ray_actors import RayActors
    check_reachable(address)
    return RayActors(make, workers, address=address)


def check_reachable(address: str) -> None:
    """Raise UserError unless somebody answers at HOST:PORT or ray://HOST:PORT; Ray itself tries for minutes.

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
