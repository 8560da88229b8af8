"""Greedy search and sampling: paths that grow a token at a time and never meet.

Owns how a path grows and ends. Knows nothing of beams that compete, of text or of models.
"""

import jax.numpy as jnp

from flaxformer_mt.search.candidates import mask_logits, top_candidates
from flaxformer_mt.search.penalties import length_penalty
from flaxformer_mt.search.sampling import draw_tokens, make_keys
from flaxformer_mt.search.token_rules import allowed_tokens, banned_tokens, barred_or_allowed
from flaxformer_mt.search.types import Lines, SearchResult, State, Task, take_beams
from flaxformer_mt.shapes import Array, Cache


def start_paths(task: Task, cache: Cache, lines: Lines) -> State:
    """The state before the first token: W paths a line, one where the search is greedy."""
    if task.options.method == "sample" and lines.seeds is None:
        raise ValueError("sampling needs a seed for each line: Lines(..., seeds=...)")
    if lines.required is not None:
        raise ValueError(f"{task.options.method} search cannot require sequences; use method beam")
    shape = (lines.max_lengths.shape[0], task.width)
    return State(
        step=jnp.zeros((), jnp.int32),
        last=jnp.full(shape, task.symbols.bos_id, jnp.int32),
        tokens=jnp.full((*shape, task.max_length), task.symbols.pad_id, jnp.int32),
        log_probs=jnp.zeros(shape, jnp.float32),
        cache=cache,
        lines=lines,
        done=lines.max_lengths == 0,
        lengths=jnp.zeros(shape, jnp.int32),
    )


def advance_paths(task: Task, state: State) -> State:
    """One more token on every path that has not ended."""
    assert state.lengths is not None
    logits, cache = task.next_logits(state.last, state.cache)
    step_log_probs, last = _choose(task, state, logits)
    growing = (state.lengths == 0) & ~state.done[:, None]
    log_probs = jnp.where(growing, state.log_probs + step_log_probs, state.log_probs)
    length = state.ages[:, None] + 1
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
        cache=_note_ancestors(cache, state.place),
        done=state.done | (lengths > 0).all(axis=1),
        lengths=lengths,
    )


def _note_ancestors(cache: Cache, place: Array) -> Cache:
    """Each path goes on with its own past; a row that was given to another line does not know yet."""
    if cache.ancestors is None:
        return cache
    own = jnp.arange(cache.ancestors.shape[1])
    return cache._replace(ancestors=cache.ancestors.at[:, :, place].set(own))


def _choose(task: Task, state: State, logits: Array) -> tuple[Array, Array]:
    """The model's log-probability [B, W] of each path's next token, and the token."""
    banned = banned_tokens(task, state)
    if task.options.method == "greedy":
        barred, allowed = barred_or_allowed(task, state, logits.shape[-1])
        best, tokens = top_candidates(logits, count=1, banned=banned, barred=barred, allowed=allowed)
        return best[:, :, 0], tokens[:, :, 0]
    assert state.lines.seeds is not None
    allowed = allowed_tokens(task, state, logits.shape[-1])
    masked = mask_logits(logits, banned=banned, allowed=allowed)
    keys = make_keys(state.lines.seeds, task.width)
    tokens = draw_tokens(masked, keys, state.ages, task.options)
    # Of the model as it is: temperature and cuts change what is drawn, not what it is worth.
    only = jnp.arange(logits.shape[-1]) == tokens[:, :, None]
    allowed = only & ~jnp.isneginf(masked)
    return top_candidates(logits, count=1, banned=(), allowed=allowed)[0][:, :, 0], tokens


def finish_paths(task: Task, state: State) -> SearchResult:
    """The paths, best first."""
    assert state.lengths is not None
    # A search that is stopped midway has paths that still grow.
    lengths = jnp.where((state.lengths == 0) & ~state.done[:, None], state.ages[:, None], state.lengths)
    exists = ~jnp.isneginf(state.log_probs)
    result = SearchResult(
        tokens=jnp.where(exists[:, :, None], state.in_order(state.tokens), task.symbols.pad_id),
        scores=state.log_probs / length_penalty(lengths, task.options),
        log_probs=state.log_probs,
        lengths=jnp.where(exists, lengths, 0),
    )
    if task.width == 1:
        return result
    order = jnp.argsort(-result.scores, axis=1)
    return SearchResult(*(take_beams(leaf, order) for leaf in result[:4]))
