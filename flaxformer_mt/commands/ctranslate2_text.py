"""Translation of a file by CTranslate2, resumable like that of the command `translate`."""

import hashlib
import itertools
import sys
from collections.abc import Hashable, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flaxformer_mt
from flaxformer_mt.commands.corpus_options import BacktranslateOptions
from flaxformer_mt.commands.options import SearchOptions
from flaxformer_mt.commands.translate_and_score import WINDOW
from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.schema import MbrConfig
from flaxformer_mt.errors import UserError, importing, name_full_disk
from flaxformer_mt.processor import core_count
from flaxformer_mt.text_io.lines import count_lines, open_input, partial_of, read_lines
from flaxformer_mt.text_io.resumable_output import open_resumable
from flaxformer_mt.text_io.throughput import Throughput
from flaxformer_mt.translation.annotation import NO_NOTES
from flaxformer_mt.translation.language_tags import LineTags, choose_line_tags

if TYPE_CHECKING:
    from flaxformer_mt.convert.ctranslate2.live_batches import LiveBatches

# The search options that change nothing there, whatever their values; `LiveBatches` refuses values of others.
_WITHOUT_EFFECT = ("coverage_layer", "diversity_strength", "length_bound", "ensemble_mean", "batch_tokens")


def translate_with_ctranslate2(options: BacktranslateOptions, output: Path) -> None:
    """Translate --input by the model folder --run, line by line, and keep the record of the output.

    Raises:
      UserError: CTranslate2 is not installed, the folder is no model of its format, or a flag has no effect.
    """
    with importing("ctranslate2", what="--backend=ctranslate2"):
        from flaxformer_mt.convert.ctranslate2.live_batches import LiveBatches
    changes = _search_changes(options)
    run = options.run.expanduser()
    batches = LiveBatches(run, split_sentences=options.split_sentences, **changes)
    threads = core_count()
    window = WINDOW if options.window is None else options.window
    origin = {
        "folder": str(run.resolve()),
        "model": _digest(run / "model.bin"),
        "config": _digest(run / "config.json"),
        "search": changes,
        "split_sentences": options.split_sentences,
        "invalid_utf8": options.invalid_utf8,
        "threads": threads,
        "versions": {"flaxformer_mt": flaxformer_mt.__version__, "ctranslate2": version("ctranslate2")},
    }
    resume = options.resume and (output.exists() or partial_of(output).exists())
    with (
        open_input(options.input) as stream,
        name_full_disk(output),
        open_resumable(
            str(output), origin=origin, step=window, resume=resume, overwrite=options.overwrite, keep=True
        ) as resumable,
    ):
        batches.seed(resumable.done)
        found = read_lines(stream, name=options.input, invalid_utf8=options.invalid_utf8)
        lines = resumable.read("input", found)
        total = count_lines(options.input)
        with Throughput(total=total, done=resumable.done, quiet=not sys.stderr.isatty()) as progress:
            while chunk := list(itertools.islice(lines, window)):
                for text in _translate_window(batches, chunk):
                    resumable.write([text])
                progress.add(lines=len(chunk), tokens=0)


def _translate_window(batches: "LiveBatches", lines: Sequence[str]) -> list[str]:
    """Return the translation of each line; sentences of similar lengths share a batch."""
    data = batches.config.data
    # Lines for models with tags of this package's own style bring their tags along.
    tags = LineTags("") if data.tag_style == "opus" else choose_line_tags(data)
    added = tags.find(lines)
    for number in sorted(range(len(lines)), key=lambda number: len(lines[number])):
        own = added[number] if added else ""
        batches.submit(number, lines[number], n_best=1, notes=NO_NOTES, tags=own, lead=tags.lead)
    texts: dict[Hashable, str] = {}
    while len(batches):
        texts |= {number: batches.finish(found).text for number, found in batches.advance()}
    return [texts[number] for number in range(len(lines))]


def _search_changes(options: BacktranslateOptions) -> dict[str, Any]:
    """Return the search options that are given. Raises UserError for flags that CTranslate2 does not have."""
    shared = {field.name for field in fields(SearchOptions)} & {field.name for field in fields(SearchConfig)}
    names = ["checkpoint", *_WITHOUT_EFFECT, *(field.name for field in fields(MbrConfig))]
    names += ["dtype", "quantization", "coordinator", "processes", "process", "workers", "ray"]
    given = [name for name in names if getattr(options, name) is not None]
    given += ["stopping"] if options.stopping == "exact" else []
    given += [name for name in ("ensemble", "allow_nonfinite", "distributed") if getattr(options, name)]
    if given:
        raise UserError(
            f"--{given[0]} has no effect with --backend=ctranslate2, whose model folder is one model in one "
            "process, and whose search has no such option; leave it out, or give --backend=jax"
        )
    return {name: value for name in sorted(shared) if (value := getattr(options, name)) is not None}


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
