"""Figures from arrays: position tables, training curves, scores and attention weights; as PNG, or in a page.

Figures are made without pyplot, which would need a display and keep every figure in memory.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flax import linen as nn

from flaxformer_mt.model.scanned_layers import unstack_layers
from flaxformer_mt.shapes import Array, Batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_DOTS_PER_INCH = 150

# Attention figures: the most heads of a figure, the inches that a label needs, the least inches of a head,
# the most inches of all heads along one axis, and the most characters of a label.
_MAX_HEADS = 32
_LABEL_INCHES = 0.14
_MIN_HEAD_INCHES = 1.4
_MAX_INCHES = 28.0
_MAX_LABEL_LENGTH = 20

# More points of a curve could not be told apart.
_MOST_POINTS = 300
# Inches of a chart: the view box of page.html.jinja has 72 units in each.
_CHART = 4.2, 2.4
# Colors that stand for those of a page: page.css has the light and the dark ones.
_INK, _GRID = "#000001", "#000002"
_RUN_COLORS = [f"#00010{number}" for number in range(6)]

# The font that matplotlib ships.
_SHIPPED_FONT = "DejaVu Sans"

# (steps, values), of the same length.
Curve = tuple[Sequence[int], Sequence[float]]


class TokenAxis(NamedTuple):
    """One axis of a matrix of attention weights: its title, and the piece of each token."""

    name: str
    pieces: Sequence[str]


def save_figure(figure: "Figure", path: Path, *, title: str = "") -> None:
    """As a PNG file, with a title above the figure."""
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    figure.savefig(path, format="png", dpi=_DOTS_PER_INCH)


# ---- positions ----


def draw_position_curves(
    tables: Mapping[str, np.ndarray], *, first_position: int = 0, column: str = "dimension"
) -> "Figure":
    """Plot four columns of tables [P, D] over positions: 4 to 7, or of more than 20 such frequencies."""
    figure = _make_figure(15, 5 * len(tables))
    for number, (name, table) in enumerate(tables.items(), start=1):
        axes = figure.add_subplot(len(tables), 1, number)
        positions = np.arange(first_position, first_position + len(table))
        width = table.shape[1]
        firsts = [2 * (max(width, 20) * share // 20) for share in (2, 3)]
        columns = [index for first in firsts for index in (first, first + 1) if index < width]
        for index in columns if width > 4 else range(width):
            axes.plot(positions, table[:, index], label=f"{column} {index}")
        axes.set(xlabel="position", ylabel="value", title=name if len(tables) > 1 else "")
        axes.margins(x=0.01)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def draw_position_tables(
    tables: Mapping[str, np.ndarray], *, first_position: int = 0, column: str = "dimension"
) -> "Figure":
    """Draw tables [P, D] as images, positions down and columns across; 0 is white."""
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


def read_curve(records: Sequence[Mapping[str, Any]], split: str, name: str) -> Curve:
    """Return a metric of a run over its steps; of a step that is recorded twice, the later record counts."""
    values = {r["step"]: r[name] for r in records if r.get("split") == split and name in r}
    steps = sorted(values)
    return steps, [math.nan if values[step] is None else values[step] for step in steps]


def draw_training(panels: Mapping[str, Mapping[str, Curve]]) -> "Figure":
    """Draw panels below each other over the same steps, each with its curves by the name of the data set.

    Panels and curves without a finite value are left out; a non-finite value is a gap.
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
    figure.align_ylabels()
    return figure


def _finite(curve: Curve) -> bool:
    return bool(np.isfinite(np.asarray(curve[1], np.float64)).any())


# ---- charts of a page ----


class Line(NamedTuple):
    """A curve: the number of its run, its name, its points, and whether it is drawn with dashes."""

    run: int
    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


class Bar(NamedTuple):
    """A value with the half width of its interval, or None."""

    value: float
    interval: float | None


class Chart(NamedTuple):
    """A drawing as the inside of an SVG element, and what is said to who does not see it."""

    title: str
    said: str
    drawing: str
    # Those that the legend names.
    lines: Sequence[Line] = ()


def chart_lines(lines: Sequence[Line], *, title: str, x_name: str) -> list[Chart]:
    """Curves over the same axis; [] if no curve has two finite points."""
    drawn = [line._replace(points=_choose_points(line.points)) for line in lines]
    drawn = [line for line in drawn if len(line.points) > 1]
    if not drawn:
        return []
    # Of all but the highest values, such as the losses of the first updates.
    ys = [y for line in drawn for _, y in line.points]
    highest = float(np.quantile(ys, 0.98, method="inverted_cdf"))
    axes = _make_chart(x_name)
    for line in drawn:
        x, y = np.transpose(line.points)
        style = "--" if line.dashed else "-"
        axes.plot(x, np.minimum(y, highest), style, color=_RUN_COLORS[line.run], clip_on=False)
    axes.set_xlim(left=0)
    axes.locator_params("x", nbins=5, integer=True)
    said = "; ".join(f"{line.name}: last value {line.points[-1][1]:.4g}" for line in drawn)
    return [Chart(title, said, _write_svg(axes), drawn)]


def chart_bars(groups: Mapping[str, Sequence[tuple[int, Bar]]], *, title: str, x_name: str) -> list[Chart]:
    """Groups of bars, one of each run, of scores up to 100, with whiskers for intervals; [] without any."""
    if not any(groups.values()):
        return []
    axes = _make_chart(x_name)
    for number, group in enumerate(groups.values()):
        width = 0.8 / max(1, len(group))
        for place, (run, bar) in enumerate(group):
            middle = number - 0.4 + width * (place + 0.5)
            axes.bar(middle, bar.value, 0.9 * width, color=_RUN_COLORS[run], clip_on=False)
            if bar.interval:
                interval = np.clip([bar.value - bar.interval, bar.value + bar.interval], 0, 100)
                axes.plot([middle] * 2, interval, color=_INK, clip_on=False)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylim(0, min(100, axes.get_ylim()[1]))
    return [Chart(title, f"{len(groups)} groups; the table has the values", _write_svg(axes))]


def _choose_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Evenly spread finite points, the first and the last included."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    numbers = np.linspace(0, len(finite) - 1, min(len(finite), _MOST_POINTS)).round().astype(int)
    return [finite[number] for number in numbers]


def _make_chart(x_name: str) -> Any:
    axes = _make_figure(*_CHART).add_subplot()
    axes.set_xlabel(x_name, loc="right")
    axes.grid(axis="y", color=_GRID, clip_on=False)
    axes.set_axisbelow(True)
    axes.tick_params(left=False, bottom=False)
    axes.spines[:].set_visible(False)
    return axes


def _write_svg(axes: Any) -> str:
    """Return what an SVG element of a page contains; the style sheet has its colors and its font."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        axes.figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    svg = file.getvalue().partition("</defs>")[2].rpartition("</svg>")[0]
    for name, color in [("ink", _INK), ("line", _GRID), *((f"run{i}", c) for i, c in enumerate(_RUN_COLORS))]:
        svg = svg.replace(color, f"var(--{name})")
    return re.sub(r' id="[^"]*"| font-family: [^;]*;|\n *', "", svg)


# ---- attention ----


def draw_attention(
    layers: Sequence[np.ndarray],
    *,
    queries: TokenAxis,
    memory: TokenAxis,
    boundary: int | None = None,
    darkest: float | None = None,
) -> dict[str, "Figure"]:
    """Draw the weights [H, Q, M] of each layer as images, queries down and attended tokens across.

    All layers share one figure, "", with one row per layer. If it would have too many heads, or no space for
    the labels, each layer has its own figure: "layer_0", "layer_1", ... All figures have the same color
    scale: white is 0, and the darkest color is `darkest`, or the largest weight. On both axes, lines are
    drawn before the token `boundary`, the first of a second text.
    """
    heads = layers[0].shape[0]
    titled = [
        [(f"layer {number}, head {head}", weights[head]) for head in range(heads)]
        for number, weights in enumerate(layers)
    ]
    one_grid = _Grid(queries, memory, rows=len(layers), columns=heads)
    if len(layers) == 1 or len(layers) * heads > _MAX_HEADS or not one_grid.fits_labels:
        columns = math.ceil(math.sqrt(heads))
        grid = _Grid(queries, memory, rows=math.ceil(heads / columns), columns=columns)
        figures = {f"layer_{number}" if len(layers) > 1 else "": row for number, row in enumerate(titled)}
    else:
        grid, figures = one_grid, {"": [panel for row in titled for panel in row]}
    if darkest is None:
        darkest = max(float(weights.max()) for weights in layers)
    return {name: grid.draw(panels, darkest, boundary) for name, panels in figures.items()}


class _Grid:
    """Heads in rows and columns; all have the same labels, which only the left and bottom heads show."""

    def __init__(self, queries: TokenAxis, memory: TokenAxis, *, rows: int, columns: int) -> None:
        self._queries, self._memory = queries, memory
        self._rows, self._columns = rows, columns
        # The size of one head, in inches.
        self._height = self._inches(len(queries.pieces), rows)
        self._width = self._inches(len(memory.pieces), columns)
        # Every n-th piece has a label.
        self._query_step = math.ceil(len(queries.pieces) * _LABEL_INCHES / self._height)
        self._memory_step = math.ceil(len(memory.pieces) * _LABEL_INCHES / self._width)

    @property
    def fits_labels(self) -> bool:
        return self._query_step == self._memory_step == 1

    def draw(
        self, panels: Sequence[tuple[str, np.ndarray]], largest: float, boundary: int | None
    ) -> "Figure":
        families, missing = _choose_fonts({*"".join(self._queries.pieces), *"".join(self._memory.pieces)})
        labels = [[_spell(p, missing) for p in side.pieces] for side in (self._queries, self._memory)]
        figure = _make_figure(self._columns * self._width + 2.5, self._rows * (self._height + 0.3) + 1.5)
        all_axes = []
        for number, (title, weights) in enumerate(panels):
            axes = figure.add_subplot(self._rows, self._columns, number + 1)
            all_axes.append(axes)
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
            if boundary is not None:
                axes.axhline(boundary - 0.5, color="tab:orange", linewidth=0.8)
                axes.axvline(boundary - 0.5, color="tab:orange", linewidth=0.8)
        figure.supylabel(self._queries.name, fontsize=9)
        figure.supxlabel(self._memory.name, fontsize=9)
        figure.colorbar(image, ax=all_axes, label="weight", pad=0.02, shrink=0.8)
        return figure

    @staticmethod
    def _inches(pieces: int, panels: int) -> float:
        return min(max(pieces * _LABEL_INCHES, _MIN_HEAD_INCHES), _MAX_INCHES / panels)


def _choose_fonts(characters: set[str]) -> tuple[list[str], set[str]]:
    """Font families with glyphs for the characters; also the characters without a glyph."""
    from matplotlib import font_manager

    missing = {character for character in characters if character.isprintable()}
    installed = {entry.name for entry in font_manager.fontManager.ttflist}
    families = []
    for family in [_SHIPPED_FONT, *sorted(installed - {_SHIPPED_FONT})]:
        if not missing:
            break
        if "Last Resort" in family:  # its glyph of every character is a box
            continue
        path = font_manager.findfont(font_manager.FontProperties(family=family))
        glyphs = {c for c in missing if ord(c) in font_manager.get_font(path).get_charmap()}
        if glyphs:
            families.append(family)
            missing -= glyphs
    return families, missing | {character for character in characters if not character.isprintable()}


def _spell(piece: str, missing: set[str]) -> str:
    """A label of limited length, with characters in `missing` as U+1F415."""
    spelled = "".join(f"U+{ord(c):04X}" if c in missing else c for c in piece)
    return spelled if len(spelled) <= _MAX_LABEL_LENGTH else spelled[: _MAX_LABEL_LENGTH - 1] + "…"


# ---- shared by all figures ----


def _make_figure(width: float, height: float) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


class AttentionMaps(NamedTuple):
    """Attention weights, one array [B, H, Q, M] per layer from the first to the last; rows sum to 1.

    encoder [B, H, S, S], decoder [B, H, T, T], cross [B, H, T, S]. A decoder-only model has only decoder
    maps, over source and target concatenated: [B, H, S + T, S + T]. A recurrent decoder has no decoder maps.
    """

    encoder: list[Array]
    decoder: list[Array]
    cross: list[Array]


def attention_maps(model: nn.Module, params: Any, batch: Batch) -> AttentionMaps:
    """The attention weights of each head and layer for a batch, without dropout."""
    _, variables = model.apply(
        {"params": params}, batch, deterministic=True, method="hidden", mutable=["intermediates"]
    )
    intermediates = unstack_layers(variables["intermediates"])
    return AttentionMaps(
        _weights(intermediates.get("encoder", {}), "self_attention"),
        _weights(intermediates.get("decoder", {}), "self_attention"),
        _weights(intermediates.get("decoder", {}), "cross_attention"),
    )


def _weights(stack: dict[str, Any], attention: str) -> list[Array]:
    layers = [stack[f"layers_{number}"] for number in range(len(stack))]
    return [layer[attention]["attention_weights"][0] for layer in layers if attention in layer]
