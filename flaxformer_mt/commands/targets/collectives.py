"""The collectives of a compiled program, read from its text: how many a device executes, and how large.

An instruction counts as often as a run executes it: in a loop, once for each iteration, if the text tells how
many there are. Of a conditional, all branches count.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_KINDS = "all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-(?:permute|broadcast)"
_COLLECTIVE = re.compile(rf"%?([\w.\-]+) = (.*?) ({_KINDS})(-start|-done)?\((?:%?([\w.\-]+))?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_CALLED = re.compile(r"\b(?:calls|body|to_apply|\w+_computations?)=(?:\{([^}]*)\}|%?([\w.\-]+))")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_LIMIT = re.compile(r" = s32\[\]\S* constant\((\d+)\)")
# What the parts of one collective have in common; newer compilers give all of them the same channel.
_CHAIN = re.compile(r'\bchain_id="(\d+)"')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_ARRAY = re.compile(r"\b([a-z]+?)(\d*)(?:e\dm\d\w*)?\[([\d,<=]*)\]")
# Groups of devices that communicate: written out, as [groups,size]<=[devices], or as axes of a mesh.
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in a run of the program, on one device.

    count: executions. bytes: of the whole arrays that are gathered, scattered or added up, over all
    executions. sent: bytes that the device sends to others, in a ring of the n devices that take part:
    (n - 1) / n of what is gathered or scattered, twice that of an all-reduce, which is both.
    """

    count: int = 0
    bytes: int = 0
    sent: int = field(default=0, compare=False)

    def add(self, other: "Traffic", times: int = 1) -> "Traffic":
        """Return the sum of this traffic and several times another."""
        return Traffic(
            self.count + times * other.count,
            self.bytes + times * other.bytes,
            self.sent + times * other.sent,
        )


def read_collectives(text: str) -> tuple[dict[str, Traffic], int]:
    """Return the collectives of a run on one device, by kind: {"all-reduce": Traffic(7, 1048576)}.

    Also returns the number of loops whose iterations the text does not tell; they are counted once.

    Args:
      text: of the program, as `Compiled.as_text()` returns it.
    """
    computations, entry = _read_computations(text)
    partitions = _PARTITIONS.search(text.partition("\n")[0])
    everybody = int(partitions[1]) if partitions else None
    found: dict[str, Traffic] = {}
    seen: set[tuple[str, str]] = set()
    loops = 0
    for name, line, times, fused in _walk(computations, entry, 1, fused=False):
        loops += " while(" in line and _count_trips(computations, line) is None
        one = _COLLECTIVE.search(line)
        if one is None or one[4] == "-start":
            continue  # the result of the end is what there is to count
        kind = one[3]
        attributes = _line_of(computations[name], one[5]) if one[4] else line
        same = _CHAIN.search(attributes) or _CHANNEL.search(attributes)
        devices, whole = _group_size(attributes) or everybody, bytes_of(one[2])
        if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # each device keeps its part of the sum
        else:
            # A TPU runs a collective beside other work as several fusions, each of which repeats it.
            if fused and same:
                if (kind, same[1]) in seen:
                    continue
                seen.add((kind, same[1]))
            if kind == "reduce-scatter":
                whole *= devices or 1
        share = 1 - 1 / devices if devices and not kind.startswith("collective") else 1.0
        sent = round(whole * share * (2 if kind == "all-reduce" else 1))
        found[kind] = found.get(kind, Traffic()).add(Traffic(1, whole, sent), times)
    return dict(sorted(found.items())), loops


def bytes_of(result: str) -> int:
    """Count the bytes of all arrays in a type: `(f32[2,3]{1,0}, bf16[4])` has 24 + 8 = 32."""
    total = 0
    for kind, bits, axes in _ARRAY.findall(result):
        if kind == "token":
            continue
        shape = [int(axis.lstrip("<=")) for axis in axes.split(",")] if axes else []
        total += max(1, int(bits or 8) // 8) * math.prod(shape)
    return total


def _walk(
    computations: dict[str, list[str]], name: str, times: int, *, fused: bool
) -> Iterator[tuple[str, str, int, bool]]:
    """All lines that a run executes: computation, line, how often, and whether it is a part of a fusion."""
    for line in computations.get(name, []):
        yield name, line, times, fused
        if "-done(" in line or "-update(" in line:
            continue
        trips = _count_trips(computations, line) or 1 if " while(" in line else 1
        for several, one in _CALLED.findall(line):
            for called in (several or one).split(","):
                inside = called.strip().lstrip("%")
                yield from _walk(computations, inside, times * trips, fused=fused or " fusion(" in line)


def _count_trips(computations: dict[str, list[str]], line: str) -> int | None:
    """Return the iterations of a loop: those that the compiler notes, or the limit of `jax.lax.scan`, or
    None.
    """
    if trips := _TRIPS.search(line):
        return int(trips[1])
    condition = _CONDITION.search(line)
    body = "\n".join(computations.get(condition[1], [])) if condition else ""
    limits = _LIMIT.findall(body)
    return int(limits[0]) if len(limits) == 1 and "direction=LT" in body else None


def _line_of(lines: list[str], name: str) -> str:
    return next(
        (line for line in lines if f"%{name} = " in line or line.lstrip().startswith(f"{name} = ")), ""
    )


def _group_size(attributes: str) -> int | None:
    """Return the number of devices of a group that a collective connects; None for all devices, or if not
    told.
    """
    if listed := _LISTED_GROUPS.search(attributes):
        return listed[1].count(",") + 1
    if counted := _COUNTED_GROUPS.search(attributes):
        return int(counted[1])
    if mesh := _MESH_GROUPS.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh[2])  # 'x':(2)4 is a part of 4 of x
        return math.prod(int(part) if part else sizes.get(name, 1) for name, part in axes)
    return None


def _read_computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of each computation, and the name of the one at which a run begins."""
    computations: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.split("\n"):
        if head := _HEAD.match(line):
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return computations, entry
