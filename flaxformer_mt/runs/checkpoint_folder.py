"""The folder of one checkpoint, as one process writes it, or seals it once all processes have written."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from flaxformer_mt.runs import array_files, atomic_folder
from flaxformer_mt.trees import Leaves, Specs, make_specs


def write_checkpoint(final: Path, trees: dict[str, Leaves], progress: dict[str, Any]) -> None:
    """Write host arrays as the checkpoint `final`, which appears when it is complete."""
    folder = atomic_folder.begin_folder(final)
    for name, leaves in trees.items():
        if filled := without_empty(leaves):
            array_files.write_item(folder / name, filled)
    specs = {name: make_specs(leaves) for name, leaves in trees.items()}
    seal_checkpoint(folder, specs, progress)
    atomic_folder.publish_folder(final)


def seal_checkpoint(
    folder: Path,
    specs: dict[str, Specs],
    progress: dict[str, Any],
    written: Mapping[str, atomic_folder.FileDigest] = MappingProxyType({}),
) -> None:
    """Write the manifest into a folder that has all arrays.

    Args:
      specs: dtypes and shapes of all arrays, by the name of their tree.
      progress: JSON values.
      written: files that another process has flushed, with what it has written.
    """
    atomic_folder.seal_folder(folder, {"trees": specs, "progress": progress}, written=written)


def without_empty(leaves: Leaves) -> Leaves:
    """Orbax stores neither empty arrays nor empty trees; the manifest describes them completely."""
    return {path: leaf for path, leaf in leaves.items() if np.size(leaf)}
