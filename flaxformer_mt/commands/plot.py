"""`plot`: plots a run's training metrics and the attention weights of a sentence as PNG files."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.commands.options import PlotOptions
from flaxformer_mt.config import Config
from flaxformer_mt.config.directions import refuse_language_model
from flaxformer_mt.config.files import read_config
from flaxformer_mt.config.load_options import LoadOptions
from flaxformer_mt.corpus.tfds_cache import compiled_dir
from flaxformer_mt.data.batch_array import pad_pairs
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation import plots
from flaxformer_mt.object_store.remote_runs import open_copy, publish
from flaxformer_mt.parallel import enable_compilation_cache
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.load_run import TrainedModel, load_trained
from flaxformer_mt.shapes import Batch
from flaxformer_mt.text_io.lines import check_writable
from flaxformer_mt.tracking import read_metrics
from flaxformer_mt.translation.copied_text import is_copied
from flaxformer_mt.translation.language_tags import choose_line_tags
from flaxformer_mt.translation.translator import Translator
from flaxformer_mt.unicode_text import is_blank
from flaxformer_mt.vocab import Vocabs

_DOTS_PER_INCH = 150

# Matplotlib figures by file name; Any, because only evaluation/plots.py imports matplotlib.
Figures = dict[str, Any]


def plot(options: PlotOptions) -> dict[str, Any]:
    """Plot the training of a run and, with --source, attention weights of a sentence; return the files."""
    run_dir, source, checkpoint = open_copy(options.run), options.source, options.checkpoint
    config = read_config(run_dir / "config.json")
    output = options.output or run_dir / "plots"
    if output.exists() and not output.is_dir():
        raise UserError(f"output {output} is a file, but the figures need a folder; give another path")
    check_writable(output)
    run_name = run_dir.resolve().name
    figures = _draw_metrics(config, run_dir, run_name)
    result: dict[str, Any] = {}
    if source:
        _check_sentence(config, run_dir, source)
        trained = load_trained(run_dir, checkpoint=checkpoint)
        attention, result = _draw_sentence(trained, source, run_name)
        figures |= attention
    elif checkpoint is not None:
        # No figure needs the checkpoint, but a wrong name is still reported.
        Checkpoints(run_dir, best_metric=config.train.metrics[0]).resolve(checkpoint)
    if not figures:
        raise UserError(f"{run_dir} has no metrics of a training to plot; give --source=TEXT for attention")
    output.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=_DOTS_PER_INCH)
        write_atomically(output / name, image.getvalue())
    publish(run_dir)  # RUN/plots
    return {"files": [str(output / name) for name in figures], **result}


# ---- training ----


def _draw_metrics(config: Config, run_dir: Path, run_name: str) -> Figures:
    if not (run_dir / "metrics.jsonl").is_file():
        return {}
    panels = training_panels(read_metrics(run_dir), config.train.label_smoothing)
    return {"training.png": plots.draw_training(panels, title=run_name)} if panels else {}


def training_panels(
    records: Sequence[Mapping[str, Any]], label_smoothing: float
) -> dict[str, dict[str, plots.Curve]]:
    """Group the curves of a run's metrics into panels; curves without a finite value are left out."""
    smoothed = f", label smoothing {label_smoothing:g}" if label_smoothing else ""
    panels = {
        "loss": {
            f"training{smoothed}": plots.read_curve(records, "train", "loss"),
            "validation": plots.read_curve(records, "valid", "loss"),
        },
        "BLEU": {"validation": plots.read_curve(records, "valid", "bleu")},
        "learning rate": {"training": plots.read_curve(records, "train", "learning_rate")},
    }
    for name, curves in panels.items():
        panels[name] = {label: curve for label, curve in curves.items() if np.isfinite(curve[1]).any()}
    return {name: curves for name, curves in panels.items() if curves}


# ---- attention ----


def _check_sentence(config: Config, run_dir: Path, source: str) -> None:
    reason = ", but attention is drawn only for translation models; leave out --source"
    refuse_language_model(config.data, run_dir, reason)
    if is_blank(source):
        raise UserError(f"--source is {source!r}, which has no words; give a sentence")
    if is_copied(source):
        raise UserError(f"--source is {source!r}, which is copied, as it has no letters; give a sentence")


def _draw_sentence(trained: TrainedModel, source: str, run_name: str) -> tuple[Figures, dict[str, Any]]:
    config, vocabs, params = trained.config, trained.vocabs, trained.params
    added = choose_line_tags(config.data).find([source])
    source_ids = vocabs.source.tokenize("".join(added or []) + source)
    if len(source_ids) == 1:  # only the end symbol: normalization removed all characters
        raise UserError(f"--source is {source!r}, which has no words; give a sentence")
    enable_compilation_cache(compiled_dir())
    options = LoadOptions(long_lines="cut", split_sentences="never", use_all_devices=False)
    translator = Translator(trained, options)
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
    title = f"{run_name}, checkpoint {trained.checkpoint}, step {trained.progress.get('step', '?')}"
    result = {
        "checkpoint": trained.checkpoint,
        "step": trained.progress.get("step"),
        "translation": translation.text,
    }
    return _draw_maps(maps, batch, vocabs, title), result


def _draw_maps(maps: plots.AttentionMaps, batch: Batch, vocabs: Vocabs, title: str) -> Figures:
    source = vocabs.source.pieces(np.asarray(batch.source[0]))
    read, written = (vocabs.target.pieces(np.asarray(ids[0])) for ids in (batch.target_in, batch.target_out))
    if maps.cross:
        sides = {
            "cross": (plots.TokenAxis("predicted subword", written), plots.TokenAxis("source", source)),
            "encoder": (plots.TokenAxis("source", source), plots.TokenAxis("source", source)),
            "decoder": (
                plots.TokenAxis("last input subword", read),
                plots.TokenAxis("translation so far", read),
            ),
        }
    else:
        row = plots.TokenAxis("source, then translation", [*source, *read])
        sides = {"decoder": (row, row)}
    figures: Figures = {}
    for name, (queries, memory) in sides.items():
        weights = [np.asarray(layer[0], np.float32) for layer in getattr(maps, name)]
        if weights:  # a recurrent decoder has none of itself
            figures[f"attention_{name}.png"] = plots.draw_attention(
                weights, queries=queries, memory=memory, title=title
            )
    return figures
