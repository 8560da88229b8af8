"""Draws PNG figures and charts for HTML pages, without pyplot, which keeps all figures in memory."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flax import linen as nn

from flaxformer_mt.model.scanned_layers import unstack_layers
from flaxformer_mt.shapes import Array, Batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Attention figures: the inches that a label needs, the least inches of a head, and the most inches of all
# heads along one axis.
_LABEL_INCHES = 0.14
_MIN_HEAD_INCHES = 1.4
_MAX_INCHES = 56.0

# More points of a curve could not be told apart.
_MOST_POINTS = 300
# Bins of a histogram.
_BINS = 12
# Inches of a chart: the view box of page.html.jinja has 72 units in each.
_CHART = 4.2, 2.4
# Colors that stand for those of a page: page.css has the light and the dark ones.
_INK, _GRID = "#000001", "#000002"
_RUN_COLORS = [f"#00010{number}" for number in range(6)]

# The font that matplotlib ships.
_SHIPPED_FONT = "DejaVu Sans"

# (steps, values), of the same length.
Curve = tuple[Sequence[int], Sequence[float]]


# ---- training ----


def read_curve(records: Sequence[Mapping[str, Any]], split: str, name: str) -> Curve:
    """Return a metric of a run over its steps; if a step is recorded twice, the later record counts."""
    values = {r["step"]: r[name] for r in records if r.get("split") == split and name in r}
    steps = sorted(values)
    return steps, [
        float(value) if isinstance(value := values[step], int | float) else math.nan for step in steps
    ]


def draw_training(panels: Mapping[str, Mapping[str, Curve]], *, title: str) -> "Figure":
    """Draw panels below each other with a common step axis; non-finite values are gaps in the curves."""
    figure = _make_figure(10, max(2.4 * len(panels), 3), title)
    rows = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, (name, curves) in zip(rows, panels.items(), strict=True):
        for label, (steps, values) in curves.items():
            marker = "." if len(steps) <= 100 else ""
            axes.plot(steps, values, label=label, marker=marker, linewidth=1.2)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    rows[-1].set_xlabel("step")
    rows[-1].locator_params("x", integer=True)
    figure.align_ylabels()
    return figure


# ---- charts of a page ----


class Line(NamedTuple):
    """A curve: the number of its run, its name, its points, and whether its line is dashed."""

    run: int
    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


class Bar(NamedTuple):
    """A value with the half-width of its confidence interval (None: no interval)."""

    value: float
    interval: float | None


class Chart(NamedTuple):
    """A drawing, as the content of an SVG element, and its text for screen readers."""

    title: str
    said: str
    drawing: str
    # Those that the legend names.
    lines: Sequence[Line] = ()


def chart_lines(lines: Sequence[Line], *, title: str, x_name: str) -> list[Chart]:
    """Draw curves over the same axis; return [] if no curve has two finite points."""
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
    """Draw groups of bars for scores up to 100, one bar per run, with intervals; return [] without bars."""
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
    axes.set_xticks(range(len(groups)), list(groups), parse_math=False)
    axes.set_ylim(0, min(100, axes.get_ylim()[1]))
    return [Chart(title, f"{len(groups)} groups; the table has the values", _write_svg(axes))]


def chart_histograms(samples: Mapping[str, Sequence[float]], *, title: str, x_name: str) -> list[Chart]:
    """Draw histograms in percent; the first and last bin include more extreme values; [] without values."""
    every = [value for values in samples.values() for value in values]
    if not every:
        return []
    low, high = np.quantile(every, [0.005, 0.995])
    clipped = [np.clip(values, low, high) for values in samples.values()]
    percents = [np.full(len(values), 100 / max(1, len(values))) for values in clipped]
    axes = _make_chart(x_name)
    axes.hist(clipped, _BINS, range=(low, high), weights=percents, color=_RUN_COLORS[: len(samples)])
    lines = [Line(number, name, (), False) for number, name in enumerate(samples)]
    return [Chart(title, f"{_BINS} bins from {low:.4g} to {high:.4g}", _write_svg(axes), lines)]


def _choose_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Choose evenly spread finite points, including the first and the last point."""
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
    """Return the content of an SVG element; the page's style sheet defines colors and font."""
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


class AttentionMaps(NamedTuple):
    """Attention weights: one array [batch, head, query, key] per layer, in order; rows sum to 1.

    With source length S and target length T, the shapes are encoder [B, H, S, S], decoder [B, H, T, T] and
    cross [B, H, T, S]. A decoder-only model has only decoder maps [B, H, S + T, S + T], over source and
    target together. A recurrent decoder has no decoder maps.
    """

    encoder: list[Array]
    decoder: list[Array]
    cross: list[Array]


def attention_maps(model: nn.Module, params: Any, batch: Batch) -> AttentionMaps:
    """Return the attention weights for a batch, without dropout."""
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


class TokenAxis(NamedTuple):
    """One axis of an attention matrix: its title, and the subword of each token."""

    name: str
    pieces: Sequence[str]


def draw_attention(
    layers: Sequence[np.ndarray], *, queries: TokenAxis, memory: TokenAxis, title: str
) -> "Figure":
    """Draw attention weights [head, query, key] as images: a row per layer, a column per head.

    Queries run down, keys across. White is 0, and the darkest color is 1.
    """
    rows, columns = len(layers), len(layers[0])
    height, query_step = _divide(len(queries.pieces), rows)
    width, memory_step = _divide(len(memory.pieces), columns)
    families, missing = _choose_fonts({*"".join(queries.pieces), *"".join(memory.pieces)})
    style: Any = {"fontsize": 7, "fontfamily": families, "parse_math": False}
    figure = _make_figure(columns * width + 2.5, rows * (height + 0.3) + 1.5, title)
    all_axes = figure.subplots(rows, columns, squeeze=False)
    for (layer, head), axes in np.ndenumerate(all_axes):
        image = axes.imshow(
            layers[layer][head], cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest"
        )
        axes.set_title(f"layer {layer}, head {head}", fontsize=8)
        axes.set(xticks=[], yticks=[])
    ticks = range(0, len(queries.pieces), query_step)
    for axes in all_axes[:, 0]:
        axes.set_yticks(ticks, [_spell(queries.pieces[tick], missing) for tick in ticks], **style)
    ticks = range(0, len(memory.pieces), memory_step)
    for axes in all_axes[-1]:
        axes.set_xticks(ticks, [_spell(memory.pieces[tick], missing) for tick in ticks], rotation=90, **style)
    for axes in all_axes.flat:
        axes.tick_params(length=0)
    figure.supylabel(queries.name, fontsize=9)
    figure.supxlabel(memory.name, fontsize=9)
    figure.colorbar(image, ax=all_axes, label="weight", pad=0.02, shrink=0.8)
    return figure


def _divide(pieces: int, heads: int) -> tuple[float, int]:
    """Return the inches per head along an axis, and the number n such that every n-th subword has a label."""
    inches = min(max(pieces * _LABEL_INCHES, _MIN_HEAD_INCHES), _MAX_INCHES / heads)
    return inches, math.ceil(pieces * _LABEL_INCHES / inches)


def _choose_fonts(characters: set[str]) -> tuple[list[str], set[str]]:
    """Return font families that have glyphs for the characters, and the characters without a glyph."""
    from matplotlib import font_manager

    missing, families = characters, []
    installed = {entry.name for entry in font_manager.fontManager.ttflist}
    for family in [_SHIPPED_FONT, *sorted(installed - {_SHIPPED_FONT})]:
        if not missing:
            break
        if "Last Resort" in family:  # its glyph of every character is a box
            continue
        path = font_manager.findfont(font_manager.FontProperties(family=family))
        glyphs = {c for c in missing if ord(c) in font_manager.get_font(path).get_charmap()}
        if glyphs:
            families.append(family)
            missing = missing - glyphs
    return families, missing


def _spell(piece: str, missing: set[str]) -> str:
    """Return the label of a subword, with the characters in `missing` written like U+1F415."""
    return "".join(f"U+{ord(c):04X}" if c in missing else c for c in piece)


# ---- shared by all figures ----


def _make_figure(width: float, height: float, title: str = "") -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    return figure
