"""Marian (C++) as a peer of both benchmarks, through `pymarian` in a Python environment of its own.

    python -m venv ENV && ENV/bin/pip install pymarian     # 600 MB
    PYTHONPATH=. python benchmarks/train.py --systems=ours,marian-cpp --marian_python=ENV/bin/python ...

Marian makes its own batches of about as many target tokens, of the same sentences, and reads text: ids are
written as words. It has no bfloat16 on CPUs.
"""

import atexit
import json
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flaxformer_mt.config import Config
from flaxformer_mt.shapes import Batch

NAME = "marian-cpp"
_TRAIN = "import sys, pymarian; pymarian.Trainer(sys.argv[1]).train()"
# Answers each line, a JSON list of sentences, with a line of their translations.
_TRANSLATE = """
import json, os, sys, pymarian
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
translator = pymarian.Translator(sys.argv[1])
for line in sys.stdin:
    print(json.dumps(translator.translate(json.loads(line))), file=answers, flush=True)
"""
_VERSION = "import pymarian; print(pymarian.__version__)"
_CONVERT = "import sys, _pymarian; _pymarian.main(['convert', *sys.argv[1:]])"
# "Cost 8.1 * 2,327 @ 2,327": of an update, and its target tokens.
_UPDATE = re.compile(r"Cost ([\d.]+) \* [\d,]+ @ ([\d,]+) ")


def find_version(python: str) -> dict[str, str]:
    """Return the version of pymarian, as facts of a system."""
    found = subprocess.run([python, "-c", _VERSION], text=True, stdout=subprocess.PIPE, check=True)
    return {"pymarian": found.stdout.strip()}


def start(python: str, code: str, *arguments: str, **pipes: Any) -> subprocess.Popen:
    """Run code in Marian's environment."""
    process = subprocess.Popen([python, "-c", code, *arguments], text=True, **pipes)
    atexit.register(stop, process)
    return process


def stop(process: subprocess.Popen) -> None:
    """Kill the process, close its pipes, and wait for its end."""
    with process:
        process.kill()


def make_trainer(config: Config, batches: Sequence[Batch], task: dict[str, Any]) -> Callable[..., Any]:
    """Start a training of the sentences of these batches, which is stopped between the turns.

    Returns a function that runs updates of as many tokens as the chosen batches have or a few more; it
    returns the last loss, and how many tokens there were.
    """
    folder = Path(task["batches"]["bucket"]).parent / NAME
    folder.mkdir()
    for side, name in (("source", "source"), ("target", "target_out")):
        lines = [
            " ".join(f"w{number}" for number in row[real][:-1])
            for batch in batches
            for row, real in zip(getattr(batch, name), getattr(batch, f"{side}_mask"), strict=True)
            if real.any()
        ]
        (folder / f"train.{side}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ["</s>", "<unk>", *(f"w{number}" for number in range(2, task["vocabulary"]))]
    vocabulary = "".join(f'"{word}": {number}\n' for number, word in enumerate(words))
    (folder / "vocab.yml").write_text(vocabulary, encoding="utf-8")
    model, optim = config.model, config.optim
    options = {
        "type": "transformer",
        "train-sets": f"{folder}/train.source {folder}/train.target",
        "vocabs": f"{folder}/vocab.yml {folder}/vocab.yml",
        "dim-vocabs": f"{task['vocabulary']} {task['vocabulary']}",
        "model": f"{folder}/model.npz",
        "enc-depth": model.num_encoder_layers,
        "dec-depth": model.num_decoder_layers,
        "dim-emb": model.model_dim,
        "transformer-dim-ffn": model.ffn_dim,
        "transformer-heads": model.num_heads,
        "tied-embeddings-all": "true",
        **dict.fromkeys(("transformer-dropout", "transformer-dropout-attention"), model.dropout_rate),
        "transformer-dropout-ffn": model.dropout_rate,
        "label-smoothing": config.train.label_smoothing,
        "optimizer": "adam",
        "learn-rate": optim.learning_rate,
        "clip-norm": 0,
        "mini-batch-words": config.data.batch_tokens,
        "mini-batch": 1000,
        "disp-freq": 1,
        "save-freq": 1_000_000,
        "cpu-threads": task["threads"],
        "workspace": 2000,
        "max-length": 1000,
    }
    flags = " ".join(f"--{name} {value}" for name, value in options.items())
    process = start(task["marian_python"], _TRAIN, flags, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def train(chosen: list[int]) -> tuple[float, int]:
        wanted, seen, loss = sum(int(batches[number].target_mask.sum()) for number in chosen), 0, 0.0
        process.send_signal(signal.SIGCONT)
        log = ""
        while seen < wanted:
            line = process.stderr.readline()
            log += line
            if not line:
                raise SystemExit(f"Marian ended with status {process.wait()}:\n{log}")
            if match := _UPDATE.search(line):
                loss, seen = float(match[1]), seen + int(match[2].replace(",", ""))
        process.send_signal(signal.SIGSTOP)
        return loss, seen

    return train


def make_translator(
    task: dict[str, Any], pieces: Sequence[list[str]]
) -> dict[str, Callable[..., list[list[str]]]]:
    """Start a translator for each precision; return functions from all sentences to pieces.

    It gets all sentences at once, and makes batches of 64 of similar length.
    """
    folder, python = Path(task["folder"]) / NAME, task["marian_python"]
    text = json.dumps([" ".join(one) for one in pieces]) + "\n"

    def make(precision: str) -> Callable[..., list[list[str]]]:
        model = folder / "model.npz"
        if precision == "int8":
            stored, model = model, folder / "model.bin"
            start(
                python,
                _CONVERT,
                f"--from={stored}",
                f"--to={model}",
                "--gemm-type=intgemm8",
                stderr=subprocess.DEVNULL,
            ).wait()
        flags = f"--config {folder}/decoder.yml --models {model} --beam-size {task['beam_size']} --quiet"
        flags += " --no-spm-encode --no-spm-decode --mini-batch 64 --maxi-batch 1000 --maxi-batch-sort src"
        flags += f" --cpu-threads {task['threads']} --workspace 500"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = start(python, _TRANSLATE, flags, **pipes)

        def translate() -> list[list[str]]:
            process.stdin.write(text)
            process.stdin.flush()
            return [line.split() for line in json.loads(process.stdout.readline())]

        return translate

    return {f"batches of 64, {one}": make(one) for one in ("float32", "int8") if one in task["precisions"]}
