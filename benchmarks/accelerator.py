"""What one accelerator does in five minutes, beside the last record of such a device.

    # Needs another machine: with a GPU; and data of others: Multi30k in DIR
    PYTHONPATH=. python benchmarks/accelerator.py --text_dir=DIR

Parts, of which `--parts=big,sentence` selects some; each runs in processes of its own:

* `big`: updates of Transformer-big in bfloat16, without and with attention dropout: target tokens a second,
  share of the peak rate, and seconds until two updates have been made (benchmarks/train.py).
* `multi30k`: the recipe in bfloat16 on packed batches, by the command: seconds, and cased BLEU on the test.
* `sentences`: 20,000 lines translated by that model: seconds of the first call of a process, and lines a
  second of the best of the next two.
* `sentence`: one line translated by the command: seconds.

Prints one JSON object: `device`, `versions`, `figures`, and `stored`, the last figures of a device of this
kind in benchmarks/records/accelerator.jsonl, to which `--record` adds those of this run. A table of both goes
to standard error. `--tiny` runs all parts on small models in a minute, on any device.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flaxformer_mt.evaluation.tables import Table, write_text

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "records" / "accelerator.jsonl"
SENTENCES = 20_000
# What makes the toy recipe train in seconds.
_TINY = (
    "train.steps=20",
    "train.evaluate_every=20",
    "model.model_dim=16",
    "model.num_heads=2",
    "model.ffn_dim=32",
)

Figures = dict[str, float]


def measure_big(options: argparse.Namespace) -> Figures:
    """Train Transformer-big with both kinds of attention."""
    figures = {}
    script = [sys.executable, str(ROOT / "benchmarks" / "train.py"), "--setting=big", "--systems=ours"]
    script += [f"--device={options.device}", f"--text_dir={options.text_dir}", *["--tiny"] * options.tiny]
    for name, rate in (("big", 0.0), ("big with attention dropout", 0.1)):
        command = [*script, f"--attention_dropout_rate={rate}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        measured = json.loads(done.stdout)["systems"]["ours"]
        figures |= {
            f"{name}: target tokens a second": measured["target_tokens_per_second"],
            f"{name}: seconds until two updates": round(measured["compile_seconds"], 1),
        }
        if "utilization" in measured:
            figures[f"{name}: MFU"] = measured["utilization"]
    return figures


def measure_multi30k(options: argparse.Namespace) -> Figures:
    """Train the recipe into the run that the other parts translate with."""
    recipe = "toy_de_en" if options.tiny else "multi30k_de_en"
    changes = [f"data.text_dir={options.text_dir}", "data.batching=pack", "model.dtype=bfloat16"]
    changes = [*_TINY] if options.tiny else changes
    flags = [f"--config={recipe}", f"--run={options.run}", *(f"--config.{change}" for change in changes)]
    seconds = _time([sys.executable, str(ROOT / "train.py"), *flags])
    report = json.loads((options.run / "report.json").read_text(encoding="utf-8"))
    return {"multi30k: seconds": seconds, "multi30k: cased BLEU": round(report["test"]["bleu"], 2)}


def measure_sentences(options: argparse.Namespace) -> Figures:
    """Translate the lines three times in a new process."""
    command = [sys.executable, __file__, f"--run={options.run}", "--worker"]
    done = subprocess.run(
        command, input="\n".join(_read_lines(options)), text=True, stdout=subprocess.PIPE, check=True
    )
    first, *others = json.loads(done.stdout)["seconds"]
    rate = SENTENCES if not options.tiny else len(_read_lines(options))
    return {
        "20,000 sentences: seconds of the first call": round(first, 1),
        "20,000 sentences: sentences a second": round(rate / min(others)),
    }


def measure_sentence(options: argparse.Namespace) -> Figures:
    """Translate one line by the command, twice; the programs of the first time are kept."""
    command = [sys.executable, "-m", "flaxformer_mt", "translate", f"--run={options.run}"]
    line = _read_lines(options)[0]
    return {f"one sentence: seconds, {name}": _time(command, text=line) for name in ("first time", "again")}


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "big": measure_big,
    "multi30k": measure_multi30k,
    "sentences": measure_sentences,
    "sentence": measure_sentence,
}


def _time(command: list[str], text: str = "") -> float:
    begin = time.perf_counter()
    subprocess.run(command, input=text, text=True, stdout=subprocess.DEVNULL, check=True, cwd=ROOT)
    return round(time.perf_counter() - begin, 1)


def _read_lines(options: argparse.Namespace) -> list[str]:
    if options.tiny:
        return ["ein Satz", "noch ein Satz"]
    lines = (Path(options.text_dir) / "train.de").read_text(encoding="utf-8").split("\n")
    return [line for line in lines if line.strip()][:SENTENCES]


def translate_three_times(run: Path, lines: list[str]) -> list[float]:
    """Return the seconds that each of three translations of the lines takes in this process."""
    from flaxformer_mt import Translator

    translator, seconds = Translator.load(run), []
    for _ in range(3):
        begin = time.perf_counter()
        translator(lines)
        seconds.append(time.perf_counter() - begin)
    return seconds


def describe_device() -> dict[str, Any]:
    """Return the kind of the first device and the versions of what computes on it."""
    code = (  # in a process of its own, which frees the device
        "import jax, jaxlib, json; device = jax.devices()[0]; "
        "versions = {'jax': jax.__version__, 'jaxlib': jaxlib.__version__, "
        "'platform': device.client.platform_version}; "
        "print(json.dumps({'device': device.device_kind, 'versions': versions}))"
    )
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


def find_record(device: str, records: Path = RECORDS) -> dict[str, Any] | None:
    """Return the last record of a kind of device."""
    lines = records.read_text(encoding="utf-8").split("\n") if records.exists() else []
    found = [record for line in lines if line and (record := json.loads(line))["device"] == device]
    return found[-1] if found else None


def format_figures(figures: Figures, stored: Mapping[str, Any] | None) -> str:
    """Return the figures of a run beside those of a record."""
    before = {} if stored is None else stored["figures"]
    versions = f"stored, JAX {stored['versions']['jax']}" if stored else "stored: none"
    names = dict.fromkeys([*figures, *before])
    rows = [
        [name, *(f"{some[name]:,}" if name in some else "" for some in (figures, before))] for name in names
    ]
    return write_text([Table(["figure", "this run", versions], rows)], indent="")


def main(argv: list[str] | None = None) -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text_dir", default="", help="folder of Multi30k: train.de, train.en, ...")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts, comma-separated")
    parser.add_argument("--run", type=Path, help="a trained run, for the parts that translate")
    parser.add_argument("--record", action="store_true", help="add the figures to the stored records")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        lines = sys.stdin.read().split("\n")
        print(json.dumps({"seconds": translate_three_times(options.run, lines)}))
        return
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    if not options.tiny and not options.text_dir:
        parser.error("give --text_dir=DIR, the folder of Multi30k, or --tiny")
    if options.run is None and "multi30k" not in parts and {"sentences", "sentence"} & set(parts):
        parser.error("give --run=DIR to translate without the part multi30k")
    with tempfile.TemporaryDirectory() as folder:
        options.run = options.run or Path(folder) / "run"
        figures: Figures = {}
        for part in parts:
            figures |= PARTS[part](options)
    result = describe_device() | {"tiny": options.tiny, "figures": figures}
    stored = find_record(result["device"])
    print(format_figures(figures, stored), file=sys.stderr)
    print(json.dumps(result | {"stored": stored}, indent=2))
    if options.record:
        with RECORDS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
