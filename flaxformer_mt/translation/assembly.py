"""The last step to a translation: the text of a search's hypotheses, and lines made of their parts' texts."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from flaxformer_mt.search import SearchResult
from flaxformer_mt.translation.annotation import Notes
from flaxformer_mt.translation.result import (
    EMPTY,
    FAILED,
    TranslatedPart,
    Translation,
    combine_parts,
    one_line,
)
from flaxformer_mt.translation.segmentation import SourcePart
from flaxformer_mt.vocab import Vocab


class FoundLine(NamedTuple):
    """A line whose parts have all been searched, with what was asked for."""

    line: str
    n_best: int
    notes: Notes
    parts: list[SourcePart]
    translations: list[Translation]

    def join(self, translations: Sequence[Translation], *, eos_id: int) -> Translation:
        """Returns the translation of the line from those of its parts."""
        options: dict[str, Any] = {"n_best": self.n_best, "notes": self.notes, "eos_id": eos_id}
        (joined,) = join_parts([self.line], self.parts, translations, **options)
        return joined

    def source_pieces(self, vocab: Vocab) -> list[str]:
        """Returns the pieces of a line that was translated as one part, without eos and added tags."""
        return (
            vocab.pieces(self.parts[0].ids[self.parts[0].added_pieces : -1]) if len(self.parts) == 1 else []
        )


def read_result(result: SearchResult, vocab: Vocab) -> Translation:
    """Returns the best hypothesis of a sentence with its alternatives; `FAILED` if there is none.

    Args:
      result: the hypotheses [N, ...] of one sentence.
      vocab: the target vocabulary.
    """
    hypotheses = [
        _detokenize(result, rank, vocab) for rank in range(len(result.lengths)) if result.lengths[rank]
    ]
    best, *others = hypotheses or [FAILED]
    return dataclasses.replace(best, alternatives=tuple(others))


def _detokenize(result: SearchResult, rank: int, vocab: Vocab) -> Translation:
    tokens = tuple(result.tokens[rank, : result.lengths[rank]].tolist())
    return Translation(
        one_line(vocab.detokenize(tokens)),
        float(result.scores[rank]),
        float(result.log_probs[rank]),
        tokens,
        satisfied=result.satisfied is None or bool(result.satisfied[rank]),
    )


def join_parts(
    lines: Sequence[str],
    parts: Sequence[SourcePart],
    translations: Sequence[Translation],
    *,
    n_best: int,
    notes: Notes,
    eos_id: int,
) -> list[Translation]:
    """Joins the translations of each line's parts; a line without parts has an empty translation."""
    empty = dataclasses.replace(
        EMPTY,
        token_log_probs=() if notes.token_log_probs else None,
        alignment=None if notes.alignments is None else (),
    )
    results = [empty] * len(lines)
    pairs = zip(parts, translations, strict=True)
    for line, group in itertools.groupby(pairs, key=lambda pair: pair[0].line):
        translated = [
            TranslatedPart(p.part, len(p.ids) - 1 - p.added_pieces, t, p.tag_words, p.tag_pieces, p.continues)
            for p, t in group
        ]
        results[line] = translated[0].translation
        if translated[0].part.text != lines[line]:
            words = notes.alignments != "pieces"
            results[line] = combine_parts(lines[line], translated, n_best=n_best, words=words, eos_id=eos_id)
    for part in parts:
        if part.cut:
            results[part.line] = dataclasses.replace(results[part.line], truncated=True)
    return results
