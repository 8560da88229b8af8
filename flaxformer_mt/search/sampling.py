"""Sampling of the next token with temperature, top-k, top-p and min-p, and separate random keys per line."""

import math

import jax
import jax.numpy as jnp

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.search.candidates import mask_logits, top_candidates, top_k
from flaxformer_mt.search.penalties import length_penalty
from flaxformer_mt.search.token_rules import (
    allowed_tokens,
    banned_tokens,
    expand_to_vocabulary,
    needs_mask,
    original_ids,
)
from flaxformer_mt.search.types import Lines, SearchResult, State, Task, empty_prefixes, take_beams
from flaxformer_mt.shapes import Array, Cache


def make_keys(seeds: Array, width: int) -> Array:
    """Derive random keys [B, W] from the lines' seeds [B]; a line's keys do not depend on other lines."""
    lines = jax.vmap(lambda seed: jax.random.key(seed, impl="threefry2x32"))(seeds)
    return jax.vmap(lambda key: jax.vmap(lambda n: jax.random.fold_in(key, n))(jnp.arange(width)))(lines)


def draw_tokens(masked: Array, keys: Array, steps: Array, options: SearchConfig) -> Array:
    """Draw tokens [B, W] from the logits that `keep_likely` returns; `steps` [B]: number of tokens so far."""
    values, ids = keep_likely(masked, options)

    def noise(key: Array, step: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(key, step), values.shape[-1:])

    # Gumbel-max: the argmax of logits plus Gumbel noise is a sample from their softmax.
    chosen = jnp.argmax(values + jax.vmap(jax.vmap(noise, in_axes=(0, None)))(keys, steps), axis=-1)
    return chosen if ids is None else jnp.take_along_axis(ids, chosen[..., None], axis=-1)[..., 0]


def keep_likely(masked: Array, options: SearchConfig) -> tuple[Array, Array | None]:
    """Return the logits [B, W, C] to sample from, with -inf for excluded tokens, and the token ids.

    If C is V, in vocabulary order, the ids are None. Temperature is applied first, then three filters,
    each applied to the result of the previous one: top_k keeps the k most likely tokens, top_p the fewest
    most likely tokens whose probabilities sum to p or more (Holtzman et al. 2020), and min_p the tokens with
    at least p times the probability of the most likely token (Nguyen et al. 2024).

    Of probabilities .5 .3 .15 .05, top_p .7 keeps .5 and .3, which are drawn with probabilities 5/8 and 3/8.
    """
    values, ids = masked / options.temperature, None
    size = values.shape[-1]
    if 0 < options.top_k < size:
        values, ids = top_k(values, options.top_k)
    elif options.top_p < 1:
        values, ids = jax.lax.top_k(values, size)
    if options.top_p < 1:
        probs = jax.nn.softmax(values, axis=-1)
        cumulative_before = jnp.cumsum(probs, axis=-1) - probs
        most_likely = jnp.arange(values.shape[-1]) == 0  # always kept, despite rounding
        values = jnp.where(most_likely | (cumulative_before < options.top_p), values, -jnp.inf)
    if options.min_p > 0:
        threshold = values.max(axis=-1, keepdims=True) + math.log(options.min_p)
        values = jnp.where(values >= threshold, values, -jnp.inf)
    return values, ids


def start_paths(task: Task, cache: Cache, lines: Lines) -> State:
    """Return the state before the first token: W paths per line, or one path for greedy search."""
    if task.options.method == "sample" and lines.seeds is None:
        raise ValueError("sampling needs a seed for each line: Lines(..., seeds=...)")
    if lines.required is not None:
        raise ValueError(f"{task.options.method} search does not support required sequences; use method beam")
    log_probs = jnp.zeros((lines.max_lengths.shape[0], task.width))
    state = empty_prefixes(task, cache, lines, log_probs)
    return state._replace(lengths=jnp.zeros(log_probs.shape, jnp.int32))


def advance_paths(task: Task, state: State) -> State:
    """Extend every path that has not ended by one token."""
    assert state.lengths is not None
    logits, cache = task.next_logits(state.last, state.cache)
    step_log_probs, last = _choose(task, state, logits)
    growing = (state.lengths == 0) & ~state.done[:, None]
    log_probs = jnp.where(growing, state.log_probs + step_log_probs, state.log_probs)
    length = state.prefix_lengths[:, None] + 1
    at_end = (last == task.symbols.eos_id) | (length >= state.lines.max_lengths[:, None])
    ended = growing & (at_end | jnp.isneginf(log_probs))
    lengths = jnp.where(ended, length, state.lengths)
    return state._replace(
        step=state.step + 1,
        last=last,
        tokens=state.tokens.at[:, :, state.place].set(
            jnp.where(growing, last, state.tokens[:, :, state.place])
        ),
        log_probs=log_probs,
        cache=_record_ancestors(cache, state.place),
        done=state.done | (lengths > 0).all(axis=1),
        lengths=lengths,
    )


def _record_ancestors(cache: Cache, position: Array) -> Cache:
    """Make each path its own ancestor at the new position, where a refilled row has no entry yet."""
    if cache.ancestors is None:
        return cache
    beams = jnp.arange(cache.ancestors.shape[1])
    return cache._replace(ancestors=cache.ancestors.at[:, :, position].set(beams))


def _choose(task: Task, state: State, logits: Array) -> tuple[Array, Array]:
    """Return the model's log-probability [B, W] of each path's next token, and the token.

    Logits of shape [B, 1, V] apply to all paths, as before the first token.
    """
    if task.options.method == "sample" or needs_mask(task, state):
        task, logits = expand_to_vocabulary(task, state.lines, logits)
    banned, allowed = banned_tokens(task, state), allowed_tokens(task, state, logits.shape[-1])
    if task.options.method == "greedy":
        best, tokens = top_candidates(logits, count=1, banned=banned, allowed=allowed)
        return best[:, :, 0], original_ids(task, state.lines, tokens[:, :, 0])
    assert state.lines.seeds is not None
    logits = jnp.broadcast_to(logits, (*state.last.shape, logits.shape[-1]))
    masked = mask_logits(logits, banned=banned, allowed=allowed)
    keys = make_keys(state.lines.seeds, task.width)
    tokens = draw_tokens(masked, keys, state.prefix_lengths, task.options)
    # Score with the unmodified model: temperature and truncation change which token is drawn, not its score.
    is_drawn = jnp.arange(logits.shape[-1]) == tokens[:, :, None]
    allowed = is_drawn & ~jnp.isneginf(masked)
    return top_candidates(logits, count=1, banned=(), allowed=allowed)[0][:, :, 0], tokens


def finish_paths(task: Task, state: State) -> SearchResult:
    """Return the paths as hypotheses, best first."""
    assert state.lengths is not None
    exists = ~jnp.isneginf(state.log_probs)
    result = SearchResult(
        tokens=jnp.where(exists[:, :, None], state.in_order(state.tokens), task.symbols.pad_id),
        scores=state.log_probs / length_penalty(state.lengths, task.options),
        log_probs=state.log_probs,
        lengths=jnp.where(exists, state.lengths, 0),
    )
    if task.width == 1:
        return result
    order = jnp.argsort(-result.scores, axis=1)
    return SearchResult(*(take_beams(leaf, order) for leaf in result[:4]))
