"""Reads and writes Marian's binary files: arrays in float32 or intgemm's 8 bits, and shortlists.

    8 bytes   version, 1
    8         number of arrays
    32 each   bytes of the name, type, number of axes, bytes of the data
    ...       names, each followed by a zero; shapes, 4 bytes per axis
    8         number of zeros that follow, up to a multiple of 256 bytes
    ...       the data of each array, padded to a multiple of 256 bytes

A matrix in 8 bits is stored transposed, unless it is an embedding table, and is followed by its scale
(float32), by which it was multiplied. An array NAME_QuantMultA has the scale of the inputs of matrix NAME.
"""

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from flaxformer_mt.convert.foreign_files import read_bytes
from flaxformer_mt.convert.toolkits.marian_network import Inputs
from flaxformer_mt.errors import UserError

ALPHA = "_QuantMultA"
_TEXT, _FLOAT32, _INTGEMM8 = 0x101, 0x404, 0x4101
_BLOCK = 256
_LARGEST = 127.0
_SHORTLIST_MAGIC = 0xF11A48D5013417F5
_WORD = (1 << 64) - 1


def is_quantized(path: Path) -> bool:
    return ".intgemm" in path.name


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], quantized: Collection[str] = ()) -> None:
    """Write float32 arrays and text (as int8 arrays); quantize the matrices in `quantized` to 8 bits."""
    headers, shapes, data = [], [], []
    for name, array in arrays.items():
        kind = _INTGEMM8 if name in quantized else _TEXT if array.dtype == np.int8 else _FLOAT32
        content = _quantize(name, array) if kind == _INTGEMM8 else np.ascontiguousarray(array).tobytes()
        data.append(_fill(content) if kind != _TEXT else content)
        shapes.append(struct.pack(f"<{array.ndim}i", *array.shape))
        headers.append(struct.pack("<4Q", len(name.encode()) + 1, kind, array.ndim, len(data[-1])))
    names = [name.encode() + b"\0" for name in arrays]
    head = b"".join([struct.pack("<2Q", 1, len(headers)), *headers, *names, *shapes])
    zeros = -(len(head) + 8) % _BLOCK
    path.write_bytes(b"".join([head, struct.pack("<Q", zeros), bytes(zeros), *data]))


def _fill(content: bytes) -> bytes:
    return content + bytes(-len(content) % _BLOCK)


def _quantize(name: str, matrix: np.ndarray) -> bytes:
    scale = find_scale(float(np.abs(matrix).max()))
    values = np.rint(matrix * scale).astype(np.int8)
    return (values if "Wemb" in name else values.T).tobytes() + scale.tobytes()


def find_scale(largest: float) -> np.float32:
    return np.float32(_LARGEST / largest if largest else 1.0)


def rounding(arrays: Mapping[str, np.ndarray]) -> Inputs:
    """Return a function that rounds the inputs of matrix products to 8 bits, as in Bergamot.

    The scale is stored with the matrix or, if it is not, computed from the largest absolute input.
    """
    scales = {name.removesuffix(ALPHA): array for name, array in arrays.items() if ALPHA in name}

    def round_inputs(name: str, x: np.ndarray) -> np.ndarray:
        scale = scales[name] if name in scales else find_scale(float(np.abs(x).max()))
        return np.clip(np.rint(x * scale), -_LARGEST, _LARGEST) / scale

    return round_inputs


class _Content:
    """Reads the bytes of a file in order; raises UserError at the end of the file."""

    def __init__(self, path: Path) -> None:
        self._path, self._content, self._position = path, memoryview(read_bytes(path)), 0

    def take(self, count: int) -> memoryview:
        end = self._position + count
        if end > len(self._content):
            raise UserError(
                f"{self._path} has {len(self._content)} bytes, but claims to have {end} or more; copy the "
                "file again"
            )
        taken, self._position = self._content[self._position : end], end
        return taken

    def numbers(self, count: int, kind: str = "Q") -> tuple[int, ...]:
        size = struct.calcsize(kind)
        return struct.unpack(f"<{count}{kind}", self.take(count * size))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a file; matrices in 8 bits are converted to float32."""
    content = _Content(path)
    version, count = content.numbers(2)
    if version != 1:
        raise UserError(f"{path} is no binary model of Marian: its version is {version}, not 1")
    headers = [content.numbers(4) for _ in range(count)]
    names = [bytes(content.take(header[0])).rstrip(b"\0").decode(errors="replace") for header in headers]
    shapes = [content.numbers(header[2], "i") for header in headers]
    content.take(*content.numbers(1))
    arrays = {}
    for name, shape, (_, kind, _, size) in zip(names, shapes, headers, strict=True):
        data, count = content.take(size), math.prod(shape)
        widths = {_TEXT: 1, _FLOAT32: 4, _INTGEMM8: 1}
        if kind not in widths:
            raise UserError(
                f"{path}: {name} has the type {kind:#x}; supported: float32 ({_FLOAT32:#x}) and 8 bits "
                f"({_INTGEMM8:#x})"
            )
        if min(shape, default=1) < 0 or count * widths[kind] + 4 * (kind == _INTGEMM8) > size:
            raise UserError(f"{path}: {name} claims the shape {list(shape)}, but has {size} bytes")
        arrays[name] = _read(data, name, kind, shape)
    return arrays


def _read(data: memoryview, name: str, kind: int, shape: tuple[int, ...]) -> np.ndarray:
    count = math.prod(shape)
    if kind != _INTGEMM8:
        return np.frombuffer(data, np.int8 if kind == _TEXT else "<f4", count).reshape(shape)
    with np.errstate(all="ignore"):  # non-finite values are reported by the import
        values = np.frombuffer(data, np.int8, count) / np.frombuffer(data, "<f4", 1, count)
    return values.reshape(shape) if "Wemb" in name else values.reshape(shape[::-1]).T


def write_shortlist(path: Path, lists: Sequence[np.ndarray]) -> None:
    """Write a list of target ids for each source id; the last list must not be empty."""
    counts = np.array([0, *map(len, lists)], np.uint64)
    ids = np.concatenate([np.sort(np.asarray(one, np.uint32)) for one in lists])
    head = struct.pack("<4Q", 0, max(map(len, lists)), len(counts), len(ids))
    content = head + counts.cumsum(dtype=np.uint64).tobytes() + ids.tobytes()
    seed = 0
    for word in np.frombuffer(content[: len(content) // 8 * 8], np.uint64).tolist():
        seed ^= (word + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _WORD
    path.write_bytes(struct.pack("<2Q", _SHORTLIST_MAGIC, seed) + content)
