"""A trained model as a run directory holds it: config, vocabularies, and the parameters of one checkpoint.

Owns which checkpoint is meant when none is named, the check that the three fit each other, and that whoever
uses a model sees one layout of parameters, a tree for each layer. Knows nothing of what is done with a model.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from flaxformer_mt.config import Config
from flaxformer_mt.config.files import read_config
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import Model, init_params, make_model
from flaxformer_mt.model.scanned_layers import is_stacked, unstack_layers
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.vocab import Vocabs, load_vocabs

Warn = Callable[[str], None]


@dataclass(frozen=True)
class TrainedModel:
    """What translates: parameters with the config and the vocabularies that they were trained with."""

    # The run's, but for model.scan_layers, which is False: the parameters are not stacked.
    config: Config
    vocabs: Vocabs
    # Nested dicts of float32 arrays; the moving average where there is one.
    params: Any
    # What the parameters come from: best, last, average or a step.
    checkpoint: str
    # What training had reached by then, as the checkpoint keeps it.
    progress: dict[str, Any]

    def make_model(self, **changes: Any) -> Model:
        """The network that the parameters are of; changes replace fields of its config, as dtype."""
        config = dataclasses.replace(self.config.model, **changes)
        return make_model(config, source_size=self.vocabs.source.size, target_size=self.vocabs.target.size)


def load_trained(run_dir: Path, *, checkpoint: str | None = None, warn: Warn) -> TrainedModel:
    """Reads what a run directory holds.

    Args:
      checkpoint: best, last, average or a step. None: train.final_checkpoint of the run's config, or, where
        there is none yet (training goes on, or was cut short), best or last, with a warning.

    Raises:
      UserError: no run directory, no such checkpoint, or parameters that do not fit the config.
    """
    config = read_config(run_dir / "config.json")
    vocabs = load_vocabs(run_dir / "vocab")
    checkpoints = Checkpoints(run_dir, best_metric=config.train.best_metric)
    which = checkpoint or _final_checkpoint(checkpoints, config.train.final_checkpoint, warn)
    params, progress = checkpoints.restore_params(which)
    if is_stacked(params):
        params = unstack_layers(params)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, scan_layers=False))
    trained = TrainedModel(config, vocabs, params, which, progress)
    if problems := compare_shapes(trained.make_model(), params):
        raise UserError(
            f"the checkpoint of {run_dir} does not fit its config.json and vocab; restore these files:\n"
            + "\n".join(problems)
        )
    return trained


def load_named(name: str, *, warn: Warn) -> TrainedModel:
    """The model that RUN or RUN@CHECKPOINT names; see `load_trained`."""
    run, _, checkpoint = name.rpartition("@")
    if not run or Path(name).expanduser().is_dir():  # folders may have an @ in their names
        run, checkpoint = name, ""
    return load_trained(Path(run).expanduser(), checkpoint=checkpoint or None, warn=warn)


def compare_shapes(model: Model, params: Any) -> list[str]:
    """A line for each parameter whose shape is not the model's, or that only one of the two has."""
    expected = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        return {jax.tree_util.keystr(p): tuple(x.shape) for p, x in jax.tree_util.tree_leaves_with_path(tree)}

    ours, theirs = shapes(expected), shapes(params)
    return [
        f"{path}: {ours.get(path, 'absent')} by the config, {theirs.get(path, 'absent')} in the checkpoint"
        for path in sorted(ours.keys() | theirs.keys())
        if ours.get(path) != theirs.get(path)
    ]


def _final_checkpoint(checkpoints: Checkpoints, wanted: str, warn: Warn) -> str:
    """`wanted` if it is there or nothing is; else best or last, with a warning unless nothing was trained."""
    if wanted == "average":
        present = (checkpoints.directory / "average").is_dir()
    else:
        present = (checkpoints.best() if wanted == "best" else checkpoints.latest()) is not None
    if present or checkpoints.latest() is None:
        return wanted
    instead = "last" if wanted == "best" or checkpoints.best() is None else "best"
    if checkpoints.latest():  # at step 0 it is an imported model, which has nothing better
        warn(f"{checkpoints.directory.parent} has no {wanted} checkpoint yet; using {instead}")
    return instead
