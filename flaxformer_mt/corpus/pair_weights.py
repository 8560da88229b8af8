"""Weights of sentence pairs in the loss: the third column of SPLIT.tsv, or the lines of SPLIT.weights.

A pair of weight 0 is left out. Weights belong to training: those of other splits are not read.
"""

import array
import math
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.config.bounds import LARGEST_WEIGHT, SMALLEST_WEIGHT
from flaxformer_mt.corpus.cached_arrays import load_or_make
from flaxformer_mt.corpus.pair_checks import EXAMPLES
from flaxformer_mt.corpus.pairs import RawSplit
from flaxformer_mt.corpus.text_files import Scan, find_file, load_or_scan, read_lines
from flaxformer_mt.errors import UserError


def load_weights(
    folder: Path, split: str, files: tuple[Path, ...], scan: Scan, *, lines: int, cache: Path
) -> tuple[np.ndarray, str] | None:
    """Return the weights of a split of text files, float32, and their digest; None if all pairs count alike.

    Args:
      files, scan: the text files of the split, and the scan of the first of them.
      lines: number of pairs.
      cache: the cache folder, where a copy is read instead of the text.

    Raises:
      UserError: a line has no weight, the file has another number of lines, or there are both a third column
        and a file SPLIT.weights.
    """
    path = find_file(folder, f"{split}.weights")
    if path is not None and scan.weighted:
        raise UserError(f"{files[0]} has a column of weights, but there is {path} too; remove one of them")
    if path is not None:
        scan = load_or_scan(path, columns=1, folder=cache / "scans")
    elif scan.weighted:
        path = files[0]
    else:
        return None
    if scan.lines != lines:
        raise UserError(f"{path} has {scan.lines} lines for {lines} pairs; give one weight for each pair")
    weights = load_or_make(cache / "weights", scan.digest, lambda: {"weights": read_weights(path)})
    return weights["weights"], scan.digest


def read_weights(path: Path) -> np.ndarray:
    """Read the last column of each line as the weight of a pair, float32.

    Raises:
      UserError: a weight is neither 0 nor between SMALLEST_WEIGHT and LARGEST_WEIGHT; the message names the
        line.
    """
    weights = array.array("f")
    for number, line in enumerate(read_lines(path), start=1):
        text = line.rsplit(b"\t", 1)[-1].strip()
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not (weight == 0 or SMALLEST_WEIGHT <= weight <= LARGEST_WEIGHT):
            shown = text.decode("utf-8", errors="replace")
            raise UserError(
                f"{path} line {number} has the weight {shown[:40]!r}; a weight is 0, which leaves the pair "
                f"out, or a number from {SMALLEST_WEIGHT:.6f} to {LARGEST_WEIGHT:,.0f}"
            )
        weights.append(weight)
    return np.array(weights, np.float32)


def drop_weightless(
    split: RawSplit, rows: np.ndarray | None, report: dict[str, Any]
) -> tuple[np.ndarray | None, dict[str, Any]]:
    """Leave pairs of weight 0 out of the rows that cleaning has kept (None: all), and report them."""
    if split.weights is None:
        return rows, report
    kept = np.arange(len(split)) if rows is None else np.asarray(rows)
    counts = split.weights[kept] > 0
    if counts.all():
        return rows, report
    dropped = kept[~counts]
    first = dropped[:EXAMPLES].tolist()
    examples = [split.make_example(row, 0, pair) for row, pair in zip(first, split.read(first), strict=True)]
    problem = {"count": len(dropped), "action": "drop", "examples": examples}
    problems = report["problems"] | {"weight_0": problem}
    return kept[counts], report | {"problems": problems, "pairs": int(counts.sum())}
