"""The command plot: figures hold the numbers they were given, and are files that the JSON names."""

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from tiny_experiment import small_model, text_data, write_untrained_run

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.commands import plot as plot_module
from flaxformer_mt.commands.main import main
from flaxformer_mt.commands.plot import training_panels
from flaxformer_mt.config import Config, ModelConfig, SearchConfig, VocabConfig
from flaxformer_mt.config.files import save_config
from flaxformer_mt.evaluation.plots import TokenAxis, draw_attention
from flaxformer_mt.tracking import read_metrics
from flaxformer_mt.translation.translator import Translation, Translator

LONGEST = 12


@pytest.fixture(scope="module")
def one_stack(tmp_path_factory):
    """An untrained decoder-only model without metrics; what it says stops within a few tokens."""
    folder = tmp_path_factory.mktemp("runs")
    config = Config(
        data=text_data(folder, max_source_length=LONGEST, max_target_length=LONGEST),
        vocab=VocabConfig(kind="char", size=19, byte_fallback=False),
        model=small_model(1, 8, 2, 12, architecture="decoder_only"),
        search=SearchConfig(method="greedy", beam_size=1, max_length_ratio=0.0, max_length_offset=5),
    )
    pairs = [SimpleNamespace(source="eins zwei drei vier", target="one two three four")]
    return write_untrained_run(folder / "one_stack", config, pairs)


@pytest.fixture
def drawn(monkeypatch):
    """Every figure by the name of its file; all are written too, in few dots."""
    figures, saved, save = {}, [], Figure.savefig
    monkeypatch.setattr(plot_module, "_DOTS_PER_INCH", 25)

    def keep(figure, file, **options):
        saved.append(figure)
        save(figure, file, **options)

    def write(path, content):
        figures[path.name] = saved[-1]
        write_atomically(path, content)

    monkeypatch.setattr(Figure, "savefig", keep)
    monkeypatch.setattr(plot_module, "write_atomically", write)
    return figures


def panels_of(figure):
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def weights_of(figure):
    return np.stack([np.asarray(axes.images[0].get_array()) for axes in panels_of(figure)])


def labels_of(figure):
    """Of the rows and the columns; the panels on the left and at the bottom have them."""
    first, *_, last = panels_of(figure)
    return [[label.get_text() for label in axis.get_ticklabels()] for axis in (first.yaxis, last.xaxis)]


def run_plot(capfd, *flags):
    assert main(["plot", *flags]) == 0
    out, told = capfd.readouterr()
    return json.loads(out), told


def test_training_and_attention_are_files_that_the_json_names(tiny_run, tmp_path, capfd, drawn):
    output = tmp_path / "new" / "pictures"
    result, _ = run_plot(capfd, f"--run={tiny_run}", "--source=gu ba", f"--output={output}")
    names = ["training.png", *(f"attention_{part}.png" for part in ("cross", "encoder", "decoder"))]
    assert result["files"] == [str(output / name) for name in names]
    assert sorted(path.name for path in output.iterdir()) == sorted(names)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in output.iterdir())
    loss, *_ = drawn["training.png"].axes
    records = [one for one in read_metrics(tiny_run) if one["split"] == "train"]
    assert list(loss.lines[0].get_xdata()) == [one["step"] for one in records]
    assert list(loss.lines[0].get_ydata()) == [one["loss"] for one in records]
    written, source = labels_of(drawn["attention_cross.png"])
    assert "".join(written) == f"▁{result['translation'].replace(' ', '▁')}</s>"
    assert "".join(source) == "▁gu▁ba</s>"
    assert labels_of(drawn["attention_encoder.png"]) == [source, source]
    assert labels_of(drawn["attention_decoder.png"]) == 2 * [["<s>", *written[:-1]]]
    for name in names[1:]:
        weights, (down, across) = weights_of(drawn[name]), labels_of(drawn[name])
        assert weights.shape == (2, len(down), len(across))
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)


def test_a_decoder_only_model_reads_a_cut_source_and_its_translation_in_one_row(one_stack, capfd, drawn):
    result, told = run_plot(capfd, f"--run={one_stack}", "--source=eins zwei drei vier")
    assert result["files"] == [str(one_stack / "plots" / "attention_decoder.png")]
    assert "longer than data.max_source_length 12" in told
    down, across = labels_of(drawn["attention_decoder.png"])
    assert down == across and down[LONGEST - 1 : LONGEST + 1] == ["</s>", "<s>"]
    assert "".join(down[: LONGEST - 1]) == "▁eins▁zwei▁"
    weights = weights_of(drawn["attention_decoder.png"])
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
    assert not np.triu(weights, k=1).any(), "a token saw a later one"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--run is required"),
        (["--run={tmp}/none"], "{tmp}/none is not a run directory: it has no config.json"),
        (["--run={run}", "--checkpoint=47"], "there is no checkpoint 47; the nearest is 48"),
        (["--run={run}", "--checkpoint=bets", "--source=gu"], "did you mean best?"),
        (["--run={run}", "--source=  "], "--source is '  ', which has no words; give a sentence"),
        (["--run={run}", "--output={run}/config.json"], "is a file, but the figures need a folder"),
        (["--run={one_stack}", "--source=\u200b"], "which has no words; give a sentence"),
        (["--run={one_stack}"], "has no metrics of a training to plot; give --source=TEXT"),
        (["--run={tmp}/text", "--source=a"], "is a language model (its data.source_language is empty)"),
    ],
)
def test_mistakes_cost_one_message_and_write_nothing(tiny_run, one_stack, tmp_path, capfd, flags, message):
    (tmp_path / "text").mkdir()
    language_model = Config(data=text_data(tmp_path, "-en"), model=ModelConfig(architecture="decoder_only"))
    save_config(language_model, tmp_path / "text" / "config.json")
    flags = [flag.format(run=tiny_run, one_stack=one_stack, tmp=tmp_path) for flag in flags]
    assert main(["plot", *flags]) == 2
    out, told = capfd.readouterr()
    assert out == "" and told.startswith("error: ") and told.count("\n") == 1
    assert message.format(tmp=tmp_path) in told
    assert not (tiny_run / "plots").exists() and not list(tmp_path.rglob("*.png"))


def test_a_checkpoint_whose_scores_are_not_numbers_is_named(one_stack, monkeypatch, capfd):
    failed = Translation("", -math.inf, -math.inf, ())
    monkeypatch.setattr(Translator, "translate", lambda self, lines: [failed for _ in lines])
    assert main(["plot", f"--run={one_stack}", "--source=eins", "--checkpoint=7"]) == 2
    assert capfd.readouterr().err.startswith("error: checkpoint 7 gives non-finite scores for 'eins'")


def test_the_later_line_of_a_step_counts_and_curves_without_numbers_are_left_out():
    records = [
        {"step": 50, "split": "train", "loss": 5.0, "learning_rate": 0.1},
        {"step": 100, "split": "train", "loss": 4.0, "learning_rate": 0.2},
        {"step": 100, "split": "valid", "loss": 4.5, "bleu": 1.0},
        # Training resumed from step 50.
        {"step": 100, "split": "train", "loss": 3.0, "learning_rate": 0.25},
        {"step": 100, "split": "valid", "loss": None, "bleu": 2.0},
        {"step": 100, "split": "epoch", "loss": 7.0},
    ]
    assert training_panels(records, 0.1) == {
        "loss": {"training, label smoothing 0.1": ([50, 100], [5.0, 3.0])},
        "BLEU": {"validation": ([100], [2.0])},
        "learning rate": {"training": ([50, 100], [0.1, 0.25])},
    }
    assert training_panels(records[-1:], 0.1) == {}


def test_all_layers_and_heads_are_one_figure_with_the_labels_that_have_room():
    layers = [np.random.default_rng(seed).random((16, 3, 90)) for seed in range(2)]
    queries = TokenAxis("q", ["▁$x$", "a\U00100000b", "c"])
    memory = TokenAxis("m", [f"m{number}" for number in range(90)])
    figure = draw_attention(layers, queries=queries, memory=memory, title="run")
    np.testing.assert_array_equal(weights_of(figure), np.concatenate(layers))
    # 16 heads share 56 inches, and a label takes 0.14: 25 of 90 have room.
    assert labels_of(figure) == [["▁$x$", "aU+100000b", "c"], [f"m{number}" for number in range(0, 90, 4)]]
    assert not any(label.get_parse_math() for label in panels_of(figure)[0].get_yticklabels())


def test_figures_are_made_without_pyplot():
    """It would choose a window system, and keep every figure until it is told to close it."""
    code = (
        "import io, sys, numpy as np; from flaxformer_mt.evaluation import plots;"
        "side = plots.TokenAxis('s', ['a', 'b']);"
        "plots.draw_training({'loss': {'t': ([1], [2.0])}}, title='t').savefig(io.BytesIO());"
        "plots.draw_attention([np.eye(2)[None]], queries=side, memory=side, title='t').savefig(io.BytesIO());"
        "print('matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "True False\n"
