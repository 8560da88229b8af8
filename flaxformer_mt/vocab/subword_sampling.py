"""Subword regularization: random segmentations of text that depend only on a seed.

Contains BPE dropout (Provilkov et al. 2020) and unigram sampling (Kudo 2018) for SentencePiece models.
SentencePiece's own sampling is not used because it differs between processes, whatever its seed.
Text is segmented in units, which are words, or whole texts if a subword of the model extends over a space.
Units repeat, so all results that are not random are cached for each unit.
"""

import bisect
import functools
import heapq
import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from flaxformer_mt.vocab.model_file import (
    BYTE,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Piece,
    read_pieces,
    read_settings,
)

# Difference between the lowest score of a subword and the score of an unknown character in a unigram model.
_UNKNOWN_PENALTY = 10.0
# Number of cached segmentations of units.
_REMEMBERED = 1 << 18
# Random numbers drawn at a time, and the largest number of merges between two dropped ones.
_DRAWN, _LARGEST_GAP = 4096, 2.0**40


class SubwordSampler(ABC):
    """Segments normalized text, with spaces as U+2581, randomly into the subwords of a model."""

    def __init__(self, pieces: Sequence[Piece], rate: float) -> None:
        """Make a sampler; `rate` is the dropout rate of merges (bpe) or alpha (unigram)."""
        self._rate = rate
        self._pieces = pieces
        self._ids = {
            piece.text: number
            for number, piece in enumerate(pieces)
            if piece.kind in (NORMAL, USER_DEFINED, UNUSED)
        }
        byte_ids = {piece.text: number for number, piece in enumerate(pieces) if piece.kind == BYTE}
        self._byte_ids = [byte_ids[name] for name in map("<0x{:02X}>".format, range(256)) if name in byte_ids]
        self._unknown = next(number for number, piece in enumerate(pieces) if piece.kind == UNKNOWN)
        crossing = any(SPACE in text[1:] for text in self._ids)
        self._unit = re.compile("(?s).+" if crossing else f"{SPACE}[^{SPACE}]*|[^{SPACE}]+")
        self._segment = functools.lru_cache(_REMEMBERED)(self._compute)

    def sample(self, texts: Sequence[str], *, seed: np.random.SeedSequence, end: int) -> list[np.ndarray]:
        """Return the ids of a random segmentation of each text, as int32 arrays that end in the id `end`."""
        numbers = self._draw_numbers(np.random.Generator(np.random.PCG64(seed)))
        return [self._sample_text(text, numbers, end) for text in texts]

    def _sample_text(self, text: str, numbers: Iterator[float], end: int) -> np.ndarray:
        ids: list[int] = []
        for unit in self._unit.findall(text):
            ids += self._sample_unit(unit, numbers)
        if self._unknown in ids:  # a run of unknown characters is one unknown token
            ids = [
                token
                for token, before in zip(ids, [None, *ids], strict=False)
                if not token == before == self._unknown
            ]
        return np.array([*ids, end], np.int32)

    def _encode(self, text: str) -> list[int]:
        """Return the id of a subword; for unknown text, its byte ids if the model has byte subwords."""
        number = self._ids.get(text, self._unknown)
        if number == self._unknown and len(self._byte_ids) == 256:
            return [self._byte_ids[byte] for byte in text.encode()]
        return [number]

    @abstractmethod
    def _draw_numbers(self, generator: np.random.Generator) -> Iterator[float]: ...

    @abstractmethod
    def _sample_unit(self, unit: str, numbers: Iterator[float]) -> Sequence[int]: ...

    @abstractmethod
    def _compute(self, unit: str, *arguments: tuple[int, ...]) -> tuple: ...


class BpeDropout(SubwordSampler):
    """BPE dropout: applies merges in the order of their scores, and skips each with probability `rate`."""

    def __init__(self, pieces: Sequence[Piece], rate: float) -> None:
        super().__init__(pieces, rate)
        self._defined = {piece.text for piece in pieces if piece.kind == USER_DEFINED}
        longest_first = sorted(map(re.escape, self._defined), key=len, reverse=True)
        self._symbol = re.compile("|".join([*longest_first, "."]), re.DOTALL)

    def _draw_numbers(self, generator: np.random.Generator) -> Iterator[float]:
        """Yield numbers of merges between two dropped merges, from a geometric distribution."""
        scale = math.log1p(-self._rate) if self._rate < 1 else -math.inf
        while True:
            gaps = np.log1p(-generator.random(_DRAWN)) / scale
            yield from np.floor(np.minimum(gaps, _LARGEST_GAP)).astype(np.int64).tolist()

    def _sample_unit(self, unit: str, numbers: Iterator[float]) -> Sequence[int]:
        dropped: tuple[int, ...] = ()
        merges, ids = self._segment(unit, dropped)
        merge = next(numbers)
        while merge < merges:
            dropped = (*dropped, int(merge))
            merges, ids = self._segment(unit, dropped)
            merge += 1 + next(numbers)
        return ids

    def _compute(self, unit: str, *arguments: tuple[int, ...]) -> tuple[int, list[int]]:
        """Segment a unit by BPE without the dropped merges; return the number of all merges, and the ids."""
        (dropped,) = arguments
        symbols = self._symbol.findall(unit)
        fixed = [symbol in self._defined for symbol in symbols]
        following, preceding = [*range(1, len(symbols)), -1], [*range(-1, len(symbols) - 1)]
        parts: dict[str, tuple[str, str]] = {}  # parts of unused subwords, which are split again
        queue: list[tuple[float, int, int, int]] = []

        def add(left: int, right: int) -> None:
            if min(left, right) < 0 or fixed[left] or fixed[right]:
                return
            merged = symbols[left] + symbols[right]
            number = self._ids.get(merged)
            if number is not None:
                heapq.heappush(queue, (-self._pieces[number].score, left, right, len(merged)))
                if self._pieces[number].kind == UNUSED:
                    parts[merged] = symbols[left], symbols[right]

        for left in range(len(symbols) - 1):
            add(left, left + 1)
        merges = 0
        while queue:
            _, left, right, size = heapq.heappop(queue)
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != size:
                continue  # one of them has been merged with another symbol
            merges += 1
            if merges - 1 in dropped:
                continue
            symbols[left], symbols[right] = symbols[left] + symbols[right], ""
            following[left] = following[right]
            if following[left] >= 0:
                preceding[following[left]] = left
            add(preceding[left], left)
            add(left, following[left])
        return merges, [token for symbol in symbols if symbol for token in self._resolve(symbol, parts)]

    def _resolve(self, symbol: str, parts: dict[str, tuple[str, str]]) -> list[int]:
        if symbol not in parts:
            return self._encode(symbol)
        return [token for part in parts[symbol] for token in self._resolve(part, parts)]


class UnigramSampling(SubwordSampler):
    """Unigram sampling: draws from all segmentations, in proportion to probability ** alpha."""

    def __init__(self, pieces: Sequence[Piece], rate: float) -> None:
        super().__init__(pieces, rate)
        scores = [piece.score for piece in pieces if piece.kind == NORMAL]
        self._lowest, self._highest = min(scores, default=0.0), max(scores, default=0.0)
        self._longest = max(map(len, self._ids), default=1)

    def _draw_numbers(self, generator: np.random.Generator) -> Iterator[float]:
        while True:
            yield from generator.random(_DRAWN).tolist()

    def _sample_unit(self, unit: str, numbers: Iterator[float]) -> Sequence[int]:
        """Draw the subwords of a unit, from the last to the first."""
        last_pieces = self._segment(unit)
        drawn, end = [], len(unit)
        while end:
            shares, starts, ids = last_pieces[end]
            # rounding can leave the last sum below 1
            choice = min(bisect.bisect_right(shares, next(numbers)), len(shares) - 1)
            drawn.append(ids[choice])
            end = starts[choice]
        return [token for tokens in reversed(drawn) for token in tokens]

    def _compute(self, unit: str, *arguments: tuple[int, ...]) -> tuple:
        """Return cumulative probabilities, starts and ids of the possible last subwords of each prefix."""
        whole = self._ids.get(unit)
        if whole is not None and self._pieces[whole].kind == USER_DEFINED:  # such as a language tag
            return (*[([], [], [])] * len(unit), ([1.0], [0], [[whole]]))
        totals = [0.0]  # log of the sum over all segmentations of each prefix
        table: list[tuple[list[float], list[int], list[list[int]]]] = [([], [], [])]
        for end in range(1, len(unit) + 1):
            starts, ids, logs = [], [], []
            for start in range(max(0, end - self._longest), end):
                score = self._score(unit[start:end])
                if score is not None:
                    starts.append(start)
                    ids.append(self._encode(unit[start:end]))
                    logs.append(totals[start] + self._rate * score)
            largest = max(logs)
            total = largest + math.log(math.fsum(math.exp(log - largest) for log in logs))
            shares = list(itertools.accumulate(math.exp(log - total) for log in logs))
            totals.append(total)
            table.append((shares, starts, ids))
        return tuple(table)

    def _score(self, text: str) -> float | None:
        piece = self._pieces[self._ids[text]] if text in self._ids else None
        if piece is None or piece.kind == UNUSED:
            return self._lowest - _UNKNOWN_PENALTY if len(text) == 1 else None
        return len(text) * self._highest - 0.1 if piece.kind == USER_DEFINED else piece.score


_SAMPLERS: dict[str, type[SubwordSampler]] = {"bpe": BpeDropout, "unigram": UnigramSampling}


def make_sampler(model: bytes, rate: float) -> SubwordSampler | None:
    """Make the sampler for a BPE or unigram SentencePiece model; return None for other kinds of models."""
    kind = _SAMPLERS.get(read_settings(model).kind)
    return None if kind is None else kind(read_pieces(model), rate)
