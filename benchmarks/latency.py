"""Latency: seconds from a sentence to its translation, with the command and the Python API.

    # Needs a trained run
    PYTHONPATH=. python benchmarks/latency.py --run=runs/toy_de_en

Each measurement runs in processes of its own, first with an empty cache of compiled programs ("cold"), then
with the programs that the first ones left ("warm"; medians of --rounds processes). Prints one JSON object:

* `command`: `echo SENTENCE | python -m flaxformer_mt translate --run=RUN`, from its start to its end.
* `api`: `import`, `load` and `warm_up` in seconds; then, in milliseconds, the first sentence and the later
  ones: their median and their maximum by length in words, each sentence once, and of lines of made-up words,
  whose translations may go on up to the length limit.
* `programs`: the number of programs that `warm_up` prepared.

A system is a function in SYSTEMS, from the options and the folder of the cache to its numbers.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# Numbers of words of the later sentences.
LENGTHS = (1, 2, 5, 10, 20, 40, 80)

# Number of lines of made-up words, their largest number of words, and what words are made of.
MADE_UP, MADE_UP_WORDS = 200, 24
_SYLLABLES = ("ka", "ru", "mi", "zo", "pel", "dra", "fun", "gri", "wex", "los", "tup", "nem", "xi", "qua")

# The environment's settings that would replace the caches of this benchmark.
_OVERRIDING = ("JAX_COMPILATION_CACHE_DIR",)


def measure_command(options: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """Run the command for one sentence; return its wall-clock time."""
    command = [sys.executable, "-m", "flaxformer_mt", "translate", f"--run={options.run}"]
    begin = time.perf_counter()
    _run(command, cache, text=options.sentence)
    return {"seconds": time.perf_counter() - begin}


def measure_api(options: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """Load a translator in a new process, warms it up, and translate sentences one by one."""
    command = [sys.executable, __file__, f"--run={options.run}", f"--sentence={options.sentence}", "--worker"]
    return json.loads(_run(command, cache))


SYSTEMS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "command": measure_command,
    "api": measure_api,
}


def serve_api(run: str, sentence: str) -> dict[str, Any]:
    """Measure the API in this process."""
    clock = time.perf_counter
    begin = clock()
    from flaxformer_mt import Translator

    load = Translator.load
    imported = clock()
    translator = load(run)
    loaded = clock()
    programs = translator.warm_up()
    warm = clock()

    def translate(line: str) -> float:
        start = clock()
        translator([line])
        return (clock() - start) * 1000

    first = translate(sentence)
    later: dict[str, Any] = {}
    for name, lines in make_lines(sentence).items():
        times = [translate(line) for line in lines]
        later[name] = {"median_ms": statistics.median(times), "max_ms": max(times)}
    return {
        "import": imported - begin,
        "load": loaded - imported,
        "warm_up": warm - loaded,
        "first_ms": first,
        "later": later,
        "programs": programs,
    }


def make_lines(sentence: str) -> dict[str, list[str]]:
    """Make different lines of each length: the sentence's words, from another one on; and made-up words."""
    words = sentence.split()
    lines = {
        f"{length} words": [
            " ".join((words[start:] + words * length)[:length]) for start in range(len(words))
        ]
        for length in LENGTHS
    }
    draw = random.Random(1)
    lines[f"up to {MADE_UP_WORDS} made-up words"] = [
        " ".join(
            "".join(draw.choices(_SYLLABLES, k=draw.randint(1, 4)))
            for _ in range(draw.randint(1, MADE_UP_WORDS))
        )
        for _ in range(MADE_UP)
    ]
    return lines


def _run(command: list[str], cache: Path, *, text: str = "") -> str:
    environment = {name: value for name, value in os.environ.items() if name not in _OVERRIDING}
    environment |= {
        "FLAXFORMER_MT_CACHE": str(cache),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(command, input=text, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def combine(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each number over rounds of the same form."""
    first = rounds[0]
    return {
        name: combine([each[name] for each in rounds])
        if isinstance(first[name], dict)
        else round(statistics.median(each[name] for each in rounds), 4)
        for name in first
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each system cold, each with an empty cache, then all of them warm, in turns."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: Path(folder) / name for name in options.systems}
        for name, cache in caches.items():
            found[name] = {"cold": combine([SYSTEMS[name](options, cache)])}
        rounds = [
            {name: SYSTEMS[name](options, cache) for name, cache in caches.items()}
            for _ in range(options.rounds)
        ]
        for name in caches:
            found[name]["warm"] = combine([each[name] for each in rounds])
    return found


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", required=True, help="run directory of a trained model")
    parser.add_argument("--sentence", default="Der Mann liest am Abend ein altes Buch über die Stadt .")
    parser.add_argument("--rounds", type=int, default=5, help="number of warm processes of each system")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    """Print the numbers as JSON."""
    options = parse_options()
    if options.worker:
        print(json.dumps(serve_api(options.run, options.sentence)))
    else:
        print(json.dumps(measure(options), indent=2))


if __name__ == "__main__":
    main()
