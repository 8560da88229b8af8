"""`plot`: figures of a run's position encodings, training metrics and attention weights, as PNG files."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.config.directions import refuse_language_model
from flaxformer_mt.config.files import read_config
from flaxformer_mt.corpus.tfds_cache import compiled_dir
from flaxformer_mt.data.batch_array import pad_pairs
from flaxformer_mt.errors import UserError, name_full_disk
from flaxformer_mt.evaluation import plots
from flaxformer_mt.evaluation.plots import save_figure
from flaxformer_mt.model.positions import LearnedPositions, rotate, sinusoidal_half_table, sinusoidal_table
from flaxformer_mt.object_store.remote_runs import open_copy, publish
from flaxformer_mt.parallel import enable_compilation_cache
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.load_run import TrainedModel, load_trained
from flaxformer_mt.shapes import Batch
from flaxformer_mt.text_io.lines import check_writable
from flaxformer_mt.tracking import read_metrics
from flaxformer_mt.translation.language_tags import choose_line_tags
from flaxformer_mt.translation.translator import Translator
from flaxformer_mt.unicode_text import is_blank
from flaxformer_mt.vocab import Vocabs

# The number of positions to draw, from the first position on.
_POSITIONS = 100

# Value of model.positions -> its table.
_SINUSOIDAL = {"sinusoidal": sinusoidal_table, "sinusoidal_halves": sinusoidal_half_table}

# Values of model.positions whose encodings are parameters.
_LEARNED = ("learned", "one_vector")

# Matplotlib figures by file name; Any, because only evaluation/plots.py imports matplotlib.
Figures = dict[str, Any]


def plot(
    run_dir: Path, *, source: str = "", output: Path | None = None, checkpoint: str | None = None
) -> dict[str, Any]:
    """Plot a run, and the attention over a sentence if one is given; return JSON values."""
    run_dir = open_copy(run_dir)
    config = read_config(run_dir / "config.json")
    output = run_dir / "plots" if output is None else output
    _check_folder(output)
    if source:
        _check_sentence(config, run_dir, source)
    params: dict[str, Any] = {}
    parameters = ""
    attention: Figures = {}
    result: dict[str, Any] = {}
    if source or config.model.positions in _LEARNED:
        trained = load_trained(run_dir, checkpoint=checkpoint)
        params = trained.params
        parameters = f"checkpoint {trained.checkpoint}, step {trained.progress.get('step', '?')}"
        if source:
            attention, result = _draw_sentence(trained, source)
    elif checkpoint is not None:
        # No figure needs the checkpoint, but a wrong name is still reported.
        Checkpoints(run_dir, best_metric=config.train.metrics[0]).resolve(checkpoint)
    run_name = run_dir.resolve().name
    learned = f"{run_name}, {parameters}"
    titled = [
        (_draw_positions(config.model, params), learned if config.model.positions in _LEARNED else run_name),
        (_draw_metrics(config, run_dir), run_name),
        (attention, learned),
    ]
    files = [file for figures, title in titled for file in _save(figures, output, title)]
    publish(run_dir)  # RUN/plots
    return {"files": files, **result}


def plot_encoding(width: int, output: Path | None = None) -> dict[str, Any]:
    if width < 1:
        raise UserError(f"--positions is {width}, but the width of an encoding must be at least 1")
    output = Path("plots") if output is None else output
    _check_folder(output)
    figures = _draw_positions(ModelConfig(model_dim=width), {})
    return {"files": _save(figures, output)}


def _check_folder(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise UserError(f"output {output} is a file, but the figures need a folder; give another path")
    check_writable(output)


def _save(figures: Figures, output: Path, title: str = "") -> list[str]:
    output.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        with name_full_disk(output / name):
            save_figure(figure, output / name, title=title)
    return [str(output / name) for name in figures]


def _note(text: str) -> None:
    print(text, file=sys.stderr)


# ---- positions ----


def _draw_positions(model: ModelConfig, params: Mapping[str, Any]) -> Figures:
    column = "dimension"
    if model.positions == "one_vector":
        _note(
            "model.positions is one_vector, which adds the same vector at every position: all curves are flat"
        )
    if model.positions == "rotary":
        column = "pair"
        _note(
            "model.positions is rotary, which rotates queries and keys instead of adding to embeddings: the "
            "figures show the cosine of the rotation angle of each pair of dimensions"
        )
    if model.positions == "relative":
        _note("model.positions is relative, which adds nothing to embeddings: there are no figures of it")
        return {}
    tables = position_tables(model, params)
    curves = {name: t[:, :4] for name, t in tables.items()} if model.positions == "rotary" else tables
    options: Any = {"first_position": model.first_position, "column": column}
    return {
        "positions.png": plots.draw_position_curves(curves, **options),
        "position_table.png": plots.draw_position_tables(tables, **options),
    }


def position_tables(config: ModelConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the position encodings that each stack adds at its first positions, as tables [P, D] by stack
    name.

    P is 100, or the number of positions of the model if that is smaller. Sinusoidal encodings are the same in
    all stacks: one table, called "model". Rotary encodings are not added: the one table [P, K/2] contains the
    cosine of the rotation angle of each pair of dimensions.
    """
    count = min(_POSITIONS, config.longest_input or _POSITIONS)
    positions = config.first_position + np.arange(count)
    if config.positions in _SINUSOIDAL:
        table = _SINUSOIDAL[config.positions](config.first_position + count, config.model_dim)
        return {"model": table[positions]}
    if config.positions == "rotary":
        half = (config.key_dim or config.model_dim // config.num_heads) // 2
        # (1, 0) rotated by an angle is (cosine of the angle, sine of the angle).
        pairs = np.concatenate([np.ones((count, 1, half)), np.zeros((count, 1, half))], axis=-1)
        return {"model": np.asarray(rotate(pairs.astype(np.float32), positions))[:, 0, :half]}
    stacks = {name: params[name]["positions"] for name in ("encoder", "decoder") if name in params}
    return {name: _learned_table(config, stack_params, positions) for name, stack_params in stacks.items()}


def _learned_table(config: ModelConfig, params: Mapping[str, Any], positions: np.ndarray) -> np.ndarray:
    rows, width = params["embedding"].shape
    zeros = nn.initializers.zeros  # unused, since the parameters exist
    module = LearnedPositions(rows, width, zeros, zeros if "bias" in params else None)
    if config.positions == "learned":
        return np.asarray(module.apply({"params": params}, positions))
    vector = np.asarray(module.apply({"params": params}, method="one_vector"))
    return np.broadcast_to(vector, (len(positions), width))


# ---- training ----


def _draw_metrics(config: Config, run_dir: Path) -> Figures:
    if not (run_dir / "metrics.jsonl").is_file():
        _note(f"{run_dir} has no metrics.jsonl, so there is no training.png")
        return {}
    figure = plots.draw_training(training_panels(read_metrics(run_dir), config.train.label_smoothing))
    if not figure.axes:
        _note(f"{run_dir}/metrics.jsonl has no numbers yet, so there is no training.png")
        return {}
    return {"training.png": figure}


def training_panels(
    records: Sequence[Mapping[str, Any]], label_smoothing: float
) -> dict[str, dict[str, plots.Curve]]:
    """Return the curves of a run's metrics."""
    smoothed = f", label smoothing {label_smoothing:g}" if label_smoothing else ""
    return {
        "loss": {
            f"training{smoothed}": plots.read_curve(records, "train", "loss"),
            "validation": plots.read_curve(records, "valid", "loss"),
        },
        "BLEU": {"validation": plots.read_curve(records, "valid", "bleu")},
        "learning rate": {"training": plots.read_curve(records, "train", "learning_rate")},
    }


# ---- attention ----


def _check_sentence(config: Config, run_dir: Path, source: str) -> None:
    reason = ", but attention is drawn only for translation models; leave out --source"
    refuse_language_model(config.data, run_dir, reason)
    if is_blank(source):
        raise UserError(f"--source is {source!r}, which has no words; give a sentence")


def _draw_sentence(trained: TrainedModel, source: str) -> tuple[Figures, dict[str, Any]]:
    config, vocabs, params = trained.config, trained.vocabs, trained.params
    added = choose_line_tags(config.data).find([source])
    source_ids = vocabs.source.tokenize("".join(added or []) + source)
    if len(source_ids) == 1:  # only the end symbol: normalization removed all characters
        raise UserError(f"--source is {source!r}, which has no words; give a sentence")
    enable_compilation_cache(compiled_dir())
    whole: dict[str, Any] = {"long_lines": "cut", "split_sentences": "never"}
    translator = Translator(config, params, vocabs, checkpoint=trained.checkpoint, **whole)
    (translation,) = translator.translate([source])
    if not translation.tokens:
        raise UserError(
            f"checkpoint {trained.checkpoint} gives non-finite scores for {source!r}; "
            "try an earlier --checkpoint"
        )
    if translation.truncated:
        source_ids = [*source_ids[: config.data.max_source_length - 1], vocabs.source.eos_id]
    ids: dict[str, Any] = {"pad_id": vocabs.target.pad_id, "bos_id": vocabs.target.bos_id}
    # Without padding, so that no attention weight belongs to it.
    batch = pad_pairs([source_ids], [translation.tokens], **ids).to_batch(np)
    model = trained.make_model()
    maps = jax.jit(lambda params: plots.attention_maps(model, params, batch))(params)
    result = {
        "checkpoint": trained.checkpoint,
        "step": trained.progress.get("step"),
        "translation": translation.text,
    }
    return _draw_maps(maps, batch, vocabs), result


def _draw_maps(maps: plots.AttentionMaps, batch: Batch, vocabs: Vocabs) -> Figures:
    source = vocabs.source.pieces(np.asarray(batch.source[0]))
    read, written = (vocabs.target.pieces(np.asarray(ids[0])) for ids in (batch.target_in, batch.target_out))
    if maps.cross:
        sides = {
            "cross": (plots.TokenAxis("predicted piece", written), plots.TokenAxis("source", source)),
            "encoder": (plots.TokenAxis("source", source), plots.TokenAxis("source", source)),
            "decoder": (
                plots.TokenAxis("last input piece", read),
                plots.TokenAxis("translation so far", read),
            ),
        }
        if not maps.decoder:  # a recurrence in place of self-attention
            del sides["decoder"]
        boundary = None
    else:
        row = plots.TokenAxis("source, then translation", [*source, *read])
        sides, boundary = {"decoder": (row, row)}, len(source)
    weights = {name: [np.asarray(layer[0], np.float32) for layer in getattr(maps, name)] for name in sides}
    # One colour scale for all figures, so that they can be compared.
    darkest = max(float(layer.max()) for layers in weights.values() for layer in layers)
    figures: Figures = {}
    for name, (queries, memory) in sides.items():
        drawn = plots.draw_attention(
            weights[name], queries=queries, memory=memory, boundary=boundary, darkest=darkest
        )
        figures |= {f"attention_{name}{part and '_'}{part}.png": figure for part, figure in drawn.items()}
    return figures
