"""Sequences of tokens that a hypothesis must contain: which are in it, and how the beam makes room for them.

Dynamic beam allocation (Post and Vilar 2018): a hypothesis belongs to the bank of the number of required
tokens that it has met, and the beam is shared out among the banks. Knows nothing of text or of models.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flaxformer_mt.search.candidates import mask_logits, top_k
from flaxformer_mt.search.types import State, Task
from flaxformer_mt.shapes import Array


class Chosen(NamedTuple):
    """The continuations that stay, with what each has met; see State."""

    log_probs: Array  # [B, W]
    last: Array  # [B, W]
    parents: Array  # [B, W]
    met: Array | None = None  # [B, W, C]
    matched: Array | None = None  # [B, W, C, R]


def start_required(required: Array, width: int) -> tuple[Array, Array]:
    """What empty prefixes have met [B, W, C], and which beginnings they end in [B, W, C, R]: the empty one.

    Rows of nothing but NO_TOKEN are no sequences, and count as met.
    """
    batch, count, longest = required.shape
    nothing = _lengths(required) == 0
    met = jnp.broadcast_to(nothing[:, None], (batch, width, count))
    empty = jnp.arange(longest) == 0
    return met, jnp.broadcast_to(empty, (batch, width, count, longest))


def follow(required: Array, met: Array, matched: Array, tokens: Array) -> tuple[Array, Array]:
    """What is met, and which beginnings prefixes end in, after one more token.

    matched[..., k] says that a prefix ends in the first k tokens of a sequence. After [5 5], the sequence
    [5 5 6] has matched its first 0, 1 and 2 tokens; after one more 5, still 0, 1 and 2.

    required [B, C, R], met [B, ..., C], matched [B, ..., C, R] and tokens [B, ...] have as many axes between.
    """
    between = (1,) * (tokens.ndim - 1)
    batch, count, longest = required.shape
    required = required.reshape(batch, *between, count, longest)
    longer = matched & (tokens[..., None, None] == required)  # [..., C, R]: now ends in the first k + 1
    lengths = (required >= 0).sum(axis=-1)
    whole = jnp.arange(longest) == lengths[..., None] - 1
    met = met | (longer & whole).any(axis=-1)
    always = jnp.ones((*longer.shape[:-1], 1), bool)
    return met, jnp.concatenate([always, longer[..., :-1]], axis=-1)


def count_met(required: Array, met: Array, matched: Array) -> Array:
    """How many required tokens prefixes have, [B, ...]: all that are met, the longest beginning of others."""
    lengths = _lengths(required).reshape(met.shape[0], *(1,) * (met.ndim - 2), met.shape[-1])
    return jnp.where(met, lengths, progress(matched)).sum(axis=-1)


def progress(matched: Array) -> Array:
    """The longest beginning [..., C] that matched [..., C, R] names."""
    return jnp.where(matched, jnp.arange(matched.shape[-1]), 0).max(axis=-1)


def choose_required(
    task: Task, state: State, logits: Array, allowed: Array | None, banned: tuple[int, ...]
) -> Chosen:
    """W continuations: the best of every bank, then the second best of every bank, and so on.

    Beside each prefix's W best next tokens stand those that its unmet sequences wait for, however unlikely.
    """
    required = state.lines.required
    assert required is not None and state.met is not None and state.matched is not None
    batch, width = state.log_probs.shape
    logits = jnp.broadcast_to(logits, (batch, width, logits.shape[-1]))
    steps, tokens = _candidates(state, logits, allowed, banned, count=min(width, logits.shape[-1]))
    count = tokens.shape[-1]
    met, matched = follow(required, state.met[:, :, None], state.matched[:, :, None], tokens)
    banks = count_met(required, met, matched).reshape(batch, -1)
    log_probs = (state.log_probs[:, :, None] + steps).reshape(batch, -1)
    chosen = _share_out(log_probs, banks, width)

    def take(leaf: Array) -> Array:  # [B, W, K, ...] -> [B, W, ...]
        flat = leaf.reshape(batch, width * count, *leaf.shape[3:])
        return jax.vmap(lambda row, places: row[places])(flat, chosen)

    best = jnp.take_along_axis(log_probs, chosen, axis=1)
    return Chosen(best, take(tokens), chosen // count, take(met), take(matched))


def _candidates(
    state: State, logits: Array, allowed: Array | None, banned: tuple[int, ...], *, count: int
) -> tuple[Array, Array]:
    """Log-probabilities and ids [B, W, K + C] of each prefix's next tokens; -inf for what is there twice."""
    required = state.lines.required
    assert required is not None and state.met is not None and state.matched is not None
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    log_probs = mask_logits(logits, banned=banned, allowed=allowed) - total
    log_probs = jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs)
    best, tokens = top_k(log_probs, count)
    place = progress(state.matched)  # [B, W, C]
    spread = jnp.broadcast_to(required[:, None], (*place.shape, required.shape[-1]))
    wanted = jnp.take_along_axis(spread, place[..., None], axis=-1)[..., 0]
    forced = jnp.take_along_axis(log_probs, jnp.maximum(wanted, 0), axis=-1)
    number = jnp.arange(wanted.shape[-1])
    again = (
        (wanted[..., :, None] == wanted[..., None, :]) & (number[:, None] > number) & ~state.met[..., None, :]
    )
    twice = again.any(axis=-1) | (wanted[..., :, None] == tokens[..., None, :]).any(axis=-1)
    forced = jnp.where(state.met | twice | (wanted < 0), -jnp.inf, forced)
    return jnp.concatenate([best, forced], axis=-1), jnp.concatenate([tokens, wanted], axis=-1)


def _share_out(log_probs: Array, banks: Array, width: int) -> Array:
    """Which W of N candidates [B, N] stay, by rank within their bank, then the fuller bank first.

    Log-probabilities [-1 -2 -3 -4] in banks [0 0 1 0], width 3: the third (best of bank 1), the first (best
    of bank 0), the second.
    """
    banks = jnp.where(jnp.isneginf(log_probs), -1, banks)  # what cannot be stays out of everyone's way
    order = jnp.lexsort((-log_probs, banks), axis=1)
    ordered = jnp.take_along_axis(banks, order, axis=1)
    places = jnp.arange(ordered.shape[1])
    first = jnp.concatenate([jnp.ones_like(ordered[:, :1], bool), ordered[:, 1:] != ordered[:, :-1]], axis=1)
    rank = places - jax.lax.cummax(jnp.where(first, places, 0), axis=1)
    turn = jnp.lexsort((-ordered, rank, ordered < 0), axis=1)[:, :width]
    return jnp.take_along_axis(order, turn, axis=1)


def _lengths(required: Array) -> Array:
    return (required >= 0).sum(axis=-1)
