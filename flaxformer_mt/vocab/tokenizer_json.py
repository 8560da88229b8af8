"""A tokenizer.json with other pieces: those that stay, in their order, and new ones behind them.

A new piece stands for pieces of the original vocabulary, its `parts`, and is used where these would be, next
to each other. So any text has the ids that it had, but for runs of them that became one new id: a BPE model
gets the merges of new pieces after all others, and a Unigram model gets new pieces with the sum of the scores
of their parts, and a little more.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flaxformer_mt.errors import UserError, importing

# What a new piece of a Unigram model scores more than its parts, for each piece that it saves: less than
# segmentations of a text usually differ by, and more than rounding.
_BONUS = 1e-4
# What that is less for each new piece before it: two segmentations are never equally good.
_RANK = 1e-6
# What symbols that no text has score less than any piece.
_NEVER = 1000.0


class NewPiece(NamedTuple):
    """name: its text. parts: the original ids that it stands for.

    pair: what a BPE model merges into it. entry: of a tag that is found before a text is split, the entry.
    """

    name: str
    parts: tuple[int, ...]
    pair: tuple[str, str] | None = None
    entry: Mapping[str, Any] | None = None


class TokenizerJson:
    """Divides texts into words, and words into pieces, as a tokenizer.json does."""

    def __init__(self, content: bytes, *, silent: Collection[int] = ()) -> None:
        """silent: ids of symbols whose names inside a text are text."""
        with importing("huggingface", what="tokenizer.json"):
            import tokenizers

        self._content, self._silent = content, silent
        self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        stored = json.loads(content)
        model = stored["model"]
        if model.get("type") not in ("BPE", "Unigram"):
            raise UserError(
                f"tokenizer.json has a {model.get('type')} model; only BPE and Unigram models can get or "
                "lose pieces"
            )
        vocab = model["vocab"]
        ids = vocab if isinstance(vocab, dict) else {name: number for number, (name, _) in enumerate(vocab)}
        # Entries of special symbols and tags, by id, and the name of each id that has one.
        self.added = {token["id"]: token for token in stored.get("added_tokens", [])}
        self.names = {number: name for name, number in ids.items()}
        self.names |= {number: token["content"] for number, token in self.added.items()}
        self.unknown: int = model["unk_id"] if "unk_id" in model else ids.get(model["unk_token"], -1)
        self._ids = {name: number for number, name in self.names.items()}
        self._merges = [
            tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model.get("merges", [])
        ]

    def count_words(self, texts: Iterable[str]) -> Counter[str]:
        """Count what a text is divided into before it is split into pieces, as it is spelled in pieces."""
        normalizer, divider = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        words: Counter[str] = Counter()
        for text in texts:
            plain = text if normalizer is None else normalizer.normalize_str(text)
            words.update(word for word, _ in divider.pre_tokenize_str(plain))
        return words

    def split(self, word: str) -> list[int]:
        return [token.id for token in self._tokenizer.model.tokenize(word)]

    def count_pieces(self, word: str) -> int:
        """Return the number of pieces of a word, of which an unknown character is one."""
        tokens = [token.value for token in self._tokenizer.model.tokenize(word)]
        known = [token for token in tokens if token in word and token in self._ids]
        return len(known) + len(word) - len("".join(known))

    def list_used(self, words: Iterable[str]) -> set[int]:
        """Return the ids of the pieces of words, and of those that BPE merges on the way to them."""
        ranks = {pair: rank for rank, pair in enumerate(self._merges)}
        used: set[int] = set()
        for word in words:
            used.update(self.split(word))
            used.update(self._ids[piece] for piece in _merge_all(word, ranks) if piece in self._ids)
        return used

    def rebuild(self, kept: Sequence[int], new: Sequence[NewPiece]) -> bytes:
        """Return the file with the pieces of `kept` and the new ones, in this order."""
        stored = json.loads(self._content)
        numbers = {old: number for number, old in enumerate(kept)}
        names = [*(self.names[old] for old in kept), *(piece.name for piece in new)]
        model = stored["model"]
        if model["type"] == "BPE":
            ids = {name: number for number, name in enumerate(names)}
            merges = [*self._merges, *(piece.pair for piece in new if piece.pair is not None)]
            model["vocab"] = ids
            model["merges"] = [pair for pair in merges if {*pair, "".join(pair)} <= ids.keys()]
        else:
            model["vocab"] = list(zip(names, self._score(model, kept, new), strict=True))
            model["unk_id"] = numbers[model["unk_id"]]
        tokens = [token | {"id": numbers[old]} for old, token in self.added.items() if old in numbers]
        tags = [(number, piece) for number, piece in enumerate(new, len(kept)) if piece.entry is not None]
        tokens += [{**(piece.entry or {}), "content": piece.name, "id": number} for number, piece in tags]
        stored["added_tokens"] = tokens
        stored["padding"] = stored["truncation"] = None
        around = (stored.get("post_processor") or {}).get("special_tokens") or {}
        if any(numbers.get(old) != old for token in around.values() for old in token["ids"]):
            stored["post_processor"] = None  # the class makes one for the languages that it is asked for
        return json.dumps(stored, ensure_ascii=False).encode("utf-8")

    def _score(self, model: dict[str, Any], kept: Sequence[int], new: Sequence[NewPiece]) -> Iterator[float]:
        scores = {number: score for number, (_, score) in enumerate(model["vocab"])}
        lowest = min(score for number, score in scores.items() if number not in self._silent)
        scores |= dict.fromkeys(self._silent, lowest - _NEVER) | {model["unk_id"]: lowest}
        yield from (scores.get(old, lowest) for old in kept)
        for rank, piece in enumerate(new):
            bonus = _BONUS * (len(piece.parts) - 1) * (1 - _RANK * rank)
            yield sum(scores.get(part, lowest) for part in piece.parts) + bonus


def _merge_all(word: str, ranks: Mapping[tuple[str, ...], int]) -> Iterator[str]:
    """Yield the characters of a word and all pieces that BPE makes of them, one after the other."""
    pieces = list(word)
    yield from pieces
    while pairs := [pair for pair in zip(pieces, pieces[1:], strict=False) if pair in ranks]:
        best = min(pairs, key=ranks.__getitem__)
        place = next(n for n in range(len(pieces)) if tuple(pieces[n : n + 2]) == best)
        pieces[place : place + 2] = ["".join(best)]
        yield pieces[place]
