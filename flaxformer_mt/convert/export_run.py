"""From a run directory to files of another system, checked against ours before they count.

Row 13 of the data path. Owns the order of an export and that nothing is left behind by one that fails. Knows
no format: `formats` has them by name.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.convert.format_interface import Format, Weights
from flaxformer_mt.convert.format_registry import find_format
from flaxformer_mt.convert.parity_check import Parity, measure
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.trees import flatten_tree

TOLERANCE = 1e-4


def export_run(
    run_dir: Path,
    *,
    format_name: str,
    output: Path,
    checkpoint: str | None = None,
    quantization: str = "none",
    tolerance: float = TOLERANCE,
    warn: Callable[[str], None],
) -> dict[str, Any]:
    """Writes a trained model in a foreign format, and returns what was written and how well it agrees.

    Args:
      checkpoint: best, last, average or a step. None: as the run's config says.
      quantization: of formats that have it; float32 parity is checked first, without it.
      tolerance: the largest difference of a logit (or log-probability) that counts as equal.

    Raises:
      UserError: no such format, a model that the format cannot express, files in the way, or a difference
        above the tolerance; then nothing is left behind.
    """
    target = find_format(format_name)
    check_output(output)
    weights = load_weights(run_dir, checkpoint=checkpoint, warn=warn)
    check_expressible(target, weights, quantization)
    partial = output.with_name(f"{output.name}.partial")
    try:
        parity = write_checked(target, weights, partial, tolerance)
        result: dict[str, Any] = {
            "format": target.name,
            "output": str(output),
            "checkpoint": weights.checkpoint,
            "step": weights.step,
            "largest_difference": parity.largest_difference,
            "tolerance": tolerance,
            "quantity": parity.quantity,
            "target_tokens": parity.tokens,
            "checked_on": parity.checked_on,
        }
        if quantization != "none":
            _clear(partial)
            target.write(weights, partial, quantization)
            rounded = measure(weights, target.open(partial), quantity=target.quantity)
            result |= {"quantization": quantization, "quantized_difference": rounded.largest_difference}
        if output.is_dir():
            output.rmdir()  # empty, as check_output has seen
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    result["files"] = sorted(str(p.relative_to(output)) for p in output.rglob("*") if p.is_file())
    return result


def load_weights(run_dir: Path, *, checkpoint: str | None, warn: Callable[[str], None]) -> Weights:
    """The parameters of a run's checkpoint, on the host."""
    trained = load_trained(run_dir, checkpoint=checkpoint, warn=warn)
    leaves = {path: np.asarray(leaf, np.float32) for path, leaf in flatten_tree(trained.params).items()}
    step = int(trained.progress.get("step", 0))
    return Weights(trained.config, trained.vocabs, leaves, trained.checkpoint, step)


def check_expressible(target: Format, weights: Weights, quantization: str) -> None:
    """Raises UserError with every reason why the format cannot hold this model."""
    problems = target.problems(weights.config)
    if problems:
        raise UserError("\n".join(f"{target.name} cannot express this model: {line}" for line in problems))
    if quantization not in target.quantizations:
        raise UserError(
            f"--quantization={quantization} is not one of {target.name}'s: {', '.join(target.quantizations)}"
        )


def write_checked(target: Format, weights: Weights, folder: Path, tolerance: float) -> Parity:
    """Writes the format into a folder, replacing it, and compares; raises UserError above the tolerance."""
    _clear(folder)
    target.write(weights, folder, "none")
    parity = measure(weights, target.open(folder), quantity=target.quantity)
    if not parity.largest_difference <= tolerance:
        raise UserError(
            f"the {target.name} model differs from ours by {parity.largest_difference:.3g} in its "
            f"{parity.quantity}, more than --tolerance={tolerance:g}; nothing was written. This is a defect "
            "of the converter unless the weights are not finite: please report the run's config.json"
        )
    return parity


def check_output(output: Path) -> None:
    """Raises UserError if something is where the files should go."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"{output} exists and is not an empty folder; give another --output=DIR or delete it")


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; give another --output=DIR") from error
