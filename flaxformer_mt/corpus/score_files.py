"""Files of a teacher's probabilities of training targets (word-level distillation), which `distil` writes.

In the safetensors format, so that other programs can read them; arrays are mapped. Each target token has
the k most probable tokens and their probabilities.
"""

import contextlib
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from flaxformer_mt.errors import UserError

# Value of `format` in the header.
_FORMAT = "flaxformer_mt teacher scores 1"
_TYPES: dict[str, Any] = {
    "I64": np.dtype("<i8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
}
_MAKE_AGAIN = "make it again with distil --teacher_scores"


@dataclass(frozen=True)
class ScoreFile:
    """The scores of R rows of text, in order, with N tokens altogether; arrays are mapped from the file.

    Row i has the tokens from `offsets[i]` to `offsets[i + 1]`, eos included; none if it was too long for the
    teacher. `checks[i]` is `checksum` of its token ids. `ids` and `probs` have the shape [N, K], the most
    probable token first. vocabulary: fingerprint of the target vocabulary.
    """

    path: Path
    offsets: np.ndarray
    checks: np.ndarray
    ids: np.ndarray
    probs: np.ndarray
    vocabulary: str
    origin: Mapping[str, Any]

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]

    def __len__(self) -> int:
        return len(self.checks)


def checksum(tokens: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(tokens, "<u4").tobytes())


def open_score_file(path: Path) -> ScoreFile:
    if not path.is_file():
        raise UserError(
            f"there are no teacher scores {path} (data.teacher_scores); make them with distil "
            "--teacher_scores=8"
        )
    try:
        arrays, metadata = _map_arrays(path)
        if metadata["format"] != _FORMAT:
            raise ValueError(f"its format is {metadata['format']!r}")
        scores = ScoreFile(
            path, **arrays, vocabulary=metadata["vocabulary"], origin=json.loads(metadata["origin"])
        )
        rows, tokens = len(scores.checks), int(scores.offsets[-1])
        if scores.offsets.shape != (rows + 1,) or (np.diff(scores.offsets) < 0).any() or scores.offsets[0]:
            raise ValueError("its offsets are not those of its rows")
        if scores.ids.ndim != 2 or scores.ids.shape != scores.probs.shape or len(scores.ids) != tokens:
            raise ValueError(
                f"it has {tokens} tokens, but arrays {scores.ids.shape} and {scores.probs.shape}"
            )
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise UserError(f"{path} is no file of teacher scores: {error}; {_MAKE_AGAIN}") from error
    return scores


def _map_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            raise ValueError(f"its header of {length} bytes exceeds the file of {size}")
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__")
    arrays = {}
    for name in ("offsets", "checks", "ids", "probs"):
        dtype = _TYPES[header[name]["dtype"]]
        shape, (begin, end) = tuple(header[name]["shape"]), header[name]["data_offsets"]
        if end - begin != dtype.itemsize * math.prod(shape) or 8 + length + end > size:
            raise ValueError(f"{name} of shape {shape} is not complete")
        if end == begin:
            arrays[name] = np.zeros(shape, dtype)
        else:
            arrays[name] = np.memmap(path, dtype, "r", offset=8 + length + begin, shape=shape).view(
                np.ndarray
            )
    return arrays, metadata


def write_part(
    path: Path, scored: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray] | None], *, top_k: int
) -> None:
    """Write rows of token ids [T], ids [T, K], probabilities [T, K] (None: no scores), atomically."""
    present = [row for row in scored if row is not None]
    arrays = {
        "lengths": np.array([0 if row is None else len(row[0]) for row in scored], "<i8"),
        "checks": np.array([0 if row is None else checksum(row[0]) for row in scored], "<u4"),
        "ids": np.concatenate([np.zeros((0, top_k)), *(row[1] for row in present)]).astype("<u4"),
        "probs": np.concatenate([np.zeros((0, top_k)), *(row[2] for row in present)]).astype("<f2"),
    }
    with _complete(path) as file:
        np.savez(file, **cast(dict[str, Any], arrays))


def join_parts(
    path: Path, parts: Sequence[Path], *, size: int, vocabulary: str, origin: Mapping[str, Any]
) -> None:
    """Write the file of all rows from parts; `size` of the vocabulary sets the type of ids."""

    def read(name: str) -> Iterator[np.ndarray]:
        for part in parts:
            with np.load(part, allow_pickle=False) as arrays:
                yield arrays[name]

    offsets = np.concatenate([[0], np.cumsum(np.concatenate(list(read("lengths"))))]).astype("<i8")
    checks, top_k = np.concatenate(list(read("checks"))), next(read("ids")).shape[1]
    scored = (int(offsets[-1]), top_k)
    kinds = {"offsets": "<i8", "checks": "<u4", "ids": "<u2" if size <= 1 << 16 else "<u4", "probs": "<f2"}
    shapes: dict[str, Any] = {
        "offsets": offsets.shape,
        "checks": checks.shape,
        "ids": scored,
        "probs": scored,
    }
    header: dict[str, Any] = {
        "__metadata__": {
            **{"format": _FORMAT, "vocabulary": vocabulary},
            **{"origin": json.dumps(dict(origin), sort_keys=True)},
        }
    }
    begin = 0
    for name, kind in kinds.items():
        end = begin + np.dtype(kind).itemsize * math.prod(shapes[name])
        type_name = next(key for key, dtype in _TYPES.items() if dtype == kind)
        header[name] = {"dtype": type_name, "shape": shapes[name], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with _complete(path) as file:
        file.write(len(text).to_bytes(8, "little") + text + offsets.tobytes() + checks.tobytes())
        for name in ("ids", "probs"):
            for array in read(name):
                file.write(array.astype(kinds[name]).tobytes())


@contextlib.contextmanager
def _complete(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears when the block ends, on the disk."""
    partial = path.with_name(f".{path.name}.new")
    with partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
