"""Alignments from attention weights and log-probabilities of tokens, by one more forward pass."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.decoding.forced_decoding import Pair, TokenScorer, Watched
from flaxformer_mt.errors import UserError
from flaxformer_mt.shapes import Array
from flaxformer_mt.translation.result import Alignment, Annotations, Translation, rank
from flaxformer_mt.translation.segments import Segment
from flaxformer_mt.vocab import Vocabs
from flaxformer_mt.vocab.words_of_pieces import number_pieces

# Factor of the weights of marks in `weigh_down_marks`.
_LITTLE = 1e-3


def align_pieces(weights: Array) -> Alignment:
    """Align each target subword with the source subword that it attends to most; weights [T, S] exclude eos.

    Weights [[.1 .9] [.8 .2]] give (1, 0), (0, 1): target subword 0 attends most to source subword 1.
    """
    if not all(weights.shape):
        return ()
    return tuple((int(i), j) for j, i in enumerate(np.asarray(weights).argmax(axis=1)))


def weigh_down_marks(
    weights: Array, source: tuple[Sequence[str], Sequence[int]], target: tuple[Sequence[str], Sequence[int]]
) -> np.ndarray:
    """Return the weights [T, S], reduced for punctuation marks that are attached to a word.

    In "sleeps?", the question mark attends to the question mark of the source, which may be attached to
    another word. `source` and `target` each hold the subwords of a sentence and the word index of each
    subword.
    """
    factors = []
    for pieces, words in (target, source):
        bare = np.array([not any(map(str.isalnum, piece)) for piece in pieces], bool)
        has_letters = set(np.asarray(words, np.int64)[~bare].tolist())
        longer = np.array([word in has_letters for word in words], bool)
        factors.append(np.where(bare & longer, _LITTLE, 1.0))
    return np.asarray(weights, np.float64) * factors[0][:, None] * factors[1]


def align_words(
    weights: Array, source_words: Sequence[int], target_words: Sequence[int], *, cover: bool = False
) -> Alignment:
    """Align each target word with the source word of the largest weight, in the order of target words.

    The weights are [T, S]; `source_words` and `target_words` are the word index of each subword, as
    `number_pieces` returns it. Weights are summed over the subwords of a source word and averaged over the
    subwords of a target word. With `cover`, each source word that is still unaligned is aligned with the
    target word of the largest weight.
    """
    if not all(weights.shape):
        return ()
    source_sums = np.zeros((max(source_words) + 1, len(target_words)))
    np.add.at(source_sums, np.asarray(source_words), np.asarray(weights, np.float64).T)
    # The sum over a target word's pieces has the same maximum as their mean.
    word_sums = np.zeros((max(target_words) + 1, len(source_sums)))
    np.add.at(word_sums, np.asarray(target_words), source_sums.T)
    pairs = [(int(np.argmax(word_sums[j])), j) for j in sorted(set(target_words))]
    if cover:
        missing = sorted(set(source_words) - {i for i, _ in pairs})
        pairs = sorted(
            [*pairs, *((i, int(np.argmax(word_sums[:, i]))) for i in missing)], key=lambda p: p[::-1]
        )
    return tuple(pairs)


def check_annotations(annotations: Annotations, models: Sequence[ModelConfig]) -> None:
    """Raise UserError if a model lacks the chosen layer or head, or if markup has alignments of pieces."""
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
    """Return the layer and head whose attention weights are read to compute alignments."""
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
    """Return the translations and their alternatives with the requested additional output."""
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
    """Return the hypothesis with the alignment and the attention weights that the segment requests.

    `attention`: the weights [T, S] of all tokens, of which eos and added subwords are left out.
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
