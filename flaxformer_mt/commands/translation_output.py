"""The output of `translate`: its format, and a file that can be resumed, or a stream that cannot.

Contains the options that must be equal to resume an output file.
"""

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flaxformer_mt.commands.options import TranslateOptions
from flaxformer_mt.errors import name_full_disk
from flaxformer_mt.object_store.working_copies import to_url
from flaxformer_mt.text_io.lines import STANDARD, is_device, open_output
from flaxformer_mt.text_io.resumable_output import ResumableOutput, open_resumable

if TYPE_CHECKING:
    from flaxformer_mt.translation.annotation import Notes
    from flaxformer_mt.translation.output_formats import TranslationFormat


def choose_format(options: TranslateOptions) -> "tuple[TranslationFormat, Notes]":
    """Return the output format of each translation, and the annotations that the format needs."""
    from flaxformer_mt.translation.annotation import Notes
    from flaxformer_mt.translation.output_formats import TranslationFormat

    form = TranslationFormat(
        n_best=options.n_best is not None,
        scores=options.scores,
        token_scores=options.token_scores,
        alignments=options.alignments is not None,
        json=options.json,
    )
    notes = Notes(
        token_log_probs=options.token_scores or options.json,
        alignments=options.alignments or ("words" if options.json else None),
        layer=options.alignment_layer,
        head=options.alignment_head,
        markup=options.markup,
    )
    return form, notes


def describe_output(
    options: TranslateOptions,
    describe: Callable[[], dict[str, Any]],
    inputs: Iterable[str],
    languages: Mapping[str, str],
) -> dict[str, Any]:
    """Return the options that must be equal to resume an output file, as JSON values.

    Args:
      describe: returns what translations depend on besides the options.
      inputs: the names of the inputs in the record.
      languages: those of the flags.
    """
    form, notes = choose_format(options)
    description = {name: value for name, value in describe().items() if name != "device_kind"}
    return {
        "run": to_url(options.run.resolve()),
        **description,
        "format": dataclasses.asdict(form),
        "notes": notes._asdict(),
        "n_best": options.n_best,
        "long_lines": options.long_lines,
        "invalid_utf8": options.invalid_utf8,
        "inputs": sorted(inputs),
        # Only if given, so that commands of earlier versions can be resumed.
        **({"unique": True} if options.unique else {}),
        **languages,
    }


class PlainOutput:
    """An output with the methods of `ResumableOutput` but without a record; starts after `done` lines."""

    def __init__(self, write: Callable[[str], object], done: int = 0) -> None:
        self._write, self.done = write, done

    def read(self, name: str, lines: Iterable[str]) -> Iterator[str]:
        """Return the lines after those that are done."""
        return itertools.islice(lines, self.done, None)

    def write(self, lines: Iterable[str]) -> None:
        """Write lines, one after the other."""
        for line in lines:
            self._write(line)


@contextlib.contextmanager
def open_one_output(
    options: TranslateOptions, origin: Callable[[], dict[str, Any]], window: int, *, keep: bool
) -> Iterator[ResumableOutput | PlainOutput]:
    """Return the output; of several processes, only the first one writes it, and all start after the same
    line.

    Args:
      origin: returns what must be equal to resume a file; called only where one is written.
      window: the number of lines between two records.
      keep: see `open_resumable`.
    """
    from flaxformer_mt.parallel.processes import exchange, is_first

    output: ResumableOutput | PlainOutput
    with contextlib.ExitStack() as files:
        if not is_first():
            output = PlainOutput(lambda line: None, done=int(exchange(b"")[0]))
        elif options.output == STANDARD or is_device(options.output):
            output = PlainOutput(files.enter_context(open_output(options.output)))
        else:
            files.enter_context(name_full_disk(options.output))
            resumed = {"resume": options.resume, "overwrite": options.overwrite, "keep": keep}
            resumable = open_resumable(options.output, origin=origin(), step=window, **resumed)
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
