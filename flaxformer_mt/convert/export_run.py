"""Exports a run directory to a foreign format, and verifies that both systems compute the same outputs.

Also writes README.md of an export, the model card of Hugging Face's Hub.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np

import flaxformer_mt
from flaxformer_mt.atomic_folder import new_folder
from flaxformer_mt.config import Config
from flaxformer_mt.config.directions import choose_tags, choose_target_tag, find_directions
from flaxformer_mt.convert.formats import EXPORTED, Format, Weights, find_format
from flaxformer_mt.convert.hub_store import find_hub_name, push_model
from flaxformer_mt.convert.parity_check import Parity, check_tolerance, measure
from flaxformer_mt.errors import UserError, name_urls, warn_user
from flaxformer_mt.object_store.remote_runs import open_copy, open_output, publish_output
from flaxformer_mt.runs.load_run import load_trained, name_checkpoint
from flaxformer_mt.runs.run_directory import IMPORTED_STEP, read_report
from flaxformer_mt.runs.target_lengths import FILE_NAME as LENGTHS_FILE
from flaxformer_mt.trees import flatten_tree
from flaxformer_mt.vocab import PretrainedVocab, Vocabs
from flaxformer_mt.vocab.shortlist import Shortlist

# Formats of transformers: for models with a vocabulary of this package, and for those of the Hub.
_TRANSFORMERS = ("hf", "marian", "hf-pre-norm")

_HF = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("."{source_language})
model = AutoModelForSeq2SeqLM.from_pretrained(".")
batch = tokenizer([{text}], return_tensors="pt", padding=True)
{first}found = model.generate(**batch{forced}{limit}){rest}
print(tokenizer.batch_decode(found, skip_special_tokens=True))"""

_CTRANSLATE2 = """\
import ctranslate2
import sentencepiece

pieces = sentencepiece.SentencePieceProcessor(model_file="source.spm")
translator = ctranslate2.Translator(".")
result = translator.translate_batch([pieces.encode({text}, out_type=str)], beam_size=4{limit})
target = sentencepiece.SentencePieceProcessor(model_file="target.spm")
print(target.decode(result[0].hypotheses[0]))"""

# The names of pieces are those of the file, as some tokenizers of transformers spell them in another way.
_CTRANSLATE2_OF_HUB = """\
import json
from pathlib import Path

import ctranslate2
from transformers import AutoTokenizer

names = json.loads(Path("shared_vocabulary.json").read_text(encoding="utf-8"))
tokenizer = AutoTokenizer.from_pretrained("vocab/tokenizer"{source_language})
translator = ctranslate2.Translator(".")
ids = tokenizer({text}).input_ids[:-1]  # CTranslate2 adds the end symbol itself
{cut}result = translator.translate_batch([[names[number] for number in ids]], beam_size=4{prefix}{limit})
ids = [names.index(name) for name in result[0].hypotheses[0]{rest}]
{restore}print(tokenizer.decode(ids, skip_special_tokens=True))"""

_TORCH = """\
import torch
from modeling import Transformer

model = Transformer.load(".")
print({call})  # of ids of pieces"""

_STATE_DICT = """\
import torch

state = torch.load("{file}", weights_only=True)
print({{name: tuple(array.shape) for name, array in state.items()}})"""


_PYMARIAN = """\
import pymarian

translator = pymarian.Translator("--config decoder.yml --cpu-threads 1")
print(translator.translate([{text}]))"""

# Of a page beside the files, with the npm package.
_BERGAMOT = """\
<script type="module">
import {{BatchTranslator}} from "./node_modules/@browsermt/bergamot-translator/translator.js";

const translator = new BatchTranslator({{registryUrl: "registry.json", pivotLanguage: null}});
const [{{from, to}}] = await translator.backing.registry;
const {{target}} = await translator.translate({{from, to, text: {text}}});
document.body.append(target.text);
</script>"""

_MARIAN = {"marian-npz": _PYMARIAN, "bergamot": _BERGAMOT}
TOLERANCE = 1e-4
# The most tokens of a translation by a card: CTranslate2's default, where transformers' is 20.
_CARD_LENGTH = 256
# The formats whose folders are models on Hugging Face's Hub.
_ON_HUB = ("hf", "marian", "hf-pre-norm", "ctranslate2")


def _write_code(config: Config, format_name: str, vocabs: Vocabs | None) -> str:
    """Return code that loads an export and translates a sentence in the first direction of the model."""
    direction = find_directions(config.data)[0]
    vocab = vocabs.target if vocabs is not None else None
    text = " ".join([*choose_tags(config.data, direction), "A sentence."])
    if format_name == "torch":
        if not config.data.source_language:
            return _TORCH.format(call="model(torch.zeros((1, 0), dtype=torch.long), torch.tensor([[1]]))")
        ids = [5, 6, 7, 2] if vocabs is None else vocabs.source.tokenize(text)
        return _TORCH.format(call=f"model.greedy(torch.tensor([{ids}]), max_length=20)")
    if format_name in _MARIAN:
        return _MARIAN[format_name].format(text=json.dumps(text))
    if format_name not in (*_TRANSFORMERS, "ctranslate2"):
        return _STATE_DICT.format(file="target.pt" if format_name == "embeddings" else "state_dict.pt")
    names = "source_language first forced rest prefix cut restore limit"
    values = dict.fromkeys(names.split(), "")
    option = "max_decoding_length" if format_name == "ctranslate2" else "max_length"
    if format_name == "ctranslate2" or isinstance(vocab, PretrainedVocab):  # others: generation_config.json
        values["limit"] = f", {option}={min(config.model.longest_input or _CARD_LENGTH, _CARD_LENGTH)}"
    if not isinstance(vocab, PretrainedVocab):
        code = _CTRANSLATE2 if format_name == "ctranslate2" else _HF
        return code.format(text=json.dumps(text), **values)
    if tag := choose_target_tag(config.data, direction):  # the tokenizer puts the tag of the source
        (source,) = choose_tags(config.data, direction)
        text = "A sentence."
        values["source_language"] = f', src_lang="{source.strip("_")}"'
        values["first"] = f'first = tokenizer.convert_tokens_to_ids("{tag}")\n'
        values["forced"], values["prefix"] = ", forced_bos_token_id=first", f', target_prefix=[["{tag}"]]'
        values["rest"] = "[1:]" if format_name == "ctranslate2" else "[:, 2:]"  # without the tag
    if vocab.metadata.kept is not None:
        values["cut"] = (
            'kept = json.loads(Path("vocab/pretrained.json").read_text(encoding="utf-8"))["kept"]\n'
            f"ids = [kept.index(number) if number in kept else {vocab.unk_id} for number in ids]\n"
        )
        values["restore"] = "ids = [kept[number] for number in ids]\n"
    code = _CTRANSLATE2_OF_HUB if format_name == "ctranslate2" else _HF
    return code.format(text=json.dumps(text), **values)


def make_card(
    config: Config,
    export: Mapping[str, Any],
    report: Mapping[str, Any] | None = None,
    vocabs: Vocabs | None = None,
) -> str:
    report, name = report or {}, export["format"]
    directions = find_directions(config.data)
    library = {
        **dict.fromkeys(_TRANSFORMERS, "transformers"),
        "ctranslate2": "ctranslate2",
        **dict.fromkeys(_MARIAN, "marian"),
    }.get(name, "pytorch")
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
        *_list_data(config, report.get("data") or {}, step=export["step"]),
    ]
    if scores:
        search = f"{report['test'].get('method')} search, beam {report['test'].get('beam_size')}"
        tested = name_checkpoint(str(report["test"].get("checkpoint")), report["test"].get("step"))
        which = f"Test set, checkpoint {tested}, {search}."
        lines += ["", "## Scores", "", which, "", *scores]
    lines += ["", "## How to load it", ""]
    if name not in (*_TRANSFORMERS, "ctranslate2", "torch", *_MARIAN):
        lines += [f"The parameters have the names of the classes of `{name}`.", ""]
    lines += ["```html" if name == "bergamot" else "```python", _write_code(config, name, vocabs), "```"]
    return "\n".join(lines) + "\n"


def _list_data(config: Config, data: Mapping[str, Any], *, step: int) -> list[str]:
    if step == IMPORTED_STEP:
        return ["None: these are the parameters that training starts from."]
    parts = (data.get("train") or {}).get("parts", [])
    lines = [f"* {part['name']}: {part['pairs']:,} training pairs" for part in parts]
    return [f"`{config.data.dataset}`", *([""] if lines else []), *lines]


def _list_scores(test: Mapping[str, Any]) -> list[str]:
    rows = []
    for direction, scores in (test.get("directions") or {"": test}).items():
        for metric, name in (("bleu", "BLEU"), ("chrf", "chrF"), ("ter", "TER")):
            if scores.get(metric) is not None:
                key = "signature" if metric == "bleu" else f"{metric}_signature"
                signature = scores.get(key) or test.get(key, "")
                rows.append(f"* {f'{name} {direction}'.strip()}: {scores[metric]:.2f}, `{signature}`")
    return rows


class ExportResult(TypedDict, total=False):
    """What `export_run` returns."""

    # Format of the exported files, their folder (`output`) and their names.
    format: str
    output: str
    files: list[str]
    # Checkpoint that was exported; `step` is its update.
    checkpoint: str
    step: int
    # Largest absolute difference from the outputs of the run. `largest_output` is the largest output,
    # `tolerance` the accepted difference.
    largest_difference: float
    largest_output: float
    tolerance: float
    # What was compared (logits or log-probabilities), on how many tokens (`target_tokens`), and of which
    # sentences (`checked_on`).
    quantity: str
    target_tokens: int
    checked_on: str
    # Name of the quantization, if any; `quantized_difference` is the largest difference of the quantized
    # model.
    quantization: str
    quantized_difference: float
    # With `push`, the address of the uploaded model.
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
    warn: Callable[[str], None] = warn_user,
) -> ExportResult:
    """Write a trained model in a foreign format; return its files and the difference from the run's outputs.

    Args:
      checkpoint: best, last, average or a step. None: train.final_checkpoint of the run's config.
      quantization: one of the quantizations of the format; the unquantized float32 model is checked first.
      shortlist: file of the pieces that may translate each source piece, for ctranslate2 and bergamot.
      tolerance: largest accepted absolute difference of logits or log-probabilities. If the largest of them
        exceeds 1, the tolerance is multiplied by it.
      push: hf:OWNER/NAME, a model of Hugging Face's Hub, to which the files are uploaded.

    Raises:
      UserError: an unknown format, a model that the format cannot express, an output folder that is not
        empty, or a difference above the tolerance. A failed export leaves no files behind.
    """
    check_tolerance(tolerance)
    run_dir, output = open_copy(run_dir), open_output(output, empty=True)
    if output.is_symlink():
        output = output.resolve()  # the finished folder is renamed, and must not replace the link
    target, hub_name = find_format(format_name, EXPORTED), None if push is None else find_hub_name(push)
    if push is not None and (hub_name is None or format_name not in _ON_HUB):
        raise UserError(
            f"--push is {push} with --format={format_name}; give hf:OWNER/NAME, and one of the formats "
            f"{', '.join(_ON_HUB)}"
        )
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"{output} exists and is not an empty folder; delete it or give another --output=DIR")
    weights = load_weights(run_dir, checkpoint=checkpoint, warn=warn)
    check_expressible(target, weights, quantization)
    if shortlist is not None and target.write_shortlist is None:
        raise UserError(
            f"the format {target.name} has no file for --shortlist={shortlist}; leave --shortlist out, or "
            "give --format=ctranslate2 or bergamot"
        )
    rules = None if shortlist is None else Shortlist.read(shortlist, weights.vocabs)
    if lost := target.lost_options(weights.config.search):
        warn(
            f"the files of format {target.name} do not carry {' and '.join(lost)}; its translations differ "
            "unless you give that system options to the same effect"
        )
    with new_folder(output) as partial:
        parity = write_checked(target, weights, partial, tolerance)
        result: dict[str, Any] = {"format": target.name, "output": name_urls(str(output))} | _describe(
            weights, parity, tolerance
        )
        if quantization != "none":
            shutil.rmtree(partial)
            partial.mkdir()
            target.write(weights, partial, quantization)
            assert target.open is not None
            quantized = measure(weights, target.open(partial), quantity=target.quantity)
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
    publish_output(output)
    return cast(ExportResult, result)


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


def load_weights(run_dir: Path, *, checkpoint: str | None, warn: Callable[[str], None]) -> Weights:
    trained = load_trained(run_dir, checkpoint=checkpoint, warn=warn)
    leaves = {path: np.asarray(leaf, np.float32) for path, leaf in flatten_tree(trained.params).items()}
    step = int(trained.progress.get("step", 0))
    # The layout of these parameters is no wish of the run: who trains an import of them chooses anew.
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
    """Write the format into an empty folder, and compare the outputs of both systems."""
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
