"""Translation of text: lines are tokenized, searched in batches, and detokenized.

Row 12 of the data path. Every line gives exactly one line, in order; all lines pass through
`Translator._translate_window`. Batches and search are in decoding/.
"""

import collections
import copy
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from flaxformer_mt.config import Config, Dtype, Quantization, SearchConfig
from flaxformer_mt.config.checks import candidate_search, check_n_best, check_search
from flaxformer_mt.config.directions import common_languages, find_directions, refuse_language_model
from flaxformer_mt.config.files import read_config
from flaxformer_mt.corpus.tfds_cache import compiled_dir
from flaxformer_mt.decoding.engine import SearchEngine
from flaxformer_mt.decoding.forced_decoding import UNBOUNDED, TokenScorer
from flaxformer_mt.decoding.sentences import Sentence
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.object_store.working_copies import open_copy
from flaxformer_mt.parallel import SplitParameters, use_cpu_cores_as_devices
from flaxformer_mt.parallel.devices import enable_compilation_cache
from flaxformer_mt.parallel.processes import exchange, process_count, process_index
from flaxformer_mt.runs.load_run import TrainedModel, Warn, check_same_vocabularies, load_named, load_trained
from flaxformer_mt.text_io.lines import format_line_numbers, take_window
from flaxformer_mt.translation.annotation import NO_NOTES, Notes, annotate
from flaxformer_mt.translation.assembly import join_parts
from flaxformer_mt.translation.constraints import (
    Constraints,
    make_symbols,
    mark_unsatisfied,
    require_in_parts,
)
from flaxformer_mt.translation.inline_markup import translate_marked
from flaxformer_mt.translation.language_tags import LineTags, choose_line_tags
from flaxformer_mt.translation.minimum_bayes_risk import count_candidates, read_best
from flaxformer_mt.translation.placed_parameters import on_host, place_models
from flaxformer_mt.translation.result import FAILED, Translation, drop_repeated, warn_of_failures
from flaxformer_mt.translation.segmentation import (
    LongLines,
    SourcePart,
    SplitSentences,
    check_lines,
    read_sources,
    splits_sentences,
    warn_of_long_lines,
)
from flaxformer_mt.trees import digest_leaves
from flaxformer_mt.vocab import Vocabs
from flaxformer_mt.vocab.shortlist import Shortlist


def own_share(*, together: bool = False) -> slice:
    """Return the slice of a list of sentences that this process translates.

    Of three processes, the second has sentences 1, 4, 7, ...; all have all sentences if they translate each
    sentence `together`, with parameters that are split over them.
    """
    return slice(None) if together else slice(process_index(), None, process_count())


def gather_translations(share: Sequence[Translation], *, together: bool = False) -> list[Translation]:
    """Return the translations of all sentences, in order, given those of this process's `own_share`.

    All processes call it together: with [a, c] in one process and [b] in the other, both get [a, b, c].
    """
    if process_count() == 1 or together:
        return list(share)
    message = json.dumps([dataclasses.asdict(translation) for translation in share]).encode()
    shares = [[_from_json(values) for values in json.loads(text)] for text in exchange(message)]
    all_translations: list[Translation] = [translation for part in shares for translation in part]
    for number, part in enumerate(shares):
        all_translations[number :: len(shares)] = part
    return all_translations


def _from_json(values: dict[str, Any]) -> Translation:
    alternatives = tuple(_from_json(alternative) for alternative in values.pop("alternatives"))
    fields = {name: _to_tuples(value) for name, value in values.items()}
    return Translation(**fields, alternatives=alternatives)


def _to_tuples(value: Any) -> Any:
    """Convert lists to tuples: JSON has lists only."""
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def _read_translation_config(run_dir: Path) -> Config:
    """Return the config of a run. Raises UserError if it is a language model."""
    config = read_config(run_dir / "config.json")
    refuse_language_model(
        config.data,
        run_dir,
        f", which cannot translate; for texts, use generate --run={run_dir}; for its perplexity, use "
        f"evaluate --run={run_dir} --reference=FILE",
    )
    return config


# Number of translators with other search options that one keeps.
_MOST_KEPT = 8


def _ignore(*, lines: int, tokens: int) -> None:
    pass


class Translator:
    """Translates lines with fixed vocabularies and search options, and with its own or given parameters.

    Compiles once for each shape of a batch; other parameters of the same shapes need no new compilation.
    """

    # Receives the numbers of lines and target tokens that a search has just finished.
    on_found: Callable[..., object] = staticmethod(_ignore)

    def __init__(
        self,
        config: Config,
        params: Any,
        vocabs: Vocabs,
        *,
        checkpoint: str = "",
        step: int | None = None,
        ensemble: Sequence[TrainedModel] = (),
        long_lines: LongLines = "split",
        split_sentences: SplitSentences = "auto",
        spread: bool | SplitParameters = False,
        keep_programs: bool = False,
        shortlist: Shortlist | None = None,
        quantization: Quantization | None = None,
        target_lengths: tuple[float, float] | None = None,
        several_sentences: float | None = None,
        warn: Warn = warn_user,
    ) -> None:
        """Build the search and the scorer from `config`, whose `search` section gives the search options.

        Args:
          params: None if every call provides its own parameters.
          checkpoint: name of the checkpoint that the parameters come from, for reports; `step`: its step.
          ensemble: further models, whose distributions of each token are averaged with those of this model.
          long_lines: split: what has more than data.max_source_length tokens is translated in parts; cut:
            only its beginning is translated.
          split_sentences: always: each sentence of a line is translated apart; never: the line as a whole;
            auto: apart, unless `several_sentences` says that the model was trained on such lines.
          spread: whether each local device searches a part of each batch, or the mesh over which parameters
            are split; parameters that are passed to a call must come from `place_parameters`.
          keep_programs: whether the programs for a few sentences are kept on disk.
          shortlist: restricts each translation to likely pieces, see `SearchEngine`.
          quantization: how matrices are stored and multiplied; None: in the dtype of the activations.
          target_lengths: what search.length_bound=learned means, see `SearchEngine`; None: it is unknown.
          several_sentences: share of the training lines with several sentences; None: it is unknown.
          warn: receives a warning per call or window that names the lines that were split or cut, or lack
            required phrases; and one when the device first runs out of memory.

        Raises:
          UserError: invalid search options, different vocabularies, or quantized parameters to be split.
        """
        self.models = [config.model, *(member.config.model for member in ensemble)]
        for model in self.models:
            check_search(config.search, model=model)
        check_same_vocabularies(vocabs, ensemble)
        self.config, self.vocabs, self.checkpoint, self.warn = config, vocabs, checkpoint, warn
        self.step = step
        self._long_lines: LongLines = long_lines
        self._sentences = splits_sentences(split_sentences, several=several_sentences)
        self._together = isinstance(spread, SplitParameters)
        models = [(params, config.model), *((one.params, one.config.model) for one in ensemble)]
        # Those of each model, the own ones first.
        self.all_params, self._digest = place_models(models, spread, quantization)
        self._with_options: dict[str, Translator] = {}
        self._make_search(
            keep_programs=keep_programs, shortlist=shortlist, spread=spread, target_lengths=target_lengths
        )

    def _make_search(self, **options: Any) -> None:
        """Make the search and the scorer for the search options of the config."""
        config, vocabs, self._search_options = self.config, self.vocabs, options
        self.search = SearchEngine(
            self.models,
            candidate_search(config.search),
            make_symbols(vocabs.target, config.search),
            sizes=(vocabs.source.size, vocabs.target.size),
            source_pad_id=vocabs.source.pad_id,
            longest_source=config.data.max_source_length,
            warn=lambda message: self.warn(message),
            **options,
        )
        self.scorer = TokenScorer(
            self.models,
            config.search,
            vocabs,
            longest=(config.data.max_source_length, self.search.lengths.longest_target or UNBOUNDED),
            warn=lambda message: self.warn(message),
            spread=options["spread"],
        )

    def with_search(self, **changes: Any) -> "Translator":
        """Return a translator with other search options and the same parameters.

        The newest few are kept, with their programs, for later calls with equal changes.

        Args:
          changes: fields of `SearchConfig`: with_search(beam_size=8, length_penalty=0.6).

        Raises:
          UserError: a field is unknown, or the search options are invalid.
        """
        key = repr(sorted(changes.items()))
        if key not in self._with_options:
            if len(self._with_options) == _MOST_KEPT:
                del self._with_options[next(iter(self._with_options))]  # the oldest
            config = self.config.replace({f"search.{name}": value for name, value in changes.items()})
            for model in self.models:
                check_search(config.search, model=model)
            other = copy.copy(self)
            other.config, other._with_options = config, {}
            other._make_search(**self._search_options)
            self._with_options[key] = other
        return self._with_options[key]

    def __repr__(self) -> str:
        data, search = self.config.data, self.config.search
        models = f"{len(self.models)} models" if len(self.models) > 1 else f"checkpoint {self.checkpoint!r}"
        return (
            f"<Translator {data.source_language} -> {data.target_language}, {models}, "
            f"{search.method} search, beam_size={search.beam_size}>"
        )

    @classmethod
    def load(
        cls,
        run_dir: str | Path,
        *,
        checkpoint: str | None = None,
        search: SearchConfig | None = None,
        ensemble: Sequence[str] = (),
        long_lines: LongLines = "split",
        split_sentences: SplitSentences = "auto",
        spread: bool = True,
        dtype: Dtype | None = None,
        allow_nonfinite: bool = False,
        shortlist: str | Path | None = None,
        quantization: Quantization | None = None,
        warn: Warn = warn_user,
    ) -> "Translator":
        """Load a trained model from a run directory.

        Args:
          run_dir: the run directory.
          checkpoint: best, last, average or a step. None: that of `train.final_checkpoint`.
          search: search options that replace those of the run's config.
          ensemble: further runs that form an ensemble with this one, as RUN or RUN@CHECKPOINT.
          long_lines: split: what has more than data.max_source_length tokens is translated in parts; cut:
            only its beginning is translated.
          split_sentences: always: each sentence of a line is translated apart; never: the line as a whole;
            auto: apart, unless the model was trained on lines of several sentences.
          dtype: data type of activations and products, of the whole ensemble. None: that of the training, or
            float32 on a CPU without instructions for bfloat16.
          allow_nonfinite: whether parameters may be NaN or infinite.
          shortlist: file of the pieces that may translate each source piece, as `prepare` writes it.
          quantization: int8 multiplies matrices of 8-bit integers, of the whole ensemble.
          warn: receives a warning per call that names the lines that were split or cut, or lack required
            phrases; and one when the device first runs out of memory.
          spread: whether to use all devices, each for a part of each batch, or, if the model is too large for
            one of them, together for each sentence. The first four cores of a CPU become devices, unless JAX
            has computed before. All callers share the programs compiled so.

        Raises:
          UserError: see `load_trained`; or the run is a language model, the search options are invalid, or
            the vocabularies of an ensemble differ.
        """
        if spread:
            use_cpu_cores_as_devices()
        run_dir = open_copy(run_dir)
        config = _read_translation_config(run_dir)
        enable_compilation_cache(compiled_dir())
        check_search(config.search if search is None else search, model=config.model)
        load: dict[str, Any] = {"dtype": dtype, "allow_nonfinite": allow_nonfinite, "warn": warn}
        trained = load_trained(run_dir, checkpoint=checkpoint, may_split=spread, **load)
        if trained.split is None:
            trained = on_host(trained)
        config = trained.config if search is None else dataclasses.replace(trained.config, search=search)
        members = [on_host(load_named(name, **load)) for name in ensemble]
        return cls(
            config,
            trained.params,
            trained.vocabs,
            checkpoint=trained.checkpoint,
            step=trained.progress.get("step"),
            ensemble=members,
            long_lines=long_lines,
            split_sentences=split_sentences,
            spread=trained.split or spread,
            keep_programs=trained.split is None,
            shortlist=None if shortlist is None else Shortlist.read(shortlist, trained.vocabs),
            quantization=quantization,
            target_lengths=trained.target_lengths,
            several_sentences=trained.several_sentences,
            warn=warn,
        )

    def warm_up(self, *, n_best: int = 1) -> int:
        """Prepare all programs, for few lines and for many; return their number.

        They are compiled in threads, one for each core, or loaded from disk. Lines with prefixes or required
        phrases, and minimum lengths, use other programs.
        """
        if self.all_params[0] is None:
            raise ValueError("this translator has no parameters of its own to warm up with")
        return self.search.warm_up(self.all_params, n_best=count_candidates(self.config.search, n_best))

    def describe(self) -> dict[str, Any]:
        """Return what translations depend on, as JSON values; equal descriptions give equal translations."""
        models = [dataclasses.asdict(model) for model in self.models]
        shortlist, learned = self.search.shortlist, self.search.lengths.learned
        return {
            "checkpoint": self.checkpoint,
            "parameters": self._digest or digest_leaves(self.all_params),
            "vocabularies": [self.vocabs.source.fingerprint, self.vocabs.target.fingerprint],
            "models": models,
            "longest_source": self.config.data.max_source_length,
            "search": dataclasses.asdict(self.config.search),
            "sentences": "apart" if self._sentences else "together",
            **({} if shortlist is None else {"shortlist": shortlist.fingerprint}),
            **({} if learned is None else {"target_lengths": list(learned)}),
        }

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the pieces of a translation's tokens in the target vocabulary."""
        return self.vocabs.target.pieces(np.asarray(tokens, np.int32))

    def read_parts(
        self, lines: Sequence[str], *, tags: Sequence[str] | None = None, language: str | None = None
    ) -> list[SourcePart]:
        """Return the parts of lines that are translated apart, see `read_sources`.

        Args:
          language: None: the one that all sources of the model have.
        """
        data = self.config.data
        return read_sources(
            lines,
            vocab=self.vocabs.source,
            longest=data.max_source_length,
            long_lines=self._long_lines,
            sentences=self._sentences,
            language=common_languages(find_directions(data)).source if language is None else language,
            tags=tags,
        )

    def __call__(self, lines: Sequence[str], **options: Any) -> list[Translation]:
        """Call `translate`."""
        return self.translate(lines, **options)

    @overload
    def translate(self, lines: str, **options: Any) -> Translation: ...

    @overload
    def translate(self, lines: Sequence[str], **options: Any) -> list[Translation]: ...

    def translate(
        self,
        lines: Sequence[str] | str,
        *,
        n_best: int = 1,
        unique: bool = False,
        prefixes: Sequence[str] | None = None,
        required: Sequence[Sequence[str]] | None = None,
        notes: Notes = NO_NOTES,
        markup: bool = False,
        source_language: str | None = None,
        target_language: str | None = None,
        params: Any = None,
        **search: Any,
    ) -> list[Translation] | Translation:
        """Translate lines; return one translation for each, in the same order.

        A text instead of a list of lines is translated as one line, and has one translation.

        Args:
          n_best: maximum number of hypotheses of each line, the translation itself included.
          unique: whether hypotheses with the text of a better one are left out, so that there may be fewer.
          prefixes: prefix that each line's translation starts with; "": none.
          required: phrases that each line's translation contains (beam search only).
          notes: additional output: log-probabilities of tokens, alignments.
          markup: the same as `notes.markup`.
          source_language: language of lines that do not begin with a language tag, for a model with
            data.source_tags.
          target_language: language to translate such lines into, for a model of several languages.
          params: parameters that replace the translator's own.
          search: search options of this call, such as beam_size=8; see `with_search`.

        Raises:
          UserError: n_best exceeds the number of hypotheses of the search, `lines` is not a sequence of
            strings, the numbers of lines and of prefixes or required phrases differ, or a line's constraints
            cannot be met.
        """
        tags = self._choose_tags(source_language, target_language)
        constraints = Constraints(n_best, prefixes, required, tags.lead)
        notes = notes._replace(markup=markup or notes.markup)
        translator = self.with_search(**search) if search else self
        each = [lines] if isinstance(lines, str) else lines
        found = translator._translate_window(each, constraints, notes, tags, first_line=1, params=params)
        found = list(map(drop_repeated, found)) if unique else found
        return found[0] if isinstance(lines, str) else found

    def translate_stream(
        self,
        lines: Iterable[str],
        *,
        n_best: int = 1,
        unique: bool = False,
        prefixes: Iterable[str] | None = None,
        required: Iterable[Sequence[str]] | None = None,
        notes: Notes = NO_NOTES,
        source_language: str | None = None,
        target_language: str | None = None,
        params: Any = None,
        window: int = 2048,
        first_line: int = 1,
        is_ready: Callable[[], bool] | None = None,
        **search: Any,
    ) -> Iterator[Translation]:
        """Translate lines in order as they arrive, `window` lines at a time, so that memory is bounded.

        Sentences share batches within a window: a large window has a higher throughput, a small window a
        lower latency. A window is read when all translations of the window before have been consumed.
        Warnings count lines from `first_line`.

        Args:
          is_ready: asked before each line but the first of a window; False translates the lines so far.
            None: a window is always full.
          search: see `translate`.
        """
        if isinstance(lines, str):
            raise UserError("translate_stream takes lines, but got one string; call translate with it")
        translator = self.with_search(**search) if search else self
        if window < 1:
            raise UserError(f"window is {window}; it must be at least 1")
        tags = self._choose_tags(source_language, target_language)
        if isinstance(lines, Sequence):  # counted before the first line is translated
            given: list[Any] = [each if isinstance(each, Sequence) else None for each in (prefixes, required)]
            Constraints(n_best, *given).check(translator.config.search, len(lines), first_line)
        lines = iter(lines)
        prefix_lines = None if prefixes is None else iter(prefixes)
        required_lines = None if required is None else iter(required)
        while chunk := take_window(lines, window, is_ready):
            own_prefixes, own_required = _take(prefix_lines, len(chunk)), _take(required_lines, len(chunk))
            constraints = Constraints(n_best, own_prefixes, own_required, tags.lead)
            found = translator._translate_window(
                chunk, constraints, notes, tags, first_line=first_line, params=params
            )
            yield from map(drop_repeated, found) if unique else found
            first_line += len(chunk)
        for what, remaining in (("prefixes", prefix_lines), ("lists of required phrases", required_lines)):
            if remaining is not None and next(remaining, None) is not None:
                raise UserError(
                    f"there are more {what} than the {first_line - 1} lines; give one for each line"
                )

    def _choose_tags(self, source_language: str | None, target_language: str | None) -> LineTags:
        known = self.vocabs.target.tags
        return choose_line_tags(self.config.data, source_language, target_language, vocab_tags=known)

    def _translate_window(
        self,
        lines: Sequence[str],
        constraints: Constraints,
        notes: Notes,
        tags: LineTags,
        *,
        first_line: int,
        params: Any,
    ) -> list[Translation]:
        """Translate one window of lines; return one translation for each."""
        check_n_best(self.config.search, constraints.n_best)
        check_lines(lines, first_line=first_line)
        constraints.check(self.config.search, len(lines), first_line)
        notes.check(self.models)
        if notes.markup:
            again = functools.partial(self._translate_window, first_line=first_line, params=params)
            return translate_marked(lines, notes, lambda plain, inner: again(plain, constraints, inner, tags))
        params = self.all_params[0] if params is None else params
        if params is None:
            raise ValueError("this translator has no parameters of its own; call it with params=...")
        all_params, longest = (params, *self.all_params[1:]), self.config.data.max_source_length
        added = tags.find(lines, first_line=first_line)
        parts = self.read_parts(lines, tags=added, language=tags.source_language)
        for message in warn_of_long_lines(parts, first_line=first_line, longest=longest):
            self.warn(message)
        placing: dict[str, Any] = {"vocab": self.vocabs.target, "first_line": first_line}
        sentences = constraints.make_sentences(parts, **placing, language=tags.target_language)
        search = functools.partial(self._search, n_best=constraints.n_best, notes=notes, params=all_params)
        translations = search(parts, sentences, count=len(lines))
        translations = require_in_parts(constraints, parts, sentences, translations, **placing, search=search)
        failed = [first_line + p.line for p, t in zip(parts, translations, strict=True) if not t.tokens]
        for message in warn_of_failures(failed):
            self.warn(message)
        joining: dict[str, Any] = {"n_best": constraints.n_best, "notes": notes}
        results = join_parts(lines, parts, translations, **joining, eos_id=self.vocabs.target.eos_id)
        results, unsatisfied = mark_unsatisfied(results, constraints, [part.line for part in parts])
        if unsatisfied:
            named = format_line_numbers([first_line + index for index in unsatisfied])
            self.warn(
                f"{named}: the translation lacks some of the required phrases; require fewer phrases, or "
                "allow longer translations or a larger beam"
            )
        return results

    def _search(
        self,
        parts: list[SourcePart],
        sentences: list[Sentence],
        *,
        n_best: int,
        notes: Notes,
        params: tuple[Any, ...],
        count: int = 0,
    ) -> list[Translation]:
        """Return the translations of parts; `FAILED` where the model's scores are NaN.

        Args:
          sentences: the parts, with their constraints.
          count: number of lines that are done when their last part is found. 0: they have been counted.
        """
        for sentence in sentences:
            self.search.check(sentence, f"line {sentence.stream[0]}")
        share = own_share(together=self._together)
        parts, sentences = parts[share], sentences[share]
        parts_left = collections.Counter(part.line for part in parts)
        # Blank lines, and those of other processes.
        self.on_found(lines=max(0, count - len(parts_left)), tokens=0)
        translations = [FAILED] * len(sentences)
        searched = count_candidates(self.config.search, n_best)
        for index, result in self.search.search_all(sentences, n_best=searched, params=params):
            best = translations[index] = read_best(result, self.vocabs.target, self.config, n_best)
            line = parts[index].line
            parts_left[line] -= 1
            self.on_found(lines=int(count > 0 and parts_left[line] == 0), tokens=len(best.tokens))
        if notes != NO_NOTES:
            translations = annotate(parts, translations, notes, scorer=self.scorer, params=params)
        return gather_translations(translations, together=self._together)


def _take(items: Iterator[Any] | None, count: int) -> list[Any] | None:
    return None if items is None else list(itertools.islice(items, count))
