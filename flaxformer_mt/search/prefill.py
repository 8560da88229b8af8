"""Prefixes of waiting lines, read in one pass (prefill).

A search without such a pass forces the tokens of prefixes step by step (see token_rules.py).
"""

from typing import Any

import jax
import jax.numpy as jnp

from flaxformer_mt.search.required_phrases import follow
from flaxformer_mt.search.search_loop import Search
from flaxformer_mt.search.state_rows import pack
from flaxformer_mt.search.types import Lines, State
from flaxformer_mt.shapes import Array, Cache


def align_prefixes(prefixes: Array, *, bos_id: int, pad_id: int) -> tuple[Array, Array, Array]:
    """Return right-aligned prefixes [B, P], the tokens [B, P] to feed for them, and each row's first step.

    With bos 1 and pad 0, prefixes [[5 6 7] [8 -1 -1]] give [[5 6 7] [0 0 8]], [[1 5 6] [0 0 1]] and [0 2].
    """
    length = prefixes.shape[1]
    starts = length - (prefixes >= 0).sum(axis=1)
    places = jnp.arange(length) - starts[:, None]
    aligned = jnp.take_along_axis(prefixes, jnp.maximum(places, 0), axis=1)
    aligned = jnp.where(places >= 0, aligned, pad_id)
    before = jnp.pad(aligned[:, :-1], [(0, 0), (1, 0)], constant_values=pad_id)
    return aligned, jnp.where(places == 0, bos_id, before), starts


def begin_prefixed_lines(
    task: Search, cache: Cache, lines: Lines, logits: Array, attention: Array | None
) -> State:
    """Return the packed state of waiting lines after their prefixes, from the pass over `align_prefixes`.

    Args:
      task: with a capacity of P + 1 tokens.
      cache: after the pass, of one beam; all beams of a line continue from it.
      lines: max_lengths are those of the whole search.
      logits: [B, P, V], from which each token of the prefixes was predicted.
      attention: [B, P, S], if there is a coverage penalty.
    """
    symbols, length = task.symbols, logits.shape[1]
    prefixes, _, starts = align_prefixes(lines.prefixes, bos_id=symbols.bos_id, pad_id=symbols.pad_id)
    is_token = jnp.arange(length) >= starts[:, None]
    counts = jnp.arange(length) >= starts[:, None] + symbols.num_free if symbols.num_free else is_token
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    log_probs = jnp.take_along_axis(log_probs, prefixes[..., None], axis=-1)[..., 0]
    sums = jnp.where(counts, log_probs, 0.0).sum(axis=1)
    sums = jnp.where(jnp.isnan(sums), -jnp.inf, sums)[:, None]
    ancestors = jnp.zeros((len(starts), task.width, task.max_length), jnp.int32)
    state = task.start(cache._replace(ancestors=ancestors), lines, clip=False)
    last = jnp.where(starts == length, symbols.bos_id, prefixes[:, -1])
    state = state._replace(
        step=jnp.asarray(length, jnp.int32),
        last=jnp.broadcast_to(last[:, None], state.last.shape),
        tokens=state.tokens.at[:, :, :length].set(prefixes[:, None]),
        log_probs=state.log_probs + sums,
    )
    if state.coverage is not None:
        assert attention is not None
        received = jnp.where(is_token[..., None], attention, 0.0).sum(axis=1)
        state = state._replace(coverage=jnp.broadcast_to(received[:, None], state.coverage.shape))
    return pack(_follow_prefixes(state, prefixes, is_token))


def _follow_prefixes(state: State, prefixes: Array, is_token: Array) -> State:
    """Return the state with the required sequences that the prefixes have met or begun."""
    if state.met is None or state.matched is None:
        return state

    def advance(constraints: Any, column: tuple[Array, Array]) -> tuple[Any, None]:
        tokens, valid = column
        met, matched = constraints
        tokens = jnp.broadcast_to(tokens[:, None], met.shape[:2])
        met_after, matched_after = follow(state.lines.required, met, matched, tokens)
        met = jnp.where(valid[:, None, None], met_after, met)
        return (met, jnp.where(valid[:, None, None, None], matched_after, matched)), None

    (met, matched), _ = jax.lax.scan(advance, (state.met, state.matched), (prefixes.T, is_token.T))
    return state._replace(met=met, matched=matched)
