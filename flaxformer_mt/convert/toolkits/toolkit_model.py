"""What the importers of other toolkits share: checks of options, the config of a model, and its parameters.

These formats are read only: the toolkits train in their own files, and need none of this package.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flaxformer_mt.config import Config, DataConfig, ModelConfig
from flaxformer_mt.convert.foreign_limits import check_fields, check_network
from flaxformer_mt.convert.format_interface import Given, Weights, fit_vocabulary, shapes_of, size_fields
from flaxformer_mt.convert.huggingface.bart_fields import make_data_config
from flaxformer_mt.convert.name_table import Constant, Rule, Table
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocabs

# Kinds and bounds of options, by what they count.
COUNT = (int, 1, 1000)
WIDTH = (int, 1, 1 << 16)
FFN_WIDTH = (int, 1, 1 << 20)
LENGTH = (int, 1, 1 << 20)
RATE = (float, 0, 0.999)
EPSILON = (float, 0, 1)

_SHOWN = 60


class Languages(NamedTuple):
    """The languages of a model; None where its files do not say them."""

    source: str | None = None
    target: str | None = None


def refuse_given(given: Given, folder: Path) -> None:
    """Raise UserError if a config or vocabularies are given for files that have their own."""
    if given != Given():
        raise UserError(
            f"{folder} describes its network and its vocabulary itself; leave out --config and --vocab"
        )


def find_file(path: Path, patterns: Sequence[str], *, what: str, without: str = "/") -> Path:
    """Return a file of a model: `path` itself, or the one in the folder that fits the first fitting pattern.

    Args:
      what: what the file has, for messages.
      without: the end of names that do not fit.

    Raises:
      UserError: no file fits, or several files fit the same pattern.
    """
    if path.is_file():
        return path
    for pattern in patterns:
        found = sorted(file for file in path.glob(pattern) if not file.name.endswith(without))
        if len(found) > 1:
            names = ", ".join(file.name for file in found[:5])
            raise UserError(
                f"{path} has several files with {what}: {names}; give one of them as --input=FILE"
            )
        if found:
            return found[0]
    raise UserError(f"{path} has no file {' or '.join(patterns)} with {what}; give the model's folder")


def check_options(
    options: Mapping[str, Any],
    path: Path,
    *,
    required: Iterable[str],
    numbers: Mapping[str, tuple[type, float, float]],
    supported: Mapping[str, tuple[Any, ...]],
    equal: Iterable[tuple[str, str]] = (),
) -> None:
    """Check the options of a network.

    Args:
      required: options that must be there, and not None.
      numbers: kind and bounds of options that are numbers; None is accepted.
      supported: accepted values of options; one that is absent or None is accepted.
      equal: pairs of options that must have the same value.

    Raises:
      UserError: one line for each option that is absent, or has a value that this package cannot express.
    """
    if missing := [name for name in required if options.get(name) is None]:
        raise UserError(f"{path} lacks {', '.join(missing)}; give the file of a complete Transformer model")
    check_fields(dict(options), dict(numbers), path)
    problems = [
        f"{name} is {str(options[name])[:_SHOWN]!r}; supported: {', '.join(map(repr, values))}"
        for name, values in supported.items()
        if options.get(name) is not None and not any(_is_same(options[name], value) for value in values)
    ]
    problems += [
        f"{one} is {options.get(one)} and {other} is {options.get(other)}; they must be equal"
        for one, other in equal
        if options.get(one) != options.get(other)
    ]
    if problems:
        lines = "\n".join(f"{path}: {problem}" for problem in problems)
        raise UserError(f"{lines}\nother models are not imported: train one with the supported values")


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; numbers of different types are, but for truth values."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def make_weights(
    network: ModelConfig,
    vocabs: Vocabs,
    tensors: Mapping[str, Any],
    rules: Iterable[Rule | Constant],
    *,
    path: Path,
    what: str,
    tied: Sequence[str] = (),
    languages: Languages = Languages(),  # noqa: B008
) -> Weights:
    """Return the parameters of a model, with a config for it.

    Args:
      tensors: by the names of `rules`; each has a shape, and becomes a numpy array when it is read.
      path: the file of the tensors.
      what: the name of the format.
      tied: names that a file may omit because another name holds the same array.

    Raises:
      UserError: the network is larger than the file, or arrays are missing, unexpected or of a wrong shape.
    """
    names = {
        "source_language": languages.source or DataConfig.source_language,
        "target_language": languages.target or DataConfig.target_language,
    }
    data = make_data_config(network.longest_input, **names)
    config = fit_vocabulary(Config(data=data, model=network), vocabs)
    check_network(config, path.parent)
    shapes = shapes_of(network, source_size=vocabs.source.size, target_size=vocabs.target.size)
    table = Table(shapes, rules, what=what)
    leaves = table.to_flax(tensors, tied=tied, origin=str(path), sizes=size_fields(config, vocabs))
    return Weights(config, vocabs, leaves)
