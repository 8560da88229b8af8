"""Which next tokens a line allows: its prefix, its shortest length, no n-gram twice.

Owns the masks; a rule that nobody asks for is not in the compiled program. Knows nothing of scores.
"""

import jax.numpy as jnp
import numpy as np

from flaxformer_mt.search.types import State, Task
from flaxformer_mt.shapes import Array


def allowed_tokens(task: Task, state: State, size: int) -> Array | None:
    """Which of `size` tokens may come next, [B, W, V] or [B, 1, V]; None: no line has a rule.

    A prefix goes before all other rules. Required sequences keep a hypothesis from ending before they are in.
    """
    lines, eos = state.lines, jnp.arange(size) == task.symbols.eos_id
    masks: list[Array] = []
    if lines.min_lengths is not None:
        long_enough = state.ages + 1 >= lines.min_lengths
        masks.append(long_enough[:, None, None] | ~eos)
    if state.met is not None:
        masks.append(jnp.all(state.met, axis=-1)[:, :, None] | ~eos)
    n = task.options.no_repeat_ngram
    if n and n <= task.max_length:
        masks.append(~repeating_tokens(state.in_order(state.tokens), state.ages, n=n, size=size))
    allowed: Array | None = None
    for mask in masks:
        allowed = mask if allowed is None else allowed & mask
    if lines.prefixes is not None:
        forced = forced_tokens(lines.prefixes, state.ages)[:, None, None]
        kept = ~np.isin(np.arange(size), task.symbols.never)
        free = kept if allowed is None else allowed & kept
        allowed = jnp.where(forced >= 0, jnp.arange(size) == forced, free)
    return allowed


def barred_or_allowed(task: Task, state: State, size: int) -> tuple[tuple[int, Array] | None, Array | None]:
    """What `top_candidates` needs to know of the rules: what is barred, or else which tokens are allowed.

    That a hypothesis is too short to end can be told without a mask of the whole vocabulary: where it is the
    only rule, the end symbol is barred where the second, [B, 1], says so.
    """
    lines, n = state.lines, task.options.no_repeat_ngram
    others = lines.prefixes is not None or state.met is not None or 0 < n <= task.max_length
    if lines.min_lengths is None or others:
        return None, allowed_tokens(task, state, size)
    return (task.symbols.eos_id, (state.ages + 1 < lines.min_lengths)[:, None]), None


def banned_tokens(task: Task, state: State) -> tuple[int, ...]:
    """Ids that may come next nowhere. Where a prefix may force a suppressed one, `allowed_tokens` decides."""
    symbols = task.symbols
    return symbols.banned if state.lines.prefixes is None else (symbols.pad_id, symbols.bos_id)


def forced_tokens(prefixes: Array, steps: Array) -> Array:
    """The token [B] that each prefix [B, P] has at its step [B]; -1 where it is over."""
    at = jnp.minimum(steps, prefixes.shape[1] - 1)
    tokens = jnp.take_along_axis(prefixes, at[:, None], axis=1)[:, 0]
    return jnp.where(steps < prefixes.shape[1], tokens, -1)


def repeating_tokens(tokens: Array, steps: Array, *, n: int, size: int) -> Array:
    """Tokens [B, W, V] that would complete an n-gram which prefixes [B, W, T] have already.

    steps [B]: how many tokens the prefixes of each line have.

    For n = 2, the prefix [5 6 7 5] bars 6, since [5 6] is in it.
    """
    batch, width, length = tokens.shape
    starts = jnp.arange(length - n + 1)
    same = jnp.broadcast_to(starts + n - 1 < steps[:, None, None], (batch, width, starts.size))
    for offset in range(n - 1):
        at = jnp.maximum(steps - n + 1 + offset, 0)[:, None, None]
        ending = jnp.take_along_axis(tokens, at, axis=2)
        same = same & (tokens[:, :, offset : offset + starts.size] == ending)
    rows, beams = jnp.arange(batch)[:, None, None], jnp.arange(width)[None, :, None]
    return jnp.zeros((batch, width, size), bool).at[rows, beams, tokens[:, :, n - 1 :]].max(same)
