"""Workers that are actors of a Ray cluster, for the map of block_map.py; the only module that imports Ray.

Ray chooses their machines, and shows each of them its own accelerator. What becomes of a lost one is decided
in block_map.py: Ray restarts nothing by itself.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from flaxformer_mt.errors import UserError
from flaxformer_mt.workers.block_map import Answer, MakeWork, WorkerLost, WorkPlace

# The resources of Ray that are accelerators.
_ACCELERATORS = ("GPU", "TPU")


class _Actor(WorkPlace):
    def __init__(self, make: MakeWork, folder: str) -> None:
        with contextlib.suppress(OSError):  # another machine may lack it, where runs are in a store
            os.chdir(folder)  # for relative paths
        super().__init__(make)


class RayWorker:
    """An actor, and the reference to its next answer."""

    def __init__(self, actor: Any, place: int) -> None:
        self.place, self._actor = place, actor
        self.answer = actor.start.remote()

    def send(self, block: Any) -> None:
        """Give it a block."""
        self.answer = self._actor.answer.remote(block)

    def receive(self) -> Answer:
        """Return its answer. Raises WorkerLost if the actor or its machine has died."""
        try:
            return ray.get(self.answer)
        except RayActorError as error:
            # Its last line names the cause, in one sentence and many more.
            cause = str(error).strip().split("\n")[-1].partition(". ")[0]
            raise WorkerLost(f"has died ({cause})") from None

    def stop(self) -> None:
        ray.kill(self._actor)


class RayActors:
    """Connects to a cluster, and starts actors there."""

    def __init__(self, make: MakeWork, count: int | None, *, address: str) -> None:
        """Connect to the cluster.

        Args:
          count: number of actors. None: one for each accelerator of the cluster, or for each of its machines
            if it has none.
          address: HOST:PORT or ray://HOST:PORT of the cluster; auto: the one that this machine belongs to;
            local: a new one on this machine, which ends with this process.
        """
        # Ray would report its use over the network.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own: dict[str, Any] = {"num_cpus": count, "include_dashboard": False} if address == "local" else {}
        try:
            with warnings.catch_warnings():
                # JAX warns of forks. Ray's end at once in other programs, its servers.
                warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
                ray.init(address, logging_level=logging.ERROR, log_to_driver=False, **own)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"--ray={address}: there is no such Ray cluster ({reason}); start one with "
                "`ray start --head`, or give --ray=local for one on this machine"
            ) from error
        resources = ray.cluster_resources()
        kind = next((kind for kind in _ACCELERATORS if resources.get(kind, 0) >= 1), None)
        machines = sum(node["Alive"] for node in ray.nodes())
        self.count = count or (machines if kind is None else int(resources[kind]))
        needs = {"num_gpus": 1} if kind == "GPU" else {"resources": {kind: 1}} if kind else {}
        self._actor = ray.remote(_Actor).options(
            num_cpus=1, scheduling_strategy="SPREAD", max_restarts=0, max_task_retries=0, **needs
        )
        self._make = ray.put(make)

    def start(self, place: int) -> RayWorker:
        """Ask Ray for another actor."""
        return RayWorker(self._actor.remote(self._make, os.getcwd()), place)

    def wait(self, workers: Sequence[RayWorker]) -> RayWorker:
        """Return one that has answered or ended."""
        (ready,), _ = ray.wait([worker.answer for worker in workers], num_returns=1)
        return next(worker for worker in workers if worker.answer == ready)

    def close(self) -> None:
        """Leave the cluster."""
        with contextlib.suppress(ConnectionError):
            ray.shutdown()
