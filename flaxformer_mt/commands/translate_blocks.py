"""The work of `translate` on one block of lines, in this process or in a worker: lines to output lines.

Contains the blocks, which are read in the process that writes the output, and the checks of the flags of
workers. A translation does not depend on the block that its line is in; samples depend on the line's number,
which a block therefore has.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flaxformer_mt.commands.experiment_options import ProcessOptions, WorkerOptions
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.lines import take_window

if TYPE_CHECKING:
    from flaxformer_mt.translation.output_formats import TranslationFormat


class Block(NamedTuple):
    """Lines that are translated together, and what constrains the translation of each."""

    # The number of the first line, counted from 1.
    first_line: int
    lines: list[str]
    # Prefixes and required phrases, by the names of these parameters in `translate_stream`.
    constraints: dict[str, list[Any]]

    def name(self) -> str:
        """Return what messages call it."""
        return f"lines {self.first_line:,} to {self.first_line + len(self.lines) - 1:,}"


class TranslatedBlock(NamedTuple):
    """The output lines of each line of a block, and the number of target tokens in all of them."""

    outputs: list[list[str]]
    tokens: int


def read_blocks(
    lines: Iterator[str],
    constraints: Mapping[str, Iterator[Any]],
    size: int,
    *,
    first_line: int,
    is_ready: Callable[[], bool] | None,
) -> Iterator[Block]:
    """Yield blocks of `size` lines; of fewer at the end, and where the next line is not ready.

    Raises:
      UserError: a line cannot be read, and those before have been yielded; or there are more constraints of
        one kind than lines. Too few are found when the block is translated.
    """
    problems: list[UserError] = []

    def read() -> Iterator[str]:
        try:
            yield from lines
        except UserError as problem:
            problems.append(problem)

    readable = read()
    while chunk := take_window(readable, size, is_ready):
        own = {name: list(itertools.islice(each, len(chunk))) for name, each in constraints.items()}
        yield Block(first_line, chunk, own)
        first_line += len(chunk)
    if problems:
        raise problems[0]
    for name, each in constraints.items():
        if next(each, None) is not None:
            raise UserError(f"--{name} has more than the {first_line - 1} lines; give one for each line")


class BlockTranslator:
    """Translates blocks by a model that it loads; what it is made of can be sent to another process."""

    def __init__(
        self,
        warn: Callable[[str], None],
        *,
        run: Path,
        load: Mapping[str, Any],
        call: Mapping[str, Any],
        warm_up: bool,
        form: "TranslationFormat",
    ) -> None:
        """Load the model.

        Args:
          warn: receives warnings.
          run: path of the run, or its URL, which other machines read too.
          load: the other arguments of `Translator.load`.
          call: the arguments of `translate_stream` that are the same for all blocks, n_best among them.
          form: of the output lines.
        """
        from flaxformer_mt.translation.translator import Translator

        self.translator = Translator.load(run, **load, warn=warn)
        self._form, self._call = form, call
        if warm_up:
            self.translator.warm_up(n_best=call["n_best"])

    def describe(self) -> dict[str, Any]:
        """Return what translations depend on besides the options of the command."""
        import jax

        import flaxformer_mt
        from flaxformer_mt.parallel import default_device_kind, local_device_count
        from flaxformer_mt.parallel.processes import process_count

        return {
            **self.translator.describe(),
            # Devices share batches, so that another number of devices rounds differently.
            "devices": [process_count(), local_device_count()],
            "device_kind": default_device_kind(),
            # Other versions may compute, round or split lines otherwise.
            "versions": {"flaxformer_mt": flaxformer_mt.__version__, "jax": jax.__version__},
        }

    def watch(self, count: Callable[..., object]) -> None:
        """From now on call `count` with the numbers of `lines` and `tokens` of each batch that is found."""
        self.translator.on_found = count

    def __call__(self, block: Block) -> TranslatedBlock:
        """Translate the lines of a block."""
        first_line, lines, constraints = block
        translations = self.translator.translate_stream(
            lines, window=len(lines), first_line=first_line, **{**self._call, **constraints}
        )
        outputs, tokens = [], 0
        for number, (line, translation) in enumerate(
            zip(lines, translations, strict=True), start=first_line - 1
        ):
            outputs.append(self._form.lines(number, line, translation, self.translator.pieces))
            tokens += len(translation.tokens)
        return TranslatedBlock(outputs, tokens)


def check_workers(options: WorkerOptions) -> bool:
    """Return whether workers translate; then this process leaves the accelerators to them.

    Raises:
      UserError: --workers or --ray excludes another flag.
    """
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
