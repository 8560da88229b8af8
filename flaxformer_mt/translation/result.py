"""Translations with their scores, as a search's hypotheses give them."""

import bisect
import dataclasses
import heapq
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from flaxformer_mt.search import SearchResult
from flaxformer_mt.shapes import Array
from flaxformer_mt.translation.segmentation import SourcePart, join_translations
from flaxformer_mt.unicode_text import WORD, spell
from flaxformer_mt.vocab import Vocab

# Factor of the weights of marks in `weigh_down_marks`.
_LITTLE = 1e-3
# Pairs of a source position and a target position.
Alignment = tuple[tuple[int, int], ...]


def align_pieces(weights: Array) -> Alignment:
    """Align each target piece with the source piece of the largest weight.

    Weights [[.1 .9] [.8 .2]] give (1, 0), (0, 1): target piece 0 attends most to source piece 1.

    Args:
      weights: attention weights [T, S], without eos.
    """
    if not all(weights.shape):
        return ()
    return tuple((int(i), j) for j, i in enumerate(np.asarray(weights).argmax(axis=1)))


def weigh_down_marks(
    weights: Array, source: tuple[Sequence[str], Sequence[int]], target: tuple[Sequence[str], Sequence[int]]
) -> np.ndarray:
    """Return the weights with little left of those of punctuation marks that are a part of a longer word.

    In "sleeps?" the mark attends to that of the source, which may be a part of another word.

    Args:
      weights: attention weights [T, S], without eos.
      source, target: the pieces, and the index of the word of each piece.
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

    The weight of a source word is the sum over its pieces; the weight for a target word is the mean over its
    pieces. With `cover`, each source word that no target word is aligned with is aligned with the target word
    of the largest weight.

    Args:
      weights: attention weights [T, S], without eos.
      source_words: index of the word of each source piece, as `vocab.words.find_words` returns it.
      target_words: index of the word of each target piece.
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


def format_pharaoh(alignment: Iterable[tuple[int, int]]) -> str:
    """Format pairs, sorted by target position, then by source position: ((1, 0), (0, 1)) gives "1-0 0-1"."""
    return " ".join(f"{i}-{j}" for i, j in sorted(alignment, key=lambda pair: (pair[1], pair[0])))


class Annotations(NamedTuple):
    """Selects additional outputs of translations, which take one more forward pass."""

    # The log-probability of each token.
    token_log_probs: bool = False
    # Alignments of words (separated by white space) or of subwords; None: no alignments.
    alignments: Literal["words", "pieces"] | None = None
    # Decoder layer whose attention gives the alignments, counted from 0; negative: counted from the last
    # layer. None, and no head: the layer and head that were trained on alignments, if all models have the
    # same `model.alignment`, otherwise the second-to-last or only layer. The trained step is also used if
    # layer and head are the trained ones.
    layer: int | None = None
    # Attention head; None: the mean of all heads.
    head: int | None = None
    # The attention weights of `layer` and `head`.
    attention: bool = False
    # Whether tags and placeholders are taken out of lines and put into translations.
    markup: bool = False
    # Whether alignments serve to place markup. Then every source word is aligned, and marks count little.
    for_markup: bool = False

    @property
    def watched_any(self) -> bool:
        """Whether attention weights are needed at all."""
        return self.alignments is not None or self.attention

    @property
    def needs_reading(self) -> bool:
        """Whether translations take a forward pass."""
        return self.watched_any or self.token_log_probs


NO_ANNOTATIONS = Annotations()


@dataclass(frozen=True)
class Translation:
    """The translation of one line, with its scores and its alternatives."""

    text: str
    # Log-probability divided by the length penalty, less the coverage penalty; hypotheses are ranked by it.
    # With search.mbr, the expected utility from 0 to 100.
    # NaN for a blank line, which is not searched.
    score: float
    log_prob: float
    # Ids of the target vocabulary; the last one is eos unless the length limit was reached.
    tokens: tuple[int, ...]
    # Whether only the beginning was translated, because the source exceeds data.max_source_length.
    truncated: bool = False
    # Whether the translation contains every phrase that the line requires; True without such phrases.
    satisfied: bool = True
    # The other hypotheses, best first.
    alternatives: tuple["Translation", ...] = ()
    # Log-probability of each token, if requested; they add up to log_prob.
    token_log_probs: tuple[float, ...] | None = None
    # Pairs of source and target words (or pieces), if requested, in the order of the target.
    alignment: Alignment | None = None
    # Number of parts in which the line was translated. For several parts, tokens are the tokens of all parts,
    # each with its eos, and scores are sums over parts.
    parts: int = 1
    # Where the translations of the sentences start in the text, if the line was split into several.
    sentence_starts: tuple[int, ...] = ()
    # Attention weights [target piece][source piece] without eos, if requested, and if the line was translated
    # as one part.
    attention: tuple[tuple[float, ...], ...] | None = None
    # Pieces of the source, if there are attention weights.
    source_pieces: tuple[str, ...] = ()

    @property
    def n_best(self) -> tuple["Translation", ...]:
        """This translation and its alternatives, best first."""
        return (self, *self.alternatives)


# Translations of a line without words, and of a line for which the model's scores are NaN.
EMPTY = Translation(text="", score=math.nan, log_prob=0.0, tokens=())
FAILED = Translation(text="", score=-math.inf, log_prob=-math.inf, tokens=())


def rank(hypotheses: Sequence[Translation]) -> Translation:
    """Return the first of hypotheses, with the others as its alternatives."""
    if len(hypotheses) == 1 and not hypotheses[0].alternatives:
        return hypotheses[0]
    return dataclasses.replace(hypotheses[0], alternatives=tuple(hypotheses[1:]))


def read_results(results: Sequence[SearchResult], vocab: Vocab) -> list[Translation]:
    """Return the best hypothesis of each sentence with its alternatives; `FAILED` if there is none.

    Args:
      results: the hypotheses [N, ...] of each sentence.
      vocab: the target vocabulary.
    """
    found: list[list[tuple[int, list[int]]]] = []
    for result in results:
        tokens = result.tokens.tolist()
        lengths = enumerate(result.lengths.tolist())
        found.append([(number, tokens[number][:length]) for number, length in lengths if length > 0])
    texts = iter(vocab.detokenize_all([tokens for own in found for _, tokens in own]))
    translations = []
    for result, own in zip(results, found, strict=True):
        scores, log_probs, satisfied = result.scores, result.log_probs, result.satisfied
        hypotheses = [
            Translation(
                one_line(next(texts)),
                float(scores[number]),
                float(log_probs[number]),
                tuple(tokens),
                satisfied=satisfied is None or bool(satisfied[number]),
            )
            for number, tokens in own
        ]
        translations.append(rank(hypotheses or [FAILED]))
    return translations


def change_texts(translation: Translation, change: Callable[[str], str]) -> Translation:
    """Return a translation with changed texts, of its alternatives too."""
    others = tuple(change_texts(one, change) for one in translation.alternatives)
    return dataclasses.replace(translation, text=change(translation.text), alternatives=others)


def check_phrases(translation: Translation, phrases: Sequence[str]) -> Translation:
    """Mark whether a translation, and each of its alternatives, contains all phrases."""
    text = spell(translation.text)
    return dataclasses.replace(
        translation,
        satisfied=all(spell(phrase) in text for phrase in phrases),
        alternatives=tuple(check_phrases(other, phrases) for other in translation.alternatives),
    )


def drop_repeated(translation: Translation) -> Translation:
    """Return a translation with those of its alternatives whose text is none before: the best of each text.

    Two hypotheses are of one text if it has two segmentations, each with a score of its own.
    """
    first = {one.text: one for one in reversed(translation.n_best)}
    others = tuple(one for one in translation.alternatives if one is first[one.text])
    return dataclasses.replace(translation, alternatives=others)


# All characters that some program treats as the end of a line, replaced by spaces: a translation is one line.
_LINE_ENDS = dict.fromkeys(map(ord, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")


def one_line(text: str) -> str:
    """Return a text without ends of lines."""
    return text.translate(_LINE_ENDS)


# Characters that some program treats as the end of a line, without line feeds, which no line of a file has.
_ODD_LINE_ENDS = re.compile("\r(?!\n)|[\v\f\x1c-\x1e\x85\u2028\u2029]")


def join_parts(
    line: str,
    parts: Sequence[SourcePart],
    translations: Sequence[Translation],
    *,
    n_best: int = 1,
    annotations: Annotations = NO_ANNOTATIONS,
    eos_id: int,
) -> Translation:
    """Return the translation of a line, given those of its parts in order; an empty one without parts.

    Log-probabilities and scores are sums over parts. The n_best hypotheses are the combinations with the
    highest sums: with scores -1 and -3 for one part, -2 and -2.5 for another, the best score is -1 - 2 and
    the second best -1 - 2.5.
    """
    if not parts:
        log_probs = () if annotations.token_log_probs else None
        alignment = None if annotations.alignments is None else ()
        return dataclasses.replace(EMPTY, token_log_probs=log_probs, alignment=alignment)
    joined = translations[0]
    if parts[0].content != line:
        # Sums of scores with the last of the chosen hypotheses, linked to those before it: of a line of
        # thousands of parts, a tuple for each combination would take quadratic time.
        combinations: list[tuple[float, _Chosen | None]] = [(0.0, None)]
        for translation in translations:
            longer = [
                (score + one.score, _Chosen(one, chosen))
                for score, chosen in combinations
                for one in translation.n_best
            ]
            combinations = heapq.nlargest(n_best, longer, key=lambda combination: combination[0])
        how: dict[str, Any] = {"words": annotations.alignments != "pieces", "eos_id": eos_id}
        joined = rank([_add_up(line, parts, _unlink(chosen), **how) for _, chosen in combinations])
    return dataclasses.replace(joined, truncated=True) if any(part.cut for part in parts) else joined


class _Chosen(NamedTuple):
    """The hypothesis chosen for one part, and those chosen for the parts before."""

    hypothesis: Translation
    before: "_Chosen | None"


def _unlink(chosen: _Chosen | None) -> list[Translation]:
    hypotheses = []
    while chosen is not None:
        hypotheses.append(chosen.hypothesis)
        chosen = chosen.before
    return hypotheses[::-1]


def _add_up(
    line: str, parts: Sequence[SourcePart], chosen: Sequence[Translation], *, words: bool, eos_id: int
) -> Translation:
    source_starts = [part.start + len(part.content) - len(part.content.lstrip()) for part in parts]
    spaces = [
        " " if part.continues else _space_before(line, start)
        for part, start in zip(parts, source_starts, strict=True)
    ]
    text, starts = join_translations([one.text for one in chosen], spaces)
    alignment = log_probs = None
    if all(one.token_log_probs is not None for one in chosen):
        log_probs = tuple(value for one in chosen for value in one.token_log_probs or ())
    if all(one.alignment is not None for one in chosen):
        # What is before each part: the number of words or pieces of the line and of its translation.
        if words:
            before = zip(_word_indices(line, source_starts), _word_indices(text, starts), strict=True)
            tag_sizes = [part.tag_words for part in parts]
        else:
            own = itertools.accumulate((part.num_pieces - part.tag_pieces for part in parts), initial=0)
            sizes = (len(one.tokens) - one.tokens.count(eos_id) for one in chosen)
            before = zip(own, itertools.accumulate(sizes, initial=0), strict=True)
            tag_sizes = [part.tag_pieces for part in parts]
        alignment = tuple(
            (_shift(i, source_offset, tag_size), j + target_offset)
            for one, (source_offset, target_offset), tag_size in zip(chosen, before, tag_sizes, strict=False)
            for i, j in one.alignment or ()
        )
    return Translation(
        text=text,
        score=sum(one.score for one in chosen),
        log_prob=sum(one.log_prob for one in chosen),
        tokens=tuple(token for one in chosen for token in one.tokens),
        truncated=any(one.truncated for one in chosen),
        satisfied=all(one.satisfied for one in chosen),
        token_log_probs=log_probs,
        alignment=alignment,
        parts=len(parts),
        sentence_starts=tuple(start for start, part in zip(starts, parts, strict=True) if not part.continues),
    )


def _shift(index: int, offset: int, tag_size: int) -> int:
    """Return the index in the line of a word or piece of a part that begins with a repeated tag."""
    return index if index < tag_size else index - tag_size + offset


def _space_before(text: str, start: int) -> str:
    """Return the white space that ends before a position, with spaces for odd characters that end lines."""
    before = text[:start]
    return _ODD_LINE_ENDS.sub(" ", before[len(before.rstrip()) :])


def _word_indices(text: str, starts: Sequence[int]) -> list[int]:
    """Return the index of the word of the character at each start: in "ab cd", 0 for "a" and 1 for "d"."""
    word_starts = [match.start() for match in WORD.finditer(text)]
    return [max(0, bisect.bisect_right(word_starts, start) - 1) for start in starts]


# Maps ids of the target vocabulary to pieces.
Pieces = Callable[[Sequence[int]], list[str]]

# Written for ||| in the text of an n-best list, whose fields are separated by it; Moses escapes | so.
_ESCAPED = "&#124;" * 3


@dataclass(frozen=True)
class TranslationFormat:
    """Selects the output of a translation.

    The columns of a line are separated by tabs: score, log-probability and token log-probabilities,
    alignment, text; the text is always written. n_best: a line `i ||| text ||| score` for each hypothesis,
    with the alignment as a fourth field if `alignments` is set, and every ||| of a text written as
    &#124;&#124;&#124;. json: one object with all fields. The score of a blank line is nan, in JSON null.
    """

    n_best: bool = False
    scores: bool = False
    token_scores: bool = False
    alignments: bool = False
    json: bool = False

    def lines(self, number: int, source: str, translation: Translation, pieces: Pieces) -> list[str]:
        """Return the output lines of input line `number`, counted from 0."""
        if self.json:
            described = {"line": number, "source": source, **_describe(translation, pieces)}
            if self.n_best:
                described["n_best"] = [_describe(one, pieces) for one in translation.n_best]
            return [write_json(described)]
        if self.n_best:
            return [self._format_hypothesis(number, hypothesis) for hypothesis in translation.n_best]
        columns = [f"{translation.score:.6f}"] if self.scores or self.token_scores else []
        if self.token_scores:
            columns += _format_log_probs(translation.log_prob, translation.token_log_probs or ())
        if self.alignments:
            columns.append(format_pharaoh(translation.alignment or ()))
        return ["\t".join([*columns, translation.text])]

    def _format_hypothesis(self, number: int, hypothesis: Translation) -> str:
        fields = [str(number), hypothesis.text.replace("|||", _ESCAPED), f"{hypothesis.score:.6f}"]
        if self.alignments:
            fields.append(format_pharaoh(hypothesis.alignment or ()))
        return " ||| ".join(fields)


def _describe(hypothesis: Translation, pieces: Pieces) -> dict[str, Any]:
    return {
        "text": hypothesis.text,
        "score": hypothesis.score,
        "log_prob": hypothesis.log_prob,
        "tokens": hypothesis.tokens,
        "pieces": pieces(hypothesis.tokens),
        "token_log_probs": hypothesis.token_log_probs or (),
        "alignment": hypothesis.alignment or (),
        "truncated": hypothesis.truncated,
        "satisfied": hypothesis.satisfied,
        "parts": hypothesis.parts,
    }


def format_score(
    score: Translation, number: int, source: str | None, pieces: Pieces, *, tokens: bool, as_json: bool
) -> str:
    """Return the output line of the score of a given target, which is the text.

    Args:
      number: index of the pair, counted from 0.
      source: None for a language model.
      tokens: add columns with the log-probability and the log-probability of each token.
      as_json: write an object with all fields instead of columns.
    """
    if not as_json:
        columns = _format_log_probs(score.log_prob, score.token_log_probs or ()) if tokens else []
        return "\t".join([f"{score.score:.6f}", *columns])
    names = ("score", "log_prob", "tokens", "pieces", "token_log_probs", "truncated")
    described = _describe(score, pieces)
    pair = {"target": score.text} if source is None else {"source": source, "target": score.text}
    return write_json({"line": number, **pair, **{name: described[name] for name in names}})


def _format_log_probs(log_prob: float, token_log_probs: Sequence[float]) -> list[str]:
    return [f"{log_prob:.6f}", " ".join(f"{each:.6f}" for each in token_log_probs)]


def write_json(value: dict[str, Any]) -> str:
    """Format a value as one line of JSON: floats with at most six decimals, null for NaN and infinity."""
    return json.dumps(_to_json(value), ensure_ascii=False, allow_nan=False)


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(inner) for inner in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
