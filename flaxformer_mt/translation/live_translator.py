"""Translation of lines that arrive while others are translated, as a server needs it.

Contains the bookkeeping of each line's parts. The translations are those of `Translator.translate`; the
search that sentences join is in decoding/live_search.py.
"""

import dataclasses
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.decoding.forced_decoding import Pair
from flaxformer_mt.decoding.live_search import LiveSearch
from flaxformer_mt.errors import UserError
from flaxformer_mt.search import search_width
from flaxformer_mt.translation.annotation import NO_NOTES, Annotated, Notes, annotate
from flaxformer_mt.translation.assembly import FoundLine
from flaxformer_mt.translation.constraints import make_sentence
from flaxformer_mt.translation.minimum_bayes_risk import count_candidates, read_best
from flaxformer_mt.translation.result import FAILED, Translation
from flaxformer_mt.translation.segmentation import SourcePart
from flaxformer_mt.translation.translator import Translator


class _PartName(NamedTuple):
    """The name of a line, and the number of one of its parts."""

    line: Hashable
    number: int


@dataclasses.dataclass
class _Line:
    """A line whose parts are being searched."""

    line: str
    n_best: int
    notes: Notes
    parts: list[SourcePart]
    translations: dict[int, Translation]


class LiveTranslator:
    """Translates lines that are submitted at any time; `advance` makes the next few decoding steps.

    `submit`, `cancel` and `advance` must be called by one thread; `finish` may be called by another.
    """

    def __init__(self, translator: Translator) -> None:
        """Translates with the options of `translator`, which must have parameters of its own."""
        self._translator = translator
        self._search = LiveSearch(translator.search, translator.all_params)
        self._lines: dict[Hashable, _Line] = {}
        self._found: list[tuple[Hashable, FoundLine]] = []

    @property
    def most_hypotheses(self) -> int:
        """The largest n_best."""
        return search_width(self._translator.config.search, 1)

    @property
    def num_active(self) -> int:
        """Number of sentences that are being searched."""
        return self._search.num_active

    def __len__(self) -> int:
        return len(self._lines) + len(self._found)

    def warm_up(self) -> Iterator[object]:
        """Compiles the programs that most lines need, and those of alignments of all their hypotheses.

        Yields now and then, so that lines can be translated in between.
        """
        yield from self._search.warm_up(dict.fromkeys((1, self.most_hypotheses)))
        translator, notes = self._translator, Notes(attention=True)
        for length in self._source_lengths():
            translator.scorer.read_all(
                [Pair(np.zeros(length, np.int32), (0,))] * self.most_hypotheses,
                params=translator.all_params,
                watched=notes.watched(translator.models),
                shortest=length,
            )
            yield length

    def submit(
        self,
        name: Hashable,
        line: str,
        *,
        n_best: int = 1,
        notes: Notes = NO_NOTES,
        tags: str = "",
        lead: str = "",
    ) -> None:
        """Adds a line; `name` identifies it in the results, and `tags` are those of its languages.

        Args:
          lead: what the translation begins with as it is tokenized; see `Constraints`.

        Raises:
          UserError: the line is not valid Unicode.
        """
        translator = self._translator
        parts = translator.read_parts([line], tags=[tags])
        entry = _Line(line, n_best, notes, parts, {})
        if not parts:
            self._found.append((name, FoundLine(line, n_best, notes, [], [])))
            return
        self._lines[name] = entry
        # Two kinds of programs: for the best hypothesis, and for all of them.
        searched = self.most_hypotheses if n_best > 1 else count_candidates(translator.config.search, 1)
        for number, part in enumerate(parts):
            sentence = make_sentence(part.ids, "", vocab=translator.vocabs.target, lead=lead)
            sentence = dataclasses.replace(sentence, stream=(1, number))
            self._search.submit(_PartName(name, number), sentence, n_best=searched)

    def cancel(self, name: Hashable) -> None:
        """Removes a line, if it is not done yet."""
        entry = self._lines.pop(name, None)
        for number in range(len(entry.parts) if entry else 0):
            self._search.cancel(_PartName(name, number))

    def advance(self) -> Iterator[tuple[Hashable, FoundLine | Exception]]:
        """Makes a few decoding steps; yields the names of the lines that are done then, and their parts.

        If the device fails, the result of the lines that it searched is the error.
        """
        found, self._found = self._found, []
        yield from found
        for part, result in self._search.advance():
            assert isinstance(part, _PartName)
            name, number = part
            entry = self._lines.get(name)
            if entry is None:
                continue
            if isinstance(result, Exception):
                self.cancel(name)
                yield name, result
                continue
            translator = self._translator
            best = read_best(result, translator.vocabs.target, translator.config, entry.n_best)
            others = best.alternatives[: entry.n_best - 1]
            entry.translations[number] = dataclasses.replace(best, alternatives=others)
            if len(entry.translations) == len(entry.parts):
                del self._lines[name]
                ordered = [entry.translations[index] for index in range(len(entry.parts))]
                yield name, FoundLine(entry.line, entry.n_best, entry.notes, entry.parts, ordered)

    def finish(self, found: FoundLine) -> Translation:
        """Returns the translation of a line, with the additional output that was asked for.

        Raises:
          UserError: the model's scores are not numbers.
        """
        translator, translations, notes = self._translator, found.translations, found.notes
        if any(one == FAILED for one in translations):
            raise UserError("the model's scores are not numbers (NaN); try an earlier checkpoint")
        if notes != NO_NOTES and translations:
            pairs = zip(found.parts, translations, strict=True)
            items = [Annotated(part.ids, part.text, one, part.added_pieces) for part, one in pairs]
            options: dict[str, Any] = {"models": translator.models, "vocabs": translator.vocabs}
            options |= {"scorer": translator.scorer, "params": translator.all_params}
            longest = max(len(p.ids) for p in found.parts)
            shortest = next(length for length in self._source_lengths() if length >= longest)
            translations = annotate(items, notes, shortest=shortest, **options)
        return found.join(translations, eos_id=translator.vocabs.target.eos_id)

    def _source_lengths(self) -> list[int]:
        """Returns the lengths to which sources are padded for alignments: few, for few programs."""
        return [size.source_length for size in self._translator.search.sizes(1).few()]

    def source_pieces(self, found: FoundLine) -> list[str]:
        """Returns the pieces of a line that was translated as one part, without eos."""
        return found.source_pieces(self._translator.vocabs.source)

    def target_pieces(self, translation: Translation) -> list[str]:
        """Returns the pieces of a translation, without eos."""
        vocab = self._translator.vocabs.target
        return vocab.pieces([token for token in translation.tokens if token != vocab.eos_id])
