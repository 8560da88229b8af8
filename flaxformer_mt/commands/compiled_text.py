"""Reads the scheduled HLO of `Compiled.as_text()`: counts collectives, GPU kernels and TPU cycles.

On a GPU, each instruction of the entry computation and of its loops is a kernel.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+?)(\d*)(?:e\dm\d\w*)?\[([\d,<=]*)\]")
_CALLED = re.compile(r"\b(?:calls|body|to_apply|\w+_computations?)=(?:\{([^}]*)\}|%?([\w.\-]+))")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# Instructions that run others as kernels of their own; those that a fusion or a sum calls are parts of it.
_CONTROL = {"while", "conditional", "call", "fusion-start", "async-start"}

_KINDS = "all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-(?:permute|broadcast)"
# The result of the end of a collective is what there is to count, not that of its start.
_COLLECTIVE = re.compile(rf"({_KINDS})(-done)?")
# What the parts of one collective have in common; newer compilers give all of them the same channel.
_CHAIN = re.compile(r'\bchain_id="(\d+)"')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")


class _Instruction(NamedTuple):
    """An HLO instruction; `rest` is the part of its line after the opening parenthesis of the operands."""

    is_root: bool
    name: str
    result: str
    op: str
    operands: list[str]
    rest: str

    def attribute(self, name: str) -> str:
        match = re.search(rf'\b{name}="?%?([\w.\-$]+)', self.rest)
        return match[1] if match else ""


# Instructions of a computation by name, in the order of the text.
_Body = dict[str, _Instruction]


def _read_computations(text: str) -> tuple[dict[str, _Body], str]:
    """Return the computations by name, and the name of the entry computation."""
    bodies: dict[str, _Body] = {}
    entry, current = "", None
    for line in text.split("\n"):
        if head := _HEAD.match(line):
            current = bodies.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))):
            root, name, result, op, rest = match.groups()
            current[name] = _Instruction(bool(root), name, result, op, _find_operands(rest), rest)
    return bodies, entry


def _find_operands(rest: str) -> list[str]:
    depth, end = 1, 0
    while depth and end < len(rest):
        depth += (rest[end] == "(") - (rest[end] == ")")
        end += 1
    return re.findall(r"%([\w.\-]+)", rest[:end])


def _walk(
    bodies: dict[str, _Body], name: str, times: int, *, is_part: bool = False
) -> Iterator[tuple[str, _Instruction, int, bool]]:
    """Yield the instructions that `times` runs of a computation execute, with all branches of conditionals.

    Items: name of the computation, instruction, number of runs, whether it is part of another instruction.
    """
    for one in bodies.get(name, {}).values():
        yield name, one, times, is_part
        if one.op.endswith(("-done", "-update")):
            continue
        inner = times * _count_trips(bodies, one) if one.op == "while" else times
        for several, single in _CALLED.findall(one.rest):
            for called in (several or single).split(","):
                part = is_part or one.op not in _CONTROL
                yield from _walk(bodies, called.strip().lstrip("%"), inner, is_part=part)


def _count_trips(bodies: dict[str, _Body], loop: _Instruction) -> int:
    """Return the iterations of a loop: the compiler's trip count, or the limit of `jax.lax.scan`, or 1."""
    if trips := _TRIPS.search(loop.rest):
        return int(trips[1])
    condition = bodies.get(loop.attribute("condition"), {}).values()
    limits = [one.rest for one in condition if one.op == "constant" and one.result.startswith("s32[]")]
    if len(limits) != 1 or not any("direction=LT" in one.rest for one in condition):
        return 1
    return int(limits[0].partition(")")[0])


def read_collectives(text: str, times: int = 1) -> dict[str, Counter[str]]:
    """Count the collectives in `times` runs of a program, by kind; loops of unknown length count once.

    count: number of executions. bytes: total size of the results on one device.
    """
    bodies, entry = _read_computations(text)
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    seen: set[tuple[str, str]] = set()
    for name, one, runs, is_part in _walk(bodies, entry, times):
        collective = _COLLECTIVE.fullmatch(one.op)
        if collective is None:
            continue
        kind, ends = collective.groups()
        start = bodies[name].get(one.operands[0], one) if ends else one
        same = _CHAIN.search(start.rest) or _CHANNEL.search(start.rest)
        if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # each device keeps its part of the sum
        elif is_part and same:
            # A TPU runs a collective beside other work as several fusions, each of which repeats it.
            if (kind, same[1]) in seen:
                continue
            seen.add((kind, same[1]))
        found[kind].update(count=runs, bytes=runs * bytes_of(one.result))
    return dict(sorted(found.items()))


def bytes_of(result: str) -> int:
    """Return the bytes of all arrays in an HLO type: `(f32[2,3]{1,0}, bf16[4])` gives 24 + 8 = 32."""
    total = 0
    for kind, bits, axes in _ARRAY.findall(result):
        if kind == "token":
            continue
        shape = [int(axis.lstrip("<=")) for axis in axes.split(",")] if axes else []
        total += max(1, int(bits or 8) // 8) * math.prod(shape)
    return total


_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
# Instructions of a GPU's program that are no kernels.
_NO_KERNELS = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "iota", "after-all"}
_NO_KERNELS |= {"partition-id", "replica-id", "opt-barrier"}


def count_kernels(text: str) -> int:
    """Count the kernels that one run of a GPU program launches; loops of unknown length count once."""
    bodies, entry = _read_computations(text)
    ignored = _NO_KERNELS | _CONTROL
    return sum(
        runs
        for _, one, runs, is_part in _walk(bodies, entry, 1)
        if not is_part and one.op not in ignored and not one.op.endswith(("-done", "-update"))
    )


def read_cycles(text: str) -> int:
    """Sum the TPU compiler's cycle estimates; Pallas kernels have no estimate, and loops count once."""
    return sum(map(int, _CYCLES.findall(text)))
