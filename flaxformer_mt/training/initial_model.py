"""Fine-tuning: starts a run from the parameters of another run, to train on another corpus.

As after `import`, the parameters become checkpoint 0 of the new run, and training continues from there with a
new optimizer state. The new run has the network and the vocabulary of the other run. If the new corpus gets a
new vocabulary, subwords that both vocabularies contain keep their parameters.
"""

import dataclasses
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from flaxformer_mt.atomic_folder import new_folder
from flaxformer_mt.config import Config
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.files import compare_configs, read_config
from flaxformer_mt.data.prepare import prepare
from flaxformer_mt.errors import UserError, find_url, name_urls, warn_user
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.object_store.remote_runs import open_copy, publish, refresh
from flaxformer_mt.parallel import default_platform
from flaxformer_mt.parallel.processes import decide_once, first_then_others, is_first
from flaxformer_mt.parameter_trees import flatten_tree, unflatten_like
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.load_run import TrainedModel, load_named, write_new_run
from flaxformer_mt.runs.run_directory import IMPORTED_STEP
from flaxformer_mt.vocab import Vocab, Vocabs

# Fields that do not change what the parameters mean: those of the new config count.
_MODEL_FIELDS = (
    "dropout_rate",
    "embedding_dropout_rate",
    "attention_dropout_rate",
    "ffn_dropout_rate",
    "initializer",
    "attention",
    "dtype",
    "remat",
    "scan_layers",
    "alignment",
)
_VOCAB_FIELDS = ("sampling",)

_FORMAT = "run"


def start_run(
    config: Config,
    run_dir: str | Path,
    init: str,
    *,
    new_vocab: bool = False,
    progress: TextIO | None = None,
) -> Config:
    """Make a run directory, unless it exists, to train from another run's model; return the new run's config.

    Args:
      config: the config of the new run; the network and the vocabulary of the other run replace its own.
      run_dir: the run directory to make; if it exists, it must have been started from the same `init`.
      init: RUN or RUN@CHECKPOINT, whose parameters are copied: the moving average if the checkpoint has one.
      new_vocab: whether to make a new vocabulary from the new corpus, with the settings of `config`.
      progress: a stream for a message on how many subwords of a new vocabulary keep their parameters.

    Raises:
      UserError: `run_dir` exists and was not started from `init`, or the config is invalid.
    """
    run_dir = open_copy(run_dir)
    path = run_dir / "config.json"
    if decide_once(path.exists):
        origin = decide_once(lambda: _read_origin(run_dir))
        if origin != _describe(init, new_vocab):
            raise UserError(
                f"{run_dir} started from {origin or 'random parameters'}, not from "
                f"{_describe(init, new_vocab)}; leave out --init to resume it, or give another --run=DIR"
            )
    else:
        if decide_once(lambda: run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir()))):
            raise UserError(f"{run_dir} exists and is not an empty folder; give another --run=DIR")
        said = _make_run(config, run_dir, load_named(init), init=init, new_vocab=new_vocab)
        if progress is not None and said and is_first():
            print(said, file=progress, flush=True)
    adopted = adopt_network(config, read_config(path), new_vocab=new_vocab)
    if is_first() and (unused := compare_configs(config, adopted)):
        warn_user(
            f"the network {'is that' if new_vocab else 'and the vocabulary are those'} of {init}; these "
            f"settings of the config are replaced: {', '.join(unused)}"
        )
    return adopted


def check_lora_start(config: Config, run_dir: Path) -> None:
    """Raise UserError if optim.lora is set but the run starts from random parameters."""
    rank = config.optim.lora.rank
    if rank and decide_once(lambda: IMPORTED_STEP not in Checkpoints(run_dir).steps()):
        raise UserError(
            f"optim.lora.rank is {rank}, but {run_dir} starts from random parameters, which are not worth "
            "freezing; give the trained model to adapt with --init=RUN, or set optim.lora.rank=0"
        )


def adopt_network(config: Config, other: Config, *, new_vocab: bool) -> Config:
    """Return `config` with the network of `other` and, unless `new_vocab`, its vocabulary settings.

    Dropout, subword sampling and execution settings (such as dtype, kernels, remat) stay as in `config`.
    """
    kept = {name: getattr(config.model, name) for name in _MODEL_FIELDS}
    changed = dataclasses.replace(config, model=dataclasses.replace(other.model, **kept))
    if new_vocab:
        return changed
    # How the vocabulary spells the tags of languages.
    changed = dataclasses.replace(
        changed, data=dataclasses.replace(config.data, tag_style=other.data.tag_style)
    )
    kept = {name: getattr(config.vocab, name) for name in _VOCAB_FIELDS}
    return dataclasses.replace(changed, vocab=dataclasses.replace(other.vocab, **kept))


def map_pieces(old: Vocab, new: Vocab) -> np.ndarray:
    """Return an array [new.size] that maps each new id to the old id of the same subword, or to -1.

    Special symbols, such as eos, correspond to each other even if their ids and names differ.
    """
    ids = {piece: number for number, piece in enumerate(old.pieces(range(old.size)))}
    found = np.asarray([ids.get(piece, -1) for piece in new.pieces(range(new.size))])
    for role in ("unk_id", "bos_id", "eos_id", "pad_id"):
        if getattr(new, role) >= 0:
            found[getattr(new, role)] = getattr(old, role)
    return found


def move_pieces(params: Any, fresh: Any, old: Vocabs, new: Vocabs) -> Any:
    """Adapt `params` to a new vocabulary; new subwords get the newly initialized parameters in `fresh`."""
    source, target = map_pieces(old.source, new.source), map_pieces(old.target, new.target)
    leaves = {}
    for path, leaf in flatten_tree(params).items():
        leaves[path] = np.asarray(leaf)
        if not path.endswith(("_embedding/embedding", "output_kernel", "output_bias")):
            continue
        found = source if path.startswith("source_") else target
        known, moved = found >= 0, np.array(flatten_tree(fresh)[path])
        # The vocabulary is the first axis of an embedding [V, D] and the last one of [D, V] and [V].
        moved, origin = (moved, leaves[path]) if path.endswith("embedding") else (moved.T, leaves[path].T)
        moved[known] = origin[found[known]]
        leaves[path] = moved if path.endswith("embedding") else moved.T
    return unflatten_like(params, leaves)


def _make_run(config: Config, run_dir: Path, base: TrainedModel, *, init: str, new_vocab: bool) -> str:
    """Write a new run to `run_dir` atomically; return a message about the subwords of a new vocabulary."""
    config = adopt_network(config, base.config, new_vocab=new_vocab)
    validate(config)
    vocabs, params, said = base.vocabs, jax.device_get(base.params), ""
    if new_vocab:
        vocabs = first_then_others(lambda: prepare(config).vocabs, name="vocabulary of a new run")
        params = move_pieces(params, _init_params(config, vocabs), base.vocabs, vocabs)
        said = _describe_pieces(base.vocabs, vocabs, init)
    origin = {"format": _FORMAT, "path": _describe(init, new_vocab)}

    def write() -> None:
        with new_folder(run_dir) as partial:
            write_new_run(partial, config, vocabs, params, origin=origin)
        publish(run_dir)

    decide_once(write)
    refresh(run_dir)
    return said


def _init_params(config: Config, vocabs: Vocabs) -> Any:
    sizes: Any = {"source_size": vocabs.source.size, "target_size": vocabs.target.size}
    plain = dataclasses.replace(config.model, scan_layers=False)
    model = make_model(plain, **sizes, platform=default_platform())
    return jax.device_get(init_params(model, jax.random.key(config.seed)))


def _describe(init: str, new_vocab: bool) -> str:
    name = find_url(init) or name_urls(str(Path(init)))
    return f"{name} with a new vocabulary" if new_vocab else name


def _describe_pieces(old: Vocabs, new: Vocabs, init: str) -> str:
    sides = [("", new.target, old.target)]
    if not new.joint:
        sides = [("source ", new.source, old.source), ("target ", new.target, old.target)]
    counts = [
        f"{int((map_pieces(before, now) >= 0).sum()):,} of {now.size:,} {side}subwords"
        for side, now, before in sides
    ]
    return f"{' and '.join(counts)} start with the parameters that they have in {init}; the others are new"


def _read_origin(run_dir: Path) -> str:
    """Return the run from which this run was started; "" for random parameters or an imported model."""
    checkpoints = Checkpoints(run_dir)
    if IMPORTED_STEP not in checkpoints.steps():
        return ""
    _, stored = checkpoints.restore(IMPORTED_STEP, {})
    origin = stored.get("imported_from") or {}
    return str(origin.get("path", "")) if origin.get("format") == _FORMAT else ""
