"""A tokenizer.json with other pieces: those that stay, in their order, and new ones behind them.

A new piece stands for pieces of the original vocabulary, its `parts`, and is used where these would be, next
to each other. So any text has the ids that it had, but for runs of them that became one new id: a BPE model
gets the merges of new pieces after all others, and a Unigram model gets new pieces with the sum of the scores
of their parts, and a little more.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flaxformer_mt.errors import UserError, importing

# What a new piece of a Unigram model scores more than its parts, for each piece that it saves: less than
# segmentations of a text usually differ by, and more than rounding.
_BONUS = 1e-4
# What symbols that no text has score less than any piece.
_NEVER = 1000.0


class NewPiece(NamedTuple):
    """name: its text. parts: the original ids that it stands for. pair: what a BPE model merges into it."""

    name: str
    parts: tuple[int, ...]
    pair: tuple[str, str] | None = None


class TokenizerJson:
    """The words of texts, and the pieces that the tokenizer of a tokenizer.json splits them into."""

    def __init__(self, content: bytes, *, silent: Collection[int] = ()) -> None:
        """silent: ids of symbols whose names inside a text are text."""
        with importing("huggingface", what="tokenizer.json"):
            import tokenizers

        self.content, self._silent = content, silent
        self.stored: dict[str, Any] = json.loads(content)
        self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        model = self.stored["model"]
        self.is_bpe = model.get("type") == "BPE"
        if not self.is_bpe and model.get("type") != "Unigram":
            raise UserError(
                f"tokenizer.json has a model of the type {model.get('type')}; pieces can be added to and removed "
                "from BPE and Unigram models"
            )
        pieces = model["vocab"].items() if self.is_bpe else enumerate(name for name, _ in model["vocab"])
        # Name of each id that has one.
        self.names: dict[int, str] = {old: name for name, old in pieces} if self.is_bpe else dict(pieces)
        self.added = {token["id"]: token for token in self.stored.get("added_tokens", [])}
        self.names |= {number: token["content"] for number, token in self.added.items()}
        unknown = model.get("unk_id") if not self.is_bpe else model["vocab"].get(model.get("unk_token"))
        self.unknown = -1 if unknown is None else unknown
        self._merges = [_split(merge) for merge in model.get("merges", [])]

    def count_words(self, texts: Iterable[str]) -> Counter[str]:
        """Count what a text is divided into before it is split into pieces, as it is spelled in pieces."""
        normalizer, divider = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        words: Counter[str] = Counter()
        for text in texts:
            plain = text if normalizer is None else normalizer.normalize_str(text)
            words.update(word for word, _ in divider.pre_tokenize_str(plain))
        return words

    def split(self, word: str) -> list[tuple[str, int]]:
        return [(token.value, token.id) for token in self._tokenizer.model.tokenize(word)]

    def list_used(self, words: Iterable[str]) -> set[int]:
        """Return the ids of the pieces of words, and of those that BPE merges on the way to them."""
        ids = {name: number for number, name in self.names.items()}
        ranks = {pair: rank for rank, pair in enumerate(self._merges)}
        used: set[int] = set()
        for word in words:
            used.update(number for _, number in self.split(word))
            used.update(ids[piece] for piece in _merge_all(word, ranks) if piece in ids)
        return used

    def rebuild(
        self, kept: Sequence[int], new: Sequence[NewPiece], added: Mapping[str, Mapping[str, Any]]
    ) -> bytes:
        """Return the file with the pieces of `kept` and the new ones, in this order.

        added: for new names that are found in a text before it is split, the entry of such a token.
        """
        stored = json.loads(self.content)
        numbers = {old: number for number, old in enumerate(kept)}
        names = [*(self.names[old] for old in kept), *(piece.name for piece in new)]
        model = stored["model"]
        if self.is_bpe:
            self._rebuild_bpe(model, names, new)
        else:
            self._rebuild_unigram(model, names, kept, new)
        tokens = [token | {"id": numbers[old]} for old, token in self.added.items() if old in numbers]
        tokens += [dict(added[name]) | {"content": name, "id": names.index(name)} for name in added]
        stored["added_tokens"] = sorted(tokens, key=lambda token: token["id"])
        if padding := stored.get("padding"):
            padding["pad_id"] = numbers.get(padding["pad_id"], 0)
        specials = (stored.get("post_processor") or {}).get("special_tokens") or {}
        for token in specials.values():
            token["ids"] = [numbers.get(old) for old in token["ids"]]
        if any(None in token["ids"] for token in specials.values()):
            stored["post_processor"] = None  # the class makes one for the language that it is asked for
        return json.dumps(stored, ensure_ascii=False).encode("utf-8")

    def _rebuild_bpe(self, model: dict[str, Any], names: list[str], new: Sequence[NewPiece]) -> None:
        as_text = model["merges"] and isinstance(model["merges"][0], str)
        vocab = {name: number for number, name in enumerate(names)}
        merges = [*self._merges, *(piece.pair for piece in new if piece.pair is not None)]
        merges = [pair for pair in merges if {*pair, "".join(pair)} <= vocab.keys()]
        model["vocab"] = vocab
        model["merges"] = [" ".join(pair) if as_text else list(pair) for pair in merges]

    def _rebuild_unigram(
        self, model: dict[str, Any], names: list[str], kept: Sequence[int], new: Sequence[NewPiece]
    ) -> None:
        scores = {number: score for number, (_, score) in enumerate(model["vocab"])}
        lowest = min(scores.values())
        scores[model["unk_id"]] = lowest  # of the parts of new pieces: a character that the model lacks
        scores |= dict.fromkeys(self._silent, lowest - _NEVER)
        sums = [sum(scores.get(part, lowest) for part in piece.parts) for piece in new]
        bonus = [_BONUS * (len(piece.parts) - 1) for piece in new]
        values = [*(scores.get(old, lowest) for old in kept), *map(sum, zip(sums, bonus, strict=True))]
        model["vocab"] = [list(pair) for pair in zip(names, values, strict=True)]
        model["unk_id"] = kept.index(model["unk_id"])


def _split(merge: Any) -> tuple[str, str]:
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def _merge_all(word: str, ranks: Mapping[tuple[str, str], int]) -> Iterable[str]:
    """Return the characters of a word and all pieces that BPE makes of them, one after the other."""
    pieces = list(word)
    yield from pieces
    while ranks:
        pairs = list(zip(pieces, pieces[1:], strict=False))
        best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)), default=None)
        if best is None or best not in ranks:
            return
        place = pairs.index(best)
        pieces[place : place + 2] = ["".join(best)]
        yield pieces[place]
