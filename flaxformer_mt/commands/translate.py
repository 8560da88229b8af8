"""The command `translate`: sends blocks of lines to an engine or to workers, and writes the translations."""

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flaxformer_mt.commands.options import (
    CorpusOptions,
    GenerateOptions,
    ProcessOptions,
    ScoreOptions,
    SearchOptions,
    TranslateOptions,
    WorkerOptions,
    read_glossary,
    read_languages,
)
from flaxformer_mt.config import DataConfig, SearchConfig
from flaxformer_mt.config.checks import check_n_best, check_search
from flaxformer_mt.config.files import read_config, split_checkpoint
from flaxformer_mt.config.load_options import LoadOptions
from flaxformer_mt.config.schema import MbrConfig
from flaxformer_mt.errors import UserError, importing, name_full_disk
from flaxformer_mt.object_store.remote_runs import open_copy, to_url
from flaxformer_mt.text_io.lines import (
    STANDARD,
    check_output,
    count_lines,
    is_device,
    open_input,
    open_lines,
    open_output,
    take_windows,
)
from flaxformer_mt.text_io.resumable_output import ResumableOutput
from flaxformer_mt.translation.define_scorer import define_scorers

if TYPE_CHECKING:
    from flaxformer_mt.commands.output_formats import TranslationFormat
    from flaxformer_mt.corpus.documents import Documents
    from flaxformer_mt.text_io.lines import Text
    from flaxformer_mt.translation.engine import Engine
    from flaxformer_mt.translation.pivot import PivotEngines
    from flaxformer_mt.translation.requests import Request
    from flaxformer_mt.translation.result import Annotations


def choose_format(options: TranslateOptions) -> "tuple[TranslationFormat, Annotations]":
    """Return the output format of translations, and the annotations that this format needs."""
    from flaxformer_mt.commands.output_formats import TranslationFormat
    from flaxformer_mt.translation.result import Annotations

    form = TranslationFormat(
        n_best=options.n_best is not None,
        scores=options.scores,
        token_scores=options.token_scores,
        alignments=options.alignments is not None,
        json=options.json,
        unique=options.unique,
    )
    annotations = Annotations(
        token_log_probs=options.token_scores or options.json,
        alignments=options.alignments or ("words" if options.json else None),
        layer=options.alignment_layer,
        head=options.alignment_head,
        markup=options.markup,
    )
    return form, annotations


def describe_output(
    options: TranslateOptions,
    describe: Callable[[], dict[str, Any]],
    inputs: Iterable[str],
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a description that must be unchanged to resume output; `fields` are equal for all lines."""
    from flaxformer_mt.atomic_folder import digest

    glossary = fields.get("glossary")
    languages = {name: fields[name] for name in ("source_language", "target_language") if name in fields}
    form, annotations = choose_format(options)
    description = {name: value for name, value in describe().items() if name != "device_kind"}
    return {
        "run": to_url(options.run.resolve()),
        **description,
        "format": dataclasses.asdict(form),
        "annotations": annotations._asdict(),
        "n_best": options.n_best,
        "long_lines": options.long_lines,
        "invalid_utf8": options.invalid_utf8,
        "inputs": sorted(inputs),
        **({"documents": _digest(options.document_ids)} if options.documents else {}),
        **({"scorer": options.scorer} if options.rerank or options.mbr else {}),
        **languages,
        **({} if glossary is None else {"glossary": digest(astuple(glossary))}),
    }


def _digest(file: str | None) -> str:
    from flaxformer_mt.atomic_folder import digest_file

    return "" if file is None else digest_file(Path(file).expanduser())


class PlainOutput:
    """An output that cannot be resumed, with the methods of `ResumableOutput`; skips `done` input lines."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write, self.done = write, 0

    def read(self, name: str, lines: Iterable[str]) -> Iterator[str]:
        return itertools.islice(lines, self.done, None)

    def write(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._write(line)


@contextlib.contextmanager
def open_one_output(
    options: TranslateOptions, origin: Callable[[], dict[str, Any]], window: int, *, keep: bool
) -> Iterator[ResumableOutput | PlainOutput]:
    """Open the output, which only the first process writes; all processes skip the lines already done."""
    from flaxformer_mt.parallel.processes import exchange, is_first

    output: ResumableOutput | PlainOutput
    with contextlib.ExitStack() as files:
        if not is_first():
            output = PlainOutput(lambda line: None)
            output.done = int(exchange(b"")[0])
        elif options.output == STANDARD or is_device(options.output):
            output = PlainOutput(files.enter_context(open_output(options.output)))
        else:
            files.enter_context(name_full_disk(options.output))
            resumed = {"resume": options.resume, "overwrite": options.overwrite, "keep": keep}
            resumable = ResumableOutput(options.output, origin=origin(), step=window, **resumed)
            output = files.enter_context(resumable)
        if is_first():
            exchange(str(output.done).encode())
        try:
            yield output
        except BaseException:
            if isinstance(output, ResumableOutput) and output.done:
                kept = f"{output.partial} holds the output of the first {output.done:,} lines"
                print(f"{kept}; run the same command with --resume to continue", file=sys.stderr)
            raise


class TranslatedBlock(NamedTuple):
    """The output lines for each line of a block, and the total number of target tokens.

    `counts`: numbers of segments that a processing step changed, by the step's message to users.
    """

    outputs: list[list[str]]
    tokens: int
    counts: Counter[str]


# Translates blocks of lines; `ahead`: whether the next block may be read while one is translated.
TranslateBlocks = Callable[..., Iterator[TranslatedBlock]]


def translate_blocks(
    engine: "Engine | PivotEngines",
    blocks: "Iterable[list[Request]]",
    *,
    form: "TranslationFormat",
    ahead: bool = False,
    on_progress: Callable[..., object] | None = None,
) -> Iterator[TranslatedBlock]:
    """Translate the lines of blocks with an engine in this process."""
    windows, again = itertools.tee(blocks)
    counted: Counter[str] = Counter()
    for translations in engine.run(windows, ahead=ahead, on_progress=on_progress):
        outputs = [
            form.lines(request.seed - 1, request.text, translation, engine.vocabs.target.pieces)
            for request, translation in zip(next(again), translations, strict=True)
        ]
        before, counted = counted, Counter(engine.counts)
        tokens = sum(len(translation.tokens) for translation in translations)
        yield TranslatedBlock(outputs, tokens, counted - before)


def _start_worker(make_engine: "Callable[[], Engine | PivotEngines]", form: "TranslationFormat") -> Any:
    """Return a worker's function: it describes the engine, and translates a block unless given None."""
    engine = make_engine()

    def work(block: "list[Request] | None") -> tuple[dict[str, Any], TranslatedBlock | None]:
        translated = None if block is None else next(translate_blocks(engine, [block], form=form))
        return engine.describe(), translated

    return work


def _name_block(block: "list[Request] | None") -> str:
    return f"lines {block[0].seed:,} to {block[-1].seed:,}" if block else "no lines"


@contextlib.contextmanager
def _open_translator(
    options: TranslateOptions, make_engine: "Callable[[], Engine | PivotEngines]", form: "TranslationFormat"
) -> Iterator[tuple[Callable[[], dict[str, Any]], TranslateBlocks]]:
    """Yield two functions, for this process or its workers: to describe the engine, to translate blocks."""
    from flaxformer_mt.workers.worker_pool import NO_POOL, PoolOptions, open_workers

    pool = PoolOptions(options.workers, options.ray)
    if pool == NO_POOL:
        engine = make_engine()
        yield engine.describe, functools.partial(translate_blocks, engine, form=form)
        return
    with open_workers(functools.partial(_start_worker, make_engine, form), pool) as map_blocks:
        ((description, _),) = map_blocks([None], name=_name_block)

        def translate(
            blocks: "Iterable[list[Request]]", *, on_progress: Callable[..., object], ahead: bool
        ) -> Iterator[TranslatedBlock]:
            for other, block in map_blocks(blocks, name=_name_block):
                check_equal(description, other)
                on_progress(lines=len(block.outputs), tokens=block.tokens)
                yield block

        yield functools.partial(dict, description), translate


def check_equal(first: dict[str, Any], other: dict[str, Any]) -> None:
    """Raise UserError if the descriptions of two workers differ, since their results would differ."""
    for name in first | other:
        if first.get(name) != other.get(name):
            raise UserError(
                f"workers differ in {name}: {first.get(name)} in one and {other.get(name)} in another, "
                "so that their results would too; give all of them the same files, versions and devices"
            )


def _make_jax_engine(
    runs: Sequence[tuple[Path, LoadOptions]],
    languages: Mapping[str, str],
    *,
    warm_up: int,
    define: Callable[[], object],
) -> "Engine | PivotEngines":
    """Load one run, or two with a pivot language; `warm_up` is the n_best to compile functions for, or 0."""
    from flaxformer_mt.translation.pivot import PivotEngines, choose_pivot
    from flaxformer_mt.translation.translator import Translator

    define()  # the scorers, in a worker again
    translators = [Translator.load(run, loading) for run, loading in runs]
    for translator in translators if warm_up else ():
        translator.warm_up(n_best=warm_up)
    if len(runs) == 1:
        return translators[0].engine()
    first, second = translators
    names = languages.get("source_language"), languages.get("target_language")
    directions = choose_pivot(first.config.data, second.config.data, *names)
    return PivotEngines(first.engine(), second.engine(), directions)


def _translate_with_ctranslate2(options: TranslateOptions, *, keep_record: bool) -> None:
    from flaxformer_mt.convert.formats import ImportOverrides, find_config

    with importing("ctranslate2", what="--backend=ctranslate2"):
        from flaxformer_mt.convert.ctranslate2.backend import load_engine
    folder, changes = options.run.expanduser(), dict[str, Any](_find_search_changes(options))
    changes |= {"split_sentences": options.split_sentences, "capitals": options.capitals}
    make_engine = functools.partial(load_engine, folder, **changes)
    data = find_config(folder, ImportOverrides()).data if options.documents else None
    _check_flags(options)
    form, annotations = choose_format(options)
    fields = {"n_best": options.n_best or 1, "annotations": annotations}
    write_translations(options, make_engine, form, data=data, fields=fields, keep_record=keep_record)


# The search options that change nothing with CTranslate2, whatever their values; its engine refuses others.
WITHOUT_EFFECT = ("diversity_strength", "length_bound", "batch_tokens")


def _find_search_changes(options: TranslateOptions) -> dict[str, Any]:
    """Return the given search options; raise UserError for flags that CTranslate2 does not support."""
    names = ["checkpoint", *WITHOUT_EFFECT, *(field.name for field in dataclasses.fields(MbrConfig))]
    names += ["dtype", "quantization", "coordinator", "processes", "process", "workers", "ray"]
    names += ["shortlist", "glossary", "then", "source_language", "target_language"]
    given = [name for name in names if getattr(options, name) is not None]
    given += ["stopping"] if options.stopping == "exact" else []
    switches = ("ensemble", "allow_nonfinite", "distributed", "documents", "warm_up")
    given += [name for name in switches if getattr(options, name)]
    given += ["long_lines"] if options.long_lines == "cut" else []
    if given:
        raise UserError(
            f"--{given[0]} has no effect with --backend=ctranslate2, whose model folder is one model in one "
            "process, and whose search has no such option; leave it out, or give --backend=jax"
        )
    return dict(sorted(options.search_flags().items()))


def check_workers(options: WorkerOptions) -> bool:
    """Return whether worker processes translate; if so, keep this process off the accelerators."""
    if options.workers is None and options.ray is None:
        return False
    flag = "ray" if options.ray is not None else "workers"
    given = next((name for name in ProcessOptions.__dataclass_fields__ if getattr(options, name)), None)
    if given is not None:
        raise UserError(
            f"--{flag} starts workers by itself and excludes --{given}, with which several commands work "
            "together; leave one of the two out"
        )
    import jax

    jax.config.update("jax_platforms", "cpu")
    return True


# Search method -> the flags that have an effect on this method only.
_METHOD_FLAGS = {
    "beam": (
        "beam_size",
        "coverage_penalty",
        "stopping",
        "patience",
        "diversity_groups",
        "diversity_strength",
        "rerank",
        "rerank_weight",
    ),
    "sample": ("temperature", "top_k", "top_p", "min_p", "seed", "mbr_samples"),
}

# The number of lines that are read before the first is written; these lines share batches.
WINDOW = 2048


def translate_file(options: TranslateOptions, *, keep_record: bool = False) -> None:
    """Run `translate`; `keep_record`: see `ResumableOutput`."""
    from flaxformer_mt.parallel import use_cpu_cores_as_devices

    if options.backend == "ctranslate2":
        _translate_with_ctranslate2(options, keep_record=keep_record)
        return
    uses_workers = check_workers(options)
    use_cpu_cores_as_devices()  # before the number of processes is asked for, which starts JAX
    n_best = 1 if options.n_best is None else options.n_best
    every, runs = [options], []
    if options.then is not None:
        if options.alignments == "pieces":
            raise UserError("--then joins alignments of words, not --alignments=pieces; leave out pieces")
        then, checkpoint = split_checkpoint(options.then)
        own: dict[str, Any] = {"checkpoint": checkpoint, "ensemble": (), "shortlist": None}
        every.append(dataclasses.replace(options, run=open_copy(then), **own))
    for one in every:
        search = choose_search(one)
        check_n_best(search, n_best, where="--")
        # Workers of other machines make copies of their own.
        runs.append((Path(to_url(one.run)), LoadOptions.of(one, search)))
    languages = read_languages(options)
    _check_flags(options)
    _check_standard_input(options, uses_workers=uses_workers)
    form, annotations = choose_format(options)
    make_engine = functools.partial(
        _make_jax_engine,
        runs,
        languages,
        warm_up=n_best * options.warm_up,
        define=functools.partial(define_scorers, options.scorer, timeout=options.scorer_timeout),
    )
    fields = {"n_best": n_best, "annotations": annotations, "glossary": read_glossary(options), **languages}
    data = read_config(options.run / "config.json").data if options.documents else None
    write_translations(options, make_engine, form, data=data, fields=fields, keep_record=keep_record)


def write_translations(
    options: TranslateOptions,
    make_engine: "Callable[[], Engine | PivotEngines]",
    form: "TranslationFormat",
    *,
    data: DataConfig | None,
    fields: Mapping[str, Any],
    keep_record: bool,
) -> None:
    """Translate --input in blocks of lines, and write the output of the blocks in order.

    `data.context` is the number of context lines (None: no context); all requests have `fields`.
    """
    from flaxformer_mt.text_io.throughput import Throughput

    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as files:
        texts, documents = _open_texts(options, data, files)
        describe, translate = files.enter_context(_open_translator(options, make_engine, form))
        typed = options.input == STANDARD and sys.stdin.isatty()
        window = options.window or (1 if typed else WINDOW)  # typed lines are translated one by one
        origin = functools.partial(describe_output, options, describe, texts, fields)
        output = files.enter_context(open_one_output(options, origin, window, keep=keep_record))
        requests = _make_requests(texts, documents, output, fields)
        quiet, total = typed or is_on_screen(options.output), count_lines(options.input)
        summary = isinstance(output, ResumableOutput) and not keep_record
        progress = Throughput(total=total, done=output.done, quiet=quiet, summary=summary)
        files.enter_context(progress)
        is_ready = next((text.is_ready for text in texts.values() if text.is_ready), None)
        # A file has windows of fixed sizes, so that a resumed command writes the same bytes.
        blocks = take_windows(requests, window, None if isinstance(output, ResumableOutput) else is_ready)
        for block in translate(blocks, ahead=is_ready is None, on_progress=progress.add):
            counts += block.counts
            for lines_of_one in block.outputs:
                output.write(lines_of_one)
    for counted, number in counts.items():
        print(f"{counted}: {number:,}", file=sys.stderr)


def _open_texts(
    options: TranslateOptions, data: DataConfig | None, files: contextlib.ExitStack
) -> "tuple[dict[str, Text], Documents | None]":
    """Open the input, prefixes and required phrases, and return them with the input's documents, if any."""
    from flaxformer_mt.corpus.documents import Documents, check_context

    paths = {"input": options.input, "prefixes": options.prefix, "required": options.required}
    paths["document_ids"] = options.document_ids
    if data is not None:
        check_context(data, "--documents")
    texts = {
        name: files.enter_context(open_lines(path, invalid_utf8=options.invalid_utf8))
        for name, path in paths.items()
        if path is not None
    }
    check_lengths(options, ("prefix", "required", "document_ids"), "input")
    ids = texts.pop("document_ids", None)
    if data is None:
        return texts, None
    documents = Documents(texts["input"].lines, data.context, ids and ids.lines)
    texts["input"] = texts["input"]._replace(lines=iter(documents))
    return texts, documents


def _make_requests(
    texts: "Mapping[str, Text]",
    documents: "Documents | None",
    output: ResumableOutput | PlainOutput,
    fields: Mapping[str, Any],
) -> "Iterator[Request]":
    """Yield a request for each line whose output has not been written yet."""
    from flaxformer_mt.translation.requests import make_requests

    lines = {name: output.read(name, text.lines) for name, text in texts.items()}
    required = (line.split("\t") for line in lines["required"]) if "required" in lines else None
    constraints = {
        "prefix": ("lines of --prefix", lines.get("prefixes")),
        "required": ("lines of --required", required),
    }
    first_line = output.done + 1
    return make_requests(lines["input"], constraints, first_line=first_line, documents=documents, **fields)


def is_on_screen(output: str) -> bool:
    return output == STANDARD and sys.stdout.isatty()


def choose_search(options: SearchOptions | ScoreOptions | GenerateOptions) -> SearchConfig:
    """Return the search options of the run's config, overridden by the given flags."""
    stored, given = read_config(options.run / "config.json"), options.search_flags()
    search = dataclasses.replace(stored.search, **given)
    check_search(search, model=stored.model, where="--")
    for method, method_flags in _METHOD_FLAGS.items():
        for name in method_flags if method != search.method else ():
            if name in given and (name, given[name]) != ("beam_size", 1):
                raise UserError(
                    f"--{name}={given[name]} has no effect on {search.method} search; give --method={method} "
                    f"or leave out --{name}"
                )
    if "mbr_samples" in given and not search.mbr:
        raise UserError(
            f"--mbr_samples={search.mbr_samples} has no effect without --mbr; give --mbr=chrf, or leave out "
            "--mbr_samples"
        )
    return search


def _check_flags(options: TranslateOptions) -> None:
    """Raise UserError for flags that exclude each other or have no effect in combination."""
    read = (options.input, options.prefix, options.required, options.glossary)
    if read.count(STANDARD) > 1:
        raise UserError(
            "only one of --input, --prefix, --required and --glossary can be standard input; give files for "
            "the others"
        )
    if options.n_best is not None and options.token_scores and not options.json:
        raise UserError("--token_scores has no effect with --n_best; leave it out, or give --json instead")
    if options.markup and options.alignments == "pieces":
        raise UserError("--markup needs alignments of words, not --alignments=pieces; leave out pieces")
    for name, effect in (("resume", "continues an output file"), ("overwrite", "replaces an output file")):
        if getattr(options, name) and (options.output == STANDARD or is_device(options.output)):
            what = "standard output" if options.output == STANDARD else f"{options.output}, a device or pipe"
            raise UserError(f"--{name} {effect}, but the output is {what}; give --output=FILE")
    check_line_flags(options)
    if options.output != STANDARD:
        inputs = (*read, options.document_ids)
        check_output(options.output, inputs=inputs)


def check_line_flags(options: TranslateOptions | CorpusOptions) -> None:
    """Raise UserError if flags about input lines exclude each other or have no effect."""
    if options.resume and options.overwrite:
        raise UserError("--resume and --overwrite exclude each other; leave one out")
    if options.document_ids == STANDARD or (options.document_ids and not options.documents):
        problem = "cannot be standard input" if options.documents else "has no effect without --documents"
        raise UserError(
            f"--document_ids={options.document_ids} {problem}; give --documents --document_ids=FILE"
        )


def _check_standard_input(options: TranslateOptions, *, uses_workers: bool) -> None:
    from flaxformer_mt.parallel.processes import process_count

    for name in ("input", "prefix", "required", "glossary"):
        if getattr(options, name) == STANDARD and process_count() > 1:
            raise UserError(f"{process_count()} processes cannot all read standard input; give --{name}=FILE")
    for name in ("input", "output", "prefix", "required", "glossary"):
        if getattr(options, name) == STANDARD and uses_workers:
            raise UserError(f"--workers and --ray translate files; give --{name}=FILE")


def check_lengths(options: Any, flags: Sequence[str], name: str) -> None:
    """Raise UserError unless the files of all `flags` have as many lines as the file of the flag `name`."""
    num_lines = count_lines(getattr(options, name))
    for flag in flags:
        if (path := getattr(options, flag, None)) is None:
            continue
        with open_input(path, flag):
            count = count_lines(path)
        if None not in (num_lines, count) and num_lines != count:
            raise UserError(
                f"--{flag}={path} has {count} lines, but --{name}={getattr(options, name)} has {num_lines}; "
                "give one for each line"
                + (", an empty one for a line without constraint" if flag in ("prefix", "required") else "")
            )
