"""Translates lines of text with the model of a run.

A `Translator` turns lines into requests and passes them to an engine (translation/engine.py), which also
serves requests that arrive one at a time.
"""

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import jax
import numpy as np

from flaxformer_mt.config import ModelConfig, Quantization
from flaxformer_mt.config.checks import candidate_search, check_n_best, check_search
from flaxformer_mt.config.directions import refuse_language_model
from flaxformer_mt.config.files import read_config
from flaxformer_mt.config.load_options import LoadOptions
from flaxformer_mt.corpus.documents import Documents, check_context
from flaxformer_mt.corpus.tfds_cache import compiled_dir
from flaxformer_mt.decoding.forced_decoding import UNBOUNDED, TokenScorer
from flaxformer_mt.decoding.search_engine import EngineOptions, SearchEngine
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.kernels.bfloat16 import cast_kernels
from flaxformer_mt.kernels.int8 import quantize_matrix
from flaxformer_mt.model.lora import matrix_axes
from flaxformer_mt.object_store.remote_runs import open_copy
from flaxformer_mt.parallel import SplitParameters, place_parameters, use_cpu_cores_as_devices
from flaxformer_mt.parallel.devices import enable_compilation_cache
from flaxformer_mt.parallel.processes import process_count
from flaxformer_mt.parameter_trees import digest_leaves, flatten_tree, nest_leaves
from flaxformer_mt.runs.load_run import TrainedModel, Warn, check_same_vocabularies, load_named, load_trained
from flaxformer_mt.text_io.lines import take_windows
from flaxformer_mt.translation.alignment import check_annotations
from flaxformer_mt.translation.constraints import check_constraints, make_symbols
from flaxformer_mt.translation.engine import Engine, Progress
from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.translation.letter_case import choose_cases
from flaxformer_mt.translation.minimum_bayes_risk import check_choice, count_candidates
from flaxformer_mt.translation.pivot import PivotEngines, choose_pivot
from flaxformer_mt.translation.requests import Request, check_lines, count_message, make_requests
from flaxformer_mt.translation.result import NO_ANNOTATIONS, Annotations, Translation, drop_repeated
from flaxformer_mt.translation.search_backend import SearchBackend, SharedSearchBackend
from flaxformer_mt.translation.sentences import splits_sentences
from flaxformer_mt.translation.steps import make_steps
from flaxformer_mt.vocab.shortlist import Shortlist

# Possible places of the output layer's table, the first that exists: separate, tied, or shared by all.
_TABLES = (
    "output_kernel",
    "target_embedding/embedding",
    "shared_embedding/embedding",
    "token_embedding/embedding",
)


def quantize_params(params: Any) -> Any:
    """Quantize all projections and the output layer; `params` must have one subtree per layer."""
    leaves = flatten_tree(params)
    quantized = dict(leaves)
    for path, leaf in leaves.items():
        if path.endswith("/kernel"):
            inputs, _ = matrix_axes(path, leaf.shape)
            quantized[path], quantized[f"{path}_scale"] = quantize_matrix(leaf, range(len(inputs)))
    table = next(path for path in _TABLES if path in leaves)
    rows = np.asarray(leaves[table]).T if table == "output_kernel" else leaves[table]
    quantized["output_int8"], quantized["output_scale"] = quantize_matrix(rows, [1])
    return nest_leaves(quantized)


def place_models(
    models: Sequence[tuple[Any, ModelConfig]],
    spread: bool | SplitParameters,
    quantization: Quantization | None,
) -> tuple[tuple[Any, ...], str]:
    """Cast or quantize the matrices of models, and place the parameters on the devices.

    Returns the parameters of each model (None remains None) and a digest of all parameters. The digest is
    empty unless several processes share the parameters, because only these processes together can compute it.
    """
    if quantization and isinstance(spread, SplitParameters):
        raise UserError(
            f"quantization={quantization} is for models that fit on one device, but this one has to be split "
            "over several; leave it out"
        )
    placed = []
    for params, config in models:
        if params is not None:
            kernels = cast_kernels(quantize_params(params) if quantization else params, config.dtype)
            params = place_parameters(kernels, spread)
        placed.append(params)
    digest = spread.digest((placed[0], tuple(placed[1:]))) if isinstance(spread, SplitParameters) else ""
    return tuple(placed), digest


def on_host(trained: TrainedModel) -> TrainedModel:
    """Move the parameters to the host, because casting on the device compiles one program per shape."""
    return dataclasses.replace(trained, params=jax.device_get(trained.params))


# Maximum number of translators with other search options that a translator caches.
_MOST_KEPT = 8


@dataclass(frozen=True)
class TranslationOptions:
    """Options of a call of `Translator.translate`, which apply to all its lines."""

    # Maximum number of hypotheses of each line, the translation itself included.
    n_best: int = 1
    # Whether to leave out hypotheses with the text of a better one; fewer than n_best may remain.
    unique: bool = False
    # Source terms and their translations, as a mapping, a file or a `Glossary`.
    glossary: Glossary | Mapping[str, str] | str | Path | None = None
    # Additional output, such as token log-probabilities and alignments. `markup` is a shorthand for
    # `annotations.markup`.
    annotations: Annotations = NO_ANNOTATIONS
    markup: bool = False
    # The source language, for a model with data.source_tags, and the target language, for a model of several
    # targets. Tags in lines are then plain text. None: the only language, or the language of each line's tag.
    source_language: str | None = None
    target_language: str | None = None
    # A translator that translates the results from the target language into a third language.
    then: "Translator | None" = None
    # Parameters that replace the translator's own.
    params: Any = None
    # Called with the numbers of `lines` and target `tokens` that have just been translated.
    on_progress: Progress | None = None


class Translator:
    """Translates lines with a trained model.

    Compiles once per batch shape; different parameters of the same shapes need no new compilation.
    """

    def __init__(
        self,
        trained: TrainedModel,
        options: LoadOptions | None = None,
        *,
        ensemble: Sequence[TrainedModel] = (),
        keep_programs: bool = False,
        warn: Warn = warn_user,
    ) -> None:
        """Build the search and the scorer.

        Args:
          trained: the model. If its parameters are None, each call gets parameters from `place_parameters`,
            as in training, where they change.
          options: `checkpoint`, `dtype`, `ensemble` and `allow_nonfinite` are ignored. None: the defaults.
          ensemble: further models, whose token distributions are averaged with this model's distributions.
          keep_programs: whether to store compiled programs on disk.
          warn: see `load`.
        """
        options = options or LoadOptions()
        config, vocabs = trained.config, trained.vocabs
        if options.search is not None:
            config = dataclasses.replace(config, search=options.search)
        if not config.data.source_language:  # padding masks concern sources, of which there are none
            config = config.replace({"model.padding_mask": "source"})
        self.models = [config.model, *(member.config.model for member in ensemble)]
        for model in self.models:
            check_search(config.search, model=model)
        check_same_vocabularies(vocabs, ensemble)
        self.config, self.vocabs, self.checkpoint, self.warn = config, vocabs, trained.checkpoint, warn
        self.step: int | None = trained.progress.get("step")
        self._options, self._together = options, trained.split is not None
        self._apart = splits_sentences(options.split_sentences, several=trained.several_sentences)
        self._changed_cases = choose_cases(options.capitals, trained.letter_cases)
        spread: bool | SplitParameters = trained.split or options.use_all_devices
        models = [(trained.params, config.model), *((one.params, one.config.model) for one in ensemble)]
        # The parameters of each model, this translator's own first.
        self.all_params, self._digest = place_models(models, spread, options.quantization)
        self._with_options: dict[str, Translator] = {}
        shortlist = None if options.shortlist is None else Shortlist.read(options.shortlist, vocabs)
        self._computing = EngineOptions(spread, keep_programs, shortlist, trained.target_lengths)
        self._make_search()

    def _make_search(self) -> None:
        """Build the search and the scorer for the search options of the config."""
        config, vocabs = self.config, self.vocabs
        check_choice(config.search)
        longest = config.data.max_source_length if config.data.source_language else 0
        self.search = SearchEngine(
            self.models,
            candidate_search(config.search),
            make_symbols(vocabs.target, config.search),
            sizes=(vocabs.source.size, vocabs.target.size),
            source_pad_id=vocabs.source.pad_id,
            longest_source=longest,
            computing=self._computing,
            warn=lambda message: self.warn(message),
        )
        self.scorer = TokenScorer(
            self.models,
            config.search,
            vocabs,
            longest=(longest, self.search.lengths.longest_target or UNBOUNDED),
            warn=lambda message: self.warn(message),
            spread=self._computing.spread,
        )

    def with_search(self, **changes: Any) -> "Translator":
        """Return a translator with other search options and the same parameters.

        The last few translators are cached, with their compiled functions, for later calls with the same
        changes.

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
            other._make_search()
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
        options: LoadOptions | None = None,
        *,
        warn: Warn = warn_user,
        **changes: Any,
    ) -> "Translator":
        """Load a trained model from a run directory.

        Args:
          run_dir: the run directory.
          options: how the model is loaded. None: the defaults of `LoadOptions`.
          warn: called with each warning. Warnings name the lines that were split, were cut, failed, or lack
            required phrases; one reports that the device ran out of memory.
          changes: fields of `LoadOptions` that override `options`, as in load(run_dir, dtype="bfloat16").

        Raises:
          UserError: the run or checkpoint does not exist, a parameter is NaN or infinite, the run is a
            language model, the search options are invalid, or the vocabularies of an ensemble differ.
        """
        run_dir = open_copy(run_dir)
        refuse_language_model(
            read_config(run_dir / "config.json").data,
            run_dir,
            f", which cannot translate; for texts, use generate --run={run_dir}; for its perplexity, use "
            f"evaluate --run={run_dir} --reference=FILE",
        )
        return load_translator(run_dir, dataclasses.replace(options or LoadOptions(), **changes), warn)

    def engine(self, *, params: Any = None, arriving: bool = False) -> Engine:
        """Return an engine that takes requests; engines of a translator share compiled functions.

        Args:
          params: parameters that replace the translator's own.
          arriving: whether requests arrive while other requests are translated; calls to the device are then
            short.
        """
        params = self.all_params[0] if params is None else params
        if params is None:
            raise ValueError("this translator has no parameters of its own; call it with params=...")
        shared = process_count() > 1 and not self._together
        backend = (SharedSearchBackend if shared else SearchBackend)(
            self.search,
            self.scorer,
            (params, *self.all_params[1:]),
            self.config.search,
            describe=self.describe,
            arriving=arriving,
        )
        steps = make_steps(
            self.config,
            self.vocabs,
            backend.check_sentence,
            apart=self._apart,
            long_lines=self._options.long_lines,
            changed_cases=self._changed_cases,
            limited=arriving,
        )
        return Engine(steps, backend, self.config, self.vocabs, apart=self._apart, arriving=arriving)

    def warm_up(self, *, n_best: int = 1) -> int:
        """Compile or load all functions for ordinary lines, in batches of all sizes; return their count.

        Lines with prefixes or required phrases, and minimum lengths, use other functions.
        """
        if self.all_params[0] is None:
            raise ValueError("this translator has no parameters of its own to warm up with")
        return sum(self.search.warm_up(self.all_params, n_best=count_candidates(self.config.search, n_best)))

    def compile(
        self,
        lines: Sequence[str],
        params: Any,
        documents: Sequence[Hashable] | bool = False,
        **languages: Any,
    ) -> None:
        """Compile the programs that translate these lines; of `params`, only the shapes are used.

        `languages`: source_language and target_language, as in `translate`.
        """
        engine, data = self.engine(params=params), self.config.data
        numbered = Documents(lines, data.context, None if isinstance(documents, bool) else documents)
        for one in make_requests(numbered, {}, documents=numbered if documents else None, **languages):
            engine.submit(dataclasses.replace(one, id=one.seed))
        engine.backend.compile()

    def describe(self) -> dict[str, Any]:
        """Describe, as JSON values, what affects translations; equal descriptions give equal results."""
        models = [dataclasses.asdict(model) for model in self.models]
        shortlist, learned = self.search.shortlist, self.search.lengths.learned
        return {
            "checkpoint": self.checkpoint,
            "parameters": self._digest or digest_leaves(self.all_params),
            "vocabularies": [self.vocabs.source.fingerprint, self.vocabs.target.fingerprint],
            "models": models,
            "longest_source": self.config.data.max_source_length,
            "search": dataclasses.asdict(self.config.search),
            "sentences": "apart" if self._apart else "together",
            **({"capitals": sorted(self._changed_cases)} if self._changed_cases else {}),
            **({} if shortlist is None else {"shortlist": shortlist.fingerprint}),
            **({} if learned is None else {"target_lengths": list(learned)}),
        }

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the target subwords of a translation's tokens."""
        return self.vocabs.target.pieces(np.asarray(tokens, np.int32))

    def __call__(self, lines: Sequence[str], **options: Any) -> list[Translation]:
        """Call `translate`."""
        return self.translate(lines, **options)

    @overload
    def translate(self, lines: str, *arguments: Any, **changes: Any) -> Translation: ...

    @overload
    def translate(self, lines: Sequence[str], *arguments: Any, **changes: Any) -> list[Translation]: ...

    def translate(
        self,
        lines: Sequence[str] | str,
        options: TranslationOptions | None = None,
        *,
        prefixes: Sequence[str] | None = None,
        required: Sequence[Sequence[str]] | None = None,
        documents: Sequence[Hashable] | bool = False,
        **changes: Any,
    ) -> list[Translation] | Translation:
        """Translate lines; return one translation for each, in the same order.

        If `lines` is a string, it is translated as one line, and one translation is returned.

        Args:
          options: options for all lines. None: the defaults.
          prefixes: for each line, the prefix that its translation must start with; "": none.
          required: for each line, phrases that its translation must contain (beam search only). Such a line
            is translated as a whole, even if it has several sentences.
          documents: whether a model with data.context reads each line with the preceding lines of its
            document; a blank line ends a document. Or the document id of each line; a new id ends one, too.
          changes: fields of `TranslationOptions` that override `options`, such as n_best=4, and search
            options of this call, such as beam_size=8; see `with_search`.

        Raises:
          UserError: n_best exceeds the number of hypotheses of the search, `lines` is not a sequence of
            strings, the number of prefixes, required phrases or documents differs from the number of lines, a
            line's constraints cannot be met, or `documents` are given to a model that reads each line alone.
        """
        each = [lines] if isinstance(lines, str) else lines
        columns: dict[str, Any] = {"prefixes": prefixes, "required": required, "documents": documents}
        stream = self.translate_stream(each, options, window=max(1, len(each)), **columns, **changes)
        return next(stream) if isinstance(lines, str) else list(stream)

    def translate_stream(
        self,
        lines: Iterable[str],
        options: TranslationOptions | None = None,
        *,
        prefixes: Iterable[str] | None = None,
        required: Iterable[Sequence[str]] | None = None,
        documents: Iterable[Hashable] | bool = False,
        window: int = 2048,
        is_ready: Callable[[], bool] | None = None,
        **changes: Any,
    ) -> Iterator[Translation]:
        """Translate lines in order as they arrive, `window` lines at a time to limit memory use.

        Sentences share batches within a window: a large window increases throughput, a small window reduces
        latency. The next window is read after all translations of the previous window have been consumed, or,
        if `lines` is a sequence, while the previous window is translated.

        Args:
          is_ready: called before each line except the first of a window; if it returns False, the lines
            collected so far are translated. None: windows are always full.
          changes: see `translate`.
        """
        if isinstance(lines, str):
            raise UserError("translate_stream takes lines, but got one string; call translate with it")
        if window < 1:
            raise UserError(f"window is {window}; it must be at least 1")
        names = {field.name for field in dataclasses.fields(TranslationOptions)}
        search = {name: value for name, value in changes.items() if name not in names}
        changes = {name: value for name, value in changes.items() if name in names}
        options = dataclasses.replace(options or TranslationOptions(), **changes)
        translator = self.with_search(**search) if search else self
        requests = translator._make_requests(lines, options, prefixes, required, documents)
        first = translator.engine(params=options.params)
        engine: Engine | PivotEngines = first
        if options.then is not None:
            directions = choose_pivot(
                self.config.data, options.then.config.data, options.source_language, options.target_language
            )
            engine = PivotEngines(first, options.then.with_search(**search).engine(), directions)
        run = engine.run(
            take_windows(requests, window, is_ready),
            ahead=is_ready is None and isinstance(lines, Sequence),
            warn=self.warn,
            on_progress=options.on_progress,
        )
        for translations in run:
            yield from map(drop_repeated, translations) if options.unique else translations

    def _make_requests(
        self,
        lines: Iterable[str],
        options: TranslationOptions,
        prefixes: Iterable[str] | None,
        required: Iterable[Sequence[str]] | None,
        documents: Iterable[Hashable] | bool,
    ) -> Iterator[Request]:
        """Return the requests for lines; options are checked before the first line is read."""
        columns = {"prefix": ("prefixes", prefixes), "required": ("lists of required phrases", required)}
        for what, values in columns.values():
            if isinstance(values, Sequence) and isinstance(lines, Sequence) and len(values) != len(lines):
                raise UserError(count_message(what, len(values), len(lines)))
        annotations = options.annotations._replace(markup=options.markup or options.annotations.markup)
        check_n_best(self.config.search, options.n_best)
        check_annotations(annotations, self.models)
        if required is not None:
            check_constraints(self.config.search)
        in_documents = None
        if documents is not False:
            check_context(self.config.data, "documents")
            check_lines(lines if isinstance(lines, Sequence) else ())
            ids = None if documents is True else documents
            lines = in_documents = Documents(lines, self.config.data.context, ids)
        return make_requests(
            lines,
            columns,
            documents=in_documents,
            n_best=options.n_best,
            source_language=options.source_language,
            target_language=options.target_language,
            annotations=annotations,
            glossary=None if options.glossary is None else Glossary.make(options.glossary),
        )


def load_translator(run_dir: str | Path, options: LoadOptions, warn: Warn = warn_user) -> Translator:
    """Load a run's translator; for a language model, its engine continues prefixes and scores results."""
    if options.use_all_devices:
        use_cpu_cores_as_devices()
    run_dir = open_copy(run_dir)
    config = read_config(run_dir / "config.json")
    enable_compilation_cache(compiled_dir())
    check_search(options.search or config.search, model=config.model)
    loading: dict[str, Any] = {"dtype": options.dtype, "allow_nonfinite": options.allow_nonfinite}
    loading["warn"] = warn
    trained = load_trained(
        run_dir, checkpoint=options.checkpoint, may_split=options.use_all_devices, **loading
    )
    if trained.split is None:
        trained = on_host(trained)
    return Translator(
        trained,
        options,
        ensemble=[on_host(load_named(name, **loading)) for name in options.ensemble],
        keep_programs=trained.split is None,
        warn=warn,
    )
