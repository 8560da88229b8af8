"""Flags whose values are URLs of an object store: the command sees local paths, and knows of no store."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flaxformer_mt.commands.conversion_options import ExportOptions
from flaxformer_mt.commands.options import PlotOptions
from flaxformer_mt.errors import find_url, local_path
from flaxformer_mt.object_store.transfers import fetch_input, open_output, publish_output
from flaxformer_mt.object_store.working_copies import open_copy

# Flags that name a file or a folder to read.
_INPUTS = ("input", "prefix", "required", "source", "reference", "target", "vocab")


def expand_path(name: str, path: Path) -> Path:
    """Return the path of a flag with its ~ expanded, which shells leave in --run=~/x; a run as a local
    folder.

    Raises:
      UserError: it is in an object store, but must not be, or cannot be read.
    """
    if name == "run":
        return open_copy(path)
    # Inputs and outputs are known when the command runs.
    return path if find_url(path) and name in (*_INPUTS, "output") else local_path(path)


def run_locally(run: Callable[[Any], object], options: Any) -> object:
    """Run a command with local copies of its inputs; upload an output that goes to a store at the end."""
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    # A sentence, not a file; and a folder that must be empty, of which `export_run` takes care.
    others = {PlotOptions: "source", ExportOptions: "output"}.get(type(options))
    names = [
        name
        for name in (*_INPUTS, "output")
        if name != others and isinstance(given.get(name), str | Path) and find_url(given[name])
    ]
    if not names:
        return run(options)
    paths = {name: (open_output if name == "output" else fetch_input)(given[name]) for name in names}
    changes = {name: str(path) if isinstance(given[name], str) else path for name, path in paths.items()}
    result = run(dataclasses.replace(options, **changes))
    if "output" in paths:
        from flaxformer_mt.parallel.processes import is_first

        if is_first():
            publish_output(paths["output"])
    return result
