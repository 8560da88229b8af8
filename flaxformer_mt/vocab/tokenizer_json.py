"""Changes the subwords of a tokenizer.json: removes subwords, and appends new subwords after the others.

A new subword replaces a run of adjacent subwords of the original vocabulary, its `parts`. The segmentation of
text changes only where a new subword replaces its parts. To this end, the merges of new subwords in a BPE
model come after all other merges, and the score of a new subword in a Unigram model is slightly above the sum
of the scores of its parts.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flaxformer_mt.errors import UserError, importing

# The score of a new Unigram subword minus the scores of its parts, for each token that it saves: less than
# the usual difference between segmentations of a text, and more than rounding errors.
_BONUS = 1e-4
# The relative decrease of that bonus with each new subword, so that no two segmentations have equal scores.
_RANK = 1e-6
# The lowest score of a subword minus the score of a silent symbol, so that no text is segmented into it.
_NEVER = 1000.0


class NewPiece(NamedTuple):
    """A new subword for a tokenizer.json.

    name: the text of the subword. parts: the original ids that it replaces. pair: the two subwords that a BPE
    model merges into it. entry: the entry in added_tokens, for a language tag.
    """

    name: str
    parts: tuple[int, ...]
    pair: tuple[str, str] | None = None
    entry: Mapping[str, Any] | None = None


class TokenizerJson:
    """Splits texts into words, and words into subwords, like the tokenizer of a tokenizer.json."""

    def __init__(self, content: bytes, *, silent: Collection[int] = ()) -> None:
        """Load a tokenizer.json; `silent` are the ids of symbols whose names, in a text, are plain text."""
        with importing("huggingface", what="tokenizer.json"):
            import tokenizers

        self._content, self._silent = content, silent
        self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        stored = json.loads(content)
        model = stored["model"]
        if model.get("type") not in ("BPE", "Unigram"):
            raise UserError(
                f"tokenizer.json has a {model.get('type')} model; only BPE and Unigram models can get or "
                "lose subwords"
            )
        vocab = model["vocab"]
        ids = vocab if isinstance(vocab, dict) else {name: number for number, (name, _) in enumerate(vocab)}
        # The added_tokens entries of special symbols and tags by id, and the name of each id that has a name.
        self.added = {token["id"]: token for token in stored.get("added_tokens", [])}
        self.names = {number: name for name, number in ids.items()}
        self.names |= {number: token["content"] for number, token in self.added.items()}
        self.unknown: int = model["unk_id"] if "unk_id" in model else ids.get(model["unk_token"], -1)
        self._ids = {name: number for number, name in self.names.items()}
        self._merges = [
            tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model.get("merges", [])
        ]

    def count_words(self, texts: Iterable[str]) -> Counter[str]:
        """Count the words of texts, as split and transformed by the pre-tokenizer."""
        normalizer, divider = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        words: Counter[str] = Counter()
        for text in texts:
            plain = text if normalizer is None else normalizer.normalize_str(text)
            words.update(word for word, _ in divider.pre_tokenize_str(plain))
        return words

    def split(self, word: str) -> list[int]:
        return [token.id for token in self._tokenizer.model.tokenize(word)]

    def count_pieces(self, word: str) -> int:
        """Return the number of subwords of a word; an unknown character counts as one subword."""
        tokens = [token.value for token in self._tokenizer.model.tokenize(word)]
        known = [token for token in tokens if token in word and token in self._ids]
        return len(known) + len(word) - len("".join(known))

    def list_used(self, words: Iterable[str]) -> set[int]:
        """Return the ids of the subwords of words, including the intermediate subwords of BPE merges."""
        ranks = {pair: rank for rank, pair in enumerate(self._merges)}
        used: set[int] = set()
        for word in words:
            used.update(self.split(word))
            used.update(self._ids[piece] for piece in _merge_all(word, ranks) if piece in self._ids)
        return used

    def rebuild(self, kept: Sequence[int], new: Sequence[NewPiece]) -> bytes:
        """Return a tokenizer.json with the subwords whose ids are `kept`, followed by the subwords `new`."""
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
            stored["post_processor"] = None  # the tokenizer class makes one for the languages of a text
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
    """Yield the characters of a word, and then the subwords that BPE merges from them, step by step."""
    pieces = list(word)
    yield from pieces
    while pairs := [pair for pair in zip(pieces, pieces[1:], strict=False) if pair in ranks]:
        best = min(pairs, key=ranks.__getitem__)
        place = next(n for n in range(len(pieces)) if tuple(pieces[n : n + 2]) == best)
        pieces[place : place + 2] = ["".join(best)]
        yield pieces[place]
