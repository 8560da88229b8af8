"""Translation of a file by CTranslate2, resumable like that of the command `translate`."""

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flaxformer_mt
from flaxformer_mt.commands.options import SearchOptions, TranslateOptions
from flaxformer_mt.commands.translate import Block, TranslatedBlock, write_translations
from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.schema import MbrConfig
from flaxformer_mt.cpu import core_count
from flaxformer_mt.errors import UserError, importing
from flaxformer_mt.translation.annotation import NO_NOTES
from flaxformer_mt.translation.language_tags import LineTags, choose_line_tags
from flaxformer_mt.translation.result import Translation
from flaxformer_mt.translation.segmentation import SplitSentences
from flaxformer_mt.workers.worker_pool import carry

# The search options that change nothing there, whatever their values; `LiveBatches` refuses values of others.
_WITHOUT_EFFECT = ("coverage_layer", "diversity_strength", "length_bound", "ensemble_mean", "batch_tokens")


def translate_with_ctranslate2(options: TranslateOptions) -> None:
    """Translate --input by the model folder --run, line by line, and keep the record of the output.

    Raises:
      UserError: CTranslate2 is not installed, the folder is no model of its format, or a flag has no effect.
    """
    work = _Batches(options.run.expanduser(), options.split_sentences, _search_changes(options))
    write_translations(options, carry(work), languages={}, keep_record=True)


class _Batches:
    """Translates blocks by CTranslate2; see `BlockTranslator`."""

    def __init__(self, folder: Path, split_sentences: SplitSentences, changes: dict[str, Any]) -> None:
        with importing("ctranslate2", what="--backend=ctranslate2"):
            from flaxformer_mt.convert.ctranslate2.live_batches import LiveBatches
        self._batches = LiveBatches(folder, split_sentences=split_sentences, **changes)
        data = self._batches.config.data
        # Lines for models with tags of this package's own style bring their tags along.
        self._tags = LineTags("") if data.tag_style == "opus" else choose_line_tags(data)
        self._folder = folder
        self._options = {"search": changes, "split_sentences": split_sentences}

    def describe(self) -> dict[str, Any]:
        return {
            "model": _digest(self._folder / "model.bin"),
            "config": _digest(self._folder / "config.json"),
            **self._options,
            "threads": core_count(),
            "versions": {"flaxformer_mt": flaxformer_mt.__version__, "ctranslate2": version("ctranslate2")},
        }

    def watch(self, count: Callable[..., object]) -> None:
        self._count = count

    def __call__(self, block: Block) -> TranslatedBlock:
        """Translate the lines of a block; sentences of similar lengths share a batch."""
        lines, batches = block.lines, self._batches
        batches.seed(block.first_line - 1)
        added = self._tags.find(lines)
        for number in sorted(range(len(lines)), key=lambda number: len(lines[number])):
            own = added[number] if added else ""
            batches.submit(number, lines[number], n_best=1, notes=NO_NOTES, tags=own, lead=self._tags.lead)
        found: dict[Hashable, Translation] = {}
        while len(batches):
            for name, line in batches.advance():
                found[name] = batches.finish(line)
                self._count(lines=1, tokens=len(found[name].tokens))
        tokens = sum(len(translation.tokens) for translation in found.values())
        return TranslatedBlock([[found[number].text] for number in range(len(lines))], tokens)


def _search_changes(options: TranslateOptions) -> dict[str, Any]:
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
