"""The strict table between our parameters and a foreign system's arrays, and the two ways across it.

Owns the check that nothing is missing, unexpected or of a wrong shape, on either side. Knows no format: each
has a file of its own, which says its rules.

    Rule("encoder/layers_{n}/feedforward/input/kernel", "encoder.layers.{n}.fc1.weight", TRANSPOSED)

stands for as many entries as there are layers. A foreign array may be made of several of ours, one after the
other (`Rule` with several paths), of a part of ours (`head`), or of none (`constant`).
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flaxformer_mt.convert.array_layouts import SAME, Layout, Shape
from flaxformer_mt.errors import UserError

# Ours by path, as {"encoder/layers_0/...": float32 array}.
Leaves = dict[str, np.ndarray]
# Theirs by name.
Tensors = dict[str, np.ndarray]
# Shapes of ours by path.
Shapes = dict[str, Shape]

# A stored table may have been computed in float32: at position 5000 that is 4e-4 off the float64 one.
TABLE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Rule:
    """What a foreign array is made of.

    ours: a path, or several whose arrays follow each other along the first foreign axis. {n} is a layer.
    theirs: the foreign name, with the same {n}; with {h} it is one of each head, ours then being cut at axis
      `head_axis`.
    """

    ours: str | tuple[str, ...]
    theirs: str
    layout: Layout = SAME
    head_axis: int | None = None


@dataclass(frozen=True)
class Constant:
    """A foreign array that is no parameter of ours: a table, or a bias that we do not have.

    optional: a file may leave it out.
    tolerance: how far a file's numbers may be from these and still count as the same; TABLE_TOLERANCE for
      tables of sines.
    """

    theirs: str
    value: np.ndarray
    optional: bool = False
    tolerance: float = 0.0


@dataclass(frozen=True)
class _Part:
    path: str
    layout: Layout
    head: tuple[int, int] | None = None  # axis and index

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
    """All foreign arrays of one model, by name, and what of ours each is made of."""

    def __init__(self, shapes: Shapes, rules: Iterable[Rule | Constant], *, what: str) -> None:
        """Expands the rules for the parameters of a model.

        Args:
          shapes: of all our parameters, by path. Rules whose paths are not among them are of other models.
          what: the format's name, for messages.

        Raises:
          UserError: a parameter that no rule takes: the format has no place for it.
        """
        self._shapes, self._what = shapes, what
        self._entries: dict[str, _Entry] = {}
        for rule in rules:
            if isinstance(rule, Constant):
                self._add(rule.theirs, _Entry((), rule.value, rule.optional, rule.tolerance))
            else:
                for name, entry in _expand(rule, shapes):
                    self._add(name, entry)
        taken = {part.path for entry in self._entries.values() for part in entry.parts}
        if left := [path for path in shapes if path not in taken]:
            raise UserError(f"{what} has no place for {', '.join(left)}")

    def _add(self, name: str, entry: _Entry) -> None:
        assert name not in self._entries, f"two rules make {name}"
        self._entries[name] = entry

    @property
    def names(self) -> list[str]:
        """The foreign names, in the order of the rules."""
        return list(self._entries)

    def shape_of(self, name: str) -> Shape:
        """Of a foreign array."""
        entry = self._entries[name]
        if entry.constant is not None:
            return entry.constant.shape
        shapes = [_theirs(part, _blank(self._shapes[part.path])).shape for part in entry.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if len(shapes) > 1 else shapes[0]

    def to_theirs(self, leaves: Leaves) -> Tensors:
        """The foreign arrays of our parameters; tied ones are one array under each of their names."""
        tensors: Tensors = {}
        made: dict[tuple[_Part, ...], np.ndarray] = {}
        for name, entry in self._entries.items():
            if entry.constant is not None:
                tensors[name] = entry.constant
                continue
            if entry.parts not in made:
                arrays = [_theirs(part, leaves[part.path]) for part in entry.parts]
                whole = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
                made[entry.parts] = np.ascontiguousarray(whole)
            tensors[name] = made[entry.parts]
        return tensors

    def to_ours(self, tensors: Tensors, *, tied: Sequence[str] = (), origin: str = "the file") -> Leaves:
        """Our parameters from foreign arrays, the exact inverse of `to_theirs`.

        Args:
          tied: names that may be left out because another holds the same array.

        Raises:
          UserError: every name that is missing, unexpected, of a wrong shape, unlike its tied twin or unlike
            the constant that it must be, in one message.
        """
        problems = self._compare(tensors, tied)
        if problems:
            raise UserError(
                f"{origin} is not a {self._what} model of this config; {len(problems)} entries differ:\n  "
                + "\n  ".join(problems)
            )
        leaves: Leaves = {path: np.full(shape, np.nan, np.float32) for path, shape in self._shapes.items()}
        filled: dict[tuple[str, Any], str] = {}
        unlike = []
        for name, entry in self._entries.items():
            if name not in tensors or entry.constant is not None:
                continue
            array, start = np.asarray(tensors[name], np.float32), 0
            for part in entry.parts:
                place = part.select(leaves[part.path])
                piece = array
                if len(entry.parts) > 1:
                    size = _theirs(part, _blank(self._shapes[part.path])).shape[0]
                    piece, start = array[start : start + size], start + size
                ours = part.layout.to_ours(piece, place.shape)
                twin = filled.setdefault((part.path, part.head), name)
                if twin != name and not np.array_equal(place, ours, equal_nan=True):
                    unlike.append(f"{name}: tied to {twin} by the config, but their numbers differ")
                place[...] = ours
        if unlike:
            raise UserError(f"{origin} is not a {self._what} model of this config:\n  " + "\n  ".join(unlike))
        return leaves

    def _compare(self, tensors: Tensors, tied: Sequence[str]) -> list[str]:
        problems = []
        held = {part.path for name in tensors if name in self._entries for part in self._entries[name].parts}
        for name, entry in self._entries.items():
            if name not in tensors:
                elsewhere = name in tied and all(part.path in held for part in entry.parts)
                if not entry.optional and not elsewhere:
                    problems.append(f"{name}: missing, wanted {list(self.shape_of(name))}")
            elif np.shape(tensors[name]) != self.shape_of(name):
                there = list(np.shape(tensors[name]))
                problems.append(f"{name}: has shape {there}, wanted {list(self.shape_of(name))}")
            elif entry.constant is not None:
                gap = np.abs(np.asarray(tensors[name], np.float32) - entry.constant).max(initial=0.0)
                if not gap <= entry.tolerance:
                    problems.append(f"{name}: is not what this config computes; largest difference {gap:.3g}")
        for name in tensors:
            if name not in self._entries:
                problems.append(f"{name}: unexpected, has shape {list(np.shape(tensors[name]))}")
        return problems


def _expand(rule: Rule, shapes: Shapes) -> Iterable[tuple[str, _Entry]]:
    paths = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
    pattern = re.compile(re.escape(paths[0]).replace(r"\{n\}", r"(\d+)"))
    for path in shapes:
        match = pattern.fullmatch(path)
        if match is None:
            continue
        layer = match[1] if match.groups() else ""
        own = [p.replace("{n}", layer) for p in paths]
        name = rule.theirs.replace("{n}", layer)
        if rule.head_axis is None:
            yield name, _Entry(tuple(_Part(p, rule.layout) for p in own))
            continue
        for head in range(shapes[path][rule.head_axis]):
            parts = tuple(_Part(p, rule.layout, (rule.head_axis, head)) for p in own)
            yield name.replace("{h}", str(head)), _Entry(parts)


def _theirs(part: _Part, array: np.ndarray) -> np.ndarray:
    return part.layout.to_theirs(part.select(array))


def _blank(shape: Shape) -> np.ndarray:
    """Zeros of a shape that take no memory."""
    return np.broadcast_to(np.float32(0), shape)


def rules_for(prefixes: Iterable[tuple[str, str]], rules: Sequence[Rule]) -> list[Rule]:
    """The same rules under several pairs of prefixes, ours and theirs.

    [("encoder/", "enc.")] and Rule("a", "b") give Rule("encoder/a", "enc.b").
    """

    def under(ours: str, theirs: str, rule: Rule) -> Rule:
        paths = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
        return Rule(tuple(ours + path for path in paths), theirs + rule.theirs, rule.layout, rule.head_axis)

    return [under(*prefix, rule) for prefix, rule in itertools.product(prefixes, rules)]
