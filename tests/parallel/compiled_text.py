"""Reads the text of a compiled program: its collectives, its matrix products and its donated arguments."""

import math
import re
from collections import Counter
from typing import NamedTuple

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_RESULT = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}

Shape = tuple[int, ...]


class Collective(NamedTuple):
    """A collective: its kind, and the dtypes and shapes of its results on one device."""

    kind: str
    arrays: tuple[tuple[str, Shape], ...]

    @property
    def bytes(self) -> int:
        return sum(_BYTES.get(dtype, 4) * math.prod(shape) for dtype, shape in self.arrays)


class CompiledText(NamedTuple):
    """What a program does on one device; the body of a loop counts once.

    product_flops: operations of all matrix products. donated: number of arguments whose memory results reuse.
    """

    collectives: list[Collective]
    product_flops: int
    donated: int

    def count(self) -> dict[str, int]:
        return dict(Counter(found.kind for found in self.collectives))


def read_compiled(text: str) -> CompiledText:
    shapes: dict[str, Shape] = {}
    collectives, flops = [], 0
    for line in text.split("\n"):
        found = _RESULT.match(line)
        if not found:
            continue
        name, result, operation, rest = found.groups()
        arrays = tuple((dtype, _to_shape(sizes)) for dtype, sizes in _ARRAY.findall(result))
        if len(arrays) == 1:
            shapes[name] = arrays[0][1]
        kind = operation.removesuffix("-start")
        if kind in _KINDS:
            collectives.append(Collective(kind, arrays))
        if operation == "dot":
            left = shapes[re.match(r"(?:\S+\[[\d,]*\]\S* )?%?([\w.\-]+)", rest)[1]]
            contracted = _to_shape(_CONTRACTED.search(rest)[1])
            flops += 2 * math.prod(arrays[0][1]) * math.prod(left[axis] for axis in contracted)
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text)
    return CompiledText(collectives, flops, len(re.findall("-alias", aliases[1])) if aliases else 0)


def _to_shape(sizes: str) -> Shape:
    return tuple(int(size) for size in sizes.split(",") if size)
