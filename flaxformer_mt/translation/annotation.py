"""Additional output for translations, of one forward pass over source and translation."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.decoding.forced_decoding import Pair, TokenScorer, Watched
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.result import (
    Annotations,
    Translation,
    align_pieces,
    align_words,
    rank,
    weigh_down_marks,
)
from flaxformer_mt.translation.segments import Segment
from flaxformer_mt.vocab import Vocabs
from flaxformer_mt.vocab.words import number_pieces


def check_annotations(annotations: Annotations, models: Sequence[ModelConfig]) -> None:
    """Raise UserError if a model lacks the layer or the head, or markup needs other alignments."""
    if annotations.markup and annotations.alignments == "pieces":
        raise UserError("markup needs alignments of words, not of pieces; leave out pieces")
    for model in models:
        for name, chosen, count in (
            ("layer", annotations.layer, model.num_decoder_layers),
            ("head", annotations.head, model.num_heads),
        ):
            if chosen is not None and not -count <= chosen < count:
                raise UserError(
                    f"alignment {name} is {chosen}, but the decoder has {count} {name}s; "
                    f"give 0 to {count - 1}"
                )


def choose_watched(annotations: Annotations, models: Sequence[ModelConfig]) -> tuple[Watched, ...]:
    """Return the attention weights that alignments are computed from."""
    if not annotations.watched_any:
        return ()
    layer, guided = annotations.layer, {(model.alignment, model.num_decoder_layers) for model in models}
    if len(guided) == 1:
        ((chosen, count),) = guided
        named = layer is not None and (layer % count, annotations.head) == (chosen.layer % count, 0)
        if chosen.weight and (named or (layer, annotations.head) == (None, None)):
            return (Watched(chosen.layer, 0, chosen.step == "read"),)
    if layer is None:
        layer = max(-2, -min(model.num_decoder_layers for model in models))
    return (Watched(layer, annotations.head),)


def annotate(
    segments: Sequence[Segment],
    translations: Sequence[Translation],
    annotations: Annotations,
    *,
    scorer: TokenScorer,
    params: Sequence[Any],
) -> list[Translation]:
    """Return the translations and their alternatives with the additional output that is asked for."""
    hypotheses = [
        (segment, one) for segment, best in zip(segments, translations, strict=True) for one in best.n_best
    ]
    readings = scorer.read_all(
        [Pair(segment.ids, one.tokens) for segment, one in hypotheses],
        params=params,
        watched=choose_watched(annotations, scorer.models),
    )
    annotated = []
    for (segment, one), reading in zip(hypotheses, readings, strict=True):
        if annotations.token_log_probs:
            one = dataclasses.replace(one, token_log_probs=tuple(reading.log_probs.tolist()))
        if annotations.watched_any:
            one = add_attention(segment, one, reading.attention[0], scorer.vocabs)
        annotated.append(one)
    remaining = iter(annotated)
    return [rank([next(remaining) for _ in translation.n_best]) for translation in translations]


def add_attention(
    segment: Segment, hypothesis: Translation, attention: np.ndarray, vocabs: Vocabs
) -> Translation:
    """Return the hypothesis with the alignment and the attention weights that the segment asks for.

    Both are without eos and added pieces, which are not part of the text.

    Args:
      attention: weights [T, S] of the tokens of the hypothesis over those of the source.
    """
    annotations, source = segment.annotations, np.asarray(segment.ids)
    target = np.asarray(hypothesis.tokens, np.int32)
    in_source, in_target = source != vocabs.source.eos_id, target != vocabs.target.eos_id
    in_source[: segment.added_pieces] = False
    for ids, counted, vocab in ((source, in_source, vocabs.source), (target, in_target, vocabs.target)):
        if vocab.silent_ids:
            counted &= ~np.isin(ids, list(vocab.silent_ids))
    weights = attention[in_target][:, in_source]
    if annotations.attention:
        pieces = tuple(vocabs.source.pieces(source[in_source]))
        weighed = tuple(map(tuple, weights.tolist()))
        hypothesis = dataclasses.replace(hypothesis, attention=weighed, source_pieces=pieces)
    if annotations.alignments is None:
        return hypothesis
    if annotations.alignments == "pieces":
        return dataclasses.replace(hypothesis, alignment=align_pieces(weights))
    source_words = number_pieces(vocabs.source, source[in_source], segment.tag + segment.text)
    target_words = number_pieces(vocabs.target, target[in_target], hypothesis.text)
    if annotations.for_markup:
        both = vocabs.source.pieces(source[in_source]), vocabs.target.pieces(target[in_target])
        weights = weigh_down_marks(weights, (both[0], source_words), (both[1], target_words))
    alignment = align_words(weights, source_words, target_words, cover=annotations.for_markup)
    return dataclasses.replace(hypothesis, alignment=alignment)
