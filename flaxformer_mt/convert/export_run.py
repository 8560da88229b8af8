"""Exports a run directory to a foreign format, and checks that both systems compute the same outputs."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np

from flaxformer_mt.atomic_folder import new_folder
from flaxformer_mt.convert.formats import EXPORTED, Format, Weights, find_format
from flaxformer_mt.convert.hub_store import find_hub_name, push_model
from flaxformer_mt.convert.model_cards import make_card
from flaxformer_mt.convert.parity_check import Parity, check_tolerance, measure
from flaxformer_mt.errors import UserError, name_urls, warn_user
from flaxformer_mt.object_store.remote_runs import open_copy, open_output, publish_output
from flaxformer_mt.parameter_trees import flatten_tree
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.runs.run_directory import read_report
from flaxformer_mt.runs.target_lengths import FILE_NAME as LENGTHS_FILE
from flaxformer_mt.vocab.shortlist import Shortlist

TOLERANCE = 1e-4
# The formats that can be uploaded to the Hugging Face Hub.
_ON_HUB = ("hf", "marian", "hf-pre-norm", "ctranslate2")


class ExportResult(TypedDict, total=False):
    """The result of `export_run`."""

    # Format of the exported files.
    format: str
    # Folder of the exported files.
    output: str
    # Paths of the exported files, relative to `output`.
    files: list[str]
    # Total size of the files directly in `output`, without the folder vocab/, which only `import` reads.
    bytes: int
    # Exported checkpoint.
    checkpoint: str
    # Training step of the checkpoint.
    step: int
    # Largest absolute difference between the outputs of the run and of the exported model.
    largest_difference: float
    # Largest absolute output.
    largest_output: float
    # Accepted difference: the argument `tolerance`.
    tolerance: float
    # Compared outputs: logits, log_probs or target vectors.
    quantity: str
    # Number of compared target tokens.
    target_tokens: int
    # Sentences on which the outputs were compared.
    checked_on: str
    # Number of lines on which the exported tokenizer was compared with the run's.
    lines: int
    # Number of these lines, and of language tags, whose ids differ.
    differing_lines: int
    # Name of the quantization, if any.
    quantization: str
    # Largest absolute difference between the outputs of the run and of the quantized model.
    quantized_difference: float
    # With `push`, the URL of the uploaded model.
    pushed: str


def export_run(
    run_dir: str | Path,
    *,
    format_name: str,
    output: str | Path,
    checkpoint: str | None = None,
    quantization: str = "none",
    tolerance: float = TOLERANCE,
    shortlist: str | Path | None = None,
    push: str | None = None,
) -> ExportResult:
    """Write a trained model in a foreign format, and compare its outputs with the run's.

    Args:
      checkpoint: best, last, average or a step. None: train.final_checkpoint of the run's config.
      quantization: a quantization that the format supports; the unquantized float32 model is checked first.
      shortlist: vocabulary shortlist file, for ctranslate2 and bergamot.
      tolerance: largest accepted absolute difference of logits or log-probabilities. If the largest absolute
        output exceeds 1, the tolerance is multiplied by that output.
      push: hf:OWNER/NAME, a model on the Hugging Face Hub to which the files are uploaded.

    Raises:
      UserError: an unknown format, a model that the format cannot express, an output folder that is not
        empty, or a difference above the tolerance. A failed export leaves no files; if only the upload
        fails, the folder stays.
    """
    check_tolerance(tolerance)
    run_dir, output = open_copy(run_dir), open_output(output, empty=True)
    if output.is_symlink():
        output = output.resolve()  # the finished folder is renamed, and must not replace the link
    target = find_format(format_name, EXPORTED)
    hub_name = None if push is None else _find_hub_name(push, format_name)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"{output} exists and is not an empty folder; delete it or give another --output=DIR")
    weights = load_weights(run_dir, checkpoint=checkpoint)
    check_expressible(target, weights, quantization)
    rules = None if shortlist is None else _read_shortlist(shortlist, target, weights)
    if lost := target.lost_options(weights.config.search):
        warn_user(
            f"the files of format {target.name} do not carry {' and '.join(lost)}; its translations differ "
            "unless you give that system options to the same effect"
        )
    with new_folder(output) as partial:
        result: dict[str, Any] = {"format": target.name, "output": name_urls(str(output))}
        result |= _describe(weights, write_checked(target, weights, partial, tolerance), tolerance)
        result |= target.compare_ids(weights, partial)
        if quantization != "none":
            shutil.rmtree(partial)
            partial.mkdir()
            quantized = _write(target, weights, partial, quantization)
            result |= {"quantization": quantization, "quantized_difference": quantized.largest_difference}
        if (run_dir / LENGTHS_FILE).is_file():
            shutil.copyfile(run_dir / LENGTHS_FILE, partial / LENGTHS_FILE)
        if rules is not None and target.write_shortlist is not None:
            target.write_shortlist(rules, partial)
        card = make_card(weights.config, result, read_report(run_dir), weights.vocabs)
        (partial / "README.md").write_text(card, encoding="utf-8")
    if hub_name is not None:
        result["pushed"] = push_model(output, hub_name)
    result["files"] = sorted(str(p.relative_to(output)) for p in output.rglob("*") if p.is_file())
    result["bytes"] = sum(p.stat().st_size for p in output.iterdir() if p.is_file())
    publish_output(output)
    return cast(ExportResult, result)


def _find_hub_name(push: str, format_name: str) -> str:
    name = find_hub_name(push)
    if name is None or format_name not in _ON_HUB:
        raise UserError(
            f"--push is {push} with --format={format_name}; give hf:OWNER/NAME, and one of the formats "
            f"{', '.join(_ON_HUB)}"
        )
    return name


def _describe(weights: Weights, parity: Parity, tolerance: float) -> dict[str, Any]:
    return {
        "checkpoint": weights.checkpoint,
        "step": weights.step,
        "largest_difference": parity.largest_difference,
        "largest_output": parity.largest_output,
        "tolerance": tolerance,
        "quantity": parity.quantity,
        "target_tokens": parity.tokens,
        "checked_on": parity.checked_on,
    }


def _read_shortlist(path: str | Path, target: Format, weights: Weights) -> Shortlist:
    if target.write_shortlist is None:
        raise UserError(
            f"the format {target.name} has no file for --shortlist={path}; leave --shortlist out, or "
            "give --format=ctranslate2 or bergamot"
        )
    return Shortlist.read(path, weights.vocabs)


def load_weights(
    run_dir: Path, *, checkpoint: str | None = None, warn: Callable[[str], None] = warn_user
) -> Weights:
    trained = load_trained(run_dir, checkpoint=checkpoint, warn=warn)
    leaves = {path: np.asarray(leaf, np.float32) for path, leaf in flatten_tree(trained.params).items()}
    step = int(trained.progress.get("step", 0))
    # scan_layers is not a property of the exported model; training after an import chooses it again.
    model = dataclasses.replace(trained.config.model, scan_layers="auto")
    config = dataclasses.replace(trained.config, model=model)
    return Weights(config, trained.vocabs, leaves, trained.checkpoint, step)


def check_expressible(target: Format, weights: Weights, quantization: str) -> None:
    problems = target.problems(weights.config) + target.more_problems(weights)
    lines = [f"{target.name} cannot express this model: {line}" for line in problems]
    if quantization not in target.quantizations:
        lines.append(
            f"{target.name} has no --quantization={quantization}; it has: {', '.join(target.quantizations)}"
        )
    if lines:
        raise UserError("\n".join(lines))


def write_checked(target: Format, weights: Weights, folder: Path, tolerance: float) -> Parity:
    """Write an unquantized model into an empty folder; raise UserError if the parity check fails."""
    parity = _write(target, weights, folder, "none")
    if not parity.is_within(tolerance):
        raise UserError(
            f"the {target.name} model differs from the Flax model by {parity.largest_difference:.3g} in "
            f"{parity.quantity}, more than --tolerance={tolerance:g}; nothing was written. This is a bug of "
            "the converter unless weights have non-finite values: report it with the run's config.json"
        )
    return parity


def _write(target: Format, weights: Weights, folder: Path, quantization: str) -> Parity:
    assert target.write is not None and target.open is not None
    target.write(weights, folder, quantization)
    return measure(weights, target.open(folder), quantity=target.quantity)
