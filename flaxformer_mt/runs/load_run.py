"""Loads trained models from run directories, always with one parameter subtree per layer."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from flaxformer_mt.config import Config, Dtype
from flaxformer_mt.config.checks import check_bounds
from flaxformer_mt.config.files import read_config, split_checkpoint
from flaxformer_mt.errors import UserError, describe_error, warn_user
from flaxformer_mt.model.lora import merge_leaves
from flaxformer_mt.model.scanned_layers import STACKED, unstack_layers
from flaxformer_mt.object_store import remote_runs
from flaxformer_mt.parallel import SplitParameters, choose_dtype, default_platform, split_for_search
from flaxformer_mt.parallel.compilation import keep_json
from flaxformer_mt.parallel.processes import decide_once, work_in_all
from flaxformer_mt.parameter_trees import copy_to_host, flatten_tree, nest_leaves
from flaxformer_mt.runs.checkpoints import Checkpoints, explain_failed_write, write_checkpoint
from flaxformer_mt.runs.run_directory import IMPORTED_STEP, load_sealed_vocabs, open_run, seal_vocabs
from flaxformer_mt.runs.target_lengths import FILE_NAME as LENGTHS_FILE
from flaxformer_mt.runs.target_lengths import TargetLengths, read_target_lengths
from flaxformer_mt.vocab import Vocabs

if TYPE_CHECKING:
    from flaxformer_mt.model import Model


Warn = Callable[[str], None]


@dataclass(frozen=True)
class TrainedModel:
    # The config of the run, with model.scan_layers False, since the parameters are not stacked, and with
    # model.dtype as it is to be used.
    config: Config
    vocabs: Vocabs
    # Nested dicts of float32 arrays; the moving average if the checkpoint has one.
    params: Any
    # The checkpoint of the parameters: best, last, average or a step.
    checkpoint: str
    # The training progress that the checkpoint stores.
    progress: dict[str, Any]
    # The mesh over which the parameters are split; None: they are whole on the default device.
    split: SplitParameters | None = None
    # The length that few translations exceed; None: unknown.
    target_lengths: TargetLengths | None = None
    # The share of training lines with several sentences; None: unknown.
    several_sentences: float | None = None
    # The shares of training lines in each letter case; None: unknown.
    letter_cases: dict[str, float] | None = None

    def make_model(self, **changes: Any) -> "Model":
        """Build the network; `changes` replace fields of its config, such as dtype."""
        from flaxformer_mt.model import make_model

        config = dataclasses.replace(self.config.model, **changes)
        return make_model(
            config,
            source_size=self.vocabs.source.size,
            target_size=self.vocabs.target.size,
            platform=default_platform(),
        )

    def find_shapes(self) -> dict[str, list[int]]:
        """Return the shape of each parameter by path, computed by tracing the network and cached on disk."""

        def trace() -> dict[str, list[int]]:
            from flaxformer_mt.model import init_params

            model = self.make_model()
            return _find_shapes(jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0)))

        shapes = [self.config.model, self.vocabs.source.size, self.vocabs.target.size]
        return keep_json("shapes", shapes, trace)


def load_trained(
    run_dir: Path,
    *,
    checkpoint: str | None = None,
    dtype: Dtype | None = None,
    allow_nonfinite: bool = False,
    may_split: bool = False,
    alone: bool = False,
    warn: Warn = warn_user,
) -> TrainedModel:
    """Load a trained model; if several processes load it together, the first one chooses the checkpoint.

    `checkpoint`: see `choose_checkpoint`. `dtype`: None means the run's config, but float32 on a CPU without
    bfloat16 instructions. `may_split`: whether parameters that are too large for one device are split over
    all devices. `alone`: whether only this process calls the function.
    """
    run_dir = remote_runs.open_copy(run_dir)
    config = read_config(run_dir / "config.json")
    check_bounds(config, f"{run_dir / 'config.json'}: ")
    vocabs = load_sealed_vocabs(run_dir / "vocab")
    checkpoints = Checkpoints(run_dir, best_metric=config.train.metrics[0])
    decide: Any = _call if alone else decide_once
    work: Any = _call if alone else work_in_all
    which, folder_name = decide(lambda: choose_checkpoint(run_dir, config, checkpoint, warn))
    what = f"read checkpoint {folder_name}, which process 0 has chosen"
    stored = work(lambda: checkpoints.describe_params(folder_name), what=what)
    changes: dict[str, Any] = {"scan_layers": False, "dtype": dtype or choose_dtype(config.model.dtype)}
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
    trained = TrainedModel(config, vocabs, None, which, {})
    if problems := _find_differences(trained, stored):
        raise UserError(
            f"the checkpoint of {run_dir} does not match its config.json and vocab; restore these files. "
            "Differing parameters:\n" + "\n".join(problems)
        )
    split = None
    if may_split:
        size = sum(like.size * like.dtype.itemsize for like in stored.values())
        split = split_for_search(config, size)
    sharding_of = None if split is None else split.sharding_of
    params, progress = work(
        lambda: checkpoints.restore_params(
            folder_name, allow_nonfinite=allow_nonfinite, sharding_of=sharding_of
        ),
        what=what,
    )
    params = unstack_layers(params)
    learned = work(lambda: read_target_lengths(run_dir), what=f"read {run_dir / LENGTHS_FILE}")
    return TrainedModel(config, vocabs, params, which, progress, split, *learned)


def _call(work: Callable[[], Any], *, what: str = "") -> Any:
    return work()


def choose_checkpoint(run_dir: Path, config: Config, checkpoint: str | None, warn: Warn) -> tuple[str, str]:
    """Return the name of the selected checkpoint and the name of its folder.

    `checkpoint` is best, last, average or a step. None: train.final_checkpoint; if it does not exist yet,
    best or last, with a warning.
    """
    checkpoints = Checkpoints(run_dir, best_metric=config.train.metrics[0])
    which = checkpoint or _final_checkpoint(checkpoints, config.train.final_checkpoint, warn)
    name = checkpoints.resolve(which).name
    if which == "best" and (warning := describe_start(int(name), checkpoints.latest(), run_dir)):
        warn(warning)
    return which, name


def _find_differences(trained: TrainedModel, stored: Mapping[str, jax.ShapeDtypeStruct]) -> list[str]:
    """List differences between stored parameters and the network, whose layers are counted before tracing."""
    model = trained.config.model
    encoder_layers = 0 if model.architecture == "decoder_only" else model.num_encoder_layers
    problems = [
        f"{stack}: {count} layers by the config, {found} in the checkpoint"
        for stack, count in (("encoder", encoder_layers), ("decoder", model.num_decoder_layers))
        if (found := _count_layers(stored, stack)) != count
    ]
    if problems:
        return problems
    try:
        params = jax.eval_shape(lambda x: unstack_layers(nest_leaves(merge_leaves(x))), dict(stored))
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        return [f"their names or shapes do not fit each other: {describe_error(error)}"]
    return compare_shapes(trained.find_shapes(), params)


def _count_layers(stored: Mapping[str, jax.ShapeDtypeStruct], stack: str) -> int:
    blocks = {path.split("/")[1]: x for path, x in stored.items() if path.startswith(f"{stack}/{STACKED}")}
    return next(iter(blocks[STACKED].shape), 0) if STACKED in blocks else len(blocks)


def describe_start(best: int | None, newest: int | None, run_dir: Path) -> str:
    """Return a warning if the best checkpoint of a trained run is its initial model, else ""."""
    if best != IMPORTED_STEP or not newest:
        return ""
    return (
        f"the best checkpoint of {run_dir} is step {IMPORTED_STEP}, the model that training started from; "
        f"--checkpoint=last takes step {newest}"
    )


def name_checkpoint(checkpoint: str, step: int | None) -> str:
    """Return the name of a checkpoint with its step, such as `best (step 250)`."""
    return checkpoint if step is None or checkpoint == str(step) else f"{checkpoint} (step {step:,})"


def load_named(name: str, **options: Any) -> TrainedModel:
    run, checkpoint = split_checkpoint(name)
    return load_trained(remote_runs.open_copy(run), checkpoint=checkpoint, **options)


def check_same_vocabularies(vocabs: Vocabs, members: Sequence[TrainedModel]) -> None:
    """Raise UserError if an ensemble member's vocabularies differ from the first model's, `vocabs`."""
    for number, member in enumerate(members, start=2):
        for side in ("source", "target"):
            first, other = getattr(vocabs, side), getattr(member.vocabs, side)
            if first.fingerprint != other.fingerprint:
                raise UserError(
                    f"model {number} of the ensemble has another {side} vocabulary ({other.size} subwords) "
                    f"than the first ({first.size}); combine models of one vocabulary, by vocab.{side}_model"
                )


def compare_shapes(expected: Mapping[str, Sequence[int]], params: Any) -> list[str]:
    """Return one line for each parameter that is missing, unexpected or of the wrong shape."""
    ours = {path: tuple(shape) for path, shape in expected.items()}
    theirs = {path: tuple(shape) for path, shape in _find_shapes(params).items()}
    return [
        f"{path}: {ours.get(path, 'absent')} by the config, {theirs.get(path, 'absent')} in the checkpoint"
        for path in sorted(ours.keys() | theirs.keys())
        if ours.get(path) != theirs.get(path)
    ]


def _find_shapes(tree: Any) -> dict[str, list[int]]:
    return {jax.tree_util.keystr(p): list(x.shape) for p, x in jax.tree_util.tree_leaves_with_path(tree)}


def _final_checkpoint(checkpoints: Checkpoints, wanted: str, warn: Warn) -> str:
    if wanted == "average":
        present = (checkpoints.directory / "average").is_dir()
    else:
        present = (checkpoints.best() if wanted == "best" else checkpoints.latest()) is not None
    if present or checkpoints.latest() is None:
        return wanted
    instead = "last" if wanted == "best" or checkpoints.best() is None else "best"
    if checkpoints.latest():  # step 0 is an imported model, untrained here: no warning
        warn(f"{checkpoints.directory.parent} has no {wanted} checkpoint yet; using {instead}")
    return instead


def write_new_run(
    run_dir: Path, config: Config, vocabs: Vocabs, params: Any, *, origin: dict[str, str]
) -> None:
    open_run(run_dir, config)
    vocabs.save(run_dir / "vocab")
    seal_vocabs(run_dir / "vocab")
    progress = {"step": IMPORTED_STEP, "imported_from": origin}
    folder = run_dir.absolute() / "checkpoints" / str(IMPORTED_STEP)
    leaves = flatten_tree(params)
    copied = copy_to_host({p: leaf for p, leaf in leaves.items() if not isinstance(leaf, np.ndarray)})
    with explain_failed_write():
        write_checkpoint(folder, {"params": leaves | copied}, progress)
