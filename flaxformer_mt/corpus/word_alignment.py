"""Word alignment of sentence pairs without a trained translator: IBM model 1, then an HMM, by EM.

Both models (Brown et al. 1993; Vogel et al. 1996, with the empty word of Och and Ney 2003) are trained in
both directions, and the two alignments are joined by grow-diag-final-and (Koehn et al. 2003). Pure numpy;
memory grows with the number of word pairs that occur in the same sentence pair.
"""

import itertools
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

# A sentence pair as words.
WordPair = tuple[Sequence[str], Sequence[str]]

# Probability that a target word has no source word.
_EMPTY = 0.1
# Jumps longer than this share one probability.
_LONGEST_JUMP = 15
# Word pairs of a block, the unit of the computation, at most.
_BLOCK = 1 << 20
# Weight of one occurrence of every jump and of a hundredth of one of every word pair, so that no probability
# becomes 0.
_SMOOTHING = 0.01
# Marks that are no part of the word that they stand beside.
_MARKS = string.punctuation + "¡¿«»‘’‚“”„…–—、。！？，"
_NEIGHBOURS = [step for step in itertools.product((-1, 0, 1), repeat=2) if step != (0, 0)]


class _Block(NamedTuple):
    """Sentence pairs whose targets have one length T; sources are padded to S words.

    pairs: their indices [N]. entries: index [N, T, S + 1] of each word pair in the lexicon; the last column
    is the empty word, and padding has the entry after the last. lengths: source lengths [N].
    """

    pairs: np.ndarray
    entries: np.ndarray
    lengths: np.ndarray


class _Lexicon(NamedTuple):
    """The word pairs of a corpus: the source word of each, and the probability of its target word."""

    sources: np.ndarray
    probabilities: np.ndarray


def align_corpus(
    pairs: Iterable[WordPair],
    *,
    iterations: tuple[int, int] = (5, 5),
    intersect: bool = False,
    say: Callable[[str], object] = lambda text: None,
) -> list[np.ndarray]:
    """Aligns the words of sentence pairs; returns for each the points [K, 2] of source and target positions.

    Case is ignored, and so are the marks around a word. Points are sorted by target position, then by source
    position; a pair with a side without words has none.

    Args:
      iterations: iterations of EM of IBM model 1 and of the HMM, in each direction.
      intersect: return only the points that both directions have, which are fewer and more often right,
        instead of joining them by grow-diag-final-and.
      say: receives a line about each step.
    """
    sides = [_number(side) for side in _split_sides(pairs)]
    links = []
    for name, (source, target) in (("forward", sides), ("backward", sides[::-1])):
        say(f"{name} alignment of {len(source):,} pairs")
        links.append(_align_direction(source, target, iterations))
    return [
        _intersect(forward, backward)
        if intersect
        else symmetrize(forward, backward, (len(source), len(target)))
        for forward, backward, source, target in zip(*links, *sides, strict=True)
    ]


def _split_sides(pairs: Iterable[WordPair]) -> tuple[list[Sequence[str]], list[Sequence[str]]]:
    sources, targets = [], []
    for source, target in pairs:
        sources.append(source)
        targets.append(target)
    return sources, targets


def _number(sentences: Iterable[Sequence[str]]) -> list[np.ndarray]:
    """Numbers the different words from 1, without case and the marks around them; 0 is the empty word."""
    numbers: dict[str, int] = {}

    def number(word: str) -> int:
        folded = word.casefold()
        return numbers.setdefault(folded.strip(_MARKS) or folded, len(numbers) + 1)

    return [np.array([number(word) for word in words], np.int64) for words in sentences]


def _align_direction(
    sources: list[np.ndarray], targets: list[np.ndarray], iterations: tuple[int, int]
) -> list[np.ndarray]:
    """Returns the source position of each target word, -1 for none, of each pair."""
    width = max((int(words.max(initial=0)) for words in targets), default=0) + 1
    blocks, lexicon = _make_blocks(sources, targets, width)
    for _ in range(iterations[0]):
        counts = np.zeros(len(lexicon.sources) + 1)
        for block in blocks:
            likely = lexicon.probabilities[block.entries]
            _count(counts, block, likely / likely.sum(axis=2, keepdims=True))
        lexicon = _normalize(lexicon, counts)
    jumps = np.ones(2 * _LONGEST_JUMP + 1) / (2 * _LONGEST_JUMP + 1)
    found = [np.full(len(words), -1, np.int64) for words in targets]
    for iteration in range(iterations[1] + 1):
        counts, new_jumps = np.zeros(len(lexicon.sources) + 1), np.full(len(jumps), _SMOOTHING)
        for block in blocks:
            posteriors, block_jumps = _read_hmm(block, lexicon, jumps)
            _count(counts, block, posteriors)
            new_jumps += block_jumps
            if iteration == iterations[1]:
                best = posteriors.argmax(axis=2)
                best[best == posteriors.shape[2] - 1] = -1
                for pair, positions in zip(block.pairs.tolist(), best, strict=True):
                    found[pair] = positions
        lexicon, jumps = _normalize(lexicon, counts), new_jumps / new_jumps.sum()
    return found


def _make_blocks(
    sources: list[np.ndarray], targets: list[np.ndarray], width: int
) -> tuple[list[_Block], _Lexicon]:
    """Groups the pairs by target length, and numbers the word pairs that occur together."""
    lengths = np.array([(len(t), len(s)) for s, t in zip(sources, targets, strict=True)]).reshape(-1, 2)
    order = [int(i) for i in np.lexsort((lengths[:, 1], lengths[:, 0])) if lengths[i].all()]
    groups = list(_group(order, lengths))
    codes = [_code(group, sources, targets, width) for group in groups]
    known = np.unique(np.concatenate([np.unique(code) for code in codes])) if codes else np.zeros(0, np.int64)
    known = known[known >= 0]
    blocks = [
        _Block(
            np.array(group),
            np.where(code < 0, len(known), np.searchsorted(known, code)).astype(np.int32),
            lengths[group, 1],
        )
        for group, code in zip(groups, codes, strict=True)
    ]
    # All target words are equally likely at first; only ratios count.
    return blocks, _Lexicon(known // width, np.append(np.ones(len(known)), 0.0))


def _group(order: list[int], lengths: np.ndarray) -> Iterator[list[int]]:
    for _, same in itertools.groupby(order, key=lambda i: lengths[i, 0]):
        group: list[int] = []
        for index in same:  # sources get longer
            if group and (len(group) + 1) * lengths[index, 0] * (lengths[index, 1] + 1) > _BLOCK:
                yield group
                group = []
            group.append(index)
        yield group


def _code(group: list[int], sources: list[np.ndarray], targets: list[np.ndarray], width: int) -> np.ndarray:
    """Codes each word pair [N, T, S + 1] as source * width + target, with -1 for padding."""
    longest = max(len(sources[index]) for index in group)
    rows = np.full((len(group), longest + 1), -1, np.int64)
    rows[:, -1] = 0
    for row, index in zip(rows, group, strict=True):
        row[: len(sources[index])] = sources[index]
    columns = np.stack([targets[index] for index in group])
    codes = rows[:, None, :] * width + columns[:, :, None]
    return np.where(rows[:, None, :] < 0, -1, codes)


def _count(counts: np.ndarray, block: _Block, weights: np.ndarray) -> None:
    counts += np.bincount(block.entries.ravel(), weights.ravel(), minlength=len(counts))


def _normalize(lexicon: _Lexicon, counts: np.ndarray) -> _Lexicon:
    counts = counts[:-1] + _SMOOTHING / 100
    totals = np.bincount(lexicon.sources, counts)
    return lexicon._replace(probabilities=np.append(counts / totals[lexicon.sources], 0.0))


def _read_hmm(block: _Block, lexicon: _Lexicon, jumps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs the forward-backward algorithm over a block.

    A state is a source position, and whether the target word has that source word or the empty one; a jump
    starts from the position of the last state.

    Returns:
      The probabilities [N, T, S + 1] of the source words of each target word, and the expected number of
      jumps of each width.
    """
    emissions = lexicon.probabilities[block.entries]
    words, empty = emissions[..., :-1], emissions[..., -1:]
    steps, size = words.shape[1:]
    positions = np.arange(size)
    widths = np.clip(positions[None] - positions[:, None], -_LONGEST_JUMP, _LONGEST_JUMP) + _LONGEST_JUMP
    matrix = jumps[widths]
    inside = positions[None] < block.lengths[:, None]
    leave = (1 - _EMPTY) / np.maximum(inside @ matrix.T, 1e-300)  # [N, S], divides by the reachable positions
    forward, forward_empty = np.empty_like(words), np.empty_like(words)
    start = before = inside / block.lengths[:, None]
    for step in range(steps):
        arrive = start * (1 - _EMPTY) if step == 0 else (before * leave) @ matrix
        forward[:, step] = arrive * words[:, step]
        forward_empty[:, step] = _EMPTY * before * empty[:, step]
        total = (forward[:, step] + forward_empty[:, step]).sum(axis=1, keepdims=True)
        forward[:, step] /= total
        forward_empty[:, step] /= total
        before = forward[:, step] + forward_empty[:, step]
    posteriors = np.empty_like(emissions)
    counts = np.zeros(len(jumps))
    after = np.ones_like(start)  # of both states at a position alike
    for step in reversed(range(steps)):
        chosen, unchosen = forward[:, step] * after, forward_empty[:, step] * after
        total = chosen.sum(axis=1, keepdims=True) + unchosen.sum(axis=1, keepdims=True)
        posteriors[:, step, :-1] = chosen / total
        posteriors[:, step, -1] = (unchosen / total).sum(axis=1)
        if step == 0:
            break
        ahead = words[:, step] * after
        before = forward[:, step - 1] + forward_empty[:, step - 1]
        moved = (before * leave) * (ahead @ matrix.T)
        rest = _EMPTY * empty[:, step] * after
        scale = (moved + before * rest).sum(axis=1, keepdims=True)
        expected = ((before * leave) / scale).T @ ahead * matrix
        counts += np.bincount(widths.ravel(), expected.ravel(), minlength=len(jumps))
        after = (leave * (ahead @ matrix.T) + rest) / scale
    return posteriors, counts


def _intersect(forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Returns the points [K, 2] that both directions have, see `symmetrize`."""
    points = [(int(s), t) for t, s in enumerate(forward) if s >= 0 and backward[s] == t]
    return np.array(points, np.int64).reshape(-1, 2)


def symmetrize(forward: np.ndarray, backward: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Joins the alignments of two directions by grow-diag-final-and; returns points [K, 2].

    Starts from the points in both, adds neighbouring points (also diagonal ones) that one of them has and
    whose source or target word is still free, and then points of either whose words are both free.

    Args:
      forward: the source position of each target word, -1 for none.
      backward: the target position of each source word, -1 for none.
      shape: number of source and target words.
    """
    one = [(int(s), t) for t, s in enumerate(forward) if s >= 0]
    other = [(s, int(t)) for s, t in enumerate(backward) if t >= 0]
    union, points = {*one, *other}, set(one) & set(other)
    free = [set(range(size)) - {point[side] for point in points} for side, size in enumerate(shape)]
    waiting = sorted(points)

    def take(point: tuple[int, int]) -> None:
        points.add(point)
        for side in (0, 1):
            free[side].discard(point[side])

    while waiting:
        source, target = waiting.pop(0)
        for down, right in _NEIGHBOURS:
            near = (source + down, target + right)
            if near in union and near not in points and (near[0] in free[0] or near[1] in free[1]):
                take(near)
                waiting.append(near)
    for point in itertools.chain(one, other):
        if point[0] in free[0] and point[1] in free[1]:
            take(point)
    return np.array(sorted(points, key=lambda point: point[::-1]), np.int64).reshape(-1, 2)
