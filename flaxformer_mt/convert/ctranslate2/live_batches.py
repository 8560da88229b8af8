"""Translation by CTranslate2 of lines that arrive while others are translated, as a server needs it.

Contains batches of what waits: unlike this package's search, CTranslate2 finishes a batch before the next.
"""

import dataclasses
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.checks import check_search
from flaxformer_mt.config.directions import common_languages, find_directions
from flaxformer_mt.convert.formats import Given, find_config, find_vocabs
from flaxformer_mt.cpu import core_count
from flaxformer_mt.decoding.sizes import LengthRule
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.annotation import Notes, add_attention
from flaxformer_mt.translation.assembly import FoundLine
from flaxformer_mt.translation.constraints import make_symbols
from flaxformer_mt.translation.result import Translation, one_line, rank
from flaxformer_mt.translation.segmentation import (
    SourcePart,
    SplitSentences,
    read_sources,
    splits_sentences,
)
from flaxformer_mt.vocab import Vocab

# Length in tokens at which both length penalties favour longer translations equally, as in exports to others.
_TYPICAL_LENGTH = 25
# Maximum number of sentences of a batch.
_BATCH = 64


def _missing_options(search: SearchConfig) -> list[str]:
    """Return the options of a search, with their values, that would change translations and CTranslate2
    lacks.
    """
    missing = []
    if search.method == "mbr":
        missing.append("search.method=mbr")
    if search.method == "beam" and search.coverage_penalty:  # its own is of another layer
        missing.append(f"search.coverage_penalty={search.coverage_penalty:g}")
    if search.method == "beam" and search.diversity_groups > 1:
        missing.append(f"search.diversity_groups={search.diversity_groups}")
    if search.method == "sample" and search.min_p:
        missing.append(f"search.min_p={search.min_p:g}")
    return missing


def _translate_options(search: SearchConfig, target: Vocab) -> dict[str, Any]:
    """Return the arguments of `translate_batch` for a search."""
    gnmt = search.length_penalty_kind == "gnmt"
    options: dict[str, Any] = {
        "beam_size": search.beam_size if search.method == "beam" else 1,
        "length_penalty": search.length_penalty * (_TYPICAL_LENGTH / (5 + _TYPICAL_LENGTH) if gnmt else 1),
        "patience": search.patience if search.stopping == "inexact" else 1,
        "no_repeat_ngram_size": search.no_repeat_ngram,
        "suppress_sequences": [[piece] for piece in target.pieces(make_symbols(target, search).banned)],
    }
    if search.method == "sample":
        options |= {
            "sampling_topk": search.top_k,
            "sampling_topp": search.top_p,
            "sampling_temperature": search.temperature,
        }
    return options


class LiveBatches:
    """Translates lines that are submitted at any time, with a model folder of format ctranslate2.

    The search options are those of the exported run. CTranslate2 has no exact stopping and only the length
    penalty of the kind length, which stands for gnmt at 25 tokens, as in other exports; with any other option
    that it does not have, nothing is translated.
    """

    def __init__(self, folder: Path, *, split_sentences: SplitSentences = "auto", **search: Any) -> None:
        """Load the model.

        Args:
          split_sentences: see `Translator`; what the model was trained on is not known.
          search: search options that replace those of the run.

        Raises:
          UserError: the folder is no such model, or the options are invalid or none of CTranslate2.
        """
        if not (folder / "model.bin").is_file():
            raise UserError(
                f"{folder} has no model.bin; with --backend=ctranslate2, give a folder that export "
                "--format=ctranslate2 wrote"
            )
        config = find_config(folder, Given())
        self.config = dataclasses.replace(config, search=dataclasses.replace(config.search, **search))
        check_search(self.config.search, model=config.model)
        if missing := _missing_options(self.config.search):
            raise UserError(
                f"{', '.join(missing)}: CTranslate2 does not have this; export a run without it, change it "
                "where the command has a flag for it, or give --backend=jax"
            )
        self._sentences = splits_sentences(split_sentences, several=None)
        self._vocabs = find_vocabs(folder, Given())
        self._model = ctranslate2.Translator(
            str(folder), device="cpu", compute_type="default", intra_threads=core_count()
        )
        options = self.config.search
        self._lengths = LengthRule(
            options.max_length_ratio,
            options.max_length_offset,
            config.data.max_source_length,
            config.model.longest_input,
        )
        target = self._vocabs.target
        self._search = _translate_options(options, target)
        self.seed(0)
        self._ids = {piece: number for number, piece in enumerate(target.pieces(range(target.size)))}
        self._waiting: dict[Hashable, FoundLine] = {}
        # The tokens that the translations of each line begin with.
        self._leads: dict[Hashable, list[int]] = {}
        self.num_active = 0

    @property
    def most_hypotheses(self) -> int:
        """The largest n_best."""
        return self._search["beam_size"]

    def __len__(self) -> int:
        return len(self._waiting)

    def seed(self, first_line: int) -> None:
        """Seed the samples of a text that goes on at a line; no effect once a sentence has been
        translated.

        The samples depend on the seed, and unlike those of this package on all sentences before.
        """
        ctranslate2.set_random_seed((self.config.search.seed + first_line) % 2**32)

    def warm_up(self) -> Iterator[object]:
        """Yield nothing: there is nothing to compile."""
        return iter(())

    def submit(
        self, name: Hashable, line: str, *, n_best: int, notes: Notes, tags: str = "", lead: str = ""
    ) -> None:
        """Add a line; `name` identifies it in the results, and `tags` are those of its languages.

        Args:
          lead: what the translation begins with as it is tokenized: the tag of its language, and a space.

        Raises:
          UserError: the line is not valid Unicode.
        """
        parts = read_sources(
            [line],
            vocab=self._vocabs.source,
            longest=self.config.data.max_source_length,
            long_lines="split",
            sentences=self._sentences,
            language=common_languages(find_directions(self.config.data)).source,
            tags=[tags],
        )
        self._waiting[name] = FoundLine(line, n_best, notes, parts, {})
        self._leads[name] = self._vocabs.target.tokenize(lead)[:-1] if lead else []

    def cancel(self, name: Hashable) -> None:
        """Remove a line that waits."""
        self._waiting.pop(name, None)
        self._leads.pop(name, None)

    def advance(self) -> Iterator[tuple[Hashable, FoundLine]]:
        """Translate a batch of the lines that wait, of one number of hypotheses; yield those lines."""
        if not self._waiting:
            return
        first = next(iter(self._waiting.values()))
        # CTranslate2 has one length limit for a call; attention costs time and is asked for separately.
        chosen: dict[Hashable, FoundLine] = {}
        for name, found in self._waiting.items():
            alike = (found.n_best, found.notes.watched_any) == (first.n_best, first.notes.watched_any)
            if alike and sum(len(one.parts) for one in chosen.values()) < _BATCH:
                chosen[name] = found
        for name in chosen:
            del self._waiting[name]
        parts = [part for found in chosen.values() for part in found.parts]
        leads = [self._leads[name] for name, found in chosen.items() for _ in found.parts]
        for name in chosen:
            del self._leads[name]
        self.num_active = len(parts)
        translated = iter(self._translate(parts, leads, first.n_best, first.notes.watched_any))
        for name, found in chosen.items():
            for number, part in enumerate(found.parts):
                hypotheses = [self._annotate(part, one, found.notes) for one in next(translated)]
                found.translations[number] = rank(hypotheses)
            yield name, found
        self.num_active = 0

    def _translate(
        self, parts: list[SourcePart], leads: list[list[int]], n_best: int, attention: bool
    ) -> list[list[Any]]:
        """Return the hypotheses of each part: pairs of a translation and its attention [T, S], or None."""
        if not parts:
            return []
        # A call has one minimum for all of its sentences.
        found: list[list[Any]] = [[] for _ in parts]
        shortest = [self._shortest(part) for part in parts]
        for least in sorted(set(shortest)):
            chosen = [number for number, own in enumerate(shortest) if own == least]
            own, forced = [parts[number] for number in chosen], [leads[number] for number in chosen]
            group = self._translate_alike(own, forced, least, n_best, attention)
            for number, hypotheses in zip(chosen, group, strict=True):
                found[number] = hypotheses
        return found

    def _shortest(self, part: SourcePart) -> int:
        """Return the minimum length of a translation, with the end symbol, which may come where its
        limit is.
        """
        options = self.config.search
        least = int(options.min_length_ratio * len(part.ids) + options.min_length_offset)
        return min(least, self._lengths.limit(len(part.ids)))

    def _translate_alike(
        self, parts: list[SourcePart], leads: list[list[int]], least: int, n_best: int, attention: bool
    ) -> list[list[Any]]:
        vocab = self._vocabs.source
        forced = [self._vocabs.target.pieces(lead) for lead in leads] if any(leads) else None
        results = self._model.translate_batch(
            [vocab.pieces(part.ids[:-1]) for part in parts],
            target_prefix=forced,
            **self._search,
            num_hypotheses=n_best,
            max_input_length=0,
            max_decoding_length=max(self._lengths.limit(len(part.ids)) for part in parts),
            min_decoding_length=max(0, least - 1),  # without the end symbol
            return_scores=True,
            return_attention=attention,
        )
        return [
            [
                (
                    self._read(part, result.hypotheses[rank], result.scores[rank]),
                    result.attention[rank] if attention else None,
                )
                for rank in range(len(result.hypotheses))
            ]
            for part, result in zip(parts, results, strict=True)
        ]

    def _read(self, part: SourcePart, pieces: list[str], score: float) -> Translation:
        # A call has one limit, that of its longest source; greedy search with the part's own ends there.
        limit = self._lengths.limit(len(part.ids))
        tokens = tuple(self._ids[piece] for piece in pieces[:limit])
        length = (len(tokens) + 1) ** self._search["length_penalty"]
        return Translation(one_line(self._vocabs.target.detokenize(tokens)), score, score * length, tokens)

    def _annotate(self, part: SourcePart, found: tuple[Translation, Any], notes: Notes) -> Translation:
        translation, weights = found
        if weights is None:
            return translation
        # One row for each piece, without the end symbol; its column may be missing too.
        attention = np.zeros((len(translation.tokens), len(part.ids)), np.float32)
        for row, own in zip(attention, weights, strict=False):
            row[: len(own)] = own[: len(row)]
        return add_attention(part, translation, attention, notes, self._vocabs)

    def finish(self, found: FoundLine) -> Translation:
        """Return the translation of a line, joined from its parts."""
        return found.join([*found.translations.values()], eos_id=self._vocabs.target.eos_id)

    def source_pieces(self, found: FoundLine) -> list[str]:
        """Return the pieces of a line that was translated as one part, without eos."""
        return found.source_pieces(self._vocabs.source)

    def target_pieces(self, translation: Translation) -> list[str]:
        """Return the pieces of a translation, without eos."""
        return self._vocabs.target.pieces(translation.tokens)
