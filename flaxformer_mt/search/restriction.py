"""Restriction of the next tokens to the shortlist of each line.

The logits of a step are then those of the tokens of a line's shortlist alone, so scores are normalized over
it. Constraints have masks of the whole vocabulary; for them, the logits are laid out by id again.
"""

from dataclasses import replace

import jax.numpy as jnp

from flaxformer_mt.search.types import Lines, Task
from flaxformer_mt.shapes import Array


def expand_to_vocabulary(task: Task, lines: Lines, logits: Array) -> tuple[Task, Array]:
    """Return logits [B, W, N + C] of shortlists as [B, W, V], -inf for all other tokens, and their task."""
    if task.shortlists is None:
        return task, logits
    assert lines.shortlist is not None
    common, size = task.shortlists
    blank = jnp.full((*logits.shape[:-1], size), -jnp.inf, logits.dtype)
    expanded = blank.at[..., common].set(logits[..., : len(common)])
    rows = jnp.arange(len(logits))[:, None, None]
    beams = jnp.arange(logits.shape[1])[:, None]
    own = jnp.where(lines.shortlist > 0, lines.shortlist - 1, size)[:, None]
    expanded = expanded.at[rows, beams, own].set(logits[..., len(common) :], mode="drop")
    return replace(task, shortlists=None), expanded


def original_ids(task: Task, lines: Lines, tokens: Array) -> Array:
    """Return the ids in the vocabulary of tokens [B, W] that are indices of the logits."""
    if task.shortlists is None:
        return tokens
    assert lines.shortlist is not None
    common = jnp.asarray(task.shortlists.common, jnp.int32)
    own = jnp.maximum(tokens - len(common), 0)
    own = jnp.take_along_axis(lines.shortlist, own, axis=1) - 1
    return jnp.where(tokens < len(common), common[jnp.minimum(tokens, len(common) - 1)], own)
