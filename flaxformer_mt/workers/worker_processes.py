"""Workers that are processes of this machine, for the map of block_map.py.

They are started anew (spawn): JAX has threads, which a fork would lose. Each has an accelerator of its own,
if there are any and its work uses JAX; workers that only read text do not import it.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from flaxformer_mt.workers.block_map import Answer, MakeWork, WorkerLost, WorkPlace


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
            by = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
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
        """Do nothing: the processes end with the crew."""


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
