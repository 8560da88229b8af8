"""Additional output for translations, of one forward pass over source and translation."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.decoding.forced_decoding import Pair, TokenScorer, Watched
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.result import Translation, align_pieces, align_words, rank, weigh_down_marks
from flaxformer_mt.translation.segmentation import SourcePart
from flaxformer_mt.vocab import Vocabs
from flaxformer_mt.vocab.words import number_pieces


class Notes(NamedTuple):
    """Selects the additional output of each translation; with the defaults, the forward pass is skipped."""

    # The log-probability of each token.
    token_log_probs: bool = False
    # Alignments of words (separated by white space) or of pieces; None: no alignments.
    alignments: Literal["words", "pieces"] | None = None
    # Decoder layer whose attention gives the alignments, counted from 0; negative: counted from the last
    # layer. None: the last layer but one, or the only layer; without a head either, the layer and the head
    # that have learned alignments, if all models have trained with the same `model.alignment`; at the step
    # that has learned them, also if they are named.
    layer: int | None = None
    # Attention head; None: the mean of all heads.
    head: int | None = None
    # The attention weights of this layer and head.
    attention: bool = False
    # Whether tags and placeholders are taken out of lines and put into translations (inline_markup.py).
    markup: bool = False
    # Whether alignments serve to place markup: every source word has a place, and marks count little.
    for_markup: bool = False

    def check(self, models: Sequence[ModelConfig]) -> None:
        """Raise UserError if a model lacks the layer or the head, or markup needs other alignments."""
        if self.markup and self.alignments == "pieces":
            raise UserError("markup needs alignments of words, not of pieces; leave out pieces")
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

    @property
    def watched_any(self) -> bool:
        """Whether attention weights are needed at all."""
        return self.alignments is not None or self.attention

    def watched(self, models: Sequence[ModelConfig]) -> tuple[Watched, ...]:
        """Return the attention weights that alignments are computed from."""
        if not self.watched_any:
            return ()
        layer, guided = self.layer, {(model.alignment, model.num_decoder_layers) for model in models}
        if len(guided) == 1:
            ((chosen, count),) = guided
            named = layer is not None and (layer % count, self.head) == (chosen.layer % count, chosen.head)
            if chosen.weight and (named or (layer, self.head) == (None, None)):
                return (Watched(chosen.layer, chosen.head, chosen.step == "read"),)
        if layer is None:
            layer = max(-2, -min(model.num_decoder_layers for model in models))
        return (Watched(layer, self.head),)


NO_NOTES = Notes()


def annotate(
    parts: Sequence[SourcePart],
    translations: Sequence[Translation],
    notes: Notes,
    *,
    scorer: TokenScorer,
    params: Sequence[Any],
) -> list[Translation]:
    """Return the translations and their alternatives with the additional output that `notes` selects."""
    hypotheses = [(part, one) for part, best in zip(parts, translations, strict=True) for one in best.n_best]
    readings = scorer.read_all(
        [Pair(part.ids, one.tokens) for part, one in hypotheses],
        params=params,
        watched=notes.watched(scorer.models),
    )
    annotated = []
    for (part, one), reading in zip(hypotheses, readings, strict=True):
        if notes.token_log_probs:
            one = dataclasses.replace(one, token_log_probs=tuple(reading.log_probs.tolist()))
        if notes.watched_any:
            one = add_attention(part, one, reading.attention[0], notes, scorer.vocabs)
        annotated.append(one)
    remaining = iter(annotated)
    return [rank([next(remaining) for _ in translation.n_best]) for translation in translations]


def add_attention(
    part: SourcePart, hypothesis: Translation, attention: np.ndarray, notes: Notes, vocabs: Vocabs
) -> Translation:
    """Return the hypothesis with the alignment and the attention weights that `notes` selects.

    Both are without eos and added pieces, which are not part of the text.

    Args:
      attention: weights [T, S] of the tokens of the hypothesis over those of the source.
    """
    source, target = np.asarray(part.ids), np.asarray(hypothesis.tokens, np.int32)
    in_source, in_target = source != vocabs.source.eos_id, target != vocabs.target.eos_id
    in_source[: part.added_pieces] = False
    for ids, chosen, vocab in ((source, in_source, vocabs.source), (target, in_target, vocabs.target)):
        if vocab.silent_ids:
            chosen &= ~np.isin(ids, list(vocab.silent_ids))
    weights = attention[in_target][:, in_source]
    if notes.attention:
        hypothesis = dataclasses.replace(hypothesis, attention=tuple(map(tuple, weights.tolist())))
    if notes.alignments is None:
        return hypothesis
    if notes.alignments == "pieces":
        return dataclasses.replace(hypothesis, alignment=align_pieces(weights))
    source_words = number_pieces(vocabs.source, source[in_source], part.text)
    target_words = number_pieces(vocabs.target, target[in_target], hypothesis.text)
    if notes.for_markup:
        pieces = vocabs.source.pieces(source[in_source]), vocabs.target.pieces(target[in_target])
        weights = weigh_down_marks(weights, (pieces[0], source_words), (pieces[1], target_words))
    alignment = align_words(weights, source_words, target_words, cover=notes.for_markup)
    return dataclasses.replace(hypothesis, alignment=alignment)
