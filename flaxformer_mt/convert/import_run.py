"""From files of another system to a run directory that translates, is evaluated, and can be trained further.

Owns the order of an import and that nothing is left behind by one that fails. Knows no format: `formats` has
them by name.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.config import Config
from flaxformer_mt.config.checks import validate
from flaxformer_mt.convert.export_run import TOLERANCE
from flaxformer_mt.convert.format_interface import Given, Weights
from flaxformer_mt.convert.format_registry import find_format
from flaxformer_mt.convert.parity_check import measure
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.run_directory import IMPORTED_STEP, open_run
from flaxformer_mt.trees import nest_leaves
from flaxformer_mt.vocab import load_vocabs


def import_run(
    path: Path,
    *,
    format_name: str,
    run_dir: Path,
    config: Config | None = None,
    vocab: Path | None = None,
    tolerance: float = TOLERANCE,
) -> dict[str, Any]:
    """Makes a run directory of a foreign model, as checkpoint 0, and returns what was read.

    Args:
      path: the folder that `export` or the foreign system wrote, or the file in it.
      config: of a model whose files do not tell. None: they do.
      vocab: a folder with joint.model, or source.model and target.model, where the files hold none.
      tolerance: the largest difference of a logit from the foreign system's that counts as equal.

    Raises:
      UserError: no such format, or one that is for export only; a directory in the way; files that are
        missing, damaged, or not of the config's model; a difference above the tolerance. Then nothing is
        left behind.
    """
    source = find_format(format_name)
    if source.read is None:
        raise UserError(f"format {format_name} is for export only: its files do not hold all of a model")
    if not path.exists():
        raise UserError(f"{path} does not exist; give the folder of the {format_name} model as --input=PATH")
    if run_dir.exists() and not (run_dir.is_dir() and not any(run_dir.iterdir())):
        raise UserError(f"{run_dir} exists and is not an empty folder; give another --run=DIR")
    weights = source.read(path, Given(config, None if vocab is None else load_vocabs(vocab)))
    validate(weights.config)
    _check_finite(weights)
    folder = path if path.is_dir() else path.parent
    parity = None
    if config is None and vocab is None:  # what was given beside the files is not in them for others to read
        parity = measure(weights, source.open(folder), quantity=source.quantity)
        if not parity.largest_difference <= tolerance:
            raise UserError(
                f"the imported model differs from {path} by {parity.largest_difference:.3g} in its "
                f"{parity.quantity}, more than --tolerance={tolerance:g}; nothing was written"
            )
    _write_run(weights, run_dir, origin={"format": source.name, "path": str(path)})
    return {
        "format": source.name,
        "run": str(run_dir),
        "parameters": sum(leaf.size for leaf in weights.leaves.values()),
        "arrays": len(weights.leaves),
        **({} if parity is None else dataclasses.asdict(parity)),
    }


def _check_finite(weights: Weights) -> None:
    bad = [name for name, leaf in weights.leaves.items() if not np.isfinite(leaf).all()]
    if bad:
        raise UserError(f"the model holds numbers that are not finite, in {', '.join(bad)}")


def _write_run(weights: Weights, run_dir: Path, *, origin: dict[str, str]) -> None:
    try:
        open_run(run_dir, weights.config)
        weights.vocabs.save(run_dir / "vocab")
        checkpoints = Checkpoints(run_dir, best_metric=weights.config.train.best_metric)
        progress = {"step": IMPORTED_STEP, "imported_from": origin}
        checkpoints.save(IMPORTED_STEP, {"params": nest_leaves(weights.leaves)}, progress)
        checkpoints.wait()
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise
