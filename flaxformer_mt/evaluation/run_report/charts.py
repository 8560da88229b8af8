"""Charts as SVG inside a page: curves, and bars with intervals; their colors are classes of its style."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Sizes in units of the drawing, which is as wide as the page allows.
_WIDTH, _HEIGHT = 420, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 10, 34
# More points of a curve could not be told apart.
_MOST_POINTS = 300


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


def draw_lines(lines: Sequence[Line], *, title: str, x_name: str) -> str:
    """Returns curves over the same axis as SVG, with a legend; "" if no curve has two finite points."""
    kept = [line._replace(points=_thin(_finite(line.points))) for line in lines]
    kept = [line for line in kept if len(line.points) > 1]
    if not kept:
        return ""
    xs, ys = zip(*(point for line in kept for point in line.points), strict=True)
    x_ticks, y_ticks = _ticks(0, max(xs)), _ticks(*_robust_range(ys))
    scale = _Scale((0, max(xs)), (y_ticks[0], y_ticks[-1]))
    parts = [*_draw_axes(scale, x_ticks, y_ticks, x_name)]
    for line in kept:
        path = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in line.points)
        dashed = " dashed" if line.dashed else ""
        parts.append(f'<polyline class="line run{line.run}{dashed}" points="{path}"/>')
    legend = "".join(
        f'<li><svg class="key" viewBox="0 0 28 8" aria-hidden="true"><path d="M0 4H28" class="line '
        f'run{line.run}{" dashed" if line.dashed else ""}"/></svg>{html.escape(line.name)}</li>'
        for line in kept
    )
    said = "; ".join(f"{line.name}: last value {line.points[-1][1]:.4g}" for line in kept)
    return _frame(title, said, parts, f'<ul class="legend">{legend}</ul>')


def draw_bars(groups: Mapping[str, Sequence[tuple[int, Bar]]], *, title: str, x_name: str) -> str:
    """Returns groups of bars, one of each run, with whiskers for their intervals, as SVG; "" without any.

    Values are scores of at most 100.
    """
    bars = [bar for group in groups.values() for _, bar in group]
    if not bars:
        return ""
    y_ticks = _ticks(0, min(100.0, max(bar.value + (bar.interval or 0) for bar in bars)))
    scale = _Scale((0, len(groups)), (0, y_ticks[-1]))
    parts = [*_draw_axes(scale, [], y_ticks, x_name)]
    for number, (label, group) in enumerate(groups.items()):
        width = 0.8 / max(1, len(group))
        for place, (run, bar) in enumerate(group):
            left, right = (scale.x(number + 0.1 + width * (place + end)) for end in (0, 0.9))
            top, middle = scale.y(bar.value), (left + right) / 2
            parts.append(
                f'<rect class="bar run{run}" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
                f'height="{scale.y(0) - top:.1f}"/>'
            )
            if bar.interval:
                high, low = scale.y(bar.value + bar.interval), scale.y(max(0.0, bar.value - bar.interval))
                parts.append(f'<path class="whisker" d="M{middle:.1f} {high:.1f}V{low:.1f}"/>')
        parts.append(
            f'<text class="middle" x="{scale.x(number + 0.5):.1f}" y="{_HEIGHT - _BOTTOM + 14}">'
            f"{html.escape(label)}</text>"
        )
    return _frame(title, f"{len(groups)} groups; the table has the values", parts, "")


class _Scale:
    """Maps values to places in the drawing."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self._x, self._y = x_range, y_range

    def x(self, value: float) -> float:
        low, high = self._x
        return _LEFT + (value - low) / ((high - low) or 1) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y
        share = min(1.0, max(0.0, (value - low) / ((high - low) or 1)))
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _draw_axes(scale: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], x_name: str) -> list[str]:
    parts = []
    for tick in y_ticks:
        y = scale.y(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="end" x="{_LEFT - 5}" y="{y + 4:.1f}">{_write(tick)}</text>')
    for tick in x_ticks:
        anchor = "end" if tick == x_ticks[-1] else "middle"
        place = f'x="{scale.x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 14}"'
        parts.append(f'<text class="{anchor}" {place}>{_write(tick)}</text>')
    parts.append(
        f'<text class="end soft" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}">{html.escape(x_name)}</text>'
    )
    return parts


def _frame(title: str, said: str, parts: Sequence[str], legend: str) -> str:
    label = html.escape(f"{title}. {said}", quote=True)
    return (
        f'<figure><figcaption>{html.escape(title)}</figcaption><svg class="chart" role="img" '
        f'aria-label="{label}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(parts)}</svg>{legend}</figure>'
    )


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keeps evenly spread points, the first and the last included."""
    last = len(points) - 1
    if last < _MOST_POINTS:
        return points
    return [points[round(number * last / (_MOST_POINTS - 1))] for number in range(_MOST_POINTS)]


def _robust_range(values: Sequence[float]) -> tuple[float, float]:
    """The range of all but the highest values, such as the losses of the first updates."""
    ordered = sorted(values)
    high = ordered[max(0, math.ceil(len(ordered) * 0.98) - 1)]
    return ordered[0], high


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from below `low` to above `high`, about five."""
    span = (high - low) or abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if span / (step * factor) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _write(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{round(value, 6):g}"
