"""The choice of where blocks are worked on: by processes, by actors of Ray, or in this process."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flaxformer_mt.errors import UserError, install_command, warn_user
from flaxformer_mt.parallel.block_map import Crew, Engine, MakeWork


class Alone:
    """The same work in this process, without workers."""

    def __init__(self, make: MakeWork) -> None:
        # With all that it has besides: its kind is known where it is made.
        self.work: Any = make(warn_user)

    def describe(self) -> dict[str, Any]:
        """What results depend on."""
        return self.work.describe()

    def map(self, blocks: Iterable[Any], *, name: Callable[[Any], str]) -> Iterator[Any]:
        """Yields the result of each block; see `Crew.map`."""
        return map(self.work, blocks)


@contextlib.contextmanager
def open_crew(make: MakeWork, *, workers: int | None, ray: str | None) -> Iterator[Alone | Crew]:
    """Opens workers for the work that `make` makes, and ends them after the body.

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
            from flaxformer_mt.parallel.worker_processes import WorkerProcesses

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
    try:
        from flaxformer_mt.parallel.ray_actors import RayActors
    except ImportError as error:
        raise UserError(
            f"--ray={address} needs the package {error.name}, which is not installed; install it with "
            f"{install_command(extra='ray')}"
        ) from error
    return RayActors(make, workers, address=address)
