"""An engine backend that translates with CTranslate2.

Waiting segments are translated in batches: unlike the search of this package, CTranslate2 finishes a batch
before it starts the next one.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np

import flaxformer_mt
from flaxformer_mt.config import Config, SearchConfig
from flaxformer_mt.config.checks import check_n_best, check_search
from flaxformer_mt.convert.formats import ImportOverrides, changed_options, find_config, find_vocabs
from flaxformer_mt.convert.huggingface.generation_options import length_power
from flaxformer_mt.decoding.search_inputs import Sentence
from flaxformer_mt.decoding.state_sizes import LengthRule
from flaxformer_mt.errors import UserError, first_line
from flaxformer_mt.processor import core_count
from flaxformer_mt.runs.target_lengths import read_target_lengths
from flaxformer_mt.translation.alignment import add_attention
from flaxformer_mt.translation.constraints import make_symbols
from flaxformer_mt.translation.engine import Engine
from flaxformer_mt.translation.letter_case import Capitals, choose_cases
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import Translation, one_line, rank
from flaxformer_mt.translation.segments import Segment
from flaxformer_mt.translation.sentences import SplitSentences, splits_sentences
from flaxformer_mt.translation.steps import make_steps
from flaxformer_mt.vocab import Vocab, Vocabs

# Maximum number of sentences in a batch, or of source tokens if requests arrive over time, since these must
# wait for the end of a batch.
_BATCH, _TOKENS = 64, 256


def _missing_options(search: SearchConfig) -> list[str]:
    """Return the search options that are set but that CTranslate2 lacks, as "search.NAME=VALUE"."""
    of_method = {"beam": ("coverage_penalty", "diversity_groups"), "sample": ("min_p",)}
    # CTranslate2's coverage penalty uses the attention of another layer.
    return changed_options(search, ("mbr", "rerank", *of_method.get(search.method, ())))


def _translate_options(search: SearchConfig, target: Vocab) -> dict[str, Any]:
    options: dict[str, Any] = {
        "beam_size": search.beam_size if search.method == "beam" else 1,
        "length_penalty": length_power(search),
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


def load_engine(
    folder: Path,
    *,
    split_sentences: SplitSentences = "auto",
    capitals: Capitals = "never",
    arriving: bool = False,
    **search: Any,
) -> Engine:
    """Load a model folder of format ctranslate2 as an engine, with the search options of the exported run.

    `search` options replace the run's; for other arguments, see `LoadOptions` and `Engine`. CTranslate2
    has no exact stopping. It only supports search.length_penalty_kind=length; gnmt is replaced by a penalty
    with the same preference for length at 25 tokens. Raises UserError for other unsupported options.
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
    # Exports of earlier versions do not have the facts about the training data.
    _, several, letter_cases = read_target_lengths(folder)
    changed_cases = choose_cases(capitals, letter_cases)
    changes: dict[str, Any] = {"search": search, "split_sentences": split_sentences}
    if changed_cases:
        changes["capitals"] = sorted(changed_cases)
    vocabs, apart = find_vocabs(folder, ImportOverrides()), splits_sentences(split_sentences, several=several)
    backend = CTranslate2Backend(folder, config, vocabs, arriving=arriving, changes=changes)
    steps = make_steps(
        config,
        vocabs,
        backend.check_sentence,
        apart=apart,
        changed_cases=changed_cases,
        # For models with this package's style of tags, lines contain their tags.
        lines_have_tags=config.data.tag_style == "opus",
    )
    return Engine(steps, backend, config, vocabs, apart=apart, arriving=arriving)


class CTranslate2Backend:
    """Translates segments with CTranslate2; the segments of a batch have equal search options."""

    has_full_call = False

    def __init__(
        self, folder: Path, config: Config, vocabs: Vocabs, *, arriving: bool, changes: Mapping[str, Any]
    ) -> None:
        """Load the model; `changes` are the options that differ from those in the folder."""
        self._folder, self._search, self._vocabs = folder, config.search, vocabs
        self._arriving, self._changes, self.num_active = arriving, changes, 0
        # Waiting segments -> number of hypotheses.
        self._waiting: dict[Segment, int] = {}
        with _naming_damage(folder):
            self._model = ctranslate2.Translator(
                str(folder), device="cpu", compute_type="default", intra_threads=core_count()
            )
        self._lengths = LengthRule(
            config.search.max_length_ratio,
            config.search.max_length_offset,
            config.data.max_source_length,
            config.model.longest_input,
        )
        self._arguments = _translate_options(config.search, vocabs.target)
        self._arguments["use_vmap"] = (folder / "vmap.txt").is_file()  # the shortlist
        self.most_hypotheses: int = self._arguments["beam_size"]
        self.seed(0)
        self._ids = {piece: n for n, piece in enumerate(vocabs.target.pieces(range(vocabs.target.size)))}

    def describe(self) -> dict[str, Any]:
        return {
            "model": _digest(self._folder / "model.bin"),
            "config": _digest(self._folder / "config.json"),
            **self._changes,
            "threads": core_count(),
            "versions": {"flaxformer_mt": flaxformer_mt.__version__, "ctranslate2": version("ctranslate2")},
        }

    def seed(self, first_line: int) -> None:
        """Seed sampling for a text that starts at line `first_line`; only works before the first translation.

        Unlike the samples of this package, samples of CTranslate2 also depend on all previous sentences.
        """
        ctranslate2.set_random_seed((self._search.seed + first_line) % 2**32)

    def check_request(self, request: Request) -> None:
        if request.n_best != 1:
            check_n_best(self._search, request.n_best)
        if request.annotations.token_log_probs:
            raise UserError("CTranslate2 gives no probabilities of tokens here; use the run itself")

    def check_sentence(self, sentence: Sentence, name: str) -> None:
        raise UserError(
            f"{name} has a prefix, required phrases or terms of a glossary, which CTranslate2 does not take "
            "here; use the run itself"
        )

    def submit(self, segments: Sequence[Segment], *, n_best: int) -> None:
        """Add segments to translate; segments of lines with similar lengths share a batch."""
        if segments:
            self.seed(min(segment.request.seed for segment in segments) - 1)
        for segment in sorted(segments, key=lambda segment: len(segment.request.text)):
            self._waiting[segment] = n_best

    def cancel(self, segment: Segment) -> None:
        self._waiting.pop(segment, None)

    def __len__(self) -> int:
        return len(self._waiting)

    def step(self, *, more: bool = False) -> list[tuple[Segment, Translation | Exception]]:
        """Translate a batch of waiting segments that need the same number of hypotheses."""
        segments = list(self._waiting)
        if (
            self._arriving
        ):  # first segments of all lines come first, so that a long text does not delay others
            segments.sort(key=lambda segment: segment.number)
        # A call has a single length limit; attention takes time and is requested separately.
        alike, batch, tokens = None, list[Segment](), 0
        for segment in segments:
            kind = self._waiting[segment], segment.annotations.watched_any
            alike = alike or kind
            is_full = len(batch) >= _BATCH and segment.whole is not batch[-1].whole
            if kind == alike and not (tokens >= _TOKENS if self._arriving else is_full):
                batch.append(segment)
                tokens += len(segment.ids)
        if alike is None:
            return []
        for segment in batch:
            del self._waiting[segment]
        self.num_active = len(batch)
        results = self._translate([segment.sentence for segment in batch], *alike)
        self.num_active = 0
        return [
            (segment, self._read(segment, result)) for segment, result in zip(batch, results, strict=True)
        ]

    def _translate(self, sentences: list[Sentence], n_best: int, attention: bool) -> list[Any]:
        """Return the result of each sentence, with one call of CTranslate2 per minimum length."""
        results: list[Any] = [None] * len(sentences)
        shortest = [self._shortest(sentence) for sentence in sentences]
        for least in sorted(set(shortest)):
            numbers = [number for number, length in enumerate(shortest) if length == least]
            options = {"num_hypotheses": n_best, "return_attention": attention}
            group = self._translate_alike([sentences[n] for n in numbers], least, options)
            for number, result in zip(numbers, group, strict=True):
                results[number] = result
        return results

    def _shortest(self, sentence: Sentence) -> int:
        """Return the minimum length of a translation with the end symbol, at most the length limit."""
        options, length = self._search, len(sentence.source)
        return min(
            int(options.min_length_ratio * length + options.min_length_offset), self._lengths.limit(length)
        )

    def _translate_alike(
        self, sentences: Sequence[Sentence], least: int, options: dict[str, Any]
    ) -> list[Any]:
        source, target = self._vocabs.source, self._vocabs.target
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

    def _read(self, segment: Segment, result: Any) -> Translation:
        return rank([self._read_one(segment, result, place) for place in range(len(result.hypotheses))])

    def _read_one(self, segment: Segment, result: Any, place: int) -> Translation:
        # A call has one length limit, for its longest source; tokens beyond the segment's own limit are cut.
        score, longest = result.scores[place], self._lengths.limit(len(segment.ids))
        tokens = tuple(self._ids[piece] for piece in result.hypotheses[place][:longest])
        length = (len(tokens) + 1) ** self._arguments["length_penalty"]
        text = one_line(self._vocabs.target.detokenize(tokens))
        translation = Translation(text, score, score * length, tokens)
        if not segment.annotations.watched_any:
            return translation
        # One row per subword, without the end symbol, whose column may be missing as well.
        attention = np.zeros((len(tokens), len(segment.ids)), np.float32)
        for row, weights in zip(attention, result.attention[place], strict=False):
            row[: len(weights)] = weights[: len(row)]
        return add_attention(segment, translation, attention, self._vocabs)


@contextlib.contextmanager
def _naming_damage(folder: Path) -> Iterator[None]:
    try:
        yield
    # Errors of model.bin, of a missing variable, and of a subword that is missing in the vocabulary.
    except (RuntimeError, ValueError, IndexError) as error:
        raise UserError(f"{folder} is damaged: {first_line(error)}; export the run again") from error


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
