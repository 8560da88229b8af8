"""Charts as places in a drawing, which the page's template writes as SVG: curves, and bars with intervals."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

# Sizes in units of the drawing, which is as wide as the page allows.
SIZE = {"width": 420, "height": 240, "left": 60, "right": 8, "top": 10, "bottom": 34}
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


class Rectangle(NamedTuple):
    """A bar in the drawing; `whisker` has the x and both ys of its interval."""

    run: int
    x: float
    y: float
    width: float
    height: float
    whisker: tuple[float, float, float] | None


class Chart(NamedTuple):
    """A drawing: ticks with their texts, and what is drawn."""

    title: str
    # What is said to who does not see it.
    said: str
    x_name: str
    x_ticks: Sequence[tuple[float, str, str]]
    y_ticks: Sequence[tuple[float, str]]
    lines: Sequence[Line] = ()
    bars: Sequence[Rectangle] = ()


def draw_lines(lines: Sequence[Line], *, title: str, x_name: str) -> list[Chart]:
    """Curves over the same axis; [] if no curve has two finite points."""
    drawn = [line._replace(points=_choose_points(line.points)) for line in lines]
    drawn = [line for line in drawn if len(line.points) > 1]
    if not drawn:
        return []
    xs, ys = zip(*(point for line in drawn for point in line.points), strict=True)
    # Of all but the highest values, such as the losses of the first updates.
    highest = float(np.quantile(ys, 0.98, method="inverted_cdf"))
    x_ticks, y_ticks = _ticks(0, max(xs)), _ticks(min(ys), highest)
    scale = _Scale((0, x_ticks[-1]), (y_ticks[0], y_ticks[-1]))
    said = "; ".join(f"{line.name}: last value {line.points[-1][1]:.4g}" for line in drawn)
    return [
        Chart(
            title,
            said,
            x_name,
            [(scale.x(tick), _write(tick), "end" if tick == x_ticks[-1] else "middle") for tick in x_ticks],
            [(scale.y(tick), _write(tick)) for tick in y_ticks],
            [line._replace(points=[(scale.x(x), scale.y(y)) for x, y in line.points]) for line in drawn],
        )
    ]


def draw_bars(groups: Mapping[str, Sequence[tuple[int, Bar]]], *, title: str, x_name: str) -> list[Chart]:
    """Groups of bars, one of each run, of scores up to 100, with whiskers for intervals; [] without any."""
    bars = [bar for group in groups.values() for _, bar in group]
    if not bars:
        return []
    y_ticks = _ticks(0, min(100.0, max(bar.value + (bar.interval or 0) for bar in bars)))
    scale = _Scale((0, len(groups)), (0, y_ticks[-1]))
    drawn = []
    for number, group in enumerate(groups.values()):
        width = 0.8 / max(1, len(group))
        for place, (run, bar) in enumerate(group):
            left, right = (scale.x(number + 0.1 + width * (place + end)) for end in (0, 0.9))
            top, whisker = scale.y(bar.value), None
            if bar.interval:
                low, high = max(0.0, bar.value - bar.interval), bar.value + bar.interval
                whisker = round((left + right) / 2, 1), scale.y(high), scale.y(low)
            size = round(right - left, 1), round(scale.y(0) - top, 1)
            drawn.append(Rectangle(run, left, top, *size, whisker))
    return [
        Chart(
            title,
            f"{len(groups)} groups; the table has the values",
            x_name,
            [(scale.x(number + 0.5), label, "middle") for number, label in enumerate(groups)],
            [(scale.y(tick), _write(tick)) for tick in y_ticks],
            bars=drawn,
        )
    ]


class _Scale:
    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self._x, self._y = x_range, y_range

    def x(self, value: float) -> float:
        low, high = self._x
        width = SIZE["width"] - SIZE["left"] - SIZE["right"]
        return round(SIZE["left"] + (value - low) / ((high - low) or 1) * width, 1)

    def y(self, value: float) -> float:
        low, high = self._y
        share = min(1.0, max(0.0, (value - low) / ((high - low) or 1)))
        base = SIZE["height"] - SIZE["bottom"]
        return round(base - share * (base - SIZE["top"]), 1)


def _choose_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Evenly spread finite points, the first and the last included."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    numbers = np.linspace(0, len(finite) - 1, min(len(finite), _MOST_POINTS)).round().astype(int)
    return [finite[number] for number in numbers]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from below `low` to above `high`, about five."""
    span = (high - low) or abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if span / (step * factor) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _write(value: float) -> str:
    """Return the text of a tick, of at most seven characters below ten million: 2.5e-3, 0.025, 25k."""
    if 0 < abs(value) < 0.01:
        digits, exponent = f"{value:.3e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{round(value, 6):g}"
