"""The engine of all translations: applies steps to lines, has the parts translated, and undoes the steps."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from flaxformer_mt.config import Config
from flaxformer_mt.decoding.search_inputs import Sentence
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.text_io.lines import format_line_numbers, take_windows
from flaxformer_mt.translation.join_sentences import join_parts
from flaxformer_mt.translation.requests import Answer, Request, check_lines
from flaxformer_mt.translation.result import Translation
from flaxformer_mt.translation.segments import Segment, Step
from flaxformer_mt.vocab import Vocabs

_NOT_NUMBERS = "the model's scores are not numbers (NaN)"
# Maximum number of requests that are read together while the device computes.
_CHUNK = 512
# A window of at most this many requests is read without another thread, which would take longer to start.
_FEW = 64

Item = TypeVar("Item")
# Called with the numbers of lines and target tokens that have just been translated.
Progress = Callable[..., object]


class Backend(Protocol):
    """Translates segments, according to their ids, constraints and requested annotations."""

    @property
    def has_full_call(self) -> bool:
        """Whether `step(more=True)` may have work to do."""

    def check_request(self, request: Request) -> None: ...

    def check_sentence(self, sentence: Sentence, name: str) -> None:
        """Raise UserError for constraints that cannot be met; the message calls the line `name`."""

    def submit(self, segments: Sequence[Segment], *, n_best: int) -> None: ...

    def cancel(self, segment: Segment) -> None: ...

    def step(self, *, more: bool = False) -> list[tuple[Segment, Translation | Exception]]:
        """Continue the work; return finished segments with results, in any order; see `Engine.step`."""

    def __len__(self) -> int:
        """Return the number of unfinished segments."""

    def describe(self) -> dict[str, Any]: ...


class Engine:
    """Translates requests that are submitted at any time. Call all methods except `read` in one thread."""

    def __init__(
        self,
        steps: Sequence[Step],
        backend: Backend,
        config: Config,
        vocabs: Vocabs,
        *,
        apart: bool,
        arriving: bool = False,
    ) -> None:
        """Create an engine without requests.

        `apart`: whether a step divides lines into sentences. `arriving`: whether requests arrive while others
        are translated; the answer to a request that fails is then the error.
        """
        self.backend: Any = backend
        self.config, self.vocabs, self.apart = config, vocabs, apart
        self._steps, self._arriving = steps, arriving
        self._lines: dict[Hashable, Segment] = {}
        self._finished: collections.deque[Segment] = collections.deque()
        # Numbers of the lines that warnings name, by what happened to the lines; see `take_warnings`.
        self._named: dict[str, set[int]] = collections.defaultdict(set)
        # Number of segments that steps have changed, by the message to users.
        self.counts: collections.Counter[str] = collections.Counter()

    def submit(self, *requests: Request) -> None:
        """Add requests; raise UserError for requests that cannot be translated."""
        self.enter(self.read(requests))

    def read(self, requests: Sequence[Request]) -> list[Segment]:
        """Apply the steps to requests; return lines with their parts for `enter`. Can run in any thread."""
        for request in requests:
            check_lines([request.text], first_line=request.seed)
            self.backend.check_request(request)
        lines = segments = [
            Segment(
                request,
                request.text,
                request.text,
                annotations=request.annotations,
                sentence_starts=request.sentence_starts,
            )
            for request in requests
        ]
        answered: list[Segment] = []
        for step in self._steps:
            segments = step.before(segments)
            answered += [segment for segment in segments if segment.translation is not None]
            segments = [segment for segment in segments if segment.translation is None]
        for part in sorted([*answered, *segments], key=lambda part: part.start):
            (part.whole or part).parts.append(part)
        return lines

    def enter(self, lines: Sequence[Segment]) -> None:
        waiting: dict[int, list[Segment]] = collections.defaultdict(list)
        for line in lines:
            self._lines[line.request.id] = line
            missing = [part for part in line.parts if part.translation is None]
            line.num_missing = len(missing)
            if missing:
                waiting[line.request.n_best] += missing
            else:
                self._finished.append(line)
            if any(part.continues for part in line.parts):
                self._named["split"].add(line.request.seed)
            if any(part.is_cut for part in line.parts):
                self._named["cut"].add(line.request.seed)
        for n_best, segments in waiting.items():
            self.backend.submit(segments, n_best=n_best)

    def cancel(self, name: Hashable) -> None:
        """Remove the request with the id `name`, unless it is already answered."""
        if (line := self._lines.pop(name, None)) is not None:
            for part in line.parts:
                self.backend.cancel(part)

    def step(self, *, more: bool = False) -> list[Answer]:
        """Continue the work; return the answers that are ready, in any order.

        `more`: whether further requests will be submitted soon; the device then works only on full batches.
        """
        answers: list[Answer] = []
        for part, result in self.backend.step(more=more):
            line: Segment = part.whole or part
            if self._lines.get(line.request.id) is not line:  # cancelled, or failed with another part
                continue
            if isinstance(result, Exception):
                self.cancel(line.request.id)
                answers.append((line.request.id, result))
                continue
            part.translation = result
            line.num_missing -= 1
            if not line.num_missing:
                self._finished.append(line)
        while self._finished:
            line = self._finished.popleft()
            if self._lines.get(line.request.id) is line:
                del self._lines[line.request.id]
                answers.append((line.request.id, self._finish(line)))
        return answers

    def _finish(self, line: Segment) -> Translation | Exception:
        """Undo the steps of each part, join the translations of the parts, and undo the steps of the line."""
        for part in line.parts:
            assert part.translation is not None
            if _has_failed(part.translation):
                if self._arriving:
                    return UserError(f"{_NOT_NUMBERS}; try an earlier checkpoint")
                self._named["failed"].add(line.request.seed)
            if part.memory:
                self.counts.update(step.counted for step in part.memory if step.counted)
                part.translation = part.undo(part.translation)
        joined = join_parts(line, eos_id=self.vocabs.target.eos_id)
        if line.parts != [line]:
            joined = line.undo(joined)
        line.parts.clear()  # which refer to the line: both are freed without the garbage collector
        if not joined.satisfied:
            self._named["unsatisfied"].add(line.request.seed)
        return joined

    def run(
        self,
        windows: Iterable[Sequence[Request]],
        *,
        ahead: bool = False,
        warn: Callable[[str], object] = warn_user,
        on_progress: Progress | None = None,
    ) -> Iterator[list[Translation]]:
        """Yield the translations of each window of requests, in order.

        The requests of a window share batches only with each other, so the results of a window depend on no
        other window. While a window is searched, another thread tokenizes the rest of the window. With
        `ahead`, this thread also takes the next window, which must arrive soon and must not depend on earlier
        results.
        """
        reader = ThreadPoolExecutor(1, thread_name_prefix="read")  # has no thread before it has work
        reading = (self._begin_to_read(window, reader) for window in windows)
        try:
            for chunks in _take_one_ahead(reading) if ahead else reading:
                answers: dict[Any, Translation] = {}
                for number, chunk in enumerate(chunks, start=1):
                    self.enter(chunk())
                    while self.backend.has_full_call and number < len(chunks):
                        _collect(self.step(more=True), answers, on_progress)
                while self._lines:
                    _collect(self.step(), answers, on_progress)
                for message in self.take_warnings():
                    warn(message)
                yield [answers[number] for number in range(len(answers))]
        finally:
            reader.shutdown(cancel_futures=True)

    def _begin_to_read(
        self, window: Sequence[Request], reader: ThreadPoolExecutor
    ) -> list[Callable[[], list[Segment]]]:
        """Return one function per chunk of a window; each function returns the chunk's lines for `enter`."""
        requests = [dataclasses.replace(request, id=number) for number, request in enumerate(window)]
        if len(window) <= _FEW:
            return [functools.partial(self.read, requests)]
        # The programs that constraints need are known only when all of them have been read.
        constrained = any(one.prefix or one.phrases or one.glossary for one in requests)
        chunks = take_windows(requests, len(requests) if constrained else _CHUNK, None)
        return [reader.submit(self.read, chunk).result for chunk in chunks]

    def __len__(self) -> int:
        return len(self._lines)

    def take_warnings(self) -> list[str]:
        """Return the warnings since the last call; they name a request by its seed (its line number)."""
        longest = f"longer than data.max_source_length {self.config.data.max_source_length} tokens, so"
        messages = {
            "split": f"{{}}: {longest} translated in parts, which are joined again",
            "cut": f"{{}}: {longest} only the beginning was translated; split long lines into sentences",
            "failed": f"{{}}: {_NOT_NUMBERS}, so the translation is empty; try an earlier checkpoint",
            "unsatisfied": "{}: the translation lacks some of the required phrases; require fewer phrases, "
            "or allow longer translations or a larger beam",
        }
        named, self._named = self._named, collections.defaultdict(set)
        return [
            message.format(format_line_numbers(sorted(named[name])))
            for name, message in messages.items()
            if named[name]
        ]

    def describe(self) -> dict[str, Any]:
        """Describe, as JSON values, what affects translations; equal descriptions give equal results."""
        return self.backend.describe()

    def target_pieces(self, translation: Translation) -> list[str]:
        """Return the subwords of a translation, without eos."""
        vocab = self.vocabs.target
        return vocab.pieces([token for token in translation.tokens if token != vocab.eos_id])


def _has_failed(translation: Translation) -> bool:
    return translation.score == -math.inf and not translation.tokens


def _take_one_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Yield each item after the next one has been taken; an error in taking is raised after the yield."""
    remaining, problem = iter(items), None
    current = next(remaining, None)
    while current is not None and problem is None:
        try:
            following = next(remaining, None)
        except Exception as error:
            following, problem = None, error
        yield current
        current = following
    if problem is not None:
        raise problem


def _collect(answers: list[Answer], found: dict[Any, Translation], on_progress: Progress | None) -> None:
    for name, answer in answers:
        if isinstance(answer, Exception):
            raise answer
        found[name] = answer
        if on_progress is not None:
            on_progress(lines=1, tokens=len(answer.tokens))
