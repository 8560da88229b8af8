"""Figures from arrays: the positions of a model, the course of a training, the weights of attention.

Owns what the pictures look like; the only door to matplotlib. Knows nothing of runs, models or vocabularies:
it takes numbers and their names. Figures are made without pyplot, so that no display is needed and nothing
outlives its figure.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Which of a table's dimensions are drawn as curves: slow enough to be seen, fast enough to move.
_CURVE_DIMENSIONS = range(4, 8)

_DOTS_PER_INCH = 100

# Attention: most heads of a figure, the inches that a piece's label needs, the least inches of a head, and
# the most inches of all heads beside each other.
_MOST_PANELS = 32
_LABEL_INCHES = 0.14
_LEAST_INCHES = 1.4
_MOST_INCHES = 28.0
_LONGEST_LABEL = 20

# Matplotlib brings this font along.
_OWN_FONT = "DejaVu Sans"

# (steps, values), of the same length.
Curve = tuple[Sequence[int], Sequence[float]]


class Side(NamedTuple):
    """One side of a matrix of weights: what its tokens are, and each token's piece."""

    name: str
    pieces: Sequence[str]


def save_figure(figure: "Figure", path: Path) -> None:
    """Writes a figure as a PNG file."""
    figure.savefig(path, format="png", dpi=_DOTS_PER_INCH)


# ---- positions ----


def draw_position_curves(
    tables: Mapping[str, np.ndarray], *, first_position: int = 0, column: str = "dimension"
) -> "Figure":
    """Columns 4 to 7 of tables [P, D] over their positions, 15 x 5 inches for each table.

    A narrower table gives what it has of them, and one of at most four columns all of them.

    Args:
      tables: by the name of what they belong to, which is written above them when there are several.
      first_position: of the first row.
      column: what one column is, for the legend: "dimension 4", ...
    """
    figure = _make_figure(15, 5 * len(tables))
    for number, (name, table) in enumerate(tables.items(), start=1):
        axes = figure.add_subplot(len(tables), 1, number)
        positions = np.arange(first_position, first_position + len(table))
        width = table.shape[1]
        for index in [i for i in _CURVE_DIMENSIONS if i < width] if width > 4 else range(width):
            axes.plot(positions, table[:, index], label=f"{column} {index}")
        axes.set(xlabel="position", ylabel="value", title=name if len(tables) > 1 else "")
        axes.margins(x=0.01)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def draw_position_tables(
    tables: Mapping[str, np.ndarray], *, first_position: int = 0, column: str = "dimension"
) -> "Figure":
    """Tables [P, D] as images, positions down and columns across, white where they are 0.

    Args:
      tables: by the name of what they belong to, which is written above them when there are several.
      first_position: of the first row.
      column: what one column is, for the axis.
    """
    figure = _make_figure(10, 6 * len(tables))
    for number, (name, table) in enumerate(tables.items(), start=1):
        axes = figure.add_subplot(len(tables), 1, number)
        largest = float(np.abs(table).max()) or 1.0
        rows, width = table.shape
        image = axes.imshow(
            table,
            cmap="RdBu_r",
            vmin=-largest,
            vmax=largest,
            aspect="auto",
            interpolation="nearest",
            extent=(-0.5, width - 0.5, first_position + rows - 0.5, first_position - 0.5),
        )
        _whole_numbers(axes.xaxis)
        _whole_numbers(axes.yaxis)
        axes.set(xlabel=column, ylabel="position", title=name if len(tables) > 1 else "")
        figure.colorbar(image, ax=axes, label="value", pad=0.02)
    return figure


# ---- training ----


def draw_training(panels: Mapping[str, Mapping[str, Curve]]) -> "Figure":
    """One panel below the other over the same steps, each with its curves.

    Args:
      panels: by the name of what is measured; curves by the name of what it is measured on. Panels and curves
        without a finite number are left out; a number that is not finite is a gap.
    """
    drawn = {name: {label: c for label, c in curves.items() if _finite(c)} for name, curves in panels.items()}
    drawn = {name: curves for name, curves in drawn.items() if curves}
    figure = _make_figure(10, max(2.4 * len(drawn), 3))
    shared = None
    for number, (name, curves) in enumerate(drawn.items(), start=1):
        axes = figure.add_subplot(len(drawn), 1, number, sharex=shared)
        shared = shared or axes
        for label, (steps, values) in curves.items():
            marker = "." if len(steps) <= 100 else ""
            axes.plot(steps, values, label=label, marker=marker, linewidth=1.2)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        if number == len(drawn):
            axes.set_xlabel("step")
            _whole_numbers(axes.xaxis)
        else:
            axes.tick_params(labelbottom=False)
    return figure


def _finite(curve: Curve) -> bool:
    return bool(np.isfinite(np.asarray(curve[1], np.float64)).any())


# ---- attention ----


def draw_attention(
    layers: Sequence[np.ndarray], *, queries: Side, memory: Side, parted_at: int | None = None
) -> dict[str, "Figure"]:
    """Weights [H, Q, M] of each layer as images, queries down and what they attend to across.

    All layers are one figure, "", with a row for each. Where that has too many heads, or no room for the
    labels, each layer is a figure of its own: "layer_0", "layer_1", ... One scale serves all of them: white
    is 0, and the darkest is the largest weight.

    Args:
      layers: from the first layer.
      queries: Q pieces.
      memory: M pieces.
      parted_at: the first token of another text on both sides; lines are drawn before it.
    """
    heads = layers[0].shape[0]
    titled = [
        [(f"layer {number}, head {head}", weights[head]) for head in range(heads)]
        for number, weights in enumerate(layers)
    ]
    together = _Grid(queries, memory, rows=len(layers), columns=heads)
    if len(layers) == 1 or len(layers) * heads > _MOST_PANELS or not together.has_room:
        columns = math.ceil(math.sqrt(heads))
        grid = _Grid(queries, memory, rows=math.ceil(heads / columns), columns=columns)
        figures = {f"layer_{number}" if len(layers) > 1 else "": row for number, row in enumerate(titled)}
    else:
        grid, figures = together, {"": [panel for row in titled for panel in row]}
    largest = max(float(weights.max()) for weights in layers)
    return {name: grid.draw(panels, largest, parted_at) for name, panels in figures.items()}


class _Grid:
    """Heads in rows and columns, with labels at the left and at the bottom only, as they are all the same."""

    def __init__(self, queries: Side, memory: Side, *, rows: int, columns: int) -> None:
        self._queries, self._memory = queries, memory
        self._rows, self._columns = rows, columns
        # Of one head, in inches.
        self._height = self._inches(len(queries.pieces), rows)
        self._width = self._inches(len(memory.pieces), columns)
        # Every so many pieces have a label.
        self._query_step = math.ceil(len(queries.pieces) * _LABEL_INCHES / self._height)
        self._memory_step = math.ceil(len(memory.pieces) * _LABEL_INCHES / self._width)

    @property
    def has_room(self) -> bool:
        """Whether every piece has a label."""
        return self._query_step == self._memory_step == 1

    def draw(
        self, panels: Sequence[tuple[str, np.ndarray]], largest: float, parted_at: int | None
    ) -> "Figure":
        """The figure of titled weights [Q, M]."""
        families, missing = _choose_fonts({*"".join(self._queries.pieces), *"".join(self._memory.pieces)})
        labels = [[_spell(p, missing) for p in side.pieces] for side in (self._queries, self._memory)]
        figure = _make_figure(self._columns * self._width + 2.5, self._rows * (self._height + 0.3) + 1.5)
        every = []
        for number, (title, weights) in enumerate(panels):
            axes = figure.add_subplot(self._rows, self._columns, number + 1)
            every.append(axes)
            image = axes.imshow(
                weights, cmap="Blues", vmin=0, vmax=largest, aspect="auto", interpolation="nearest"
            )
            axes.set_title(title, fontsize=8)
            style: Any = {"fontsize": 7, "fontfamily": families, "parse_math": False}
            ticks = range(0, len(labels[0]), self._query_step)
            axes.set_yticks(ticks, labels[0][:: self._query_step], **style)
            ticks = range(0, len(labels[1]), self._memory_step)
            axes.set_xticks(ticks, labels[1][:: self._memory_step], rotation=90, **style)
            axes.tick_params(
                length=0,
                labelleft=number % self._columns == 0,
                labelbottom=number + self._columns >= len(panels),  # nothing is below it
            )
            if parted_at is not None:
                axes.axhline(parted_at - 0.5, color="tab:orange", linewidth=0.8)
                axes.axvline(parted_at - 0.5, color="tab:orange", linewidth=0.8)
        figure.supylabel(self._queries.name, fontsize=9)
        figure.supxlabel(self._memory.name, fontsize=9)
        figure.colorbar(image, ax=every, label="weight", pad=0.02, shrink=0.8)
        return figure

    @staticmethod
    def _inches(pieces: int, panels: int) -> float:
        return min(max(pieces * _LABEL_INCHES, _LEAST_INCHES), _MOST_INCHES / panels)


def _choose_fonts(characters: set[str]) -> tuple[list[str], set[str]]:
    """Families that have glyphs for the characters, and the characters that no family has."""
    from matplotlib import font_manager

    missing = {character for character in characters if character.isprintable()}
    installed = {entry.name for entry in font_manager.fontManager.ttflist}
    families = []
    for family in [_OWN_FONT, *sorted(installed - {_OWN_FONT})]:
        if not missing:
            break
        if "Last Resort" in family:  # it has a box for every character there is
            continue
        path = font_manager.findfont(font_manager.FontProperties(family=family))
        found = {c for c in missing if ord(c) in font_manager.get_font(path).get_charmap()}
        if found:
            families.append(family)
            missing -= found
    return families, missing | {character for character in characters if not character.isprintable()}


def _spell(piece: str, missing: set[str]) -> str:
    """A piece as a label: characters in `missing` as U+1F415, and no longer than labels may be."""
    spelled = "".join(f"U+{ord(c):04X}" if c in missing else c for c in piece)
    return spelled if len(spelled) <= _LONGEST_LABEL else spelled[: _LONGEST_LABEL - 1] + "…"


# ---- what all figures share ----


def _make_figure(width: float, height: float) -> "Figure":
    """A figure of so many inches that draws itself without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))
