"""The thread that owns a model: it takes lines as they come, and lets them join the search that is running.

Requests are handled by other threads, which submit lines and receive futures.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from flaxformer_mt.commands.server.request_fields import Pair
from flaxformer_mt.config import DataConfig
from flaxformer_mt.config.directions import choose_tags, choose_target_tag, find_directions
from flaxformer_mt.translation.annotation import Notes
from flaxformer_mt.translation.result import Translation

if TYPE_CHECKING:
    from flaxformer_mt.convert.ctranslate2.live_batches import LiveBatches
    from flaxformer_mt.translation.live_translator import LiveTranslator

    # A translation system that lines can join at any time.
    LineSystem = LiveTranslator | LiveBatches


class Answer(NamedTuple):
    """The translation of a line, with its alternatives."""

    translation: Translation
    # Pieces of the line and of each hypothesis, without eos; of a line in several parts, no source pieces.
    source_pieces: list[str]
    pieces: list[list[str]]


class Stopped(Exception):
    """The thread has ended, because of an error or because the server stops."""


class ModelThread:
    """Runs a `LineSystem` in a thread of its own."""

    def __init__(self, system: "LineSystem", name: str, *, preparation: Iterable[object] = ()) -> None:
        """Start the thread.

        Args:
          name: of the pair of languages.
          preparation: work in parts, which the thread does as long as there are no lines.
        """
        self.system, self._preparation = system, iter(preparation)
        # Why the thread has ended, if it has.
        self.failure: BaseException | None = None
        self._arriving: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # The lines that the system has, named by their futures.
        self._lines: dict[Future[Answer], Notes] = {}
        # Alignments need a forward pass, whose program may have to be compiled: the search goes on meanwhile.
        self._finishing = ThreadPoolExecutor(1, thread_name_prefix=f"finish {name}")
        self._thread = threading.Thread(target=self._run, name=f"model {name}", daemon=True)
        self._thread.start()

    def submit(
        self, line: str, *, n_best: int, notes: Notes, tags: str = "", lead: str = ""
    ) -> "Future[Answer]":
        """Add a line with the tags of its languages. To cancel the future removes it from the search.

        `lead` is what the translation begins with as it is tokenized: the tag of its language, and a space.
        The future raises the error of a line that cannot be translated, and `Stopped` when the thread ended.
        """
        future: Future[Answer] = Future()

        def drop_cancelled(done: "Future[Answer]") -> None:
            if done.cancelled():
                self._arriving.put(lambda: self._drop(future))

        future.add_done_callback(drop_cancelled)
        if self.failure is not None:
            future.set_exception(Stopped(f"the model has stopped: {self.failure}"))
            return future
        submitted: dict[str, Any] = {"n_best": n_best, "notes": notes, "tags": tags, "lead": lead}
        self._arriving.put(lambda: self._enter(future, line, submitted))
        return future

    def stop(self) -> None:
        """End the thread after what it is doing; lines that are not done then fail."""
        self._arriving.put(None)
        self._thread.join()
        self._finishing.shutdown()

    def _run(self) -> None:
        try:
            while self._take_arrivals():
                for future, found in self.system.advance():
                    self._deliver(future, found)
            self.failure = Stopped("the server stops")
        except Exception as error:  # a bug: what waits for this thread must not wait forever
            self.failure = error
        failure = Stopped(f"the model has stopped: {type(self.failure).__name__}: {self.failure}")
        while not self._arriving.empty():
            if action := self._arriving.get():
                action()
        for future in list(self._lines):
            self._fail(future, failure)

    def _take_arrivals(self) -> bool:
        """Accept and remove lines, and wait for the first if there is no other work; False: stop."""
        idle = not len(self.system)
        while idle or not self._arriving.empty():
            if self._arriving.empty() and next(self._preparation, self) is not self:
                continue
            action = self._arriving.get()
            if action is None:
                return False
            action()
            idle = False
        return True

    def _enter(self, future: "Future[Answer]", line: str, submitted: dict[str, Any]) -> None:
        if future.cancelled():
            return
        self._lines[future] = submitted["notes"]
        try:
            self.system.submit(future, line, **submitted)
        except Exception as error:  # of this line alone
            self._fail(future, error)

    def _drop(self, future: "Future[Answer]") -> None:
        if self._lines.pop(future, None) is not None:
            self.system.cancel(future)

    def _fail(self, future: "Future[Answer]", error: BaseException) -> None:
        del self._lines[future]
        if future.set_running_or_notify_cancel():
            future.set_exception(error)

    def _deliver(self, future: Any, found: Any) -> None:
        if future not in self._lines:
            return
        if isinstance(found, Exception):
            self._fail(future, found)
            return
        notes = self._lines.pop(future)
        if not future.set_running_or_notify_cancel():
            return
        if notes.watched_any:
            self._finishing.submit(self._finish, future, found)
        else:
            self._finish(future, found)

    def _finish(self, future: "Future[Answer]", found: Any) -> None:
        try:
            translation = self.system.finish(found)
            source_pieces = self.system.source_pieces(found)
            pieces = [self.system.target_pieces(one) for one in translation.n_best]
            future.set_result(Answer(translation, source_pieces, pieces))
        except Exception as error:  # of this line alone
            future.set_exception(error)


class DirectedModel(NamedTuple):
    """What translates the lines of a pair of languages: a model in one of its directions."""

    thread: ModelThread
    # The tags that each line gets, and what its translation begins with; see `ModelThread.submit`.
    tags: str = ""
    lead: str = ""
    # What names the model to its readers, such as its run and checkpoint.
    title: str = ""

    def submit(self, line: str, *, n_best: int, notes: Notes) -> "Future[Answer]":
        """Add a line; see `ModelThread.submit`."""
        return self.thread.submit(line, n_best=n_best, notes=notes, tags=self.tags, lead=self.lead)


def direct(thread: ModelThread, data: DataConfig, *, title: str = "") -> dict[Pair, DirectedModel]:
    """Return a model in each of its directions, with the tags of their sources and targets."""
    models: dict[Pair, DirectedModel] = {}
    for pair in find_directions(data):
        tags = "".join(f"{tag} " for tag in choose_tags(data, pair))
        target = choose_target_tag(data, pair)
        models[pair] = DirectedModel(thread, tags, f"{target} " if target else "", title)
    return models
