"""What the text of a compiled program says: its collectives, and what its kernels cost on a GPU or a TPU.

`Compiled.as_text()` is the scheduled program. On a GPU, each instruction of the entry and of its loops is a
kernel with the shapes that it reads and writes. Nothing runs: the costs are a model, held against measured
updates in benchmarks/README.md.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

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
# Groups of devices that communicate: written out, as [groups,size]<=[devices], or as axes of a mesh.
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")


class _Instruction(NamedTuple):
    """An instruction; `rest` is its line from the operands on, with their names in `operands`."""

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
    """Return the computations by name, and the name of the one at which a run begins."""
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
    """Yield what runs of a computation execute, in order; of a conditional, all branches.

    The computation of each instruction, how often it runs, and whether it is a part of another.
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
    """Return the iterations of a loop: those that the compiler notes, the limit of `jax.lax.scan`, or 1."""
    if trips := _TRIPS.search(loop.rest):
        return int(trips[1])
    condition = bodies.get(loop.attribute("condition"), {}).values()
    limits = [one.rest for one in condition if one.op == "constant" and one.result.startswith("s32[]")]
    if len(limits) != 1 or not any("direction=LT" in one.rest for one in condition):
        return 1
    return int(limits[0].partition(")")[0])


def read_collectives(text: str, times: int = 1) -> dict[str, Counter[str]]:
    """Add up the collectives of so many runs of a program, by kind; loops of unknown length count once.

    count: executions. sent: bytes that a device sends to others, in a ring of the n devices that take part:
    (n - 1) / n of what is gathered or scattered, twice that of an all-reduce, which is both. overlapped: the
    bytes that it sends while other kernels run.
    """
    bodies, entry = _read_computations(text)
    partitions = _PARTITIONS.search(text.partition("\n")[0])
    everybody = int(partitions[1]) if partitions else None
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    seen: set[tuple[str, str]] = set()
    for name, one, runs, is_part in _walk(bodies, entry, times):
        collective = _COLLECTIVE.fullmatch(one.op)
        if collective is None:
            continue
        kind, ends = collective.groups()
        start = bodies[name].get(one.operands[0], one) if ends else one
        same = _CHAIN.search(start.rest) or _CHANNEL.search(start.rest)
        devices, whole = _group_size(start.rest) or everybody, bytes_of(one.result)
        if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # each device keeps its part of the sum
        else:
            # A TPU runs a collective beside other work as several fusions, each of which repeats it.
            if is_part and same:
                if (kind, same[1]) in seen:
                    continue
                seen.add((kind, same[1]))
            if kind == "reduce-scatter":
                whole *= devices or 1
        share = 1 - 1 / devices if devices and not kind.startswith("collective") else 1.0
        sent = round(whole * share * (2 if kind == "all-reduce" else 1))
        overlaps = is_part or _works_between(bodies[name], start, one)
        found[kind].update(count=runs, sent=runs * sent, overlapped=runs * sent if overlaps else 0)
    return dict(sorted(found.items()))


def _works_between(body: _Body, start: _Instruction, end: _Instruction) -> bool:
    """Tell whether kernels run between the start and the end of a collective."""
    names = list(body)
    between = names[names.index(start.name) + 1 : names.index(end.name)]
    return any(body[name].op in ("fusion", "custom-call", "dot", "while") for name in between)


def bytes_of(result: str) -> int:
    """Count the bytes of all arrays in a type: `(f32[2,3]{1,0}, bf16[4])` has 24 + 8 = 32."""
    total = 0
    for kind, bits, axes in _ARRAY.findall(result):
        if kind == "token":
            continue
        shape = [int(axis.lstrip("<=")) for axis in axes.split(",")] if axes else []
        total += max(1, int(bits or 8) // 8) * math.prod(shape)
    return total


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


class Kernel(NamedTuple):
    """A kernel of a GPU: what it reads, writes and computes each time, and how often a run calls it."""

    kind: str
    bytes: int
    flops: int = 0
    times: int = 1


_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')


def read_cycles(text: str) -> int:
    """Add up the cycles that the TPU compiler expects; Pallas kernels have none, and loops count once."""
    return sum(map(int, _CYCLES.findall(text)))


# What kernels reach on an H100: operations and bytes a second, and the seconds that each takes at least.
# Fitted to updates of Transformer-big in bfloat16 that were measured (benchmarks/README.md).
_FLOPS, _BYTES, _LAUNCH = 700e12, 2.8e12, 2e-6
# Attention by cuDNN over rows of 100 takes so many times as long as its bytes: they fill its tiles of 128
# badly.
_ATTENTION_FACTOR = 2.6

_NO_KERNELS = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "iota", "after-all"}
_NO_KERNELS |= {"partition-id", "replica-id", "opt-barrier"}
_COPYING = {"copy", "transpose", "slice", "concatenate", "pad", "dynamic-slice", "convert", "copy-start"}
_FILLING = {"broadcast", "iota"}
_SLICING = {"dynamic-slice", "slice", "gather"}
# Kernels of attention, by the target of their call, or by the name that Pallas gives them.
_ATTENTION = re.compile(r'(?:custom_call_target|\bname) ?= ?"[^"]*(?:fmha|attention|attn|splash)', re.I)
_CONTRACTED = (
    re.compile(r"lhs_contracting_dims=\{([\d,]*)\}"),
    re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]'),
)


def read_kernels(text: str, times: int = 1) -> list[Kernel]:
    """List the kernels of so many runs of a program for a GPU; loops of unknown length count once."""
    bodies, entry = _read_computations(text)
    ignored = _NO_KERNELS | _CONTROL
    return [
        _describe_kernel(one, bodies[name], bodies)._replace(times=runs)
        for name, one, runs, is_part in _walk(bodies, entry, times)
        if not is_part and one.op not in ignored and not one.op.endswith(("-done", "-update"))
    ]


def _describe_kernel(one: _Instruction, body: _Body, bodies: dict[str, _Body]) -> Kernel:
    read = sum(bytes_of(body[operand].result) for operand in dict.fromkeys(one.operands) if operand in body)
    size, op = read + bytes_of(one.result), one.op
    if op == "fusion":
        return _describe_fusion(bodies[one.attribute("calls")], bodies)
    if op == "custom-call":
        if re.search("cublas|gemm|matmul", one.attribute("custom_call_target")):
            result = re.match(r"\(?([^{]*)", one.result)
            return Kernel("products", read + bytes_of(result[1] if result else ""), _product_flops(one, body))
        return Kernel("attention" if _ATTENTION.search(one.rest) else "others", size)
    if op == "dot":
        return Kernel("products", size, _product_flops(one, body))
    if op == "dynamic-update-slice":
        return Kernel("copies", 2 * bytes_of(body[one.operands[1]].result))
    if op == "dynamic-slice":
        return Kernel("copies", 2 * bytes_of(one.result))
    if re.match(_KINDS, op):
        return Kernel("collectives", 0)  # `read_collectives` has their bytes
    kind = "copies" if op in _COPYING | _FILLING else "reductions" if op == "reduce" else "others"
    return Kernel(kind, size)


def _describe_fusion(body: _Body, bodies: dict[str, _Body]) -> Kernel:
    # A product of Triton may be one computation deeper.
    inner = [bodies[one.attribute("calls")] for one in body.values() if one.op == "fusion"]
    products = [(one, part) for part in (body, *inner) for one in part.values() if one.op == "dot"]
    ops = {one.op for one in body.values()} - {"parameter", "constant", "bitcast", "tuple"}
    if products:
        kind = "products"
    elif "reduce" in ops:
        kind = "reductions"
    elif "dynamic-update-slice" in ops or ops <= _COPYING or ops <= _FILLING:
        kind = "copies"
    else:
        kind = "others" if "sort" in ops else "element-wise"
    return Kernel(kind, _fusion_bytes(body), sum(_product_flops(one, part) for one, part in products))


def _product_flops(one: _Instruction, body: _Body) -> int:
    sides = next(filter(None, (pattern.search(one.rest) for pattern in _CONTRACTED)), None)
    left = body.get(one.operands[0])
    if sides is None or left is None:
        return 0
    shape = _shape(left.result)
    return 2 * math.prod(_shape(one.result)) * math.prod(shape[int(n)] for n in re.findall(r"\d+", sides[1]))


def _shape(result: str) -> list[int]:
    array = _ARRAY.search(result)
    return [int(axis) for axis in array[3].split(",")] if array and array[3] else []


def _fusion_bytes(body: _Body) -> int:
    """Count the bytes that a fusion reads and writes: of what it slices or updates in place, the slices."""
    users = defaultdict(list)
    for one in body.values():
        for operand in one.operands:
            users[operand].append(one)
    read = sum(_read_bytes(one, users) for one in body.values() if one.op == "parameter")
    root = next(one for one in body.values() if one.is_root)
    written = 0
    for output in [body[name] for name in root.operands] if root.op == "tuple" else [root]:
        while output.op in ("bitcast", "reshape") and output.operands[0] in body:
            output = body[output.operands[0]]
        updates = output.op == "dynamic-update-slice"
        written += bytes_of(body[output.operands[1]].result if updates else output.result)
    return read + written


def _read_bytes(parameter: _Instruction, users: dict[str, list[_Instruction]]) -> int:
    whole, sliced = bytes_of(parameter.result), 0
    waiting, seen = [parameter], set()
    while waiting:
        node = waiting.pop()
        for user in users[node.name]:
            if user.name in seen:
                continue
            seen.add(user.name)
            only_sliced = all(after.op in _SLICING for after in users[user.name])
            if user.op in _SLICING and user.operands[0] == node.name:
                sliced += bytes_of(user.result)
            elif user.op in ("bitcast", "reshape") or (user.op in ("convert", "copy") and only_sliced):
                waiting.append(user)
            elif user.op != "dynamic-update-slice" or user.operands[0] != node.name:
                return whole
    return min(whole, sliced)


def kernel_seconds(kernel: Kernel) -> float:
    """Model the time of all calls of a kernel on an H100: the roofline, and a launch."""
    size = kernel.bytes * (_ATTENTION_FACTOR if kernel.kind == "attention" else 1)
    return kernel.times * (max(kernel.flops / _FLOPS, size / _BYTES) + _LAUNCH)


def sum_kernels(kernels: Iterable[Kernel], *, timed: bool) -> list[dict[str, Any]]:
    """Add up kernels by kind, the most bytes first, as JSON values; unless `timed`, without milliseconds."""
    kinds = defaultdict(list)
    for kernel in kernels:
        kinds[kernel.kind].append(kernel)
    rows: list[dict[str, Any]] = [
        {
            "kind": kind,
            "kernels": sum(one.times for one in own),
            "gigabytes": round(sum(one.times * one.bytes for one in own) / 1e9, 3),
            "milliseconds": round(1e3 * sum(map(kernel_seconds, own)), 3) if timed else None,
        }
        for kind, own in kinds.items()
    ]
    return sorted(rows, key=lambda row: -row["gigabytes"])
