"""Table of recipes times targets: what compilers make of an update for devices that are not at hand.

    pip install '.[tpu,cuda13]'
    PYTHONPATH=. python benchmarks/targets.py --output=targets.jsonl
    # for at most an hour; then, or later, the table of what has been compiled
    PYTHONPATH=. python benchmarks/targets.py --output=targets.jsonl --minutes=60
    PYTHONPATH=. python benchmarks/targets.py --output=targets.jsonl --minutes=0
    # one cell, with other settings:
    PYTHONPATH=. python benchmarks/targets.py --recipes=wmt14_en_de_big --targets=v5e:2x2 \\
        --config.parallel.fsdp=4

Each cell is what `show --target` says of an update. It takes from half a minute to many minutes of a core.
Cells are compiled in rounds of targets, in each of which small recipes come first. --output keeps finished
cells: the same command continues where it was stopped. Prints the table as Markdown, at its end the cells
that are not compiled yet. Nothing runs on the target.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

# Targets in the order in which they are compiled: of each round all recipes, then the next round.
ROUNDS = (("v5e:1x1", "h100:1"), ("v5e:2x2", "h100:8"), ("v6e:1x1", "h200:1", "v5p:2x2x1"), ("v5e:4x4",))
_CHIPS_AND_HOSTS = tuple(target for targets in ROUNDS[:3] for target in targets)

# Recipe -> its targets; small recipes first. The first nine have batches of 1,600 to 4,096 tokens, which a
# slice of 16 chips would mostly pad; the last two are for the machines in their names.
PLAN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "kokoyi_iwslt",
            "handbuilt",
            "toy_de_en",
            "toy_documents",
            "decoder_only",
            "multi30k_de_en",
            "parallel_text",
            "tatoeba_many",
            "ted_pt_en",
            "multi30k_en_de_tiny",
        ),
        _CHIPS_AND_HOSTS,
    ),
    **dict.fromkeys(("wmt14_en_de_base", "aiayn", "wmt14_en_de_big"), (*_CHIPS_AND_HOSTS, *ROUNDS[3])),
    "wmt14_en_de_big_h100_8": ("h100:8",),
    "wmt14_en_de_big_tpu_v5e_16": ("v5e:4x4",),
}

# The training text decides the sizes of these vocabularies; that of IWSLT is not public here.
_ASSUMED = {"kokoyi_iwslt": ("--config.vocab.size=30000",)}

_HEAD = ("recipe", "target", "layout", "rows", "peak of memory, GiB", "attention")


class Cell(NamedTuple):
    """A recipe with flags that change it, and the devices to compile it for."""

    recipe: str
    target: str
    flags: tuple[str, ...] = ()


def plan_cells(recipes: Sequence[str], targets: Sequence[str], flags: Sequence[str]) -> list[Cell]:
    """Return the cells of the table, recipe by recipe; by default all of `PLAN`, or its targets of these
    recipes.
    """
    return [
        Cell(recipe, target, (*_ASSUMED.get(recipe, ()), *flags))
        for recipe in recipes or PLAN
        for target in targets or PLAN.get(recipe, _CHIPS_AND_HOSTS)
    ]


def find_round(cell: Cell) -> int:
    """Return the place of a cell in the order of compilation; a target that no round has belongs to the
    first.
    """
    return next((number for number, targets in enumerate(ROUNDS) if cell.target in targets), 0)


def compile_cell(cell: Cell) -> dict[str, Any]:
    """Compile a cell in this process; the message of a user error stands in place of the result."""
    import jax

    from flaxformer_mt.commands.flag_parser import parse_flags
    from flaxformer_mt.commands.options import ShowOptions
    from flaxformer_mt.commands.show import plan_sizes
    from flaxformer_mt.commands.show_target import describe_update
    from flaxformer_mt.commands.target_devices import parse_target
    from flaxformer_mt.config.checks import validate
    from flaxformer_mt.errors import UserError

    jax.config.update("jax_platforms", "cpu")  # devices at hand, if there are any, are not needed
    try:
        flags = [f"--config={cell.recipe}", *cell.flags]
        config = parse_flags(ShowOptions, flags, prog="targets").config
        validate(config)
        return {"found": describe_update(config, parse_target(cell.target), sizes=plan_sizes(config))}
    except UserError as error:
        return {"error": str(error)}
    finally:
        jax.clear_caches()


def compile_apart(cells: Iterable[Cell]) -> Iterator[dict[str, Any]]:
    """Compile cells one after the other in a second process, which survives none of the compiler's
    crashes.

    Yields what `compile_cell` returns. The process imports JAX once.
    """
    spawn, pool = multiprocessing.get_context("spawn"), None
    try:
        for cell in cells:
            pool = pool or ProcessPoolExecutor(1, mp_context=spawn)
            try:
                yield pool.submit(compile_cell, cell).result()
            except BrokenProcessPool:
                pool = None
                yield {"error": "the compiler ended the process"}
    finally:
        if pool:
            pool.shutdown(wait=False, cancel_futures=True)


def run_cells(cells: Sequence[Cell], output: Path, *, minutes: float) -> list[dict[str, Any]]:
    """Compile the cells that the output file does not have, starting none after so many minutes.

    Returns all cells of the file, and those that are missing as {"recipe", "target", "flags"} alone.
    """
    start, known = time.monotonic(), _read_cells(output)
    missing = sorted((cell for cell in cells if cell not in known), key=find_round)

    def due() -> Iterator[Cell]:
        for cell in missing:
            if time.monotonic() - start >= 60 * minutes:
                return
            print(f"{time.strftime('%H:%M:%S')} {cell.recipe} for {cell.target}", file=sys.stderr, flush=True)
            yield cell

    for cell, result in zip(missing, compile_apart(due()), strict=False):
        known[cell] = _describe(cell) | result
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(known[cell]) + "\n")
    order = dict.fromkeys([*cells, *known])
    return [known.get(cell, _describe(cell)) for cell in order]


def _describe(cell: Cell) -> dict[str, Any]:
    return cell._asdict() | {"flags": list(cell.flags)}


def _read_cells(output: Path) -> dict[Cell, dict[str, Any]]:
    lines = output.read_text(encoding="utf-8").split("\n") if output.exists() else []
    found = [json.loads(line) for line in lines if line]
    return {Cell(x["recipe"], x["target"], tuple(x["flags"])): x for x in found}


def format_table(cells: Iterable[dict[str, Any]]) -> str:
    """Return the cells as a table in Markdown; a cell that failed has its error, a missing one says so.

    The missing cells of a recipe share a row.
    """
    rows: list[Sequence[str]] = [_HEAD, ("---",) * len(_HEAD)]
    missing: dict[str, list[str]] = {}
    for cell in cells:
        name = " ".join([cell["recipe"], *(flag.removeprefix("--config.") for flag in cell["flags"])])
        if "found" in cell or "error" in cell:
            rows.append((name, cell["target"], *_format_found(cell)))
        else:
            missing.setdefault(name, []).append(cell["target"])
    for name, targets in missing.items():
        rows.append((name, ", ".join(targets), *_fill("not compiled")))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _fill(text: str) -> tuple[str, ...]:
    return (text, *[""] * (len(_HEAD) - 3))


def _format_found(cell: dict[str, Any]) -> tuple[str, ...]:
    if "error" in cell:
        return _fill(cell["error"].replace("\n", " ").replace("|", "\\|"))
    found = cell["found"]
    batch = found["batch"]
    no = "" if found["fits"] else "**does not fit** "
    return (
        found["layout"],
        f"{batch['rows']} x {batch['source_length']}",
        f"{no}{found['peak_gib']:.2f} of {found['memory_gib']:.2f}",
        found["attention"]["kernel"],
    )


def main() -> None:
    """Compile the cells that are missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = {"type": lambda text: text.split(","), "default": []}
    parser.add_argument("--recipes", **names, help="names, separated by commas; default: all")
    parser.add_argument("--targets", **names, help="the same of targets; default: those of each recipe")
    parser.add_argument("--output", type=Path, default=Path("targets.jsonl"))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no cell starts later")
    options, flags = parser.parse_known_args()
    cells = plan_cells(options.recipes, options.targets, flags)
    print(format_table(run_cells(cells, options.output, minutes=options.minutes)))


if __name__ == "__main__":
    main()
