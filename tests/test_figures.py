"""Figures hold the numbers they were given: what their axes, images, labels and files say."""

import subprocess
import sys

import numpy as np
import pytest

from flaxformer_mt.evaluation.plots import (
    TokenAxis,
    draw_attention,
    draw_position_curves,
    draw_position_tables,
    draw_training,
)
from flaxformer_mt.model.positions import sinusoidal_table


def panels_of(figure):
    """Axes without those of colour bars, which matplotlib labels so."""
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def legend_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def tick_labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def make_weights(heads, queries, memory, *, seed=0):
    weights = np.random.default_rng(seed).random((heads, queries, memory))
    return weights / weights.sum(axis=-1, keepdims=True)


def make_side(name, length):
    return TokenAxis(name, [f"{name[0]}{number}" for number in range(length)])


@pytest.mark.parametrize(
    ("width", "drawn"), [(3, [0, 1, 2]), (4, [0, 1, 2, 3]), (6, [4, 5]), (9, [4, 5, 6, 7])]
)
def test_a_narrow_table_gives_the_curves_it_has(width, drawn):
    table = sinusoidal_table(7, width)
    (axes,) = draw_position_curves({"model": table}, first_position=1, column="pair").axes
    assert legend_of(axes) == [f"pair {index}" for index in drawn]
    for index, line in zip(drawn, axes.lines, strict=True):
        np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 8))
        np.testing.assert_array_equal(line.get_ydata(), table[:, index])


@pytest.mark.parametrize("draw", [draw_position_curves, draw_position_tables])
def test_several_tables_are_told_apart_by_their_titles(draw):
    one, two = sinusoidal_table(5, 8), -sinusoidal_table(11, 8)
    figure = draw({"encoder": one, "decoder": two})
    assert [axes.get_title() for axes in panels_of(figure)] == ["encoder", "decoder"]
    assert tuple(figure.get_size_inches()) == ((15, 10) if draw is draw_position_curves else (10, 12))
    for axes, table in zip(panels_of(figure), (one, two), strict=True):
        shown = axes.images[0].get_array() if axes.images else axes.lines[2].get_ydata()
        np.testing.assert_array_equal(shown, table if axes.images else table[:, 6])


def test_a_table_is_an_image_with_zero_in_the_middle_of_its_colours():
    table = 3 * sinusoidal_table(100, 12)
    figure = draw_position_tables({"model": table}, first_position=2, column="pair")
    (axes,) = panels_of(figure)
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), table)
    assert image.get_clim() == (-np.abs(table).max(), np.abs(table).max())
    # The cell of row 0 lies around position 2, the last around 101; the first position is at the top.
    assert image.get_extent() == [-0.5, 11.5, 101.5, 1.5]
    assert axes.get_ylim() == (101.5, 1.5)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("pair", "position")
    assert tuple(figure.get_size_inches()) == (10, 6)


def test_a_table_of_zeros_has_a_scale_too():
    (axes,) = panels_of(draw_position_tables({"model": np.zeros((4, 6), np.float32)}))
    assert axes.images[0].get_clim() == (-1, 1)


def test_panels_and_curves_without_numbers_are_left_out():
    nan = float("nan")
    figure = draw_training(
        {"loss": {"training": ([1, 2, 3], [2.0, nan, 1.0]), "validation": ([], [])},
         "BLEU": {"validation": ([2], [nan])}, "learning rate": {}},
    )  # fmt: skip
    (axes,) = figure.axes
    assert (axes.get_ylabel(), axes.get_xlabel(), legend_of(axes)) == ("loss", "step", ["training"])
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), [2.0, nan, 1.0])  # a gap, not a line across
    assert draw_training({"BLEU": {"validation": ([], [])}}).axes == []


def test_too_many_heads_are_a_figure_a_layer():
    layers = [make_weights(17, 3, 3, seed=layer) for layer in range(2)]
    figures = draw_attention(layers, queries=make_side("q", 3), memory=make_side("m", 3))
    assert list(figures) == ["layer_0", "layer_1"]
    for number, figure in enumerate(figures.values()):
        panels = panels_of(figure)
        assert [axes.get_title() for axes in panels] == [f"layer {number}, head {head}" for head in range(17)]
        np.testing.assert_array_equal(panels[16].images[0].get_array(), layers[number][16])
        assert panels[0].images[0].get_clim() == (0, max(weights.max() for weights in layers))


def test_long_sentences_are_a_figure_a_layer_and_keep_the_labels_that_have_room():
    layers = [make_weights(2, 3, 240, seed=layer) for layer in range(2)]
    figures = draw_attention(layers, queries=make_side("q", 3), memory=make_side("m", 240))
    assert list(figures) == ["layer_0", "layer_1"]
    axes = panels_of(figures["layer_1"])[0]
    # Two heads share 28 inches, and a label takes 0.14: 100 of 240 have room, so each third one is there.
    assert tick_labels(axes.xaxis) == [f"m{number}" for number in range(0, 240, 3)]
    assert list(axes.get_xticks()) == list(range(0, 240, 3))
    assert figures["layer_1"].get_size_inches()[0] == pytest.approx(28 + 2.5)


def test_pieces_are_spelled_so_that_they_can_be_read():
    pieces = ["▁$x$", "a\u200bb", "x" * 21]
    side = TokenAxis("odd", pieces)
    (figure,) = draw_attention([make_weights(1, 3, 3)], queries=side, memory=side).values()
    axes = panels_of(figure)[0]
    assert tick_labels(axes.yaxis) == ["▁$x$", "aU+200Bb", "x" * 19 + "…"]
    assert not any(label.get_parse_math() for label in axes.get_yticklabels())


def test_figures_are_made_without_pyplot():
    """It would choose a window system, and keep every figure until it is told to close it."""
    code = (
        "import io, sys, numpy as np; from flaxformer_mt.evaluation import plots;"
        "side = plots.TokenAxis('s', ['a', 'b']);"
        "table = np.eye(5); weights = [np.eye(2)[None]];"
        "figures = [plots.draw_position_curves({'m': table}), plots.draw_position_tables({'m': table}),"
        "plots.draw_training({'loss': {'t': ([1], [2.0])}}),"
        "*plots.draw_attention(weights, queries=side, memory=side).values()];"
        "[plots.save_figure(figure, io.BytesIO()) for figure in figures];"
        "print(len(figures), 'matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "4 True False\n"
