"""Workers that are actors of a Ray cluster; the only module that imports Ray.

Ray chooses a machine for each actor, and lets each actor see only its own accelerator. Actors that die are
not restarted by Ray.
"""

import contextlib
import logging
import os
import re
import socket
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError

from flaxformer_mt.errors import UserError
from flaxformer_mt.workers.worker_process import Answer, BlockFunction, WorkerLost

# The resources of Ray that are accelerators.
_ACCELERATORS = ("GPU", "TPU")
# Seconds that the head of a cluster gets to accept a connection; Ray itself tries for minutes.
_PATIENCE = 10.0


class _Function(BlockFunction):
    def __init__(self, make: Callable[[], Any], folder: str) -> None:
        with contextlib.suppress(OSError):  # another machine may lack it, where runs are in a store
            os.chdir(folder)  # for relative paths
        super().__init__(make)


class _Actor:
    """A worker that is an actor, with the same methods as `WorkerProcess`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def ask(self, block: Any) -> Answer:
        try:
            return ray.get(self._actor.answer.remote(block))
        except RayActorError as error:
            # The last line begins with the sentence that names the cause.
            cause = str(error).strip().split("\n")[-1].partition(". ")[0]
            raise WorkerLost(f"has died ({cause})") from None

    def stop(self) -> None:
        ray.kill(self._actor)


@contextlib.contextmanager
def open_cluster(
    make: Callable[[], Any], address: str, count: int | None
) -> Iterator[tuple[Callable[[int], _Actor], int]]:
    """Connect to a Ray cluster during the body; yield a function that starts an actor, and how many to start.

    `address` is HOST:PORT or ray://HOST:PORT of the cluster; auto: the cluster that this machine belongs to;
    local: a new cluster on this machine, which ends with this process. `count` None: one actor per
    accelerator of the cluster, or one per machine if it has no accelerators. `make` is as in `open_workers`.
    """
    # Ray would report its use over the network.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local: dict[str, Any] = {"num_cpus": count, "include_dashboard": False} if address == "local" else {}
    try:
        if place := re.fullmatch(r"(?:ray://)?\[?(.*?)\]?:(\d+)", address):
            socket.create_connection((place[1], int(place[2])), timeout=_PATIENCE).close()
        with warnings.catch_warnings():
            # JAX warns about forks, but Ray's forks at once execute other programs, its servers.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False, **local)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"--ray={address}: there is no such Ray cluster ({reason}); start one with "
            "`ray start --head`, or give --ray=local for one on this machine"
        ) from error
    resources = ray.cluster_resources()
    kind = next((kind for kind in _ACCELERATORS if resources.get(kind, 0) >= 1), None)
    machines = sum(node["Alive"] for node in ray.nodes())
    needs = {"num_gpus": 1} if kind == "GPU" else {"resources": {kind: 1}} if kind else {}
    actor = ray.remote(_Function).options(
        num_cpus=1, scheduling_strategy="SPREAD", max_restarts=0, max_task_retries=0, **needs
    )
    try:
        default = machines if kind is None else int(resources[kind])
        yield lambda place: _Actor(actor.remote(make, os.getcwd())), count or default
    finally:
        with contextlib.suppress(ConnectionError):
            ray.shutdown()
