"""Translation through a pivot language: a second model translates the translations of a first."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from flaxformer_mt.config import DataConfig
from flaxformer_mt.config.directions import Direction, find_directions
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.translation.engine import Engine, Progress
from flaxformer_mt.translation.inline_markup import put_back_all, take_out
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import NO_ANNOTATIONS, Alignment, Translation, rank

# From the source to the pivot language, and from the pivot to the target language.
Directions = tuple[Direction, Direction]


class PivotLine:
    """A request translated by two models: builds the requests to both and joins their translations.

    The second model translates every hypothesis of the first, divided into the sentences of the first model's
    output. Of all pairs of hypotheses, the n_best with the highest sums of both scores are kept, and of equal
    texts only the best.
    """

    def __init__(self, request: Request, directions: Directions, *, apart: bool) -> None:
        """Prepare the first model's request; `apart`: whether that model divides lines into sentences."""
        wanted = request.annotations
        if wanted.alignments == "pieces":
            raise UserError(
                "alignments of subwords cannot pass through a pivot language; ask for those of words"
            )
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

    def follow(self, first: Translation) -> list[Request]:
        """Return the requests to the second model, one for each hypothesis of the first model."""
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

    def join(self, first: Translation, second: Iterable[Translation]) -> Translation:
        """Return the line's translation; `second` has the translation of each hypothesis in `first`."""
        pairs = [(one, two) for one, best in zip(first.n_best, second, strict=True) for two in best.n_best]
        best: dict[str, Translation] = {}
        for joined in sorted((_join(one, two) for one, two in pairs), key=lambda one: -one.score):
            best.setdefault(joined.text, joined)
        translation = rank(list(best.values())[: self.request.n_best])
        if self._marked is not None:
            keep = self.request.annotations.alignments is not None
            translation = put_back_all(self._marked, translation, keep_alignment=keep)
        return translation


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
    """Return the pairs of source and target words that are aligned with the same word of the pivot language.

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
    """Return the two directions that lead through a pivot language, from `source` to `target` if given."""
    directions = find_directions(first), find_directions(second)
    fitting = [
        (one, two)
        for one, two in itertools.product(*directions)
        if one.target == two.source and source in (None, one.source) and target in (None, two.target)
    ]
    if len(fitting) == 1:
        return fitting[0]
    named, other = (", ".join(one.name for one in own) for own in directions)
    wanted = f" from {source or 'any language'} to {target or 'any language'}" if source or target else ""
    problem = "in several ways" if fitting else "in no way"
    raise UserError(
        f"the first model translates {named} and the second {other}, which leads{wanted} {problem}; give "
        + ("source and target language" if fitting else "a second model that reads what the first one writes")
    )


@dataclasses.dataclass(frozen=True)
class PivotEngines:
    """Two engines; the second translates the translations of the first."""

    first: Engine
    second: Engine
    directions: Directions

    def run(
        self,
        windows: Iterable[Sequence[Request]],
        *,
        ahead: bool = False,
        warn: Callable[[str], object] = warn_user,
        on_progress: Progress | None = None,
    ) -> Iterator[list[Translation]]:
        """Yield the translations of each window of requests; see `Engine.run`."""
        # The windows in the first engine; and the windows in the second, with the first engine's answers.
        asked: collections.deque[list[PivotLine]] = collections.deque()
        answered: collections.deque[list[tuple[PivotLine, Translation]]] = collections.deque()

        def ask_first() -> Iterator[list[Request]]:
            for window in windows:
                asked.append([PivotLine(one, self.directions, apart=self.first.apart) for one in window])
                yield [line.first for line in asked[-1]]

        def ask_second() -> Iterator[list[Request]]:
            for translations in self.first.run(ask_first(), ahead=ahead, warn=warn):
                answered.append(list(zip(asked.popleft(), translations, strict=True)))
                yield [request for line, first in answered[-1] for request in line.follow(first)]

        for found in self.second.run(ask_second(), warn=lambda one: warn(f"in the pivot language, {one}")):
            second = iter(found)
            joined = [
                line.join(first, itertools.islice(second, len(first.n_best)))
                for line, first in answered.popleft()
            ]
            if on_progress is not None:
                on_progress(lines=len(joined), tokens=sum(len(one.tokens) for one in joined))
            yield joined

    vocabs = property(lambda self: self.second.vocabs)
    counts = property(lambda self: self.first.counts + self.second.counts)

    def describe(self) -> dict[str, Any]:
        then = self.second.describe()
        then.pop("device_kind", None)  # that of both
        return {**self.first.describe(), "then": then}
