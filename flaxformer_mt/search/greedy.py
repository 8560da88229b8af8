"""Greedy search: the most probable token, again and again.

Row 12 of the data path. Knows neither text nor models. Beam search of width 1 must equal it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from flaxformer_mt.search.candidates import NextLogits, SearchResult, penalty_of, top_candidates
from flaxformer_mt.shapes import Array, Cache, typed


class _State(NamedTuple):
    step: Array  # []
    last: Array  # [B]
    tokens: Array  # [B, T]
    log_probs: Array  # [B]
    lengths: Array  # [B]
    done: Array  # [B]
    cache: Cache


@typed
def greedy_search(
    next_logits: NextLogits,
    cache: Cache,
    *,
    batch_size: int,
    length_penalty: float,
    max_lengths: Int[Array, "B"],
    max_length: int,
    bos_id: int,
    eos_id: int,
    pad_id: int,
) -> SearchResult:
    """Takes each sentence's most probable next token until that is eos or the sentence's limit is reached.

    With bos 1, eos 2: [1] -> most probable 7, [1 7] -> 9, [1 7 9] -> 2 gives tokens [7 9 2], length 3.
    The cache has one beam; `max_lengths` bound each sentence (0: not searched at all), `max_length` the loop.
    """
    limits = jnp.clip(jnp.asarray(max_lengths), 0, max_length)
    start = _State(
        step=jnp.zeros((), jnp.int32),
        last=jnp.full((batch_size,), bos_id, jnp.int32),
        tokens=jnp.full((batch_size, max_length), pad_id, jnp.int32),
        log_probs=jnp.zeros((batch_size,), jnp.float32),
        lengths=jnp.zeros((batch_size,), jnp.int32),
        done=limits == 0,
        cache=cache,
    )

    def advance(state: _State) -> _State:
        logits, cache = next_logits(state.last[:, None], state.cache)
        best, tokens = top_candidates(logits, count=1, banned=(pad_id, bos_id))
        best, last = best[:, 0, 0], tokens[:, 0, 0]
        log_probs = jnp.where(state.done, state.log_probs, state.log_probs + best)
        length = state.step + 1
        return _State(
            step=length,
            last=last,
            tokens=state.tokens.at[:, state.step].set(jnp.where(state.done, pad_id, last)),
            log_probs=log_probs,
            lengths=jnp.where(state.done, state.lengths, length),
            done=state.done | (last == eos_id) | (length >= limits) | jnp.isneginf(log_probs),
            cache=cache,
        )

    end = jax.lax.while_loop(lambda state: ~jnp.all(state.done), advance, start)
    exists = ~jnp.isneginf(end.log_probs)
    return SearchResult(
        tokens=jnp.where(exists[:, None], end.tokens, pad_id)[:, None],
        scores=(end.log_probs / penalty_of(end.lengths, length_penalty))[:, None],
        log_probs=end.log_probs[:, None],
        lengths=jnp.where(exists, end.lengths, 0)[:, None],
    )
