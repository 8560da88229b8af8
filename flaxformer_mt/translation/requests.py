"""What a translation engine is asked and answers, and how many requests go through one.

`Engine` is the whole interface: files, the API, the server, workers, evaluation and distillation submit
requests and step the engine.
"""

import collections
import dataclasses
import functools
import logging
import queue
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from flaxformer_mt.corpus.documents import Documents
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.lines import take_windows
from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.translation.result import NO_ANNOTATIONS, Annotations, Translation
from flaxformer_mt.unicode_text import is_blank

# Requests that are split and tokenized together, while the device computes; fewer are read at once.
_CHUNK = 512
# A window of at most this many requests is read without another thread, which would take longer to start.
_FEW = 64


@dataclasses.dataclass(frozen=True)
class Request:
    """A line to translate, or a translation to score (`target`). Requests can be pickled.

    Attributes:
      text: the source; "" for a language model.
      id: identifies the answer; unique among the requests of an engine.
      seed: makes the samples of equal texts differ. For a line of a file, its number, which messages name.
      target: an existing translation, whose score the engine returns (forced decoding).
      prefix: what the translation begins with.
      required: phrases that the translation contains.
      glossary: terms of the source, and their translations.
      n_best: maximum number of hypotheses, the translation itself included.
      source_language: for a multilingual model. None: the tag at the start of the text names it.
      target_language: for a multilingual model. None: the tag at the start of the text names it.
      annotations: additional output, and whether markup is taken out and put back.
      sentence_starts: where the sentences of the text start; None, or with markup: the engine finds them.
      context: the lines before this one in its document, the nearest last, for a model with data.context;
        None: the line is in no document.
    """

    text: str
    id: Hashable = None
    seed: int = 1
    target: str | None = None
    prefix: str = ""
    required: tuple[str, ...] = ()
    n_best: int = 1
    source_language: str | None = None
    target_language: str | None = None
    annotations: Annotations = NO_ANNOTATIONS
    context: tuple[str, ...] | None = None
    glossary: Glossary | None = None
    sentence_starts: tuple[int, ...] | None = None

    @property
    def phrases(self) -> list[str]:
        """The required phrases; a blank one requires nothing."""
        return [phrase for phrase in self.required if not is_blank(phrase)]


def make_requests(
    lines: Iterable[str],
    constraints: Mapping[str, tuple[str, Iterable[Any] | None]],
    *,
    first_line: int = 1,
    documents: Documents | None = None,
    **fields: Any,
) -> Iterator[Request]:
    """Yield a request for each line, whose number is its seed.

    Args:
      constraints: what messages call a field of requests, and its value of each line. None: the default.
      documents: what `lines` come from, if they have lines before them.
      fields: of all requests.
    """
    columns = {
        name: (what, iter(values)) for name, (what, values) in constraints.items() if values is not None
    }
    number = first_line - 1
    for number, line in enumerate(lines, start=first_line):
        values: dict[str, Any] = {name: next(column, None) for name, (_, column) in columns.items()}
        if missing := [columns[name][0] for name, value in values.items() if value is None]:
            raise UserError(count_message(missing[0], number - 1, number))
        if "required" in values:
            values["required"] = tuple(values["required"])
        if documents is not None:
            values["context"] = documents.before
        yield Request(line, seed=number, **values, **fields)
    for what, column in columns.values():
        if next(column, None) is not None:
            raise UserError(f"there are more {what} than the {number} lines; give one for each line")


def count_message(what: str, count: int, num_lines: int) -> str:
    """Say that the constraints of lines are not as many as the lines."""
    return (
        f"there are {count} {what} for {num_lines} lines; give one for each line, an empty one for a line "
        "without constraint"
    )


# The id of a request, and its translation or why there is none.
Answer = tuple[Any, Translation | Exception]


class Engine(Protocol):
    """Translates requests that are submitted at any time. All methods but `read` must run in one thread."""

    def submit(self, *requests: Request) -> None:
        """Add requests; raise UserError for requests that cannot be translated."""

    def read(self, requests: Sequence[Request]) -> Any:
        """Split and tokenize requests, in any thread; `enter` takes the result. Together: `submit`."""

    def enter(self, lines: Any) -> None: ...

    def cancel(self, name: Hashable) -> None:
        """Remove the request with this id, if it is not answered yet."""

    def step(self, *, more: bool = False) -> list[Answer]:
        """Continue the work; return the answers that are ready, in any order.

        Args:
          more: whether more requests will be submitted soon. If so, the engine works only while the
            submitted requests fill the device.
        """

    @property
    def has_full_call(self) -> bool:
        """Whether `step(more=True)` may have something to do."""

    def __len__(self) -> int:
        """Return the number of requests that are not answered."""

    def take_warnings(self) -> list[str]:
        """Return warnings about the requests since the last call; messages name a request by its seed."""

    def describe(self) -> dict[str, Any]:
        """Return what translations depend on, as JSON values; equal descriptions give equal translations."""


def run(
    engine: Engine,
    requests: Iterable[Request],
    window: int = 2048,
    *,
    is_ready: Callable[[], bool] | None = None,
    ahead: bool = False,
    warn: Callable[[str], object] = lambda message: None,
) -> Iterator[Translation]:
    """Yield the translation of each request, in order.

    Args:
      window: number of requests that share batches, and after which results are yielded.
      is_ready: tells whether the next request can be had at once; False closes a window. None: a window is
        always full.
      ahead: see `run_windows`.
    """
    windows = take_windows(requests, window, is_ready)
    for translations in run_windows(engine, windows, ahead=ahead, warn=warn):
        yield from translations


def run_windows(
    engine: Engine,
    windows: Iterable[Sequence[Request]],
    *,
    ahead: bool = False,
    warn: Callable[[str], object] = lambda message: None,
) -> Iterator[list[Translation]]:
    """Yield the translations of each window of requests, in order.

    The requests of a window share batches with each other alone, so that its results depend on nothing else.
    While it is searched, another thread reads the rest of it and the next one.

    Args:
      ahead: whether the next window is taken, and read, while one is searched: not if it may be long in
        coming, or depends on the results before.
    """
    source, problems = iter(windows), list[Exception]()
    # Windows that were taken, and functions that read their parts.
    pending: collections.deque[tuple[Sequence[Request], list[Callable[[], Any]]]] = collections.deque()
    answers: dict[Any, Translation] = {}
    done = 0
    reader = ThreadPoolExecutor(1, thread_name_prefix="read")  # has no thread before it has work

    def read(requests: Sequence[Request], first: int) -> Any:
        return engine.read([dataclasses.replace(one, id=n) for n, one in enumerate(requests, start=first)])

    def take_next() -> None:
        """Begin to read the next window; what goes wrong is raised when those before are done."""
        try:
            window = None if problems else next(source, None)
        except Exception as problem:
            problems.append(problem)
            return
        if window is not None:
            first = done + sum(len(requests) for requests, _ in pending)
            size = max(1, len(window)) if len(window) <= _FEW or _is_constrained(window) else _CHUNK
            starts = range(0, len(window), size)
            parts = [functools.partial(read, window[n : n + size], first + n) for n in starts]
            many = len(window) > _FEW
            pending.append((window, [reader.submit(part).result for part in parts] if many else [*parts]))

    def collect(found: list[Answer]) -> None:
        for name, answer in found:
            if isinstance(answer, Exception):
                raise answer
            answers[name] = answer

    try:
        take_next()
        while pending:
            if ahead:
                take_next()
            window, parts = pending[0]
            for number, part in enumerate(parts):
                engine.enter(part())
                while engine.has_full_call and number < len(parts) - 1:
                    collect(engine.step(more=True))
            while len(engine):
                collect(engine.step())
            for message in engine.take_warnings():
                warn(message)
            pending.popleft()
            translations = [answers.pop(done + number) for number in range(len(window))]
            done += len(window)
            yield translations
            if not pending:
                take_next()
    finally:
        reader.shutdown(cancel_futures=True)
    if problems:
        raise problems[0]


def _is_constrained(window: Sequence[Request]) -> bool:
    """Whether the programs that a window needs are known only when all of it has been read."""
    return any(request.prefix or request.phrases or request.glossary for request in window)


class Stopped(Exception):
    """The thread has ended, because of an error or because the server stops."""


class EngineThread:
    """Runs an engine in a thread of its own: requests come at any time, and their answers are futures."""

    def __init__(self, engine: Engine, name: str = "", *, preparation: Iterable[object] = ()) -> None:
        """Start the thread, which does `preparation`, work in parts, as long as there are no requests."""
        self.engine: Any = engine  # of which servers ask more than the interface has
        self._preparation = iter(preparation)
        # Whether the preparation is done; may be asked by any thread.
        self.is_ready = False
        # Why the thread has ended, if it has.
        self.failure: BaseException | None = None
        self._arriving: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # Of the requests that the engine has, by number.
        self._futures: dict[int, Future[Translation]] = {}
        self._count = 0
        self._thread = threading.Thread(target=self._run, name=f"model {name}", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Future[Translation]:
        """Add a request, whose id is of no account. To cancel the future removes it from the search.

        The future raises why the request cannot be translated, and `Stopped` when the thread has ended.
        """
        future: Future[Translation] = Future()
        if self.failure is not None:
            future.set_exception(Stopped(f"the model has stopped: {self.failure}"))
        else:
            self._arriving.put(lambda: self._enter(future, request))
        return future

    def stop(self, *, patience: float | None = None) -> None:
        """End the thread after what it is doing, and wait; requests that are not answered then fail."""
        self._arriving.put(None)
        self._thread.join(patience)

    def _run(self) -> None:
        try:
            while self._take_arrivals():
                for number, answer in self.engine.step():
                    self._answer(number, answer)
            self.failure = Stopped("the server stops")
        except Exception as error:  # a bug: what waits for this thread must not wait forever
            self.failure = error
            logging.exception("the model has stopped")
        failure = Stopped(f"the model has stopped: {type(self.failure).__name__}: {self.failure}")
        while not self._arriving.empty():
            if action := self._arriving.get():
                action()
        for number in list(self._futures):
            self._answer(number, failure)

    def _take_arrivals(self) -> bool:
        """Accept and remove requests, and wait for the first if there is no other work; False: stop."""
        idle = not len(self.engine)
        while idle or not self._arriving.empty():
            if self._arriving.empty() and not self.is_ready:
                self.is_ready = next(self._preparation, self) is self
                continue
            action = self._arriving.get()
            if action is None:
                return False
            action()
            idle = not len(self.engine)
        return True

    def _enter(self, future: Future[Translation], request: Request) -> None:
        if future.cancelled():
            return
        number = self._count
        self._count += 1
        self._futures[number] = future

        def drop_cancelled(done: Future[Translation]) -> None:
            if done.cancelled():
                self._arriving.put(lambda: self._drop(number))

        future.add_done_callback(drop_cancelled)
        try:
            self.engine.submit(dataclasses.replace(request, id=number))
        except Exception as error:  # of this request alone
            self._answer(number, error)

    def _drop(self, number: int) -> None:
        if self._futures.pop(number, None) is not None:
            self.engine.cancel(number)

    def _answer(self, number: int, answer: Translation | BaseException) -> None:
        future = self._futures.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)
