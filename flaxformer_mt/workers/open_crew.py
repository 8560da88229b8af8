"""The choice of where blocks are worked on: by processes, by actors of Ray, or in this process."""

import contextlib
import functools
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from flaxformer_mt.errors import UserError, importing, warn_user
from flaxformer_mt.processor import core_count
from flaxformer_mt.workers.block_map import Crew, Engine, MakeWork, Work


class Hands(NamedTuple):
    """The workers of `open_crew`: how many, and the cluster that they run on."""

    workers: int | None = None
    ray: str | None = None

    def for_work(self, blocks: float, *, least: int) -> "Hands":
        """Return these, or no workers for fewer blocks than `least`: their start would take longer."""
        return HERE if blocks < least else self


# Seconds that a head of a cluster gets to accept a connection.
_PATIENCE = 10.0

# The work is done in this process.
HERE = Hands()


def choose_hands(workers: int | None, ray: str | None) -> Hands:
    """Return the workers that flags ask for; without flags, one for each core of this machine."""
    return Hands(core_count() if workers is None and ray is None else workers, ray)


class Alone:
    """The same work in this process, without workers."""

    def __init__(self, make: MakeWork) -> None:
        # With all that it has besides: its kind is known where it is made.
        self.work: Any = make(warn_user)

    def describe(self) -> dict[str, Any]:
        """Return what results depend on."""
        return self.work.describe()

    def map(self, blocks: Iterable[Any], *, name: Callable[[Any], str]) -> Iterator[Any]:
        """Yield the result of each block; see `Crew.map`."""
        return map(self.work, blocks)


def carry(work: Work) -> MakeWork:
    """For `open_crew`: work that is made already, and travels to the workers as it is."""
    return functools.partial(_give, work)


def _give(work: Work, warn: Callable[[str], None]) -> Work:
    return work


@contextlib.contextmanager
def open_crew(make: MakeWork, *, workers: int | None, ray: str | None) -> Iterator[Alone | Crew]:
    """Open workers for the work that `make` makes, and end them after the body.

    Args:
      workers: number of workers. None: with Ray, one for each accelerator; without, the work is done here.
      ray: address of a Ray cluster, `auto` or `local`; see `RayActors`. None: processes of this machine.

    Raises:
      UserError: the package ray is missing, or there is no such cluster.
    """
    if workers is None and ray is None:
        yield Alone(make)
        return
    with contextlib.ExitStack() as stack:
        engine: Any
        if ray is None:
            from flaxformer_mt.workers.worker_processes import WorkerProcesses

            assert workers is not None
            engine = WorkerProcesses(make, workers)
        else:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # for messages that Ray prints
            engine = _connect_to_ray(make, workers, ray)
        stack.callback(engine.close)
        crew = Crew(engine)
        stack.callback(crew.close)
        yield crew


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
