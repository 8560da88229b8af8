"""`show`: reports the size, cost and batch shapes of an experiment by tracing it with abstract arrays."""

from collections import Counter
from pathlib import Path
from typing import Any

import jax

from flaxformer_mt.config import Config
from flaxformer_mt.config.files import to_dict
from flaxformer_mt.corpus.columns import Column, Links
from flaxformer_mt.data.batch_array import BatchArray, make_empty_batch
from flaxformer_mt.data.buckets import make_longest_shape
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.flops import padded_work, peak_flops, training_flops
from flaxformer_mt.model import make_model
from flaxformer_mt.model.lora import without_factors
from flaxformer_mt.model.scanned_layers import unstack_layers
from flaxformer_mt.parallel import default_device_kind, default_platform
from flaxformer_mt.runs.run_directory import check_run
from flaxformer_mt.training.state import choose_scan, init_state, init_training_params
from flaxformer_mt.training.trained_parameters import select_trained


def show(config: Config, run_dir: Path | None = None, *, device_kind: str | None = None) -> dict[str, Any]:
    """Describe the size and the cost of an experiment as JSON values.

    A step has `optim.accumulation` batches of the longest shape, without padding. `at_peak` is the time of a
    step at the peak rate of `device_kind` (None: this machine's devices), or None if this rate is unknown.
    Vocabulary sizes and batches come from the data if `run_dir` has been prepared for this config. Otherwise,
    vocabularies are assumed to have `vocab.size` entries, and `batches` and `stages` are None. For language
    models, source vocabulary size and source length are 0.
    """
    sizes = batches = stages = None
    if run_dir is not None and _is_prepared(run_dir, config):
        from flaxformer_mt.data.prepare import prepare

        report = prepare(config, run_dir).report
        sizes = report["vocabulary"]["source_size"], report["vocabulary"]["target_size"]
        batches, stages = report["batches"], report.get("stages")
    source_size, target_size = sizes or plan_sizes(config)
    kind = device_kind or default_device_kind()
    network, layers = choose_scan(config, platform=default_platform(), device_kind=kind)
    model = make_model(network, source_size=source_size, target_size=target_size, platform=default_platform())
    params = jax.eval_shape(lambda: init_training_params(model, config, config.seed))
    batch = longest_batch(config)
    rows, source_length, target_length = batch.shape
    tokens = rows * target_length * config.optim.accumulation
    chunk = config.train.loss_chunk_tokens
    work = padded_work(rows, source_length, target_length, loss_chunk_tokens=chunk)
    flops = training_flops(config.model, work, target_size=target_size) * config.optim.accumulation
    return {
        "parameters": count_parameters(without_factors(params)),
        "vocabulary": {"source_size": source_size, "target_size": target_size},
        "batches": batches,
        **({"stages": stages} if config.data.stages else {}),
        "longest_batch": {
            "rows": rows,
            "source_length": source_length,
            "target_length": target_length,
        },
        "step": {
            "target_tokens": tokens,
            "teraflops": round(flops / 1e12, 4),
            "megaflops_a_target_token": round(flops / tokens / 1e6, 3),
            "memory_mib": estimate_memory(config, params),
        },
        "at_peak": _time_at_peak(config, flops, kind),
        "layers": layers,
        "config": to_dict(config),
    }


def _is_prepared(run_dir: Path, config: Config) -> bool:
    """Return whether the run has been prepared for this config; warn if it was trained with another one."""
    if not (run_dir / "vocab").is_dir():
        return False
    try:
        check_run(run_dir, config)
    except UserError as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        warn_user(f"{reason}; its vocabularies and batches are not those of the config that is shown")
        return False
    return True


def plan_sizes(config: Config) -> tuple[int, int]:
    """Return the configured sizes of source and target vocabulary; a language model has source size 0."""
    vocab = config.vocab
    source_size = vocab.size if vocab.source_size is None else vocab.source_size
    if not vocab.size or not source_size and config.data.source_language:
        raise UserError(
            "vocab.size or vocab.source_size is 0, all words or characters of the training text; prepare it "
            "first, with the same --run=DIR"
        )
    return source_size if config.data.source_language else 0, vocab.size


def _time_at_peak(config: Config, flops: int, kind: str) -> dict[str, Any] | None:
    peak = peak_flops(config, kind)
    if peak is None:
        return None
    return {
        "device": kind,
        "teraflops_a_second": round(peak / 1e12, 3),
        "seconds_a_step": float(f"{flops / peak:.4g}"),
        "device_hours": float(f"{config.train.steps * flops / peak / 3600:.4g}"),
    }


def longest_batch(config: Config) -> BatchArray:
    """Return a batch of padding, in the shape for the longest sentences that the config allows."""
    shape, packed = make_longest_shape(config.data), config.data.batching == "pack"
    ids: dict[str, Any] = {"pad_id": config.vocab.pad_id, "bos_id": config.vocab.bos_id}
    columns: dict[str, Column] = {}
    if config.model.alignment.weight:
        columns["alignment"] = Links((), ())
    return make_empty_batch(shape, columns, packed=packed, **ids)


def count_parameters(params: Any) -> dict[str, Any]:
    """Count parameters: in total, in embeddings, and per module, such as {"encoder/layers_0": 1315072}."""
    params = jax.eval_shape(unstack_layers, params)
    modules: Counter[str] = Counter()
    embeddings = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [str(key.key) for key in path]
        modules["/".join(names[:2])] += leaf.size
        embeddings += leaf.size if names[-1] == "embedding" else 0
    return {"total": modules.total(), "embeddings": embeddings, "modules": dict(modules)}


def estimate_memory(config: Config, params: Any) -> dict[str, float]:
    """Estimate the MiB that a step needs on a device, without activations, if parameters are replicated."""
    state = jax.eval_shape(lambda p: init_state(p, config.optim), params)
    sizes = {
        "parameters": _bytes_of(state.params),
        "gradients": _bytes_of(select_trained(state.params, config.optim))
        * (2 if config.optim.accumulation > 1 else 1),
        "optimizer": _bytes_of(state.opt_state),
        "moving_average": _bytes_of(state.ema_params),
    }
    total = sum(sizes.values())
    return {name: round(size / 2**20, 1) for name, size in (sizes | {"without_activations": total}).items()}


def _bytes_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
