"""The command plot on tiny untrained runs, and figures: both hold the numbers they were given."""

import dataclasses
import errno
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny_experiment import write_untrained_run

from flaxformer_mt.commands import plot as plot_module
from flaxformer_mt.commands.main import main
from flaxformer_mt.commands.plot import plot, position_tables, training_panels
from flaxformer_mt.config import Config, DataConfig, ModelConfig, SearchConfig, VocabConfig
from flaxformer_mt.config.files import read_config, save_config
from flaxformer_mt.evaluation.plots import (
    TokenAxis,
    attention_maps,
    draw_attention,
    draw_position_curves,
    draw_position_tables,
    draw_training,
)
from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.shapes import Batch
from flaxformer_mt.translation.translator import Translation, Translator
from flaxformer_mt.vocab import load_vocabs

WORDS = {"eins": "one", "zwei": "two", "drei": "three", "vier": "four", "acht": "eight"}
SOURCE = "zwei acht"
LONGEST = 12

MODEL = ModelConfig(
    num_encoder_layers=1,
    num_decoder_layers=1,
    model_dim=8,
    num_heads=2,
    ffn_dim=12,
    first_position=1,
    dropout_rate=0.0,
)

METRICS = [
    {"step": 50, "split": "train", "loss": 5.0, "learning_rate": 0.1},
    {"step": 100, "split": "train", "loss": 4.0, "learning_rate": 0.2},
    {"step": 100, "split": "valid", "loss": 4.5, "bleu": 1.0},
    {"step": 150, "split": "train", "loss": 9.0, "learning_rate": 0.3},
    # Training resumed from step 50.
    {"step": 100, "split": "train", "loss": 3.0, "learning_rate": 0.25},
    {"step": 100, "split": "valid", "loss": None, "bleu": 2.0},
    {"step": 100, "split": "epoch", "loss": 7.0},
]


def make_run(folder, model, *, source_language="de"):
    """A run of an untrained model, evaluated at step 7; what it says stops within a few tokens."""
    config = Config(
        data=DataConfig(
            dataset="parallel_text",
            source_language=source_language,
            cache_dir=str(folder.parent / "cache"),
            max_source_length=LONGEST,
            max_target_length=LONGEST,
        ),
        vocab=VocabConfig(kind="char", size=22, byte_fallback=False),
        model=model,
        search=SearchConfig(method="greedy", beam_size=1, max_length_ratio=0.0, max_length_offset=5),
    )
    pairs = [
        SimpleNamespace(source=f"{a} {b}", target=f"{WORDS[a]} {WORDS[b]}") for a in WORDS for b in WORDS
    ]
    return write_untrained_run(folder, config, pairs)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An encoder and a decoder with sinusoidal positions, and metrics."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "run", MODEL)
    lines = [json.dumps(record) for record in METRICS]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def one_stack(tmp_path_factory):
    model = dataclasses.replace(MODEL, architecture="decoder_only", positions="learned", max_positions=30)
    return make_run(tmp_path_factory.mktemp("runs") / "one_stack", model)


@pytest.fixture
def drawn(monkeypatch):
    """Every figure by the name of its file; all are written too, in few dots."""
    figures, save = {}, plot_module.save_figure
    monkeypatch.setattr("flaxformer_mt.evaluation.plots._DOTS_PER_INCH", 25)

    def keep(figure, path, **options):
        figures[path.name] = figure
        save(figure, path, **options)

    monkeypatch.setattr(plot_module, "save_figure", keep)
    return figures


def panels_of(figure):
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def weights_of(figure):
    return np.stack([np.asarray(axes.images[0].get_array()) for axes in panels_of(figure)])


def labels_of(figure):
    axes = panels_of(figure)[0]
    return [[label.get_text() for label in axis.get_ticklabels()] for axis in (axes.yaxis, axes.xaxis)]


def run_plot(capfd, *flags):
    assert main(["plot", *flags]) == 0
    out, told = capfd.readouterr()
    return json.loads(out), told


def test_positions_training_and_attention_are_files_that_the_json_names(run, tmp_path, capfd, drawn):
    output = tmp_path / "new" / "pictures"
    result, _ = run_plot(capfd, f"--run={run}", f"--source={SOURCE}", f"--output={output}")
    names = ["positions.png", "position_table.png", "training.png"]
    names += [f"attention_{part}.png" for part in ("cross", "encoder", "decoder")]
    assert result["files"] == [str(output / name) for name in names]
    assert sorted(path.name for path in output.iterdir()) == sorted(names)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in output.iterdir())
    assert all((output / name).stat().st_size > 1000 for name in names)
    assert (result["checkpoint"], result["step"]) == ("best", 7)
    check_positions_and_training(drawn)
    check_attention(run, result, drawn)
    for name, figure in drawn.items():
        trained = ", checkpoint best, step 7" if name.startswith("attention") else ""
        assert figure.get_suptitle() == f"run{trained}", name
    # one scale for all attention figures: the largest weight of any of them is the darkest colour
    attention = [figure for name, figure in drawn.items() if name.startswith("attention")]
    largest = max(weights_of(figure).max() for figure in attention)
    for figure in attention:
        assert {axes.images[0].get_clim() for axes in panels_of(figure)} == {(0.0, largest)}


def check_positions_and_training(drawn):
    table = sinusoidal_table(101, 8)[1:]  # model.first_position is 1
    (axes,) = drawn["positions.png"].axes
    for index, line in zip((4, 5, 6, 7), axes.lines, strict=True):
        np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 101))
        np.testing.assert_array_equal(line.get_ydata(), table[:, index])
    np.testing.assert_array_equal(panels_of(drawn["position_table.png"])[0].images[0].get_array(), table)
    loss, bleu, rate = drawn["training.png"].axes
    assert [axes.get_ylabel() for axes in (loss, bleu, rate)] == ["loss", "BLEU", "learning rate"]
    # At step 100 validation gave no number the second time, so there is no such curve.
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["training, label smoothing 0.1"]
    assert list(loss.lines[0].get_ydata()) == [5.0, 3.0, 9.0]


def check_attention(run, result, drawn):
    vocabs = load_vocabs(run / "vocab")
    source = vocabs.source.tokenize(SOURCE)
    written, read_from = labels_of(drawn["attention_cross.png"])
    assert read_from == vocabs.source.pieces(source)
    assert labels_of(drawn["attention_encoder.png"]) == [read_from, read_from]
    read = ["<s>", *written[:-1]]
    assert labels_of(drawn["attention_decoder.png"]) == [read, read]
    ids = {piece: number for number, piece in enumerate(vocabs.target.pieces(range(vocabs.target.size)))}
    target = [ids[piece] for piece in written]
    assert 1 <= len(target) <= 5
    assert vocabs.target.detokenize(target) == result["translation"]
    # The weights are those of the model, computed here without the command.
    arrays = [np.asarray([row], np.int32) for row in (source, [ids["<s>"], *target[:-1]], target)]
    batch = Batch(*arrays, np.ones(arrays[0].shape, bool), np.ones(arrays[1].shape, bool))
    trained = load_trained(run, warn=print)
    model = trained.make_model()
    maps = jax.jit(lambda params: attention_maps(model, params, batch))(trained.params)
    sizes = {
        "cross": (len(target), len(source)),
        "encoder": 2 * (len(source),),
        "decoder": 2 * (len(target),),
    }
    for part, size in sizes.items():
        shown = weights_of(drawn[f"attention_{part}.png"])
        assert shown.shape == (2, *size)
        np.testing.assert_allclose(shown, getattr(maps, part)[0][0], atol=1e-6)


def test_a_decoder_only_model_reads_a_cut_source_and_its_translation_in_one_row(one_stack, capfd, drawn):
    result, told = run_plot(capfd, f"--run={one_stack}", "--source=eins zwei drei vier")
    plots = one_stack / "plots"
    names = ["positions.png", "position_table.png", "attention_decoder.png"]
    assert result["files"] == [str(plots / name) for name in names]
    assert sorted(path.name for path in plots.iterdir()) == sorted(names)
    assert "longer than data.max_source_length 12" in told
    assert {figure.get_suptitle() for figure in drawn.values()} == {"one_stack, checkpoint best, step 7"}
    assert "has no metrics.jsonl, so there is no training.png" in told
    figure = drawn["attention_decoder.png"]
    down, across = labels_of(figure)
    assert down == across and down[LONGEST - 1 : LONGEST + 1] == ["</s>", "<s>"]
    assert "".join(down[: LONGEST - 1]) == "▁eins▁zwei▁"
    weights = weights_of(figure)
    assert weights.shape == (2, len(down), len(down))
    assert LONGEST + 1 <= len(down) <= LONGEST + 5
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
    assert not np.triu(weights, k=1).any(), "a token saw a later one"
    across_line, _ = panels_of(figure)[0].lines
    assert set(across_line.get_ydata()) == {LONGEST - 0.5}
    # Learned positions are the checkpoint's rows, from model.first_position on.
    learned = load_trained(one_stack, warn=print).params["decoder"]["positions"]["embedding"]
    (axes,) = drawn["positions.png"].axes
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), np.asarray(learned)[1:31, 4])


def test_a_run_that_was_not_evaluated_yet_is_drawn_from_its_last_checkpoint(one_stack, tmp_path, capfd):
    copy = tmp_path / "young"
    shutil.copytree(one_stack, copy)
    config = read_config(copy / "config.json")
    train = dataclasses.replace(config.train, final_checkpoint="average")
    save_config(dataclasses.replace(config, train=train), copy / "config.json")
    result, told = run_plot(capfd, f"--run={copy}")
    assert len(result["files"]) == 2
    assert f"warning: {copy} has no average checkpoint yet; using best" in told


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--run is missing; give --run=DIR, or --positions=WIDTH to plot without a run"),
        (["--positions=0"], "--positions is 0, but the width of an encoding must be at least 1"),
        (["--positions=8", "--run={run}"], "without a run; leave out --run"),
        (["--run={tmp}/none"], "{tmp}/none is not a run directory: it has no config.json"),
        (["--run={run}", "--checkpoint=8"], "there is no checkpoint 8; the nearest is 7"),
        (["--run={run}", "--checkpoint=bets", f"--source={SOURCE}"], "did you mean best?"),
        (["--run={run}", "--source=  "], "--source is '  ', which has no words; give a sentence"),
        (["--run={run}", "--source=\u200b"], "which has no words; give a sentence"),
        (
            ["--run={run}", "--output={run}/config.json"],
            "config.json is a file, but the figures need a folder",
        ),
        (
            ["--run={tmp}/text", f"--source={SOURCE}"],
            "is a language model (its data.source_language is empty)",
        ),
    ],
)
def test_mistakes_cost_one_message_and_write_nothing(run, tmp_path, capfd, flags, message):
    data = DataConfig(source_language="")
    model = ModelConfig(architecture="decoder_only")
    (tmp_path / "text").mkdir()
    save_config(Config(data=data, model=model), tmp_path / "text" / "config.json")
    assert main(["plot", *(flag.format(run=run, tmp=tmp_path) for flag in flags)]) == 2
    out, told = capfd.readouterr()
    assert out == ""
    assert told.startswith("error: ") and told.count("\n") == 1
    assert message.format(tmp=tmp_path) in told
    assert not (run / "plots").exists() and not list(tmp_path.rglob("*.png"))


def test_the_encoding_of_a_width_is_plotted_without_a_run(tmp_path, capfd):
    assert main(["plot", "--positions=20", f"--output={tmp_path / 'out'}"]) == 0
    files = json.loads(capfd.readouterr().out)["files"]
    assert [Path(file).name for file in files] == ["positions.png", "position_table.png"]
    assert all(Path(file).stat().st_size > 1000 for file in files)


def test_a_folder_that_cannot_be_written_to_costs_one_message(run, tmp_path, capfd, monkeypatch):
    """Before the run is loaded; a disk that fills up is told with the file."""
    plots = [["--positions=8"], [f"--run={run}", f"--source={SOURCE}"]]
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path not in (tmp_path, run))
        patch.setattr(plot_module, "load_trained", pytest.fail)
        for flags in [*plots, [f"--run={run}"]]:
            output = [] if flags == [f"--run={run}"] else [f"--output={tmp_path / 'new'}"]
            assert main(["plot", *flags, *output]) == 2
            folder = tmp_path if output else run
            told = capfd.readouterr().err
            assert told.startswith(f"error: output folder {folder} cannot be written to: it is read-only")
            assert told.count("\n") == 1

    def fill(figure, path, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(plot_module, "save_figure", fill)
    assert main(["plot", "--positions=8", f"--output={tmp_path}"]) == 2
    assert capfd.readouterr().err.startswith(
        f"error: {tmp_path}/positions.png: No space left on device; free"
    )


def test_a_checkpoint_whose_scores_are_not_numbers_is_named(run, monkeypatch, capfd):
    failed = Translation("", -math.inf, -math.inf, ())
    monkeypatch.setattr(Translator, "translate", lambda self, lines: [failed for _ in lines])
    assert main(["plot", f"--run={run}", f"--source={SOURCE}", "--checkpoint=7"]) == 2
    told = capfd.readouterr().err
    assert told.startswith(f"error: checkpoint 7 gives non-finite scores for {SOURCE!r}")


def test_metrics_without_numbers_give_no_picture(run, tmp_path, capfd):
    copy = tmp_path / "begun"
    shutil.copytree(run, copy)
    (copy / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": null}\n', encoding="utf-8")
    result = plot(copy)
    assert list(result) == ["files"]  # without a sentence, there is no translation
    assert result["files"] == [str(copy / "plots" / name) for name in ("positions.png", "position_table.png")]
    assert "metrics.jsonl has no numbers yet" in capfd.readouterr().err


def test_the_later_line_of_a_step_counts():
    panels = training_panels(METRICS, 0.0)
    assert panels["loss"]["training"] == ([50, 100, 150], [5.0, 3.0, 9.0])
    assert panels["learning rate"] == {"training": ([50, 100, 150], [0.1, 0.25, 0.3])}
    assert panels["BLEU"] == {"validation": ([100], [2.0])}
    steps, losses = panels["loss"]["validation"]
    assert steps == [100] and math.isnan(losses[0])


def test_rotary_positions_are_the_cosines_of_each_pairs_turn():
    config = dataclasses.replace(MODEL, positions="rotary", key_dim=6)
    tables = position_tables(config, {})
    turns = np.arange(1, 101)[:, None] / 10000.0 ** (np.arange(3) / 3)
    assert list(tables) == ["model"]
    np.testing.assert_allclose(tables["model"], np.cos(turns), atol=1e-5)


def test_learned_positions_are_rows_of_each_stack_with_their_bias():
    config = dataclasses.replace(MODEL, positions="learned", max_positions=4, model_dim=3)
    table, bias = np.arange(15, dtype=np.float32).reshape(5, 3), np.asarray([1.0, 2.0, 4.0], np.float32)
    params = {
        "encoder": {"positions": {"embedding": table, "bias": bias}},
        "decoder": {"positions": {"embedding": -table}},
    }
    tables = position_tables(config, params)
    assert list(tables) == ["encoder", "decoder"]
    np.testing.assert_array_equal(tables["encoder"], table[1:] + bias)
    np.testing.assert_array_equal(tables["decoder"], -table[1:])


def test_one_vector_is_the_same_at_every_position():
    config = dataclasses.replace(MODEL, positions="one_vector", model_dim=3)
    table = np.arange(15, dtype=np.float32).reshape(5, 3)
    tables = position_tables(config, {"decoder": {"positions": {"embedding": table}}})
    vector = sum(number * row for number, row in enumerate(table))
    np.testing.assert_array_equal(tables["decoder"], np.tile(vector, (100, 1)))


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
    ("width", "drawn"),
    [
        (3, [0, 1, 2]),
        (4, [0, 1, 2, 3]),
        (6, [4, 5]),
        (9, [4, 5, 6, 7]),
        (20, [4, 5, 6, 7]),
        (128, [24, 25, 38, 39]),
    ],
)
def test_a_table_gives_the_curves_it_has_of_about_the_same_frequencies(width, drawn):
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
        {
            "loss": {"training": ([1, 2, 3], [2.0, nan, 1.0]), "validation": ([], [])},
            "BLEU": {"validation": ([2], [nan])},
            "learning rate": {},
        },
    )
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
