"""Aligns the words of sentence pairs by IBM model 1 and then an HMM, both trained by EM; reads alignments.

Sources: Brown et al. (1993) for model 1, Vogel et al. (1996) for the HMM, Och and Ney (2003) for its empty
word. Sentences are ids of words for `align`, or of subwords for a shortlist. The two directions are combined
by grow-diag-final-and (Koehn et al. 2003). Above 30 million word combinations, the rarest are dropped.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flaxformer_mt.atomic_folder import artifact, digest, map_arrays, save_arrays
from flaxformer_mt.corpus.pairs import RawSplit, Side, WordLinks
from flaxformer_mt.corpus.pharaoh import parse_points
from flaxformer_mt.corpus.text_files import load_or_scan, read_lines
from flaxformer_mt.errors import UserError
from flaxformer_mt.unicode_text import MARKS, spell, split_words

# Maximum number of cells of a block [N, T, S], the unit of computation, and of all blocks kept in memory.
_BLOCK, _KEPT = 1 << 17, 1 << 28
# Maximum number of different combinations of a source and a target word in memory.
_MOST_KEYS = 30_000_000
# Probability that a target word has no source word.
_EMPTY = 0.1
# Jumps longer than this share one probability.
_LONGEST_JUMP = 15
# Added to the expected count of every jump; a hundredth is added to the count of every word combination.
_SMOOTHING = 0.01
_NEIGHBORS = [step for step in itertools.product((-1, 0, 1), repeat=2) if step != (0, 0)]


class _Block(NamedTuple):
    """N pairs of similar lengths: their indices and lengths [N], and `places` [N, T, S] in the lexicon."""

    pairs: np.ndarray
    places: np.ndarray
    source_lengths: np.ndarray
    target_lengths: np.ndarray


class Lexicon:
    """Probabilities of target words given source words, learned by IBM model 1.

    keys: the word combinations that occur in a pair, as source * width + target, ascending. probabilities:
    one per key; the last two entries are for a dropped combination and for padding.
    """

    def __init__(self, source: Side, target: Side, rows: np.ndarray, *, empty: bool, passes: int) -> None:
        """Learn from the pairs `rows` in `passes` EM iterations; `empty` appends word 0 to each source."""
        self._sides, self._empty = (source, target), empty
        self._width = int(target.tokens.max(initial=0)) + 1
        lengths = np.stack([target.lengths[rows], source.lengths[rows]]).astype(np.int64)
        order = np.lexsort(lengths[::-1])
        order = order[lengths[:, order].all(axis=0)]
        cells = np.cumsum(lengths[0, order] * (lengths[1, order] + empty))
        self._groups = (
            np.split(rows[order], np.flatnonzero(np.diff(cells // _BLOCK)) + 1) if len(order) else []
        )
        self.keys = self._find_keys()
        self._blocks = [self._read(group) for group in self._groups] if cells[-1:].sum() <= _KEPT else None
        self.probabilities = np.append(np.ones(len(self.keys)), (1e-9, 0.0))
        for _ in range(passes):
            counts = np.zeros(len(self.probabilities))
            for block in self.blocks():
                likely = self.probabilities[block.places]
                likely /= np.maximum(likely.sum(axis=2, keepdims=True), 1e-300)
                counts += self.count(block, likely)
            self.update(counts)

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        return np.divmod(self.keys, self._width)

    def blocks(self) -> Iterator[_Block]:
        """Yield the blocks of pairs; blocks that do not fit in memory are built again on each call."""
        yield from self._blocks or map(self._read, self._groups)

    def count(self, block: _Block, weights: np.ndarray) -> np.ndarray:
        """Sum the weights [N, T, S] of a block for each word combination."""
        return np.bincount(block.places.ravel(), weights.ravel(), minlength=len(self.probabilities))

    def update(self, counts: np.ndarray) -> None:
        counts = counts[: len(self.keys)] + _SMOOTHING / 100
        sources = self.pairs[0]
        self.probabilities[: len(self.keys)] = counts / np.bincount(sources, counts)[sources]

    def _find_keys(self) -> np.ndarray:
        keys, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for group in self._groups:
            new, new_counts = np.unique(self._code(group), return_counts=True)
            keys, places = np.unique(np.append(keys, new[new >= 0]), return_inverse=True)
            counts = np.bincount(places, np.append(counts, new_counts[new >= 0])).astype(np.int64)
            least = 1
            while len(keys) > _MOST_KEYS:
                frequent = counts > least
                keys, counts, least = keys[frequent], counts[frequent], least + 1
        return keys

    def _code(self, group: np.ndarray) -> np.ndarray:
        """Return the word combinations of pairs [N, T, S] as source * width + target, -1 for padding."""
        sources, targets = (_pad(side, group) for side in self._sides)
        if self._empty:
            sources = np.pad(sources, ((0, 0), (0, 1)))
        codes = sources[:, None, :] * self._width + targets[:, :, None]
        return np.where((sources < 0)[:, None, :] | (targets < 0)[:, :, None], -1, codes)

    def _read(self, group: np.ndarray) -> _Block:
        codes, size = self._code(group), len(self.keys)
        places = np.minimum(np.searchsorted(self.keys, codes), max(size - 1, 0))
        places[self.keys[places] != codes] = size
        places[codes < 0] = size + 1
        return _Block(group, places.astype(np.int32), *(side.lengths[group] for side in self._sides))


def _pad(side: Side, rows: np.ndarray) -> np.ndarray:
    columns, lengths = np.arange(int(side.lengths[rows].max())), side.lengths[rows][:, None]
    inside = columns < lengths
    return np.where(
        inside, side.tokens[np.where(inside, side.offsets[rows][:, None] + columns, 0)], np.int64(-1)
    )


def align_corpus(
    pairs: Iterable[tuple[Sequence[str], Sequence[str]]],
    *,
    iterations: tuple[int, int] = (5, 5),
    intersect: bool = False,
    say: Callable[[str], object] = lambda text: None,
) -> list[np.ndarray]:
    """Align the words of sentence pairs; return the (source, target) positions [K, 2] of each pair.

    Case and the punctuation around a word are ignored. Points are sorted by target, then by source position.
    `iterations`: number of EM iterations of model 1 and of the HMM, in each direction. `intersect`: return
    only points that both directions have, which are fewer and more precise. `say` receives progress messages.
    """
    source, target = map(_number, zip(*pairs, strict=True)) if (pairs := list(pairs)) else (_number([]),) * 2
    links = []
    for name, sides in (("forward", (source, target)), ("backward", (target, source))):
        say(f"{name} alignment of {len(source.lengths):,} pairs")
        links.append(_align_direction(*sides, iterations))
    sizes = zip(source.lengths.tolist(), target.lengths.tolist(), strict=True)
    return [
        _intersect(forward, backward) if intersect else symmetrize(forward, backward, size)
        for forward, backward, size in zip(*links, sizes, strict=True)
    ]


def _number(sentences: Sequence[Sequence[str]]) -> Side:
    """Number the distinct words from 1, ignoring case and punctuation around a word; 0 is the empty word."""
    numbers: dict[str, int] = {}

    @functools.lru_cache(maxsize=1 << 16)
    def number(word: str) -> int:
        folded = spell(word).casefold()
        return numbers.setdefault(folded.strip(MARKS) or folded, len(numbers) + 1)

    lengths = np.array([len(words) for words in sentences], np.int64)
    tokens = np.array([number(word) for words in sentences for word in words], np.int64)
    return Side(tokens, np.cumsum(lengths) - lengths, lengths)


def _align_direction(source: Side, target: Side, iterations: tuple[int, int]) -> list[np.ndarray]:
    """Return, for each pair, the source position of each target word; -1 for none."""
    rows = np.arange(len(source.lengths))
    lexicon = Lexicon(source, target, rows, empty=True, passes=iterations[0])
    jumps = np.ones(2 * _LONGEST_JUMP + 1) / (2 * _LONGEST_JUMP + 1)
    alignments = [np.full(length, -1, np.int64) for length in target.lengths]
    for iteration in range(iterations[1] + 1):
        counts, new_jumps = np.zeros(len(lexicon.probabilities)), np.full(len(jumps), _SMOOTHING)
        for block in lexicon.blocks():
            posteriors, block_jumps = _read_hmm(block, lexicon.probabilities[block.places], jumps)
            counts += lexicon.count(block, posteriors)
            new_jumps += block_jumps
            if iteration == iterations[1]:
                best = posteriors.argmax(axis=2)
                best[best == posteriors.shape[2] - 1] = -1
                for pair, positions in zip(block.pairs.tolist(), best, strict=True):
                    alignments[pair] = positions[: target.lengths[pair]]
        lexicon.update(counts)
        jumps = new_jumps / new_jumps.sum()
    return alignments


def _read_hmm(block: _Block, likely: np.ndarray, jumps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Run the forward-backward algorithm over a block.

    A state is a source position, and whether the target word is aligned to the word there or to the empty
    word. A jump starts from the position of the previous state. `likely` [N, T, S + 1] are the probabilities
    of target words given source words, of which the last is the empty word; `jumps` are the probabilities of
    jump widths. Returns the posterior probabilities [N, T, S + 1] of the source words of each target word,
    and the expected number of jumps of each width.
    """
    steps, size = likely.shape[1], likely.shape[2] - 1
    real = np.arange(steps) < block.target_lengths[:, None]  # [N, T]
    emissions = np.stack(
        [likely[..., :-1], np.repeat(likely[..., -1:], size, axis=2)], axis=2
    )  # [N, T, 2, S]
    emissions[~real] = 1
    positions = np.arange(size)
    widths = np.clip(positions[None] - positions[:, None], -_LONGEST_JUMP, _LONGEST_JUMP) + _LONGEST_JUMP
    matrix, inside = jumps[widths], positions[None] < block.source_lengths[:, None]
    leave = (1 - _EMPTY) / np.maximum(inside @ matrix.T, 1e-300)  # [N, S], divides by the reachable positions
    start = before = inside / block.source_lengths[:, None]
    forward = np.empty_like(emissions)
    for step in range(steps):
        arrive = before * (1 - _EMPTY) if step == 0 else (before * leave) @ matrix * inside
        forward[:, step] = np.stack([arrive, _EMPTY * before], axis=1) * emissions[:, step]
        forward[:, step] /= forward[:, step].sum(axis=(1, 2), keepdims=True)
        before = forward[:, step].sum(axis=1)
    posteriors, counts, after = np.empty_like(likely), np.zeros(len(jumps)), np.ones_like(start)
    for step in reversed(range(steps)):
        posterior = forward[:, step] * after[:, None]
        posterior /= posterior.sum(axis=(1, 2), keepdims=True)
        posteriors[:, step, :-1], posteriors[:, step, -1] = posterior[:, 0], posterior[:, 1].sum(axis=1)
        if step == 0:
            break
        before = forward[:, step - 1].sum(axis=1)
        ahead = emissions[:, step] * after[:, None]
        after = leave * (ahead[:, 0] * inside @ matrix.T) + _EMPTY * ahead[:, 1]
        scale = (before * after).sum(axis=1, keepdims=True)
        expected = (real[:, step, None] * before * leave / scale).T @ (ahead[:, 0] * inside) * matrix
        counts += np.bincount(widths.ravel(), expected.ravel(), minlength=len(jumps))
        after /= scale
    return posteriors, counts


def _intersect(forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    points = [(int(s), t) for t, s in enumerate(forward) if s >= 0 and backward[s] == t]
    return np.array(points, np.int64).reshape(-1, 2)


def symmetrize(forward: np.ndarray, backward: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Combine the alignments of two directions by grow-diag-final-and; return points [K, 2].

    forward[t] is the source position of target word t, backward[s] the target position of source word s; -1:
    none. `shape`: numbers of source and target words. Starts from the points that both directions have. Then
    adds neighboring points (also diagonal ones) of either direction whose source or target word is not yet
    aligned, and finally points of either direction whose words are both unaligned.
    """
    forward_points = [(int(s), t) for t, s in enumerate(forward) if s >= 0]
    backward_points = [(s, int(t)) for s, t in enumerate(backward) if t >= 0]
    union, points = {*forward_points, *backward_points}, set(forward_points) & set(backward_points)
    free = [set(range(size)) - {point[side] for point in points} for side, size in enumerate(shape)]
    waiting = sorted(points)

    def take(point: tuple[int, int]) -> None:
        points.add(point)
        for side in (0, 1):
            free[side].discard(point[side])

    while waiting:
        source, target = waiting.pop(0)
        for down, right in _NEIGHBORS:
            near = (source + down, target + right)
            if near in union and near not in points and (near[0] in free[0] or near[1] in free[1]):
                take(near)
                waiting.append(near)
    for point in itertools.chain(forward_points, backward_points):
        if point[0] in free[0] and point[1] in free[1]:
            take(point)
    return np.array(sorted(points, key=lambda point: point[::-1]), np.int64).reshape(-1, 2)


_CHUNK = 4096
# Part of the cache key: raise it when the cached arrays change.
_FORMAT = 2


def load_links(path: Path, split: RawSplit, *, may_drop: bool, cache: Path) -> WordLinks:
    """Read a split's word alignments, or load them from the cache; with `may_drop`, ignore surplus lines."""
    if not path.is_file():
        raise UserError(
            f"there are no alignments {path} (data.alignments); make them with `align`, or with eflomal or "
            "fast_align, one line for each training pair"
        )
    scan = load_or_scan(path, columns=1, folder=cache / "scans")
    if scan.lines != len(split) and not (may_drop and scan.lines > len(split)):
        raise UserError(
            f"{path} has {scan.lines} lines, but {split.name} has {len(split)} training pairs "
            f"({' and '.join(dict.fromkeys(split.sides))}); give one line for each pair, an empty one for a "
            "pair without alignment"
        )
    key = digest([_FORMAT, split.identity, split.languages, scan.digest, len(split)])
    folder = cache / "alignments" / key
    arrays = artifact(folder, lambda partial: save_arrays(partial, _read(path, split)), map_arrays)
    return WordLinks(**arrays, identity=key)


def _read(path: Path, split: RawSplit) -> dict[str, np.ndarray]:
    """Return the points of all rows, int32 [N, 2], and the offsets of the points of each row, int64."""
    points: list[np.ndarray] = []
    counts = np.zeros(len(split) + 1, np.int64)
    for row, (line, sizes) in enumerate(zip(read_lines(path), _count_words(split), strict=False)):
        parsed = parse_points(line, sizes, where=f"{path} line {row + 1}")
        points.append(np.array(parsed, np.int32).reshape(-1, 2))
        counts[row + 1] = len(parsed)
    return {"points": np.concatenate([np.zeros((0, 2), np.int32), *points]), "offsets": np.cumsum(counts)}


def _count_words(split: RawSplit) -> Iterator[tuple[int, int]]:
    for pair in itertools.chain.from_iterable(split.read_blocks(_CHUNK)):
        source, target = (len(split_words(text.decode("utf-8", errors="replace"))) for text in pair)
        yield source, target
