"""Models in the directions that they translate: what the threads of a server submit lines to."""

from concurrent.futures import Future
from typing import NamedTuple

from flaxformer_mt.commands.server.request_fields import Pair
from flaxformer_mt.config import DataConfig
from flaxformer_mt.config.directions import find_directions
from flaxformer_mt.translation.requests import EngineThread, Request
from flaxformer_mt.translation.result import Annotations, Translation


class DirectedModel(NamedTuple):
    """What translates the lines of a pair of languages: a model in one of its directions."""

    thread: EngineThread
    source_language: str | None = None
    target_language: str | None = None
    # What names the model to its readers, such as its run and checkpoint.
    title: str = ""

    def submit(self, line: str, *, n_best: int, annotations: Annotations) -> Future[Translation]:
        """Add a line; see `EngineThread.submit`."""
        languages = self.source_language, self.target_language
        request = Request(
            line,
            n_best=n_best,
            source_language=languages[0],
            target_language=languages[1],
            annotations=annotations,
        )
        return self.thread.submit(request)


def direct(thread: EngineThread, data: DataConfig, *, title: str = "") -> dict[Pair, DirectedModel]:
    """Return a model in each of its directions."""
    return {pair: DirectedModel(thread, *pair, title) for pair in find_directions(data)}
