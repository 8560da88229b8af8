"""Reads the text of a compiled XLA program: its collectives, its kernels and the compiler's cycles.

Pure functions of the text that `Compiled.as_text()` returns. An instruction counts as often as a run of the
program executes it: in a loop, once for each iteration; of the branches of a conditional, only the most
expensive one counts.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

# Bytes of one element; sizes below one byte are rounded up.
_ITEM_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "s4", "u4", "s2", "u2"), 1),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2),
    **dict.fromkeys(("f32", "s32", "u32"), 4),
    **dict.fromkeys(("f64", "s64", "u64", "c64"), 8),
    "c128": 16,
}
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Operations whose `-start` has its operands in its result, before the results proper. (Compilers for GPUs
# write them as a tuple of their own, also for other operations.)
_REPEATS_OPERANDS = ("all-gather-start", "collective-permute-start")

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_CALLED = re.compile(
    r"\b(calls|body|condition|to_apply|branch_computations|true_computation|false_computation)="
    r"(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# Groups of devices that communicate: written out, as [groups,size]<=[devices], or as axes of a mesh.
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_PARTITIONS = re.compile(r"^HloModule .*\bnum_partitions=(\d+)")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_PATH = re.compile(r'op_name="([^"]*)"')
_KERNEL = re.compile(r'custom_call_target="([^"]*)"')
_DECLARED = re.compile(r'"cost_estimate":\{"flops":"(\d+)".*?"bytes_accessed":"(\d+)"')
_KERNEL_NAME = re.compile(r'"kernel_name":\s*"([^"]*)"')


class Instruction(NamedTuple):
    """One instruction: its name, the type of its result, its operation, its operands and its attributes.

    The operands of a constant are its value, as text.
    """

    name: str
    result: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def path(self) -> str:
        """The path of the traced operation in the model, or an empty string."""
        found = _PATH.search(self.attributes)
        return found.group(1) if found else ""

    @property
    def cycles(self) -> int:
        """The compiler's estimate of the cycles of one execution; 0 without an estimate."""
        found = _CYCLES.search(self.attributes)
        return int(found.group(1)) if found else 0

    @property
    def kernel(self) -> str:
        """The name of the kernel that a custom call runs, or an empty string."""
        target = _KERNEL.search(self.attributes)
        if self.opcode != "custom-call" or target is None:
            return ""
        named = _KERNEL_NAME.search(self.attributes)
        return named.group(1) if named else target.group(1)

    def called(self, role: str) -> list[str]:
        """The computations that an attribute such as `calls`, `body` or `branch_computations` names."""
        names = []
        for found in _CALLED.finditer(self.attributes):
            if found.group(1) == role:
                names += [name.strip().lstrip("%") for name in (found.group(2) or found.group(3)).split(",")]
        return names


class Execution(NamedTuple):
    """An instruction, the computation that it stands in, and how often a run executes it.

    fused: whether the instruction is a part of a fusion, whose estimate covers it.
    """

    instruction: Instruction
    computation: str
    times: int
    fused: bool


@dataclass(frozen=True, order=True)
class Traffic:
    """The collectives of one kind in a run of the program, on one device.

    count: executions. bytes: of the operands or of the results, whichever are larger, over all executions.
    sent: bytes that the device sends to others, in a ring of the n devices that take part: (n - 1) / n of
    what is gathered or scattered, twice that of an all-reduce, which is both.
    """

    count: int
    bytes: int
    sent: int = field(default=0, compare=False)

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.count + other.count, self.bytes + other.bytes, self.sent + other.sent)

    def repeat(self, times: int) -> "Traffic":
        """The traffic of several equal runs."""
        return Traffic(self.count * times, self.bytes * times, self.sent * times)


class KernelWork(NamedTuple):
    """What kernels of one path in the model declare to do in a run: operations, and bytes of memory."""

    flops: int
    bytes: int


def bytes_of(result: str) -> int:
    """Counts the bytes of all arrays in a type: `(f32[2,3]{1,0}, bf16[4])` has 24 + 8 = 32."""
    total = 0
    for kind, axes in _ARRAY.findall(result):
        size = _ITEM_BYTES.get(kind, 1 if kind.startswith("f8") or kind.startswith("f4") else 0)
        for axis in axes.split(",") if axes else []:
            size *= int(axis.lstrip("<="))
        total += size
    return total


class Program:
    """A compiled program, as its text describes it."""

    def __init__(self, text: str) -> None:
        self._computations, self._entry = _read_computations(text)
        partitions = _PARTITIONS.match(text)
        self._partitions = int(partitions.group(1)) if partitions else None

    @cached_property
    def executions(self) -> list[Execution]:
        """All instructions that a run executes."""
        return list(self._walk(self._entry, 1, fused=False))

    @property
    def cycles(self) -> int:
        """The sum of the compiler's estimates over a run; 0 if the compiler gives none."""
        return self.cycles_by_path().total()

    def cycles_by_path(self) -> Counter[str]:
        """The compiler's estimates over a run, by the path of the traced operation."""
        cycles: Counter[str] = Counter()
        for run in self.executions:
            if not run.fused and run.instruction.cycles:
                cycles[run.instruction.path] += run.times * run.instruction.cycles
        return cycles

    def collectives(self) -> dict[str, Traffic]:
        """The collectives of a run on one device, by kind: {"all-reduce": Traffic(7, 1048576)}.

        A TPU runs a collective beside other work as several fusions, for its start, its steps and its end.
        Each of them repeats the instruction, so that those of one channel count once.
        """
        channels: dict[tuple[str, ...], Traffic] = {}
        for run in self.executions:
            kind = run.instruction.opcode.removesuffix("-start")
            if kind in _COLLECTIVES:
                channel = _CHANNEL.search(run.instruction.attributes) if run.fused else None
                if kind == "all-reduce" and run.computation.startswith("all-reduce-scatter"):
                    kind = "reduce-scatter"  # each device keeps its part of the sum
                    channel = None  # sums that the compiler has combined all have the channel 1
                own = (run.computation, run.instruction.name)
                key = (kind, channel.group(1)) if channel else (kind, *own)
                moved = self._bytes_moved(run)
                traffic = Traffic(1, moved, self._bytes_sent(run, kind, moved)).repeat(run.times)
                channels[key] = max(traffic, channels.get(key, traffic))
        found: dict[str, Traffic] = {}
        for (kind, *_), traffic in sorted(channels.items()):
            found[kind] = found.get(kind, Traffic(0, 0)) + traffic
        return found

    def kernels(self) -> Counter[str]:
        """How often a run calls each kernel from outside XLA, by name, such as `__cudnn$fmhaSoftmax`."""
        kernels: Counter[str] = Counter()
        for run in self.executions:
            if run.instruction.kernel:
                kernels[run.instruction.kernel] += run.times
        return kernels

    def declared_work(self) -> dict[str, list[KernelWork]]:
        """The work of each call of a Pallas kernel in a run, by path: the compiler gives these no cycles."""
        found: dict[str, list[KernelWork]] = {}
        for run in self.executions:
            work = _DECLARED.search(run.instruction.attributes) if run.instruction.kernel else None
            if work is not None and not run.instruction.cycles:
                calls = [KernelWork(int(work.group(1)), int(work.group(2)))] * run.times
                found.setdefault(run.instruction.path, []).extend(calls)
        return found

    def loops_of_unknown_length(self) -> int:
        """The number of loops whose iterations the compiler does not know; they are counted once."""
        loops = [run.instruction for run in self.executions if run.instruction.opcode == "while"]
        return sum(self._count_trips(loop) is None for loop in loops)

    def _count_trips(self, loop: Instruction) -> int | None:
        """The iterations of a loop: those that the compiler notes, or those of `jax.lax.scan`, or None.

        A scan counts from 0 and goes on while its counter, element 0 of its state, is below a constant.
        """
        if found := _TRIPS.search(loop.attributes):
            return int(found.group(1))
        condition = [i for name in loop.called("condition") for i in self._computations.get(name, [])]
        items = {item.name: item for item in condition}
        test = next((item for item in condition if item.opcode == "compare"), None)
        if test is None or len(condition) != 4 or "direction=LT" not in test.attributes:
            return None
        counter, bound = (items.get(name) for name in test.operands)
        if (
            counter is None
            or bound is None
            or (counter.opcode, bound.opcode)
            != (
                "get-tuple-element",
                "constant",
            )
        ):
            return None
        return int(bound.operands[0]) if "index=0" in counter.attributes else None

    @cached_property
    def _results(self) -> dict[str, dict[str, str]]:
        return {
            name: {item.name: item.result for item in items} for name, items in self._computations.items()
        }

    def _bytes_moved(self, run: Execution) -> int:
        types = self._results[run.computation]
        operands = sum(bytes_of(types.get(name, "")) for name in run.instruction.operands)
        result = bytes_of(run.instruction.result)
        if run.instruction.opcode in _REPEATS_OPERANDS or run.instruction.result.startswith("(("):
            result -= operands
        return max(operands, result)

    def _bytes_sent(self, run: Execution, kind: str, moved: int) -> int:
        if kind in ("collective-permute", "collective-broadcast"):
            return moved
        devices = _group_size(run.instruction.attributes) or self._partitions
        share = 1 - 1 / devices if devices else 1.0
        return round(moved * share * (2 if kind == "all-reduce" else 1))

    def _walk(self, name: str, times: int, *, fused: bool) -> Iterator[Execution]:
        for item in self._computations.get(name, []):
            yield Execution(item, name, times, fused)
            if item.opcode == "while":
                trips = self._count_trips(item) or 1
                for body in item.called("body"):
                    yield from self._walk(body, times * trips, fused=fused)
            elif item.opcode == "conditional":
                branches = [
                    branch
                    for role in ("branch_computations", "true_computation", "false_computation")
                    for branch in item.called(role)
                ]
                runs = [list(self._walk(branch, times, fused=fused)) for branch in branches]
                yield from max(runs, key=_expense, default=[])
            elif item.opcode == "call":
                for called in item.called("to_apply"):
                    yield from self._walk(called, times, fused=fused)
            elif not item.opcode.endswith(("-done", "-update")):
                inner = fused or item.opcode == "fusion"
                for called in item.called("calls"):
                    yield from self._walk(called, times, fused=inner)


def _group_size(attributes: str) -> int | None:
    """The number of devices of a group that a collective connects; None for all devices, or if not told."""
    if listed := _LISTED_GROUPS.search(attributes):
        return listed.group(1).count(",") + 1
    if counted := _COUNTED_GROUPS.search(attributes):
        return int(counted.group(1))
    if mesh := _MESH_GROUPS.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh.group(1))}
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh.group(2))  # 'x':(2)4 is a part of 4 of x
        return math.prod(int(part) if part else sizes.get(name, 1) for name, part in axes)
    return None


def _expense(runs: list[Execution]) -> tuple[int, int]:
    return sum(run.times * run.instruction.cycles for run in runs if not run.fused), len(runs)


def _read_computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of each computation, and the name of the computation at which a run begins."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.split("\n"):
        if head := _HEAD.match(line):
            current = computations.setdefault(head.group(2), [])
            entry = head.group(2) if head.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            if (instruction := _read_instruction(*found.groups())) is not None:
                current.append(instruction)
    return computations, entry


def _read_instruction(name: str, text: str) -> Instruction | None:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    opcode = _OPCODE.match(text, end)
    if opcode is None:
        return None
    close = _closing(text, opcode.end() - 1)
    inside = text[opcode.end() : close]
    operands = (inside,) if opcode.group(1) == "constant" else tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, text[:end], opcode.group(1), operands, text[close + 1 :])


def _closing(text: str, start: int) -> int:
    """The position of the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return len(text)
