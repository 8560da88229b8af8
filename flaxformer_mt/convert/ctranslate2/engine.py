"""Translation by CTranslate2 with the engine interface of this package.

Contains batches of what waits: unlike this package's search, CTranslate2 finishes a batch before the next.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np

import flaxformer_mt
from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.checks import check_search
from flaxformer_mt.convert.formats import ImportOverrides, find_config, find_vocabs
from flaxformer_mt.cpu import core_count
from flaxformer_mt.decoding.sentences import Sentence
from flaxformer_mt.decoding.sizes import LengthRule
from flaxformer_mt.errors import UserError, first_line
from flaxformer_mt.runs.target_lengths import read_target_lengths
from flaxformer_mt.translation.annotation import add_attention
from flaxformer_mt.translation.constraints import make_symbols
from flaxformer_mt.translation.engine import Line, LineEngine, Part
from flaxformer_mt.translation.language_tags import LineTags
from flaxformer_mt.translation.letter_case import Capitals, choose_cases
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import Translation, one_line, rank
from flaxformer_mt.translation.segmentation import SplitSentences, splits_sentences
from flaxformer_mt.vocab import Vocab

# Length in tokens at which both length penalties favour longer translations equally, as in exports to others.
_TYPICAL_LENGTH = 25
# Maximum number of sentences of a batch; where requests arrive, which wait for its end, of source tokens.
_BATCH, _TOKENS = 64, 256


def _missing_options(search: SearchConfig) -> list[str]:
    """Return the options of a search, with their values, that would change translations and CTranslate2
    lacks.
    """
    missing = []
    if search.mbr:
        missing.append(f"search.mbr={search.mbr}")
    if search.rerank:
        missing.append(f"search.rerank={search.rerank}")
    if search.method == "beam" and search.coverage_penalty:  # its own is of another layer
        missing.append(f"search.coverage_penalty={search.coverage_penalty:g}")
    if search.method == "beam" and search.diversity_groups > 1:
        missing.append(f"search.diversity_groups={search.diversity_groups}")
    if search.method == "sample" and search.min_p:
        missing.append(f"search.min_p={search.min_p:g}")
    return missing


def _translate_options(search: SearchConfig, target: Vocab) -> dict[str, Any]:
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


class _Batches:
    """Sentences that wait, and batches of those alike; see `translation.engine.Searches`."""

    has_full_call = False

    def __init__(self, translate: Callable[[list[Sentence], int, bool], list[Any]]) -> None:
        self._translate, self.num_active = translate, 0
        self._waiting: dict[Part, tuple[Sentence, int]] = {}

    def submit(self, sentences: Mapping[Part, Sentence], *, n_best: int) -> None:
        self._waiting.update((part, (sentence, n_best)) for part, sentence in sentences.items())

    def cancel(self, name: Any) -> None:
        self._waiting.pop(name, None)

    def __len__(self) -> int:
        return len(self._waiting)

    def step(self, max_steps: int | None, *, more: bool = False) -> Iterator[tuple[Part, Any]]:
        """Translate a batch of the sentences that wait, of one number of hypotheses."""
        parts, arriving = list(self._waiting), max_steps is not None
        if arriving:  # the first sentence of each line before all second ones: a long text holds up no others
            parts.sort(key=lambda part: part[1])
        # A call has one length limit; attention costs time and is asked for separately.
        alike, chosen, tokens = None, list[Part](), 0
        for part in parts:
            sentence, count = self._waiting[part]
            kind = count, part[0].annotations.watched_any
            alike = alike or kind
            full = tokens >= _TOKENS if arriving else len(chosen) >= _BATCH and part[0] is not chosen[-1][0]
            if kind == alike and not full:
                chosen.append(part)
                tokens += len(sentence.source)
        if alike is None:
            return
        sentences = [self._waiting.pop(part)[0] for part in chosen]
        self.num_active = len(chosen)
        yield from zip(chosen, self._translate(sentences, *alike), strict=True)
        self.num_active = 0


class CTranslate2Engine(LineEngine):
    """Translates requests with a model folder of format ctranslate2.

    The search options are those of the exported run. CTranslate2 has no exact stopping and only the length
    penalty of the kind length, which stands for gnmt at 25 tokens, as in other exports; with any other option
    that it does not have, nothing is translated.
    """

    def __init__(
        self,
        folder: Path,
        *,
        split_sentences: SplitSentences = "auto",
        capitals: Capitals = "never",
        arriving: bool = False,
        **search: Any,
    ) -> None:
        """Load the model.

        Args:
          split_sentences, capitals: see `LoadOptions`.
          arriving: see `LineEngine`.
          search: search options that replace those of the run.
        """
        if not (folder / "model.bin").is_file():
            raise UserError(
                f"{folder} has no model.bin; with --backend=ctranslate2, give a folder that export "
                "--format=ctranslate2 wrote"
            )
        config = find_config(folder, ImportOverrides())
        config = dataclasses.replace(config, search=dataclasses.replace(config.search, **search))
        check_search(config.search, model=config.model)
        if missing := _missing_options(config.search):
            raise UserError(
                f"{', '.join(missing)}: CTranslate2 does not have this; export a run without it, change it "
                "where the command has a flag for it, or give --backend=jax"
            )
        # Exports of earlier versions do not say what the model was trained on.
        _, several, letter_cases = read_target_lengths(folder)
        changed_cases = choose_cases(capitals, letter_cases)
        self._batches = _Batches(self._translate)
        super().__init__(
            config,
            find_vocabs(folder, ImportOverrides()),
            self._batches,
            long_lines="split",
            sentences=splits_sentences(split_sentences, several=several),
            arriving=arriving,
            changed_cases=changed_cases,
        )
        self._folder = folder
        self._changes: dict[str, Any] = {"search": search, "split_sentences": split_sentences}
        if changed_cases:
            self._changes["capitals"] = sorted(changed_cases)
        with _naming_damage(folder):
            self._model = ctranslate2.Translator(
                str(folder), device="cpu", compute_type="default", intra_threads=core_count()
            )
        options, target = config.search, self.vocabs.target
        self._lengths = LengthRule(
            options.max_length_ratio,
            options.max_length_offset,
            config.data.max_source_length,
            config.model.longest_input,
        )
        self._arguments = _translate_options(options, target)
        self.seed(0)
        self._ids = {piece: number for number, piece in enumerate(target.pieces(range(target.size)))}

    def describe(self) -> dict[str, Any]:
        return {
            "model": _digest(self._folder / "model.bin"),
            "config": _digest(self._folder / "config.json"),
            **self._changes,
            "threads": core_count(),
            "versions": {"flaxformer_mt": flaxformer_mt.__version__, "ctranslate2": version("ctranslate2")},
        }

    def seed(self, first_line: int) -> None:
        """Seed the samples of a text that goes on at a line; no effect once a sentence has been
        translated.

        The samples depend on the seed, and unlike those of this package on all sentences before.
        """
        ctranslate2.set_random_seed((self.config.search.seed + first_line) % 2**32)

    @property
    def most_hypotheses(self) -> int:
        return self._arguments["beam_size"]

    def _choose_tags(self, source: str | None, target: str | None) -> LineTags:
        # Lines for models with tags of this package's own style bring their tags along.
        if (source, target) == (None, None) and self.config.data.tag_style == "opus":
            return LineTags("")
        return super()._choose_tags(source, target)

    def enter(self, lines: list[Line]) -> None:
        """Add requests; sentences of similar lengths share a batch."""
        if lines:
            self.seed(min(line.request.seed for line in lines) - 1)
        super().enter(sorted(lines, key=lambda line: len(line.request.text)))

    def _translate(self, sentences: list[Sentence], n_best: int, attention: bool) -> list[Any]:
        """Return the result of each sentence; a call has one minimum for all of its sentences."""
        found: list[Any] = [None] * len(sentences)
        shortest = [self._shortest(sentence) for sentence in sentences]
        for least in sorted(set(shortest)):
            chosen = [number for number, own in enumerate(shortest) if own == least]
            options = {"num_hypotheses": n_best, "return_attention": attention}
            group = self._translate_alike([sentences[n] for n in chosen], least, options)
            for number, result in zip(chosen, group, strict=True):
                found[number] = result
        return found

    def _shortest(self, sentence: Sentence) -> int:
        """Return the minimum length of a translation, with the end symbol, which may come where its
        limit is.
        """
        options, length = self.config.search, len(sentence.source)
        return min(
            int(options.min_length_ratio * length + options.min_length_offset), self._lengths.limit(length)
        )

    def _translate_alike(
        self, sentences: Sequence[Sentence], least: int, options: dict[str, Any]
    ) -> list[Any]:
        source, target = self.vocabs.source, self.vocabs.target
        prefixes = [target.pieces(sentence.prefix) for sentence in sentences]
        with _naming_damage(self._folder):
            return self._model.translate_batch(
                [source.pieces(sentence.source[:-1]) for sentence in sentences],
                target_prefix=prefixes if any(prefixes) else None,
                **self._arguments | options,
                max_input_length=0,
                max_decoding_length=max(self._lengths.limit(len(sentence.source)) for sentence in sentences),
                min_decoding_length=max(0, least - 1),  # without the end symbol
                return_scores=True,
            )

    def _annotate(self, parts: list[Part]) -> None:
        """Do nothing: CTranslate2 returns attention with its translations."""

    def _check_sentences(self, request: Request, sentences: Sequence[Sentence]) -> None:
        raise UserError("CTranslate2 takes no prefixes and required phrases here; use the run itself")

    def _score(self, lines: list[Line]) -> None:
        raise UserError("CTranslate2 scores no given translations here; use the run itself")

    def _read(self, found: list[tuple[Part, Any]]) -> list[tuple[Part, Translation]]:
        translated = []
        for (line, number, is_trial), result in found:
            hypotheses = [
                self._read_one(line, number, result, place) for place in range(len(result.hypotheses))
            ]
            translated.append(((line, number, is_trial), rank(hypotheses)))
            line.is_annotated = True
        return translated

    def _read_one(self, line: Line, number: int, result: Any, place: int) -> Translation:
        # A call has one limit, that of its longest source; greedy search with the part's own ends there.
        part, score = line.parts[number], result.scores[place]
        tokens = tuple(
            self._ids[piece] for piece in result.hypotheses[place][: self._lengths.limit(len(part.ids))]
        )
        length = (len(tokens) + 1) ** self._arguments["length_penalty"]
        text = one_line(self.vocabs.target.detokenize(tokens))
        translation = Translation(text, score, score * length, tokens)
        if not line.annotations.watched_any:
            return translation
        # One row for each piece, without the end symbol; its column may be missing too.
        attention = np.zeros((len(tokens), len(part.ids)), np.float32)
        for row, own in zip(attention, result.attention[place], strict=False):
            row[: len(own)] = own[: len(row)]
        return add_attention(part, translation, attention, line.annotations, self.vocabs)


@contextlib.contextmanager
def _naming_damage(folder: Path) -> Iterator[None]:
    try:
        yield
    # Of its model.bin, a variable that it lacks, or a piece that its vocabulary lacks.
    except (RuntimeError, ValueError, IndexError) as error:
        raise UserError(f"{folder} is damaged: {first_line(error)}; export the run again") from error


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
