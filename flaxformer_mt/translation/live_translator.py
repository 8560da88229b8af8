"""Translation of lines that arrive while others are translated, as a server needs it.

The translations are those of `Translator.translate`; sentences join the search of decoding/live_search.py.
"""

from collections.abc import Hashable, Iterator
from typing import Any, cast

from flaxformer_mt.decoding.live_search import LiveSearch
from flaxformer_mt.errors import UserError
from flaxformer_mt.search import search_width
from flaxformer_mt.translation.annotation import NO_NOTES, Notes, annotate
from flaxformer_mt.translation.assembly import FoundLine
from flaxformer_mt.translation.constraints import Constraints
from flaxformer_mt.translation.minimum_bayes_risk import count_candidates, read_best
from flaxformer_mt.translation.result import FAILED, Translation
from flaxformer_mt.translation.translator import Translator


class LiveTranslator:
    """Translates lines that are submitted at any time; `advance` makes the next few decoding steps.

    `submit`, `cancel` and `advance` must be called by one thread; `finish` may be called by another.
    """

    def __init__(self, translator: Translator) -> None:
        """Translate with the options of `translator`, which must have parameters of its own."""
        self._translator = translator
        self._search = LiveSearch(translator.search, translator.all_params)
        self._lines: dict[Hashable, FoundLine] = {}
        self._blank: list[tuple[Hashable, FoundLine]] = []

    @property
    def most_hypotheses(self) -> int:
        """The largest n_best."""
        return search_width(self._translator.config.search, 1)

    @property
    def num_active(self) -> int:
        """Number of sentences that are being searched."""
        return self._search.num_active

    def __len__(self) -> int:
        return len(self._lines) + len(self._blank)

    def warm_up(self) -> Iterator[object]:
        """Compile the programs that most lines need, and those of alignments of all their hypotheses.

        Yields now and then, so that lines can be translated in between.
        """
        translator, watched = self._translator, Notes(attention=True).watched(self._translator.models)
        for n_best in dict.fromkeys((1, self.most_hypotheses)):
            yield from translator.search.warm_up_each(translator.all_params, n_best=n_best)
        translator.scorer.warm_up(params=translator.all_params, watched=watched)

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
        """Add a line; `name` identifies it in the results, and `tags` are those of its languages.

        Args:
          lead: what the translation begins with as it is tokenized; see `Constraints`.

        Raises:
          UserError: the line is not valid Unicode.
        """
        translator = self._translator
        parts = translator.read_parts([line], tags=[tags])
        found = FoundLine(line, n_best, notes, parts, {})
        if not parts:
            self._blank.append((name, found))
            return
        self._lines[name] = found
        # Two kinds of programs: for the best hypothesis, and for all of them.
        searched = self.most_hypotheses if n_best > 1 else count_candidates(translator.config.search, 1)
        constraints = Constraints(n_best, lead=lead)
        sentences = constraints.make_sentences(parts, vocab=translator.vocabs.target, first_line=1)
        for number, sentence in enumerate(sentences):
            self._search.submit((name, number), sentence, n_best=searched)

    def cancel(self, name: Hashable) -> None:
        """Remove a line, if it is not done yet."""
        found = self._lines.pop(name, None)
        for number in range(len(found.parts) if found else 0):
            self._search.cancel((name, number))

    def advance(self) -> Iterator[tuple[Hashable, FoundLine | Exception]]:
        """Make a few decoding steps; yield the names of the lines that are done then, and their parts.

        If the device fails, the result of the lines that it searched is the error.
        """
        blank, self._blank = self._blank, []
        yield from blank
        for part, result in self._search.advance():
            name, number = cast(tuple[Hashable, int], part)
            found = self._lines.get(name)
            if found is None:
                continue
            if isinstance(result, Exception):
                self.cancel(name)
                yield name, result
                continue
            translator = self._translator
            best = read_best(result, translator.vocabs.target, translator.config, found.n_best)
            found.translations[number] = best
            if len(found.translations) == len(found.parts):
                del self._lines[name]
                yield name, found

    def finish(self, found: FoundLine) -> Translation:
        """Return the translation of a line, with the additional output that was asked for.

        Raises:
          UserError: the model's scores are not numbers.
        """
        translator, notes = self._translator, found.notes
        translations = [found.translations[number] for number in range(len(found.parts))]
        if any(one == FAILED for one in translations):
            raise UserError("the model's scores are not numbers (NaN); try an earlier checkpoint")
        if notes != NO_NOTES and translations:
            options: dict[str, Any] = {"scorer": translator.scorer, "params": translator.all_params}
            translations = annotate(found.parts, translations, notes, **options)
        return found.join(translations, eos_id=translator.vocabs.target.eos_id)

    def source_pieces(self, found: FoundLine) -> list[str]:
        """Return the pieces of a line that was translated as one part, without eos."""
        return found.source_pieces(self._translator.vocabs.source)

    def target_pieces(self, translation: Translation) -> list[str]:
        """Return the pieces of a translation, without eos."""
        vocab = self._translator.vocabs.target
        return vocab.pieces([token for token in translation.tokens if token != vocab.eos_id])
