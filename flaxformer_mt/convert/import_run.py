"""Imports a foreign model as a run directory that can translate, be evaluated and be trained further.

Contains the order of the steps and the clean-up after a failed import. Formats are found from the files in
format_of_files.py, and by name in format_registry.py.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.config import Config
from flaxformer_mt.config.checks import validate
from flaxformer_mt.convert.export_run import TOLERANCE
from flaxformer_mt.convert.format_interface import Format, Given, Weights, fit_vocabulary
from flaxformer_mt.convert.format_of_files import find_format_name
from flaxformer_mt.convert.format_registry import find_format
from flaxformer_mt.convert.given_vocabularies import read_given_vocabs
from flaxformer_mt.convert.parity_check import Parity, measure
from flaxformer_mt.errors import UserError
from flaxformer_mt.object_store.transfers import fetch_input
from flaxformer_mt.object_store.working_copies import open_copy, publish_run
from flaxformer_mt.runs.new_run import write_new_run
from flaxformer_mt.trees import nest_leaves


def import_run(
    path: str | Path,
    *,
    format_name: str | None = None,
    run_dir: str | Path,
    config: Config | None = None,
    vocab: str | Path | None = None,
    tolerance: float = TOLERANCE,
) -> dict[str, Any]:
    """Writes a foreign model as checkpoint 0 of a new run directory; returns a summary of the import.

    Args:
      path: the folder that `export` or the foreign system wrote, or the weights file in it.
      format_name: None: found from the files.
      config: config of a model whose files do not contain one. None: read it from the files.
      vocab: for files without vocabularies: a folder with joint.model, or with source.model and target.model;
        or with joint.txt, or source.txt and target.txt, lists of words in the order of their ids; or one such
        file. None: read them from the model's folder.
      tolerance: largest accepted absolute difference of a logit between the foreign and the imported model.

    Raises:
      UserError: an unknown or export-only format, a run directory that is not empty, files that are missing,
        damaged or do not fit the config, or a difference above the tolerance. A failed import leaves no files
        behind.
    """
    path, run_dir = fetch_input(path), open_copy(run_dir)
    source = find_format(format_name or find_format_name(path))
    if source.read is None:
        raise UserError(f"format {source.name} is export-only: its files do not contain the complete model")
    if not path.exists():
        raise UserError(f"{path} does not exist; give the folder of the {source.name} model as --input=PATH")
    if run_dir.exists() and not (run_dir.is_dir() and not any(run_dir.iterdir())):
        raise UserError(f"{run_dir} exists and is not an empty folder; give another --run=DIR")
    given = Given(config, None if vocab is None else read_given_vocabs(Path(vocab).expanduser()))
    weights = source.read(path, given)
    if given.vocabs is not None:
        weights = dataclasses.replace(weights, config=fit_vocabulary(weights.config, given.vocabs))
    validate(weights.config)
    _check_finite(weights)
    parity = _measure(source, weights, path, given)
    if not parity.largest_difference <= tolerance:
        raise UserError(
            f"the imported model differs from {path} by {parity.largest_difference:.3g} in "
            f"{parity.quantity}, more than --tolerance={tolerance:g}; nothing was written"
        )
    _write_run(weights, run_dir, origin={"format": source.name, "path": str(path)})
    return {
        "format": source.name,
        "run": str(run_dir),
        "parameters": sum(leaf.size for leaf in weights.leaves.values()),
        "arrays": len(weights.leaves),
        **dataclasses.asdict(parity),
    }


def _measure(source: Format, weights: Weights, path: Path, given: Given) -> Parity:
    try:
        return measure(weights, source.open(path, given), quantity=source.quantity, read_data=False)
    except UserError:
        raise
    except Exception as error:  # another system fails at files of another origin in many ways
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"{path} cannot be opened as a {source.name} model: {type(error).__name__}: {reason}"
        ) from error


def _check_finite(weights: Weights) -> None:
    bad = [name for name, leaf in weights.leaves.items() if not np.isfinite(leaf).all()]
    if bad:
        raise UserError(f"the imported model has non-finite values in {', '.join(bad)}")


def _write_run(weights: Weights, run_dir: Path, *, origin: dict[str, str]) -> None:
    try:
        write_new_run(run_dir, weights.config, weights.vocabs, nest_leaves(weights.leaves), origin=origin)
        publish_run(run_dir)
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise
