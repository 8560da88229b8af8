"""README.md of an export, in the form of a model card of Hugging Face's Hub.

Contains what the Hub reads, what the model was trained on, its scores, and how another system loads it.
"""

import json
from collections.abc import Mapping
from typing import Any

import flaxformer_mt
from flaxformer_mt.config import Config
from flaxformer_mt.config.directions import find_directions

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


def make_card(config: Config, facts: Mapping[str, Any], report: Mapping[str, Any] | None = None) -> str:
    """Return README.md of an export: what the Hub reads, the data, the scores, and how to load the files.

    Args:
      facts: of the export: format, checkpoint, step.
      report: the report of the run; None: it has none.
    """
    report = report or {}
    directions = find_directions(config.data)
    library, code = _LIBRARIES.get(facts["format"], ("pytorch", ""))
    names = ", ".join(one.name for one in directions)
    header = {
        "language": list(dict.fromkeys(code for one in directions for code in one if code)),
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
        f"Trained with flaxformer_mt {flaxformer_mt.__version__}; checkpoint {facts['checkpoint']}, step "
        f"{facts['step']:,}, exported as `{facts['format']}`. `config.json` has all settings.",
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
        else [f"PyTorch loads the parameters, which have the names of the classes of `{facts['format']}`."]
    )
    return "\n".join(lines) + "\n"


def _list_data(data: Mapping[str, Any]) -> list[str]:
    """Return the number of pairs of each part of the training set, as a list."""
    parts = (data.get("train") or {}).get("parts", [])
    return ["", *(f"* {part['name']}: {part['pairs']:,} training pairs" for part in parts)] if parts else []


def _list_scores(test: Mapping[str, Any]) -> list[str]:
    """Return the scores with their signatures, as a list; [] without any."""
    rows = []
    for direction, found in (test.get("directions") or {"": test}).items():
        for metric, name in (("bleu", "BLEU"), ("chrf", "chrF"), ("ter", "TER")):
            if metric in found:
                key = "signature" if metric == "bleu" else f"{metric}_signature"
                signature = found.get(key) or test.get(key, "")
                rows.append(f"* {f'{name} {direction}'.strip()}: {found[metric]:.2f}, `{signature}`")
    return rows
