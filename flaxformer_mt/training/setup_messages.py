"""Messages at the start of training: the data, the network, the devices, and doubtful settings."""

from collections.abc import Iterator
from typing import Any

from flaxformer_mt.config import Config
from flaxformer_mt.config.directions import find_directions
from flaxformer_mt.corpus.mixture_weights import format_shares
from flaxformer_mt.data.curriculum import format_stages
from flaxformer_mt.kernels.attention_kernels import explain_attention
from flaxformer_mt.parallel import Parallel
from flaxformer_mt.processor import slow_bfloat16_reason
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.run_directory import IMPORTED_STEP
from flaxformer_mt.training.optimizers import warmup_updates
from flaxformer_mt.training.setup import TrainingSetup
from flaxformer_mt.training.trained_parameters import describe_frozen

COMPILING_AHEAD = "compiling the training step for all batch shapes"


def describe_training(setup: TrainingSetup) -> Iterator[str]:
    config, checkpoints = setup.config, setup.checkpoints
    vocabs, step = setup.prepared.vocabs, setup.progress.step
    sizes = f"{vocabs.source.size:,}" if vocabs.joint else f"{vocabs.source.size:,} + {vocabs.target.size:,}"
    directions = ", ".join(direction.name for direction in find_directions(config.data))
    yield (
        f"{config.data.dataset} {directions}: "
        f"{len(setup.prepared.train.base):,} {'pairs' if config.data.source_language else 'sentences'}, "
        f"{sizes} {config.vocab.kind} subwords; "
        f"{setup.parameters:,} parameters on {setup.parallel.describe()}"
    )
    if shares := setup.prepared.report.get("mixture"):
        yield format_shares(shares)
    yield from format_stages(setup.prepared.report.get("stages", []))
    yield _describe_attention(config, setup.parallel)
    yield f"layers: {setup.layers}"
    if frozen := describe_frozen(setup.state.params, config.optim):
        yield frozen
    if setup.parallel.device_count > 1:
        placements = setup.parallel.describe_parameters(setup.state.params)
        yield "\n".join([setup.parallel.layout.describe(), *placements])
    if config.data.row_multiple % setup.parallel.layout.row_parts:
        yield (
            f"batches get rows of padding: data.row_multiple {config.data.row_multiple} is not divisible by "
            f"the {setup.parallel.layout.row_parts} devices that share the rows"
        )
    yield describe_batches(setup.prepared.report["batches"])
    yield from describe_long_warmup(config)
    if step:
        yield f"resuming at step {step} of {config.train.steps}"
    if starts_from_import(checkpoints, step):
        yield _describe_import(checkpoints)


def describe_batches(plan: dict[str, Any]) -> str:
    """Describe the batches of an epoch; `plan` is the result of `plan_summary`."""
    axes = {"rows": "rows", "source": "source", "target": "target"}
    noun = "pairs"
    if not any(shape["source"] for shape in plan["shapes"]):  # a language model
        axes, noun = {"rows": "rows", "target": "tokens"}, "sentences"
    shapes = ", ".join("x".join(str(shape[axis]) for axis in axes) for shape in plan["shapes"])
    skipped = f"; {plan['skipped']:,} {noun} are too long and left out" if plan["skipped"] else ""
    return (
        f"{plan['batches']:,} batches an epoch, {plan['padding']:.1%} padding, "
        f"{len(plan['shapes'])} shapes ({' x '.join(axes.values())}): {shapes}{skipped}"
    )


def starts_from_import(checkpoints: Checkpoints, step: int) -> bool:
    """Return whether training starts from checkpoint 0, whose parameters come from `import` or --init."""
    return step == IMPORTED_STEP and IMPORTED_STEP in checkpoints.steps()


def _describe_import(checkpoints: Checkpoints) -> str:
    _, stored = checkpoints.restore(IMPORTED_STEP, {})
    origin = stored.get("imported_from") or {}
    names = ", ".join(str(origin[name]) for name in ("format", "path") if name in origin)
    return (
        f"starting from the imported model{f' ({names})' if names else ''} with a new optimizer state; "
        f"checkpoint {IMPORTED_STEP} keeps the imported parameters"
    )


def _describe_attention(config: Config, parallel: Parallel) -> str:
    data = config.data
    lengths = (data.max_source_length if data.source_language else 0, data.max_target_length)
    source, target = (-(-length // data.length_multiple) * data.length_multiple for length in lengths)
    kernel, reason = explain_attention(
        config.model, parallel.platform, lengths=(source, target), tensor=parallel.layout.tensor
    )
    return f"attention: {kernel} ({reason})"


def describe_doubts(config: Config, platform: str) -> Iterator[str]:
    warmup, steps = config.optim.warmup_steps, config.train.steps
    if (updates := warmup_updates(config.optim, total_steps=steps)) != warmup:
        yield (
            f"optim.warmup_steps {warmup} is not below train.steps {steps}, at which schedule "
            f"{config.optim.schedule} ends; the warm-up is shortened to {updates} steps"
        )
    reason = slow_bfloat16_reason() if config.model.dtype == "bfloat16" and platform == "cpu" else None
    if reason:
        yield (
            f"model.dtype bfloat16 is no faster than float32 on this CPU, since {reason}; "
            "--config.model.dtype=float32 is more exact"
        )


def describe_long_warmup(config: Config) -> Iterator[str]:
    """Yield a message about the highest learning rate if the warm-up is longer than the training."""
    warmup, steps = warmup_updates(config.optim, total_steps=config.train.steps), config.train.steps
    if warmup > steps:
        yield (
            f"optim.warmup_steps {warmup} goes beyond train.steps {steps}: the learning rate rises to the "
            f"end, where it is {steps / warmup:.0%} of the highest"
        )


def describe_stage_end(config: Config, step: int, ended: int, stage: int) -> str:
    stages = config.data.stages
    following = "the last one" if stage == len(stages) else f"then stage {stages[stage].name}"
    return f"step {step} ends stage {stages[ended].name}, {following}"
