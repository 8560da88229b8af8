"""Required token sequences in beam search: dynamic beam allocation (Post and Vilar 2018).

Hypotheses that have met the same number of required tokens form a "bank" (the term of the paper), and the
beam is divided among the banks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flaxformer_mt.search.candidates import mask_logits, top_k
from flaxformer_mt.search.types import State, Task
from flaxformer_mt.shapes import Array


class Chosen(NamedTuple):
    """The continuations that stay in the beam, with the required sequences that each has met; see `State`."""

    log_probs: Array  # [B, W]
    last: Array  # [B, W]
    parents: Array  # [B, W]
    met: Array | None = None  # [B, W, C]
    matched: Array | None = None  # [B, W, C, R]


def start_constraints(required: Array, width: int) -> tuple[Array, Array]:
    """Return `met` and `matched` (see `follow`) for empty prefixes; padding (empty phrases) counts as met."""
    batch, count, longest = required.shape
    is_padding = _lengths(required) == 0
    met = jnp.broadcast_to(is_padding[:, None], (batch, width, count))
    empty_beginning = jnp.arange(longest) == 0
    return met, jnp.broadcast_to(empty_beginning, (batch, width, count, longest))


def follow(required: Array, met: Array, matched: Array, tokens: Array) -> tuple[Array, Array]:
    """Return `met` and `matched` after one more token.

    matched[..., k] is True if the prefix ends in the first k tokens of the required sequence. After [5 5],
    the first 0, 1 and 2 tokens of the sequence [5 5 6] are matched; after one more 5, still 0, 1 and 2.

    Shapes: required [B, C, R], met [B, ..., C], matched [B, ..., C, R] and tokens [B, ...], with the same
    axes for each `...`.
    """
    inner_axes = (1,) * (tokens.ndim - 1)
    batch, count, longest = required.shape
    required = required.reshape(batch, *inner_axes, count, longest)
    extended = matched & (tokens[..., None, None] == required)  # [..., C, R]: ends in the first k + 1 tokens
    lengths = (required >= 0).sum(axis=-1)
    is_last_token = jnp.arange(longest) == lengths[..., None] - 1
    met = met | (extended & is_last_token).any(axis=-1)
    empty_beginning = jnp.ones((*extended.shape[:-1], 1), bool)
    return met, jnp.concatenate([empty_beginning, extended[..., :-1]], axis=-1)


def count_met(required: Array, met: Array, matched: Array) -> Array:
    """Count the tokens in each prefix [B, ...] that belong to met or partly matched required sequences."""
    lengths = _lengths(required).reshape(met.shape[0], *(1,) * (met.ndim - 2), met.shape[-1])
    return jnp.where(met, lengths, progress(matched)).sum(axis=-1)


def progress(matched: Array) -> Array:
    """Return how many first tokens of each sequence are matched, as [..., C]; `matched` is [..., C, R]."""
    return jnp.where(matched, jnp.arange(matched.shape[-1]), 0).max(axis=-1)


def choose_required(
    task: Task, state: State, logits: Array, allowed: Array | None, banned: tuple[int, ...]
) -> Chosen:
    """Choose W continuations: the best of each bank (equal `count_met`), then each bank's second best, etc.

    The candidates for each prefix are its W best next tokens, and the next token of each unmet required
    sequence, however unlikely.
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
    chosen = _allocate_beam(log_probs, banks, width)

    def take(leaf: Array) -> Array:  # [B, W, K, ...] -> [B, W, ...]
        flat = leaf.reshape(batch, width * count, *leaf.shape[3:])
        return jax.vmap(lambda row, indices: row[indices])(flat, chosen)

    best = jnp.take_along_axis(log_probs, chosen, axis=1)
    return Chosen(best, take(tokens), chosen // count, take(met), take(matched))


def _candidates(
    state: State, logits: Array, allowed: Array | None, banned: tuple[int, ...], *, count: int
) -> tuple[Array, Array]:
    """Return log-probabilities and ids [B, W, K + C] of each prefix's candidates; -inf for duplicates."""
    required = state.lines.required
    assert required is not None and state.met is not None and state.matched is not None
    logits = logits.astype(jnp.float32)
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    log_probs = mask_logits(logits, banned=banned, allowed=allowed) - normalizer
    log_probs = jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs)
    best, tokens = top_k(log_probs, count)
    num_matched = progress(state.matched)  # [B, W, C]
    expanded = jnp.broadcast_to(required[:, None], (*num_matched.shape, required.shape[-1]))
    needed = jnp.take_along_axis(expanded, num_matched[..., None], axis=-1)[..., 0]
    needed_log_probs = jnp.take_along_axis(log_probs, jnp.maximum(needed, 0), axis=-1)
    number = jnp.arange(needed.shape[-1])
    repeated = (
        (needed[..., :, None] == needed[..., None, :]) & (number[:, None] > number) & ~state.met[..., None, :]
    )
    duplicate = repeated.any(axis=-1) | (needed[..., :, None] == tokens[..., None, :]).any(axis=-1)
    needed_log_probs = jnp.where(state.met | duplicate | (needed < 0), -jnp.inf, needed_log_probs)
    return jnp.concatenate([best, needed_log_probs], axis=-1), jnp.concatenate([tokens, needed], axis=-1)


def _allocate_beam(log_probs: Array, banks: Array, width: int) -> Array:
    """Choose W of N candidates [B, N] by rank within their bank; for equal ranks, the higher bank first.

    Log-probabilities [-1 -2 -3 -4] in banks [0 0 1 0] with width 3 give the third candidate (best of bank 1),
    the first (best of bank 0) and the second.
    """
    banks = jnp.where(jnp.isneginf(log_probs), -1, banks)  # impossible candidates rank last
    order = jnp.lexsort((-log_probs, banks), axis=1)
    ordered = jnp.take_along_axis(banks, order, axis=1)
    positions = jnp.arange(ordered.shape[1])
    first = jnp.concatenate([jnp.ones_like(ordered[:, :1], bool), ordered[:, 1:] != ordered[:, :-1]], axis=1)
    rank = positions - jax.lax.cummax(jnp.where(first, positions, 0), axis=1)
    allocation = jnp.lexsort((-ordered, rank, ordered < 0), axis=1)[:, :width]
    return jnp.take_along_axis(order, allocation, axis=1)


def _lengths(required: Array) -> Array:  # [B, C, R] -> [B, C], without NO_TOKEN
    return (required >= 0).sum(axis=-1)
