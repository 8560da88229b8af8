"""Table of recipes times targets: what compilers make of an update for devices that are not at hand.

    pip install '.[tpu,gpu]'
    PYTHONPATH=. python benchmarks/targets.py --output=targets.jsonl
    # one cell, with other settings:
    PYTHONPATH=. python benchmarks/targets.py --recipes=wmt14_en_de_big --targets=v5e:2x2 \\
        --config.parallel.fsdp=4

Each cell is `show --target` in a process of its own, and takes minutes. --output keeps finished cells: the
same command continues where it was stopped. Prints the table as Markdown. Nothing runs on the target.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RECIPES = (
    "toy_de_en",
    "multi30k_de_en",
    "wmt14_en_de_base",
    "wmt14_en_de_big",
    "wmt14_en_de_big_tpu_v5e_16",
    "wmt14_en_de_big_h100_8",
)
TARGETS = ("v5e:1x1", "v5e:2x2", "v5e:4x4", "v6e:1x1", "v5p:2x2x1", "h100:1", "h100:8", "h200:1")
_HEAD = (
    "recipe",
    "target",
    "layout",
    "rows",
    "peak of memory, GiB",
    "attention",
    "sent, GiB",
    "ms",
    "MFU",
)


def measure(recipe: str, target: str, flags: Sequence[str]) -> dict[str, Any]:
    """One cell: the result of `show --target`, or the message of the error that it ended with."""
    command = [sys.executable, "-m", "flaxformer_mt", "show", f"--config={recipe}", f"--target={target}"]
    done = subprocess.run([*command, *flags, "--json"], capture_output=True, text=True)
    cell = {"recipe": recipe, "target": target, "flags": list(flags)}
    if done.returncode:
        return cell | {"error": done.stderr.strip().rpartition("error: ")[2]}
    return cell | {"found": json.loads(done.stdout)["target"]}


def run_cells(
    recipes: Iterable[str], targets: Sequence[str], flags: Sequence[str], output: Path
) -> list[dict[str, Any]]:
    """All cells; those in the output file are not measured again."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    if output.exists():
        cells = [json.loads(line) for line in output.read_text(encoding="utf-8").split("\n") if line]
        known = {(cell["recipe"], cell["target"], tuple(cell["flags"])): cell for cell in cells}
    for recipe in recipes:
        for target in targets:
            key = (recipe, target, tuple(flags))
            if key not in known:
                print(f"{recipe} for {target}", file=sys.stderr, flush=True)
                known[key] = measure(recipe, target, flags)
                with output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[key]) + "\n")
    return list(known.values())


def format_table(cells: Iterable[dict[str, Any]]) -> str:
    """The cells as a table in Markdown; a cell that failed has its error."""
    rows = [_HEAD, ("---",) * len(_HEAD)]
    for cell in cells:
        name = " ".join([cell["recipe"], *(flag.removeprefix("--config.") for flag in cell["flags"])])
        rows.append((name, cell["target"], *_format_found(cell)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _format_found(cell: dict[str, Any]) -> tuple[str, ...]:
    if "error" in cell:
        return (cell["error"].replace("\n", " "), *[""] * (len(_HEAD) - 3))
    found = cell["found"]
    batch, estimate = found["batch"], found["estimate"]
    sent = sum(kind["sent"] for kind in found["collectives"].values()) / 2**30
    no = "" if found["fits"] else "**does not fit** "
    return (
        found["layout"],
        f"{batch['rows']} x {batch['source_length']}",
        f"{no}{found['peak_gib']:.2f} of {found['memory_gib']:.2f}",
        found["attention"]["kernel"],
        f"{sent:.2f}",
        f"{estimate['milliseconds']:.0f}" if estimate else "",
        f"{estimate['mfu']:.0%}" if estimate and estimate["mfu"] else "",
    )


def main() -> None:
    """Measures the cells that are missing, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", type=lambda text: text.split(","), default=list(RECIPES))
    parser.add_argument("--targets", type=lambda text: text.split(","), default=list(TARGETS))
    parser.add_argument("--output", type=Path, default=Path("targets.jsonl"))
    options, flags = parser.parse_known_args()
    print(format_table(run_cells(options.recipes, options.targets, flags, options.output)))


if __name__ == "__main__":
    main()
