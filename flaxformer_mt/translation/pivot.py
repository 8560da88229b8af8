"""Translation through a pivot language: two engines in a row, with the interface of one."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from flaxformer_mt.config import DataConfig
from flaxformer_mt.config.directions import Direction, find_directions
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.engine import LineEngine
from flaxformer_mt.translation.inline_markup import put_back_all, take_out
from flaxformer_mt.translation.requests import Answer, Request
from flaxformer_mt.translation.result import NO_ANNOTATIONS, Alignment, Translation, rank

# From the source to the pivot language, and from there to the target.
Directions = tuple[Direction, Direction]


class PivotLine:
    """A request on its way: what both models are asked, and the translation made of their answers.

    The second model translates all hypotheses of the first, with the sentences that the first has found. Of
    the n_best hypotheses of each, those with the best sums of both scores are kept, and of equal texts the
    best.
    """

    def __init__(self, request: Request, directions: Directions, *, apart: bool) -> None:
        """Prepare the request for the first model; `apart`: whether it splits lines into sentences."""
        wanted = request.annotations
        if wanted.alignments == "pieces":
            raise UserError(
                "alignments of pieces cannot pass through a pivot language; ask for those of words"
            )
        if request.target is not None:
            raise UserError("a translation cannot be scored through a pivot language")
        if request.context is not None or request.glossary is not None:
            what = "the lines before" if request.context is not None else "a glossary"
            raise UserError(
                f"{what} cannot pass through a pivot language, in which there are no such lines or terms; "
                "leave out --documents and --glossary, or translate with one model"
            )
        self.request, self._apart, self._into = request, apart, directions[1]
        self._marked = take_out(request.text) if wanted.markup else None
        needed = wanted._replace(token_log_probs=False, attention=False, markup=False)
        if wanted.markup:
            needed = needed._replace(alignments="words", for_markup=True)
        self.first = dataclasses.replace(
            request,
            text=request.text if self._marked is None else self._marked.text,
            source_language=directions[0].source,
            target_language=directions[0].target,
            prefix="",
            required=(),
            annotations=needed if needed.watched_any else NO_ANNOTATIONS,
            sentence_starts=self._marked.find_sentences(str(directions[0].source))
            if self._marked
            else request.sentence_starts,
        )

    def ask_second(self, first: Translation) -> list[Request]:
        """Return a request for each hypothesis of the first model."""
        needed = self.first.annotations._replace(token_log_probs=self.request.annotations.token_log_probs)
        return [
            dataclasses.replace(
                self.request,
                text=one.text,
                source_language=self._into.source,
                target_language=self._into.target,
                annotations=needed,
                sentence_starts=(one.sentence_starts or (0,)) if self._apart else None,
            )
            for one in first.n_best
        ]

    def join(self, first: Translation, second: Sequence[Translation]) -> Translation:
        """Return the translation of the line, given those of each hypothesis of the first model."""
        pairs = [(one, two) for one, best in zip(first.n_best, second, strict=True) for two in best.n_best]
        best: dict[str, Translation] = {}
        for joined in sorted((_join(one, two) for one, two in pairs), key=lambda one: -one.score):
            best.setdefault(joined.text, joined)
        found = rank(list(best.values())[: self.request.n_best])
        if self._marked is not None:
            keep = self.request.annotations.alignments is not None
            found = put_back_all(self._marked, found, keep_alignment=keep)
        return found


def _join(first: Translation, second: Translation) -> Translation:
    alignment = None
    if first.alignment is not None and second.alignment is not None:
        alignment = join_alignments(first.alignment, second.alignment)
    return dataclasses.replace(
        second,
        score=first.score + second.score,
        log_prob=first.log_prob + second.log_prob,
        truncated=first.truncated or second.truncated,
        alignment=alignment,
        parts=first.parts,
        alternatives=(),
    )


def join_alignments(first: Alignment, second: Alignment) -> Alignment:
    """Return the pairs of words that are aligned through a word of the pivot language.

    ((0, 1), (1, 0)) and ((0, 0), (1, 1)) give (1, 0), (0, 1).
    """
    through: dict[int, list[int]] = {}
    for source, pivot in first:
        through.setdefault(pivot, []).append(source)
    pairs = {(target, source) for pivot, target in second for source in through.get(pivot, ())}
    return tuple((source, target) for target, source in sorted(pairs))


def choose_pivot(
    first: DataConfig, second: DataConfig, source: str | None = None, target: str | None = None
) -> Directions:
    """Return the directions of two models through a pivot language, between these languages if given."""
    directions = find_directions(first), find_directions(second)
    found = [
        (one, two)
        for one, two in itertools.product(*directions)
        if one.target == two.source and source in (None, one.source) and target in (None, two.target)
    ]
    if len(found) == 1:
        return found[0]
    named, other = (", ".join(one.name for one in own) for own in directions)
    wanted = f" from {source or 'any language'} to {target or 'any language'}" if source or target else ""
    problem = "in several ways" if found else "in no way"
    raise UserError(
        f"the first model translates {named} and the second {other}, which leads{wanted} {problem}; give "
        + ("source and target language" if found else "a second model that reads what the first one writes")
    )


class PivotEngine:
    """Translates requests by one engine, and the translations by another; see `requests.Engine`."""

    on_progress: Callable[..., object] | None = None
    has_full_call = False

    def __init__(self, first: LineEngine, second: LineEngine, directions: Directions) -> None:
        self._first, self._second, self._directions = first, second, directions
        self.vocabs = second.vocabs
        self._lines: dict[Hashable, PivotLine] = {}
        # Answers of the first engine: before the second is asked, and then with its answers so far.
        self._waiting: dict[Hashable, Translation] = {}
        self._found: dict[Hashable, tuple[Translation, dict[int, Translation]]] = {}

    @property
    def num_recased(self) -> int:
        return self._first.num_recased + self._second.num_recased

    def submit(self, *requests: Request) -> None:
        self.enter(self.read(requests))

    def read(self, requests: Sequence[Request]) -> Any:
        lines = [PivotLine(request, self._directions, apart=self._first.apart) for request in requests]
        return lines, self._first.read([line.first for line in lines])

    def enter(self, lines: Any) -> None:
        self._lines.update((line.request.id, line) for line in lines[0])
        self._first.enter(lines[1])

    def cancel(self, name: Hashable) -> None:
        self._lines.pop(name, None)
        self._first.cancel(name)
        if name in self._found:
            first, _ = self._found.pop(name)
            for number in range(len(first.n_best)):
                self._second.cancel((name, number))

    def __len__(self) -> int:
        return len(self._lines)

    def step(self, *, more: bool = False) -> list[Answer]:
        answers: list[Answer] = []
        for name, first in self._first.step():
            if isinstance(first, Exception):
                answers.append((name, first))
            else:
                self._waiting[name] = first
        if self._waiting and not len(self._first):  # in the order of the requests, as in all processes
            asked: list[Request] = []
            for name, line in self._lines.items():
                if name in self._waiting:
                    self._found[name] = self._waiting[name], {}
                    requests = enumerate(line.ask_second(self._waiting[name]))
                    asked += [dataclasses.replace(one, id=(name, number)) for number, one in requests]
            self._waiting = {}
            self._second.submit(*asked)
        for (name, number), answer in self._second.step():
            if isinstance(answer, Exception):
                answers.append((name, answer))
            elif name in self._lines:
                first, second = self._found[name]
                second[number] = answer
                if len(second) == len(first.n_best):
                    joined = self._lines[name].join(first, [second[n] for n in range(len(second))])
                    answers.append((name, joined))
        for name, answer in answers:
            self._lines.pop(name, None)
            self._found.pop(name, None)
            if self.on_progress is not None and isinstance(answer, Translation):
                self.on_progress(lines=1, tokens=len(answer.tokens))
        return answers

    def take_warnings(self) -> list[str]:
        second = (f"in the pivot language, {one}" for one in self._second.take_warnings())
        return [*self._first.take_warnings(), *second]

    def describe(self) -> dict[str, Any]:
        then = self._second.describe()
        then.pop("device_kind", None)  # that of both
        return {**self._first.describe(), "then": then}
