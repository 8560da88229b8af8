"""Expected lengths of translations, learned from the training set and stored in RUN/target_lengths.json."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.config.files import read_json_object
from flaxformer_mt.errors import UserError
from flaxformer_mt.unicode_text import CASES

FILE_NAME = "target_lengths.json"

# Share of the training pairs whose targets are not longer than the line says.
_SHARE = 0.999

# With fewer pairs, the 99.9th percentile cannot be estimated.
_MIN_PAIRS = 1000

# The line is fitted to no more pairs than this, evenly spread over the training set.
_MAX_PAIRS = 1_000_000

# Slopes that are tried: multiples of the mean ratio of the lengths.
_SLOPES = np.linspace(1.0, 2.0, 101)

# Maximum source lengths of the groups that the file tells apart; the last group has all longer ones.
_GROUPS = (8, 16, 24, 32, 48, 64, 96, 128)

# What the file says of the target lengths of a group.
_QUANTILES = {"median": 0.5, "99%": 0.99, "99.9%": 0.999, "longest": 1.0}


class TargetLengths(NamedTuple):
    """A limit that few target lengths exceed: int(ratio * source length + offset); lengths include eos."""

    ratio: float
    offset: float


def fit_target_lengths(source_lengths: np.ndarray, target_lengths: np.ndarray) -> TargetLengths | None:
    """Fit the line that bounds 99.9% of the N target lengths and is lowest on average; None if N < 1,000.

    The slope is at least the mean ratio of lengths, so that the line also fits sources longer than in
    training.
    """
    sources, targets = _thin_out(source_lengths), _thin_out(target_lengths)
    if len(source_lengths) < _MIN_PAIRS or not sources.all():
        return None
    rank = math.ceil(_SHARE * len(sources)) - 1
    mean = sources.mean()
    lines = []
    for ratio in _SLOPES * (float(targets.sum()) / float(sources.sum())):
        ratio = math.ceil(1000 * ratio) / 1000
        # The length is rounded down, so a length on the line must not be lost to rounding.
        offset = math.ceil(100 * np.partition(targets - ratio * sources, rank)[rank]) / 100 + 0.01
        lines.append((ratio * mean + offset, ratio, round(offset, 2)))
    _, ratio, offset = min(lines)
    return TargetLengths(ratio, offset)


def _thin_out(lengths: np.ndarray) -> np.ndarray:
    return lengths[:: -(-len(lengths) // _MAX_PAIRS) or 1].astype(np.float64)


def describe_target_lengths(source_lengths: np.ndarray, target_lengths: np.ndarray) -> dict[str, Any] | None:
    line = fit_target_lengths(source_lengths, target_lengths)
    if line is None:
        return None
    numbers = np.searchsorted(_GROUPS, source_lengths)
    groups = []
    for number in np.unique(numbers).tolist():
        targets = np.sort(target_lengths[numbers == number])
        ranks = {name: math.ceil(share * len(targets)) - 1 for name, share in _QUANTILES.items()}
        longest = {} if number == len(_GROUPS) else {"longest_source": _GROUPS[number]}
        quantiles = {name: int(targets[rank]) for name, rank in ranks.items()}
        groups.append({**longest, "pairs": len(targets), **quantiles})
    return {**line._asdict(), "share": _SHARE, "pairs": len(source_lengths), "groups": groups}


def write_target_lengths(run_dir: Path, described: dict[str, Any] | None) -> None:
    """Write the result of `describe_target_lengths` atomically; if the result is None, delete the file."""
    path = run_dir / FILE_NAME
    if described is None:
        path.unlink(missing_ok=True)
        return
    text = json.dumps(described, indent=1) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return  # another process may be reading the file
    write_atomically(path, text.encode())


def read_target_lengths(
    run_dir: Path,
) -> tuple[TargetLengths | None, float | None, dict[str, float] | None]:
    """Return the length limit, the share of multi-sentence lines, and letter-case shares; None: unknown."""
    path = run_dir / FILE_NAME
    try:
        described = read_json_object(path)
        line = TargetLengths(*(float(described[name]) for name in TargetLengths._fields))
        if not (0 <= line.ratio <= 1000 and abs(line.offset) <= 1e6):
            raise ValueError(f"ratio is {line.ratio}, offset is {line.offset}")
        # Those that are missing were not written by an earlier version.
        shares = {name: float(described[name]) for name in ("several_sentences", *CASES) if name in described}
        if bad := [name for name, share in shares.items() if not 0 <= share <= 1]:
            raise ValueError(f"{bad[0]} is {shares[bad[0]]}")
        return line, shares.pop("several_sentences", None), shares or None
    except FileNotFoundError:
        return None, None, None
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise UserError(
            f"{path} is damaged ({reason}); delete it, and translations are searched as without it, or let "
            f"`prepare --run={path.parent}` write it again"
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
