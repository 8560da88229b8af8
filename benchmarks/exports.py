"""Rates and BLEU of exported models in CTranslate2, in turns: how much faster is a student than its teacher?

    pip install ".[ctranslate2]"
    python -m flaxformer_mt export --run=TEACHER --format=ctranslate2 --quantization=int8 --output=teacher
    python -m flaxformer_mt export --run=STUDENT --format=ctranslate2 --quantization=int8 --output=student
    PYTHONPATH=. python benchmarks/exports.py --source=test.de --target=test.en teacher student

Each model translates the whole source in every round, by beam search, in batches of at most 64 sentences of
similar lengths that CTranslate2 makes itself; a model with a vmap.txt is measured with it and without it.
Tokenization is not timed. Prints one JSON object: for each
folder its size, the lines and target tokens a second of each round, their median, and BLEU (sacreBLEU's);
and the ratios of the median rates in lines to that of the first folder. --clock=processor counts seconds of
processor time of all threads, which other programs hardly change.
"""

import argparse
import importlib.metadata
import json
import statistics
import time
from pathlib import Path
from typing import Any

import sentencepiece
from systems import require_packages

from flaxformer_mt.scoring.metrics import score_translations

_CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


class Export:
    """An exported model with its vocabularies, as it translates the source sentences."""

    def __init__(self, folder: Path, lines: list[str], *, threads: int) -> None:
        """Load the model in the precision that it was exported in."""
        import ctranslate2

        source, self.target = (
            sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
            for side in ("source", "target")
        )
        self.model = ctranslate2.Translator(
            str(folder), compute_type="default", inter_threads=threads, intra_threads=1
        )
        self.pieces = [source.encode(line, out_type=str) for line in lines]
        self.bytes = (folder / "model.bin").stat().st_size

    def translate(self, beam_size: int, *, shortlist: bool) -> list[list[str]]:
        """Translate the source; return the pieces of each translation."""
        found = self.model.translate_batch(
            self.pieces, beam_size=beam_size, max_batch_size=64, use_vmap=shortlist
        )
        return [result.hypotheses[0] for result in found]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds, in each of which every model translates once."""
    lines, references = (
        path.read_text(encoding="utf-8").splitlines() for path in (options.source, options.target)
    )
    exports = {str(folder): Export(folder, lines, threads=options.threads) for folder in options.folders}
    variants = {name: (export, False) for name, export in exports.items()} | {
        f"{name}, shortlist": (export, True)
        for name, export in exports.items()
        if (Path(name) / "vmap.txt").exists()
    }
    clock = _CLOCKS[options.clock]
    found: dict[str, dict[str, Any]] = {}
    for name, (export, shortlist) in variants.items():  # also warms each model up
        pieces = export.translate(options.beam_size, shortlist=shortlist)
        scores = score_translations([export.target.decode(one) for one in pieces], references)
        found[name] = {
            "megabytes": round(export.bytes / 1e6, 1),
            "bleu": round(scores["bleu"], 2),
            "signature": scores.signatures["bleu"],
            "lines_a_second": [],
            "tokens_a_second": [],
        }
    for _ in range(options.rounds):
        for name, (export, shortlist) in variants.items():
            start = clock()
            pieces = export.translate(options.beam_size, shortlist=shortlist)
            seconds = clock() - start
            found[name]["lines_a_second"].append(round(len(pieces) / seconds, 1))
            found[name]["tokens_a_second"].append(round(sum(map(len, pieces)) / seconds, 1))
    medians = {name: statistics.median(one["lines_a_second"]) for name, one in found.items()}
    first = next(iter(medians.values()))
    ratios = {name: round(median / first, 2) for name, median in medians.items()}
    settings = {"beam_size": options.beam_size, "threads": options.threads, "clock": options.clock}
    versions = {"ctranslate2": importlib.metadata.version("ctranslate2")}
    return {**settings, **versions, "models": found, "medians": medians, "ratios": ratios}


def main() -> None:
    """Print the measurements as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="model folders of CTranslate2")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--beam_size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=list(_CLOCKS), default="wall")
    options = parser.parse_args()
    require_packages(["ctranslate2"])
    print(json.dumps(measure(options), indent=2))


if __name__ == "__main__":
    main()
