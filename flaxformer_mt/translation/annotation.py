"""What a second look adds to translations: the probability of each token, and which words belong together.

Owns what is asked of that look, and how its attention becomes an alignment. Knows nothing of search.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.decoding.forced_decoding import Pair, Reading, Watched
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.alignment import Alignment, align_pieces, align_words, find_words
from flaxformer_mt.translation.result import Translation
from flaxformer_mt.translation.scorer import TokenScorer
from flaxformer_mt.vocab import Vocab, Vocabs


class Notes(NamedTuple):
    """What is asked for beside the translations; nothing: no second look is taken."""

    token_log_probs: bool = False
    # Of words, as white space separates them, or of pieces; None: no alignment.
    alignments: Literal["words", "pieces"] | None = None
    # The decoder layer whose attention aligns, from 0; negative ones count from the last. None: the last but
    # one, or the only one.
    layer: int | None = None
    # The head; None: the mean of all.
    head: int | None = None

    def check(self, models: Sequence[ModelConfig]) -> None:
        """Raises UserError if a model has no such layer or head."""
        for model in models:
            for name, chosen, count in (
                ("layer", self.layer, model.num_decoder_layers),
                ("head", self.head, model.num_heads),
            ):
                if chosen is not None and not -count <= chosen < count:
                    raise UserError(
                        f"alignment {name} is {chosen}, but the decoder has {count} {name}s; "
                        f"give 0 to {count - 1}"
                    )

    def watched(self, models: Sequence[ModelConfig]) -> tuple[Watched, ...]:
        """The attention that the alignments need."""
        if self.alignments is None:
            return ()
        layer = self.layer
        if layer is None:
            layer = max(-2, -min(model.num_decoder_layers for model in models))
        return (Watched(layer, self.head),)


NO_NOTES = Notes()


class Annotated(NamedTuple):
    """A source as ids and as text, and what to look at again: its translations."""

    ids: np.ndarray
    text: str
    translation: Translation


def annotate(
    items: Sequence[Annotated],
    notes: Notes,
    *,
    scorer: TokenScorer,
    models: Sequence[ModelConfig],
    vocabs: Vocabs,
    params: Sequence[Any],
) -> list[Translation]:
    """The translations, and their alternatives, with what `notes` asks for."""
    hypotheses = [(item, one) for item in items for one in item.translation.n_best]
    pairs = [Pair(item.ids, one.tokens) for item, one in hypotheses]
    readings = scorer.read_all(pairs, params=params, watched=notes.watched(models))
    found = iter(
        _write_notes(item, one, reading, notes, vocabs)
        for (item, one), reading in zip(hypotheses, readings, strict=True)
    )
    results = []
    for item in items:
        best, *others = [next(found) for _ in item.translation.n_best]
        results.append(dataclasses.replace(best, alternatives=tuple(others)))
    return results


def _write_notes(
    item: Annotated, one: Translation, reading: Reading, notes: Notes, vocabs: Vocabs
) -> Translation:
    if notes.token_log_probs:
        one = dataclasses.replace(one, token_log_probs=tuple(reading.log_probs.tolist()))
    if notes.alignments is not None:
        alignment = _align(item, one, reading.attention[0], notes.alignments == "words", vocabs)
        one = dataclasses.replace(one, alignment=alignment)
    return one


def _align(
    item: Annotated, one: Translation, attention: np.ndarray, words: bool, vocabs: Vocabs
) -> Alignment:
    """Pairs without end symbols, which are no part of the text."""
    source, target = np.asarray(item.ids), np.asarray(one.tokens, np.int32)
    read, written = source != vocabs.source.eos_id, target != vocabs.target.eos_id
    weights = attention[written][:, read]
    if not words:
        return align_pieces(weights)
    return align_words(
        weights,
        _words(vocabs.source, source[read], item.text),
        _words(vocabs.target, target[written], one.text),
    )


def _words(vocab: Vocab, ids: np.ndarray, text: str) -> list[int]:
    def cut(words: list[str]) -> list[list[str]]:
        return [vocab.pieces(tokens[:-1]) for tokens in vocab.tokenize_all(words)]

    return find_words(vocab.pieces(ids), text, cut)
