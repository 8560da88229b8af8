"""Figures hold the numbers they were given: what their axes, images, labels and files say."""

import struct
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
    save_figure,
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


# ---- positions ----


def test_curves_are_dimensions_4_to_7_over_their_positions():
    table = sinusoidal_table(100, 20)
    figure = draw_position_curves({"model": table})
    (axes,) = figure.axes
    assert legend_of(axes) == [f"dimension {index}" for index in (4, 5, 6, 7)]
    for index, line in zip((4, 5, 6, 7), axes.lines, strict=True):
        np.testing.assert_array_equal(line.get_xdata(), np.arange(100))
        np.testing.assert_array_equal(line.get_ydata(), table[:, index])
    # The slow pair of four, against the definition: sine and cosine of p / 10000^(4/20).
    np.testing.assert_allclose(axes.lines[0].get_ydata(), np.sin(np.arange(100) / 10000**0.2), atol=1e-6)
    np.testing.assert_allclose(axes.lines[1].get_ydata(), np.cos(np.arange(100) / 10000**0.2), atol=1e-6)
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("position", "value", "")
    assert tuple(figure.get_size_inches()) == (15, 5)


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


# ---- training ----


def test_training_is_one_panel_a_measure_over_the_same_steps():
    figure = draw_training(
        {
            "loss": {"training": ([50, 100, 150], [5.0, 4.0, 3.5]), "validation": ([100], [4.5])},
            "BLEU": {"validation": ([100, 200], [1.5, 2.5])},
        }
    )
    loss, bleu = figure.axes
    assert (loss.get_ylabel(), bleu.get_ylabel()) == ("loss", "BLEU")
    assert legend_of(loss) == ["training", "validation"]
    assert [list(line.get_xdata()) for line in loss.lines] == [[50, 100, 150], [100]]
    assert [list(line.get_ydata()) for line in loss.lines] == [[5.0, 4.0, 3.5], [4.5]]
    assert list(bleu.lines[0].get_ydata()) == [1.5, 2.5]
    assert loss.get_xlim() == bleu.get_xlim() and loss.get_xlim()[1] > 200
    assert (loss.get_xlabel(), bleu.get_xlabel()) == ("", "step")
    assert figure.get_size_inches()[1] == pytest.approx(4.8)


def test_panels_and_curves_without_numbers_are_left_out():
    nan = float("nan")
    figure = draw_training(
        {
            "loss": {"training": ([1, 2, 3], [2.0, nan, 1.0]), "validation": ([], [])},
            "BLEU": {"validation": ([2], [nan])},
            "learning rate": {},
        }
    )
    (axes,) = figure.axes
    assert (axes.get_ylabel(), axes.get_xlabel(), legend_of(axes)) == ("loss", "step", ["training"])
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), [2.0, nan, 1.0])  # a gap, not a line across
    assert draw_training({"BLEU": {"validation": ([], [])}}).axes == []


def test_long_curves_have_no_markers():
    (axes,) = draw_training(
        {"loss": {"long": (range(101), [1.0] * 101), "short": (range(100), [2.0] * 100)}}
    ).axes
    assert [line.get_marker() for line in axes.lines] == ["", "."]


# ---- attention ----


def test_all_heads_of_all_layers_are_one_figure_with_one_scale():
    layers = [make_weights(2, 5, 7, seed=layer) for layer in range(3)]
    figures = draw_attention(layers, queries=make_side("written", 5), memory=make_side("source", 7))
    assert list(figures) == [""]
    panels = panels_of(figures[""])
    assert [axes.get_title() for axes in panels] == [
        f"layer {layer}, head {head}" for layer in range(3) for head in range(2)
    ]
    largest = max(weights.max() for weights in layers)
    for axes, weights in zip(panels, [head for layer in layers for head in layer], strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), weights)
        assert axes.images[0].get_clim() == (0, largest)
        assert not axes.lines
    assert tick_labels(panels[4].yaxis) == ["w0", "w1", "w2", "w3", "w4"]
    assert tick_labels(panels[4].xaxis) == [f"s{number}" for number in range(7)]
    assert figures[""].get_supylabel() == "written"
    assert figures[""].get_supxlabel() == "source"


def test_labels_stand_at_the_left_and_at_the_bottom_alone():
    """Five heads in two rows of three: nothing is below the third, so it has its labels itself."""
    (figure,) = draw_attention(
        [make_weights(5, 4, 4)], queries=make_side("q", 4), memory=make_side("m", 4)
    ).values()
    panels = panels_of(figure)
    assert [axes.yaxis.get_tick_params()["labelleft"] for axes in panels] == [True, False, False, True, False]
    assert [axes.xaxis.get_tick_params()["labelbottom"] for axes in panels] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_lines_part_two_texts_before_the_first_token_of_the_second():
    side = make_side("row", 6)
    (figure,) = draw_attention([make_weights(1, 6, 6)], queries=side, memory=side, boundary=4).values()
    across, down = panels_of(figure)[0].lines
    assert set(across.get_ydata()) == {3.5} and set(down.get_xdata()) == {3.5}


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


# ---- files ----


def test_a_figure_is_a_png_of_100_dots_an_inch(tmp_path):
    path = tmp_path / "positions.png"
    save_figure(draw_position_curves({"model": sinusoidal_table(10, 8)}), path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", data[16:24]) == (1500, 500)


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
