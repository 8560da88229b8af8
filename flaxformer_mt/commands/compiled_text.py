"""What the text of a compiled program says: its collectives, and what its kernels cost on a GPU or a TPU.

`Compiled.as_text()` is the scheduled program. On a GPU, each instruction of the entry and of its loops is a
kernel with the shapes that it reads and writes. Nothing runs: the costs are a model, held against measured
updates in benchmarks/README.md.
"""

import collections
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    executions. sent: bytes that the device sends to others, in a ring of the n devices that take part: (n -
    1) / n of what is gathered or scattered, twice that of an all-reduce, which is both. overlapped: those of
    these bytes that are sent while other kernels run.
    """

    count: int = 0
    bytes: int = 0
    sent: int = field(default=0, compare=False)
    overlapped: int = field(default=0, compare=False)

    def add(self, other: "Traffic", times: int = 1) -> "Traffic":
        """Return the sum of this traffic and several times another."""
        return Traffic(
            self.count + times * other.count,
            self.bytes + times * other.bytes,
            self.sent + times * other.sent,
            self.overlapped + times * other.overlapped,
        )


def read_collectives(text: str) -> tuple[dict[str, Traffic], int]:
    """Return the collectives of a run on one device, by kind: {"all-reduce": Traffic(7, 1048576)}.

    Also returns the number of loops whose iterations the text does not tell; they are counted once.
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
        overlaps = fused or bool(one[4]) and _works_between(computations[name], one[5], line)
        traffic = Traffic(1, whole, sent, sent if overlaps else 0)
        found[kind] = found.get(kind, Traffic()).add(traffic, times)
    return dict(sorted(found.items())), loops


def _works_between(lines: list[str], start: str, end: str) -> bool:
    """Tell whether kernels run between the start and the end of a collective."""
    first = next((number for number, line in enumerate(lines) if f"%{start} = " in line), len(lines))
    ops = (_INSTRUCTION.match(line) for line in lines[first + 1 : lines.index(end)])
    return any(one is not None and one[4] in ("fusion", "custom-call", "dot", "while") for one in ops)


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


class Kernel(NamedTuple):
    """A kernel of a GPU: what it reads, writes and computes each time, and how often a run calls it.

    loops: how many loops of unknown length it is in, of which each counts as one iteration. in_float32:
    whether it is a product that writes float32.
    """

    kind: str
    name: str
    bytes: int
    flops: int = 0
    times: int = 1
    loops: int = 0
    in_float32: bool = False


_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')


def read_cycles(text: str) -> int:
    """Add up the cycles that the TPU compiler expects; Pallas kernels have none, and loops count once."""
    return sum(map(int, _CYCLES.findall(text)))


class Rates(NamedTuple):
    """What kernels of a GPU reach: operations and bytes a second, and seconds that each takes at least."""

    flops: float
    bytes: float
    launch: float


# Fitted to updates of Transformer-big in bfloat16 that were measured on an H100 (benchmarks/README.md).
MEASURED_RATES = {"h100": Rates(700e12, 2.8e12, 2e-6)}
# Attention by cuDNN over rows of 100 takes so many times as long as its bytes: they fill its tiles of 128
# badly.
_ATTENTION_FACTOR = 2.6

PRODUCTS, REDUCTIONS, ELEMENT_WISE = "products", "reductions", "element-wise"
ATTENTION, COPIES, COLLECTIVES, OTHERS = "attention", "copies", "collectives", "others"

_NO_KERNELS = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "iota", "after-all"} | {
    "partition-id",
    "replica-id",
    "opt-barrier",
}
_COPYING = {"copy", "transpose", "slice", "concatenate", "pad", "dynamic-slice", "convert", "copy-start"}
_FILLING = {"broadcast", "iota"}
_SLICING = {"dynamic-slice", "slice", "gather"}
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
# The name of a kernel of Pallas, on TPUs and on GPUs; and of any other.
_NAMES = (
    re.compile(r'"kernel_name":\s*"([^"]*)"'),
    re.compile(r'custom_call_target="__gpu\$xla\.gpu\.triton".* name = "([^"]*)"'),
    re.compile(r'custom_call_target="([^"]*)"'),
)
_CONTRACTED = (
    re.compile(r"lhs_contracting_dims=\{([\d,]*)\}"),
    re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]'),
)


class _Instruction(NamedTuple):
    is_root: bool
    name: str
    result: str
    op: str
    operands: list[str]
    attributes: str

    def attribute(self, name: str) -> str:
        match = re.search(name + r'="?%?([\w.\-$]+)', self.attributes)
        return match[1] if match else ""


_Body = dict[str, _Instruction]


def read_kernels(text: str) -> list[Kernel]:
    """List the kernels of a program compiled for a GPU, in the order in which they run."""
    lines, entry = _read_computations(text)
    bodies = {name: _read_instructions(body) for name, body in lines.items()}
    return list(_list_kernels(lines, bodies, entry, times=1, loops=0))


def _read_instructions(lines: Iterable[str]) -> _Body:
    body = {}
    for line in lines:
        if match := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line)):
            root, name, result, op, rest = match.groups()
            depth, end = 1, 0
            while depth and end < len(rest):
                depth += (rest[end] == "(") - (rest[end] == ")")
                end += 1
            operands = re.findall(r"%([\w.\-]+)", rest[:end])
            body[name] = _Instruction(bool(root), name, result, op, operands, rest[end:])
    return body


def _list_kernels(
    lines: dict[str, list[str]], bodies: dict[str, _Body], name: str, *, times: int, loops: int
) -> Iterator[Kernel]:
    body = bodies[name]
    for one in body.values():
        if one.op == "while":
            trips = _count_trips(lines, one.attributes)
            within = {"times": times * (trips or 1), "loops": loops + (trips is None)}
            yield from _list_kernels(lines, bodies, one.attribute("body"), **within)
        elif one.op == "conditional":  # of branches, the first
            branches = re.search(r"branch_computations=\{%?([\w.\-]+)", one.attributes)
            first = branches[1] if branches else one.attribute("true_computation")
            yield from _list_kernels(lines, bodies, first, times=times, loops=loops)
        elif one.op in ("call", "fusion-start", "async-start"):
            called = one.attribute("to_apply") or one.attribute("calls")
            if called in bodies:
                yield from _list_kernels(lines, bodies, called, times=times, loops=loops)
        elif one.op not in _NO_KERNELS and not one.op.endswith(("-done", "-update")):
            yield _describe_kernel(one, body, bodies)._replace(times=times, loops=loops)


def _describe_kernel(one: _Instruction, body: _Body, bodies: dict[str, _Body]) -> Kernel:
    read = sum(bytes_of(body[operand].result) for operand in dict.fromkeys(one.operands) if operand in body)
    size, op = read + bytes_of(one.result), one.op
    in_float32 = one.result.lstrip("(").startswith("f32")
    if op == "fusion":
        kind, size, flops = _describe_fusion(bodies[one.attribute("calls")], bodies)
        return Kernel(kind, op, size, flops, in_float32=in_float32 and kind == PRODUCTS)
    if op == "custom-call":
        name = one.attribute("custom_call_target")
        if re.search("cublas|gemm|matmul", name):
            result = re.match(r"\(?([^{]*)", one.result)
            size = read + bytes_of(result[1] if result else "")
            return Kernel(PRODUCTS, name, size, _product_flops(one, body), in_float32=in_float32)
        (name,) = read_calls(one.attributes)
        return Kernel(ATTENTION if is_attention(name) else OTHERS, name, size)
    if op == "dot":
        return Kernel(PRODUCTS, op, size, _product_flops(one, body), in_float32=in_float32)
    if op == "dynamic-update-slice":
        return Kernel(COPIES, op, 2 * bytes_of(body[one.operands[1]].result))
    if op == "dynamic-slice":
        return Kernel(COPIES, op, 2 * bytes_of(one.result))
    if re.match(_KINDS, op):
        return Kernel(COLLECTIVES, op.removesuffix("-start"), 0)  # `read_collectives` has their bytes
    kind = COPIES if op in _COPYING | _FILLING else REDUCTIONS if op == "reduce" else OTHERS
    return Kernel(kind, op, size)


def read_calls(text: str) -> list[str]:
    """Return the names of the kernels from outside XLA that a program calls, as often as its text does."""
    calls = (line for line in text.split("\n") if "custom_call_target=" in line)
    return [next(filter(None, (pattern.search(line) for pattern in _NAMES)))[1] for line in calls]


def is_attention(name: str) -> bool:
    """Tell whether a kernel from outside XLA computes attention, by its name."""
    return re.search(r"fmha|attention|attn|splash|tpu_custom_call", name, re.I) is not None


def _describe_fusion(body: _Body, bodies: dict[str, _Body]) -> tuple[str, int, int]:
    """Return kind, bytes and operations of a fusion."""
    # A product of Triton may be one computation deeper.
    inner = [bodies[one.attribute("calls")] for one in body.values() if one.op == "fusion"]
    products = [(one, part) for part in (body, *inner) for one in part.values() if one.op == "dot"]
    ops = {one.op for one in body.values()} - {"parameter", "constant", "bitcast", "tuple"}
    if products:
        kind = PRODUCTS
    elif "reduce" in ops:
        kind = REDUCTIONS
    elif "dynamic-update-slice" in ops or ops <= _COPYING or ops <= _FILLING:
        kind = COPIES
    else:
        kind = OTHERS if "sort" in ops else ELEMENT_WISE
    return kind, _fusion_bytes(body), sum(_product_flops(one, part) for one, part in products)


def _product_flops(one: _Instruction, body: _Body) -> int:
    sides = next(filter(None, (pattern.search(one.attributes) for pattern in _CONTRACTED)), None)
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
    users = collections.defaultdict(list)
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


def kernel_seconds(kernel: Kernel, rates: Rates) -> float:
    """Model the time of all calls of a kernel: the roofline, and a launch."""
    size = kernel.bytes * (_ATTENTION_FACTOR if kernel.kind == ATTENTION else 1)
    return kernel.times * (max(kernel.flops / rates.flops, size / rates.bytes) + rates.launch)


def sum_kernels(kernels: Iterable[Kernel], rates: Rates | None) -> list[dict[str, Any]]:
    """Add up kernels by kind, the most bytes first, as JSON values; `milliseconds` are None without rates."""
    kinds = collections.defaultdict(list)
    for kernel in kernels:
        kinds[kernel.kind].append(kernel)
    rows: list[dict[str, Any]] = [
        {
            "kind": kind,
            "kernels": sum(one.times for one in own),
            "gigabytes": round(sum(one.times * one.bytes for one in own) / 1e9, 3),
            "teraflops": round(sum(one.times * one.flops for one in own) / 1e12, 3),
            "milliseconds": rates and round(1e3 * sum(kernel_seconds(one, rates) for one in own), 3),
        }
        for kind, own in kinds.items()
    ]
    return sorted(rows, key=lambda row: -row["gigabytes"])
