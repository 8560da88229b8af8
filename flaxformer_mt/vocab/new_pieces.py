"""New pieces for a language that a vocabulary splits badly: training by BPE goes on, on text of the language.

First come characters that the vocabulary lacks; then the most frequent pair of neighboring pieces becomes a
piece, again and again (Sennrich et al. 2016, from the pieces of the vocabulary rather than characters).
"""

import heapq
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

from flaxformer_mt.vocab.model_file import SPACE
from flaxformer_mt.vocab.tokenizer_json import NewPiece, TokenizerJson

Pair = tuple[str, str]

# The share of a text's characters that the vocabulary must have, the rarest left out, as in SentencePiece.
_COVERAGE = 0.9995
# Without a number of pieces: words are split badly if their pieces have fewer characters than this, and a
# pair becomes a piece if such words have it at least as often as this.
_CHARACTERS_A_PIECE, _FEWEST = 3, 10
_LONGEST = 16


def find_missing_characters(
    model: TokenizerJson, words: Mapping[str, int], *, unknown: int
) -> list[NewPiece]:
    """Return the characters of words that no piece consists of, the most frequent first."""
    known, characters = set(model.names.values()), Counter[str]()
    for word, count in words.items():
        for character in word:
            characters[character] += count
    spare = (1 - _COVERAGE) * characters.total()
    missing = [pair for pair in characters.most_common() if pair[0] not in known]
    while missing and (spare := spare - missing[-1][1]) >= 0:
        missing.pop()
    return [NewPiece(character, (unknown,)) for character, _ in missing if character != SPACE]


def learn_pieces(
    model: TokenizerJson, words: Mapping[str, int], others: Iterable[str], *, most: int | None
) -> list[Pair]:
    """Return the pairs of pieces to merge, in order, for words of a new language.

    Args:
      others: words of other languages, whose pieces must stay as they are.
      most: number of pairs. None: until the words have pieces of enough characters.
    """
    blocked = {pair for word in others for pair in _pair(_names_of(model, word))}
    merger = _Merger(blocked, model.names.values(), by_rule=most is None)
    for word, count in words.items():
        merger.add(_names_of(model, word), count)
    return merger.merge_most_frequent(most)


def _names_of(model: TokenizerJson, word: str) -> list[str]:
    """Return the pieces of a word; an unknown run of characters has the name of the unknown symbol."""
    return [model.names[number] for _, number in model.split(word)]


def _pair(pieces: list[str]) -> list[Pair]:
    return list(zip(pieces, pieces[1:], strict=False))


class _Merger:
    """Words as lists of pieces, and how often each pair of neighbors occurs."""

    def __init__(self, blocked: Collection[Pair], names: Collection[str], *, by_rule: bool) -> None:
        self._blocked, self._names, self._by_rule = blocked, set(names), by_rule
        self._words: list[list[str]] = []
        self._counts: list[int] = []
        self._pairs: Counter[Pair] = Counter()
        self._places: defaultdict[Pair, set[int]] = defaultdict(set)

    def add(self, pieces: list[str], count: int) -> None:
        self._words.append(pieces)
        self._counts.append(count)
        self._count(len(self._words) - 1, count)

    def _count(self, number: int, change: int) -> set[Pair]:
        """Add a number to the counts of a word's pairs that may be merged; return these."""
        pieces = self._words[number]
        length = sum(map(len, pieces)) - pieces[0].startswith(SPACE) if pieces else 0
        if self._by_rule and length >= _CHARACTERS_A_PIECE * len(pieces):
            return set()
        pairs = [pair for pair in _pair(pieces) if self._may_merge(pair)]
        for pair in pairs:
            self._pairs[pair] += change
            self._places[pair].add(number)
        return set(pairs)

    def _may_merge(self, pair: Pair) -> bool:
        text = "".join(pair)
        letters = text.removeprefix(SPACE)
        return (
            pair not in self._blocked
            and text not in self._names
            and len(letters) <= _LONGEST
            and all(unicodedata.category(letter)[0] in "LM" for letter in letters)
        )

    def merge_most_frequent(self, most: int | None) -> list[Pair]:
        merges: list[Pair] = []
        least = 2 if most is not None else _FEWEST
        queue = [(-count, pair) for pair, count in self._pairs.items()]
        heapq.heapify(queue)
        while queue and len(merges) != most:
            count, pair = heapq.heappop(queue)
            if -count != self._pairs[pair] or -count < least or not self._may_merge(pair):
                continue  # another entry has its count of now, it is rare, or another pair became this piece
            merges.append(pair)
            self._names.add("".join(pair))
            changed = {other for number in self._places.pop(pair) for other in self._merge(number, pair)}
            for other in sorted(changed):
                heapq.heappush(queue, (-self._pairs[other], other))
        return merges

    def _merge(self, number: int, pair: Pair) -> set[Pair]:
        count, pieces = self._counts[number], self._words[number]
        if pair not in _pair(pieces):
            return set()
        changed = self._count(number, -count)
        merged: list[str] = []
        for piece in pieces:
            if merged and (merged[-1], piece) == pair:
                merged[-1] = "".join(pair)
            else:
                merged.append(piece)
        self._words[number] = merged
        return changed | self._count(number, count)
