"""A table that maps Flax parameters to the arrays of a foreign format, and converts in both directions.

`read_names` reads the rules of a format from a text with one line per part of the network:

    (encoder|decoder)/layers_{n}/feedforward/(input|output)    (encoder|decoder).layers.{n}.fc(1|2)

A foreign array may also be the concatenation of several Flax arrays (`query+key+value`), the slice of one
head (`{h}`), or a value without a Flax parameter (`Constant`). Missing and unexpected arrays are errors.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.errors import UserError

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """A conversion of an array and its inverse; `to_flax` needs the Flax shape to restore flattened axes."""

    to_foreign: Callable[[np.ndarray], np.ndarray]
    to_flax: Callable[[np.ndarray, Shape], np.ndarray]


# Unchanged.
SAME = Layout(lambda a: a, lambda a, shape: a)
# [in, out], or a convolution [1, in, out] of kernel size 1 -> [out, in].
LINEAR = Layout(lambda a: a.reshape(a.shape[-2:]).T, lambda a, shape: a.T.reshape(shape))
# [D, H, K] -> [HK, D], as in PyTorch's Linear; the rows of one head are contiguous.
HEADS_IN = Layout(lambda a: a.reshape(len(a), -1).T, lambda a, shape: a.T.reshape(shape))
# [H, E, D] -> [D, HE], as in PyTorch's Linear.
HEADS_OUT = Layout(lambda a: a.reshape(-1, a.shape[-1]).T, lambda a, shape: a.T.reshape(shape))
# [H, K] -> [HK].
FLAT = Layout(lambda a: a.reshape(-1), lambda a, shape: a.reshape(shape))
# [H, E, D] -> [HE, D].
FLAT_ROWS = Layout(lambda a: a.reshape(-1, a.shape[-1]), lambda a, shape: a.reshape(shape))
# [D, H, K] -> [H, D, K]: one matrix per head.
HEAD_STACKED = Layout(lambda a: a.transpose(1, 0, 2), lambda a, shape: a.transpose(1, 0, 2))
# [1, in, out] -> [out, in, 1]: a Flax convolution to a PyTorch Conv1d.
CONVOLUTION_BOTH = Layout(lambda a: a.transpose(2, 1, 0), lambda a, shape: a.transpose(2, 1, 0))
# [V] -> [1, V].
ROW = Layout(lambda a: a[None], lambda a, shape: a[0])

# Flax parameters by path: {"encoder/layers_0/...": float32 array}.
Leaves = dict[str, np.ndarray]
# Foreign arrays by name.
Tensors = dict[str, np.ndarray]
# Shapes of Flax parameters by path.
Shapes = dict[str, Shape]

# Largest accepted difference of a stored sinusoidal table. A table that was computed in float32 differs from
# the float64 table by 4e-4 at position 5000.
TABLE_TOLERANCE = 1e-3

# Number of differing entries that a message lists.
_LISTED = 10
# Bytes.
_ALIGNMENT = 64
_NO_SHAPES: Shapes = {}


@dataclass(frozen=True)
class Rule:
    """A rule that makes foreign arrays from Flax parameters.

    ours: path of a Flax parameter, or several paths whose arrays are concatenated along the first foreign
      axis; {n} is the layer number.
    theirs: name of the foreign array, with the same {n}, or {n+1} if layers are counted from 1.
    layout: the conversion between the Flax array and the foreign array.
    head_axis: axis of the heads in the Flax array, if each head is a separate foreign array; {h} in `theirs`
      is the head number.
    unless: path of a parameter; if the network has it, the rule does not apply. For tied output matrices.
    """

    ours: str | tuple[str, ...]
    theirs: str
    layout: Layout = SAME
    head_axis: int | None = None
    unless: str = ""


@dataclass(frozen=True)
class Constant:
    """A foreign array without a Flax parameter: a position table, or a bias that the Flax model lacks.

    optional: files may omit the array.
    tolerance: largest accepted difference from `value`; TABLE_TOLERANCE for sinusoidal tables.
    """

    theirs: str
    value: np.ndarray
    optional: bool = False
    tolerance: float = 0.0


@dataclass(frozen=True)
class _Part:
    path: str
    layout: Layout
    head: tuple[int, int] | None = None  # axis and index of the head

    def select(self, array: np.ndarray) -> np.ndarray:
        if self.head is None:
            return array
        axis, index = self.head
        return array[(slice(None),) * axis + (index,)]


@dataclass(frozen=True)
class _Entry:
    parts: tuple[_Part, ...] = ()
    constant: np.ndarray | None = None
    optional: bool = False
    tolerance: float = 0.0


class Table:
    """Maps the names of all foreign arrays of a model to the Flax parameters from which they are made."""

    def __init__(
        self, shapes: Shapes, rules: Iterable[Rule | Constant], *, what: str, absent: Shapes = _NO_SHAPES
    ) -> None:
        """Make the table; raise UserError if a Flax parameter has no counterpart.

        `absent` are parameters that only the foreign network has: scales are 1, all others 0.
        """
        self._shapes, self._what = shapes, what
        self._entries: dict[str, _Entry] = {}
        rules = list(rules)
        for rule in rules:
            if isinstance(rule, Constant):
                self._add(rule.theirs, _Entry((), rule.value, rule.optional, rule.tolerance))
            else:
                for name, entry in _expand(rule, shapes):
                    self._add(name, entry)
        for name, entry in (
            pair for rule in rules if isinstance(rule, Rule) for pair in _expand(rule, absent)
        ):
            arrays = [_to_foreign(part, _broadcast_zeros(absent[part.path])) for part in entry.parts]
            value = np.concatenate(arrays) + np.float32(entry.parts[0].path.endswith("/scale"))
            self._add(name, _Entry((), value))
        matched = {part.path for entry in self._entries.values() for part in entry.parts}
        if unmatched := [path for path in shapes if path not in matched]:
            raise UserError(f"{what} has no counterpart for {', '.join(unmatched)}")

    def _add(self, name: str, entry: _Entry) -> None:
        assert name not in self._entries, f"two rules make {name}"
        self._entries[name] = entry

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def shape_of(self, name: str) -> Shape:
        entry = self._entries[name]
        if entry.constant is not None:
            return entry.constant.shape
        shapes = [_to_foreign(part, _broadcast_zeros(self._shapes[part.path])).shape for part in entry.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if len(shapes) > 1 else shapes[0]

    def to_foreign(self, leaves: Leaves, *, tied: bool = True) -> Tensors:
        """Convert Flax parameters to foreign arrays; tied=False returns only the first of tied arrays."""
        tensors: Tensors = {}
        built: dict[tuple[_Part, ...], np.ndarray] = {}
        for name, entry in self._entries.items():
            if entry.constant is not None:
                tensors[name] = entry.constant
                continue
            if entry.parts in built and not tied:
                continue
            if entry.parts not in built:
                arrays = [_to_foreign(part, leaves[part.path]) for part in entry.parts]
                array = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
                built[entry.parts] = np.ascontiguousarray(array)
            tensors[name] = built[entry.parts]
        return tensors

    def to_flax(
        self,
        tensors: Mapping[str, Any],
        *,
        may_omit_tied: bool = False,
        origin: str = "the file",
    ) -> Leaves:
        """Convert foreign arrays to Flax parameters; the exact inverse of `to_foreign`.

        `tensors` are numpy arrays, or objects with a shape that convert to numpy. `may_omit_tied`: whether a
        name may be missing if another name has the same array. Raises UserError if names, shapes or constants
        differ from the table.
        """
        problems = self._compare(tensors, may_omit_tied)
        if problems:
            more = f"\n  and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
            raise UserError(
                f"{origin} is not a {self._what} model of this config; {len(problems)} entries differ:\n  "
                + "\n  ".join(problems[:_LISTED])
                + more
            )
        leaves: Leaves = {path: _make_leaf(shape) for path, shape in self._shapes.items()}
        filled: dict[tuple[str, Any], str] = {}
        unequal = []
        for name, entry in self._entries.items():
            if name not in tensors or entry.constant is not None:
                continue
            array, start = np.asarray(tensors[name], np.float32), 0
            for part in entry.parts:
                view = part.select(leaves[part.path])
                piece = array
                if len(entry.parts) > 1:
                    size = _to_foreign(part, _broadcast_zeros(self._shapes[part.path])).shape[0]
                    piece, start = array[start : start + size], start + size
                values = part.layout.to_flax(piece, view.shape)
                first_name = filled.setdefault((part.path, part.head), name)
                if first_name != name and not np.array_equal(view, values, equal_nan=True):
                    unequal.append(f"{name}: tied to {first_name} by the config, but their values differ")
                view[...] = values
        if unequal:
            raise UserError(
                f"{origin} is not a {self._what} model of this config:\n  " + "\n  ".join(unequal)
            )
        return leaves

    def _compare(self, tensors: Mapping[str, Any], may_omit_tied: bool) -> list[str]:
        problems = []
        paths = {part.path for name in tensors if name in self._entries for part in self._entries[name].parts}
        for name, entry in self._entries.items():
            if name not in tensors:
                is_tied = may_omit_tied and entry.parts and all(part.path in paths for part in entry.parts)
                if not entry.optional and not is_tied:
                    problems.append(f"{name}: missing, expected shape {list(self.shape_of(name))}")
            elif np.shape(tensors[name]) != self.shape_of(name):
                shape = list(np.shape(tensors[name]))
                problems.append(f"{name}: has shape {shape}, expected {list(self.shape_of(name))}")
            elif entry.constant is not None:
                difference = np.abs(np.asarray(tensors[name], np.float32) - entry.constant).max(initial=0.0)
                if not difference <= entry.tolerance:
                    problems.append(
                        f"{name}: differs from the value that this config implies by up to {difference:.3g}"
                    )
        for name in tensors:
            if name not in self._entries:
                problems.append(f"{name}: unexpected, has shape {list(np.shape(tensors[name]))}")
        return problems


def _expand(rule: Rule, shapes: Shapes) -> Iterable[tuple[str, _Entry]]:
    paths = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
    if rule.unless in shapes:
        return
    pattern = re.compile(re.escape(paths[0]).replace(r"\{n\}", r"(\d+)"))
    for path in shapes:
        match = pattern.fullmatch(path)
        if match is None:
            continue
        layer = match[1] if match.groups() else ""
        layer_paths = [p.replace("{n}", layer) for p in paths]
        name = rule.theirs.replace("{n}", layer).replace("{n+1}", str(int(layer or 0) + 1))
        if rule.head_axis is None:
            yield name, _Entry(tuple(_Part(p, rule.layout) for p in layer_paths))
            continue
        for head in range(shapes[path][rule.head_axis]):
            parts = tuple(_Part(p, rule.layout, (rule.head_axis, head)) for p in layer_paths)
            yield name.replace("{h}", str(head)), _Entry(parts)


def _to_foreign(part: _Part, array: np.ndarray) -> np.ndarray:
    return part.layout.to_foreign(part.select(array))


def _make_leaf(shape: Shape) -> np.ndarray:
    """Return an array of NaN that is aligned to 64 bytes, so that JAX on CPU uses it without a copy."""
    size = math.prod(shape) * 4
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    leaf = memory[start : start + size].view(np.float32).reshape(shape)
    leaf.fill(np.nan)
    return leaf


def _broadcast_zeros(shape: Shape) -> np.ndarray:
    """Return an array of zeros that takes no memory, since it is broadcast from one number."""
    return np.broadcast_to(np.float32(0), shape)


# Parameter of a Flax module -> its name in PyTorch's layers.
PYTORCH = {"kernel": ".weight", "scale": ".weight", "embedding": ".weight", "bias": ".bias"}
# Pattern for the end of a path -> layout of the array; the first pattern that matches applies.
Layouts = Mapping[str, Layout]
# The layouts of PyTorch's layers.
LINEAR_LAYERS = {
    "_attention/(query|key|value)/kernel": HEADS_IN,
    "_attention/(query|key|value)/bias": FLAT,
    "_attention/output/kernel": HEADS_OUT,
    "kernel": LINEAR,
    "": SAME,
}
# Pattern for the end of a path -> the axis whose size is the model's width.
_WIDTH_AXES = {
    "(query|key|value|input|gate)/bias|output_bias": None,
    "(query|key|value)/kernel": 0,
    "attention/output/kernel": 2,
    "(input|gate)/kernel|output_kernel": -2,
    "": -1,
}
_TARGET_EMBEDDINGS = ("target_embedding", "shared_embedding", "token_embedding")
# Alternative names of modules: one embedding may be shared by both languages.
_ALIASES = {
    "source_embedding": ("source_embedding", "shared_embedding"),
    "target_embedding": _TARGET_EMBEDDINGS,
}


def read_names(
    text: str,
    *,
    prefix: str = "",
    parameters: Mapping[str, str] = PYTORCH,
    layouts: Layouts = LINEAR_LAYERS,
    half_width: bool = False,
) -> list[Rule | Constant]:
    """Read rules from lines that contain a module (or a parameter) of the network and its foreign name.

    A line with groups (a|b) stands for one line per alternative; the alternatives of both columns correspond
    in their order. `output` is the output matrix, which may be tied to the target embedding.

    parameters: Flax name of a parameter -> suffix of the foreign name.
    layouts: pattern for the end of a Flax path -> layout of the array.
    half_width: whether columns are permuted because the foreign model has all sines before all cosines.
    """
    rules = []
    for ours, theirs in (line.split() for line in text.split("\n") if line.strip()):
        pairs = _expand_groups(ours, prefix + theirs)
        rules += [rule for pair in pairs for rule in _read_line(*pair, parameters, layouts)]
    return [half_split(rule) if half_width else rule for rule in rules]


def expand_groups(text: str) -> list[str]:
    """Return a text for each combination of alternatives: (enc|dec)_x gives enc_x and dec_x."""
    parts = [part.split("|") for part in re.split(r"[()]", text)]
    return ["".join(choice) for choice in itertools.product(*parts)]


def _expand_groups(ours: str, theirs: str) -> Iterable[tuple[str, str]]:
    groups = [[part.split("|") for part in re.split(r"[()]", side)] for side in (ours, theirs)]
    counts = [len(part) for part in groups[0][1::2]]
    assert [len(part) for part in groups[1][1::2]] in (counts, []), (ours, theirs)
    for choice in itertools.product(*map(range, counts)):
        yield tuple(  # type: ignore[misc]
            "".join(
                part[choice[index // 2]] if index % 2 and len(side) > 1 else part[0]
                for index, part in enumerate(side)
            )
            for side in groups
        )


def _read_line(ours: str, theirs: str, parameters: Mapping[str, str], layouts: Layouts) -> Iterable[Rule]:
    if ours == "output":
        kernel = theirs + parameters["kernel"]
        yield make_rule("output_kernel", kernel, layouts)
        for table in _TARGET_EMBEDDINGS:
            yield Rule(f"{table}/embedding", kernel, unless="output_kernel")
    elif re.fullmatch("(output_)?(kernel|bias|scale)|embedding", ours.rpartition("/")[2]):
        yield make_rule(ours, theirs, layouts)
    else:
        for parameter, name in parameters.items():
            for module in _ALIASES.get(ours, (ours,)):
                yield make_rule(f"{module}/{parameter}", theirs + name, layouts)


def make_rule(ours: str, theirs: str, layouts: Layouts = LINEAR_LAYERS) -> Rule:
    if "{h}" in theirs:
        return Rule(ours, theirs, LINEAR, 1) if ours.endswith("kernel") else Rule(ours, theirs, SAME, 0)
    joined = re.search(r"[^/]*\+[^/]*", ours)
    paths = [ours.replace(joined[0], part) for part in joined[0].split("+")] if joined else [ours]
    return Rule(tuple(paths) if joined else ours, theirs, _find(layouts, paths[0]))


def _find(values: Mapping[str, Any], path: str) -> Any:
    return next(value for pattern, value in values.items() if re.search(f"({pattern})$", path))


def half_split_order(width: int) -> np.ndarray:
    """Return the Flax columns in an order with all sines before all cosines; for width 5: 0 2 4 1 3."""
    return np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])


def half_split(rule: Rule) -> Rule:
    """Return the rule; a width axis of its array is also permuted by the layout (see `half_split_order`)."""
    axis = _find(_WIDTH_AXES, rule.ours if isinstance(rule.ours, str) else rule.ours[0])
    return rule if axis is None else replace(rule, layout=_permute(rule.layout, axis))


@functools.cache  # tied names need equal layouts to share an array
def _permute(layout: Layout, axis: int) -> Layout:
    def to_foreign(array: np.ndarray) -> np.ndarray:
        return layout.to_foreign(np.take(array, half_split_order(array.shape[axis]), axis))

    def to_flax(array: np.ndarray, shape: Shape) -> np.ndarray:
        inverse = np.argsort(half_split_order(shape[axis]))
        return np.take(layout.to_flax(array, shape), inverse, axis)

    return Layout(to_foreign, to_flax)
