"""Exports a run directory to a foreign format, and verifies that both systems compute the same outputs.

Row 13 of the data path. Also writes README.md of an export, the model card of Hugging Face's Hub.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import flaxformer_mt
from flaxformer_mt.config import Config
from flaxformer_mt.config.directions import find_directions
from flaxformer_mt.convert.formats import Format, Weights, find_format
from flaxformer_mt.convert.hub_store import find_hub_name, push_model
from flaxformer_mt.convert.parity_check import Parity, check_tolerance, measure
from flaxformer_mt.errors import UserError, name_urls, warn_user
from flaxformer_mt.object_store.working_copies import open_copy, open_output, publish_output
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.runs.run_directory import read_report
from flaxformer_mt.trees import flatten_tree
from flaxformer_mt.vocab.shortlist import Shortlist

_TRANSFORMERS = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForSeq2SeqLM.from_pretrained(".")
batch = tokenizer(["A sentence."], return_tensors="pt", padding=True)
print(tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True))"""

_CTRANSLATE2 = """\
import ctranslate2
import sentencepiece

pieces = sentencepiece.SentencePieceProcessor(model_file="source.spm")
translator = ctranslate2.Translator(".")
result = translator.translate_batch([pieces.encode("A sentence.", out_type=str)], beam_size=4)
target = sentencepiece.SentencePieceProcessor(model_file="target.spm")
print(target.decode(result[0].hypotheses[0]))"""

_TORCH = """\
import torch
from modeling import Transformer

model = Transformer.load(".")
print(model.greedy(torch.tensor([[5, 6, 7, 2]]), max_length=20))  # ids of pieces, and the end symbol"""

# Format -> the library that opens its folder, and how.
_LIBRARIES = {
    **dict.fromkeys(("hf", "marian", "hf-pre-norm"), ("transformers", _TRANSFORMERS)),
    "ctranslate2": ("ctranslate2", _CTRANSLATE2),
    "torch": ("pytorch", _TORCH),
}


def make_card(config: Config, export: Mapping[str, Any], report: Mapping[str, Any] | None = None) -> str:
    report = report or {}
    directions = find_directions(config.data)
    library, code = _LIBRARIES.get(export["format"], ("pytorch", ""))
    names = ", ".join(direction.name for direction in directions)
    header = {
        "language": list(dict.fromkeys(code for direction in directions for code in direction if code)),
        "library_name": library,
        "pipeline_tag": "translation" if config.data.source_language else "text-generation",
        "tags": ["translation" if config.data.source_language else "language-model", "flaxformer_mt"],
    }
    scores = _list_scores(report.get("test") or {})
    if scores:
        header["metrics"] = ["bleu", "chrf"]
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in header.items()), "---", ""]
    lines += [f"# Translation, {names}" if config.data.source_language else f"# Language model, {names}", ""]
    lines += [
        f"Trained with flaxformer_mt {flaxformer_mt.__version__}; checkpoint {export['checkpoint']}, step "
        f"{export['step']:,}, exported as `{export['format']}`. `config.json` has all settings.",
        "",
        "## Data",
        "",
        f"`{config.data.dataset}`",
        *_list_data(report.get("data") or {}),
    ]
    if scores:
        search = f"{report['test']['method']} search, beam {report['test']['beam_size']}"
        which = f"Test set, checkpoint {report['test']['checkpoint']}, {search}."
        lines += ["", "## Scores", "", which, "", *scores]
    lines += ["", "## How to load it", ""]
    lines += (
        ["```python", code, "```"]
        if code
        else [f"PyTorch loads the parameters, which have the names of the classes of `{export['format']}`."]
    )
    return "\n".join(lines) + "\n"


def _list_data(data: Mapping[str, Any]) -> list[str]:
    parts = (data.get("train") or {}).get("parts", [])
    return ["", *(f"* {part['name']}: {part['pairs']:,} training pairs" for part in parts)] if parts else []


def _list_scores(test: Mapping[str, Any]) -> list[str]:
    rows = []
    for direction, scores in (test.get("directions") or {"": test}).items():
        for metric, name in (("bleu", "BLEU"), ("chrf", "chrF"), ("ter", "TER")):
            if metric in scores:
                key = "signature" if metric == "bleu" else f"{metric}_signature"
                signature = scores.get(key) or test.get(key, "")
                rows.append(f"* {f'{name} {direction}'.strip()}: {scores[metric]:.2f}, `{signature}`")
    return rows


TOLERANCE = 1e-4
# The formats whose folders are models on Hugging Face's Hub.
_ON_HUB = ("hf", "marian", "hf-pre-norm", "ctranslate2")


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
    warn: Callable[[str], None] = warn_user,
) -> dict[str, Any]:
    """Write a trained model in a foreign format; return the written files and the measured difference.

    Args:
      checkpoint: best, last, average or a step. None: train.final_checkpoint of the run's config.
      quantization: one of the quantizations of the format; the unquantized float32 model is checked first.
      shortlist: file of the pieces that may translate each source piece, for format ctranslate2.
      tolerance: largest accepted absolute difference of a logit (or log-probability), where these are up to
        1; in proportion where they are larger.
      push: hf:OWNER/NAME, a model of Hugging Face's Hub, to which the files are uploaded.

    Raises:
      UserError: an unknown format, a model that the format cannot express, an output folder that is not
        empty, or a difference above the tolerance. A failed export leaves no files behind.
    """
    check_tolerance(tolerance)
    run_dir, output = open_copy(run_dir), open_output(output, empty=True)
    if output.is_symlink():
        output = output.resolve()  # the finished folder is renamed, and must not replace the link
    target, hub_name = find_format(format_name), None if push is None else find_hub_name(push)
    if push is not None and (hub_name is None or format_name not in _ON_HUB):
        raise UserError(
            f"--push is {push} with --format={format_name}; give hf:OWNER/NAME, and one of the formats "
            f"{', '.join(_ON_HUB)}"
        )
    check_output(output)
    weights = load_weights(run_dir, checkpoint=checkpoint, warn=warn)
    check_expressible(target, weights, quantization)
    rules = _read_shortlist(shortlist, target, weights)
    if lost := target.lost_options(weights.config.search):
        warn(
            f"the files of format {target.name} do not carry {' and '.join(lost)}; its translations differ "
            "unless you give that system options to the same effect"
        )
    partial = output.with_name(f"{output.name}.partial")
    try:
        parity = write_checked(target, weights, partial, tolerance)
        result: dict[str, Any] = {"format": target.name, "output": name_urls(str(output))} | _describe(
            weights, parity, tolerance
        )
        if quantization != "none":
            _clear(partial)
            target.write(weights, partial, quantization)
            assert target.open is not None
            quantized = measure(weights, target.open(partial), quantity=target.quantity)
            result |= {"quantization": quantization, "quantized_difference": quantized.largest_difference}
        if rules is not None:
            rules.write(partial / str(target.shortlist_name))
        card = make_card(weights.config, result, read_report(run_dir))
        (partial / "README.md").write_text(card, encoding="utf-8")
        if output.is_dir():
            output.rmdir()  # check_output has verified that the folder is empty
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if hub_name is not None:
        result["pushed"] = push_model(output, hub_name)
    result["files"] = sorted(str(p.relative_to(output)) for p in output.rglob("*") if p.is_file())
    publish_output(output)
    return result


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


def _read_shortlist(path: str | Path | None, target: Format, weights: Weights) -> Shortlist | None:
    if path is not None and target.shortlist_name is None:
        raise UserError(
            f"the format {target.name} has no file for --shortlist={path}; leave --shortlist out, or give "
            "--format=ctranslate2"
        )
    return None if path is None else Shortlist.read(path, weights.vocabs)


def load_weights(run_dir: Path, *, checkpoint: str | None, warn: Callable[[str], None]) -> Weights:
    trained = load_trained(run_dir, checkpoint=checkpoint, warn=warn)
    leaves = {path: np.asarray(leaf, np.float32) for path, leaf in flatten_tree(trained.params).items()}
    step = int(trained.progress.get("step", 0))
    # The layout of these parameters is no wish of the run: who trains an import of them chooses anew.
    model = dataclasses.replace(trained.config.model, scan_layers="auto")
    config = dataclasses.replace(trained.config, model=model)
    return Weights(config, trained.vocabs, leaves, trained.checkpoint, step)


def check_expressible(target: Format, weights: Weights, quantization: str) -> None:
    problems = target.problems(weights.config)
    if problems:
        raise UserError("\n".join(f"{target.name} cannot express this model: {line}" for line in problems))
    if quantization not in target.quantizations:
        raise UserError(
            f"{target.name} has no --quantization={quantization}; it has: {', '.join(target.quantizations)}"
        )


def write_checked(target: Format, weights: Weights, folder: Path, tolerance: float) -> Parity:
    """Write the format into a folder, replacing its contents, and compare the outputs of both systems."""
    _clear(folder)
    target.write(weights, folder, "none")
    assert target.open is not None
    parity = measure(weights, target.open(folder), quantity=target.quantity)
    if not parity.is_within(tolerance):
        raise UserError(
            f"the {target.name} model differs from the Flax model by {parity.largest_difference:.3g} in "
            f"{parity.quantity}, more than --tolerance={tolerance:g}; nothing was written. This is a bug of "
            "the converter unless weights have non-finite values: report it with the run's config.json"
        )
    return parity


def check_output(output: Path) -> None:
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"{output} exists and is not an empty folder; delete it or give another --output=DIR")


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; give another --output=DIR") from error
