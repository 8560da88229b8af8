"""Beam search, with optional diversity groups (Vijayakumar et al. 2016)."""

from typing import Any

import jax
import jax.numpy as jnp

from flaxformer_mt.search.candidates import top_candidates
from flaxformer_mt.search.penalties import attainable, coverage_penalty, length_penalty
from flaxformer_mt.search.required_phrases import Chosen, choose_required, start_constraints
from flaxformer_mt.search.token_rules import (
    allowed_tokens,
    banned_tokens,
    expand_to_vocabulary,
    needs_mask,
    original_ids,
)
from flaxformer_mt.search.types import Lines, SearchResult, State, Task, empty_prefixes, take_beams
from flaxformer_mt.shapes import Array, Cache


def start_beams(task: Task, cache: Cache, lines: Lines) -> State:
    """Return the state before the first token; since all prefixes are empty, only one per group is live."""
    options, batch, width = task.options, lines.max_lengths.shape[0], task.width
    slots = options.diversity_groups * min(task.n_best, width // options.diversity_groups)
    no_scores = jnp.full((batch, slots), -jnp.inf, jnp.float32)
    first_of_group = jnp.arange(width) % (width // options.diversity_groups) == 0
    log_probs = jnp.broadcast_to(jnp.where(first_of_group, 0.0, -jnp.inf), (batch, width))
    finished = SearchResult(
        tokens=jnp.full((batch, slots, task.max_length), task.symbols.pad_id, jnp.int32),
        scores=no_scores,
        log_probs=no_scores,
        lengths=jnp.zeros((batch, slots), jnp.int32),
    )
    state = empty_prefixes(task, cache, lines, log_probs)._replace(finished=finished)
    if options.stopping == "inexact":
        state = state._replace(num_ended=jnp.zeros(batch, jnp.int32))
    if options.coverage_penalty:
        if task.attention_of is None or lines.source_mask is None:
            raise ValueError("a coverage penalty needs attention_of and Lines(..., source_mask=...)")
        state = state._replace(coverage=jnp.zeros((batch, width, lines.source_mask.shape[1]), jnp.float32))
    if lines.required is not None:
        if options.diversity_groups > 1:
            raise ValueError("required sequences need a single group of beams; set diversity_groups to 1")
        met, matched = start_constraints(lines.required, width)
        state = state._replace(met=met, matched=matched)
    return state


def advance_beams(task: Task, state: State) -> State:
    """Extend every live prefix of every sentence by one token.

    The W best continuations of all live prefixes stay in the beam. Continuations that end in eos move from
    the beam to the pool of finished hypotheses, so a search of width 1 is greedy search. The results of a
    finished sentence do not change while other sentences of the batch continue.
    """
    logits, cache = task.next_logits(state.last, state.cache)
    coverage = None
    if state.coverage is not None:
        assert task.attention_of is not None
        coverage = state.coverage + task.attention_of(cache)
    chosen = _choose(task, state, logits)
    after = state._replace(
        step=state.step + 1,
        last=chosen.last,
        tokens=take_beams(state.tokens, chosen.parents).at[:, :, state.place].set(chosen.last),
        log_probs=chosen.log_probs,
        coverage=None if coverage is None else take_beams(coverage, chosen.parents),
        met=chosen.met,
        matched=chosen.matched,
    )
    after = _freeze(state, _collect(task, after))
    return after._replace(
        cache=_reorder(cache, chosen.parents, state.place), done=state.done | _is_done(task, after)
    )


def _choose(task: Task, state: State, logits: Array) -> Chosen:
    """Choose the continuations that stay in the beam; logits [B, 1, V] apply to all beams."""
    groups = task.options.diversity_groups
    if groups > 1 or needs_mask(task, state):
        task, logits = expand_to_vocabulary(task, state.lines, logits)
    if groups > 1:
        logits = jnp.broadcast_to(logits, (*state.log_probs.shape, logits.shape[-1]))
    allowed, banned = allowed_tokens(task, state, logits.shape[-1]), banned_tokens(task, state)
    if logits.shape[1] == 1 and allowed is not None:
        allowed = allowed[:, :1]
    if state.lines.required is not None:
        return choose_required(task, state, logits, allowed, banned)
    width = task.width // groups
    discount, chosen_by_group = None, []
    for group in range(groups):
        group_allowed = allowed if allowed is None or allowed.shape[1] == 1 else _part(allowed, group, groups)
        group_log_probs, group_logits = _part((state.log_probs, logits), group, groups)
        steps, tokens = top_candidates(
            group_logits,
            count=min(width, logits.shape[-1]),  # the W best overall are among the W best of each prefix
            banned=banned,
            allowed=group_allowed,
            discount=discount,
        )
        chosen = _extend(group_log_probs, steps, tokens, discount)
        chosen_by_group.append(chosen._replace(parents=chosen.parents + group * width))
        if group + 1 < groups:
            discount = _discount(discount, chosen, task.options.diversity_strength, logits.shape)
    chosen = _join(*chosen_by_group)
    return chosen._replace(last=original_ids(task, state.lines, chosen.last))


def _extend(log_probs: Array, steps: Array, tokens: Array, discount: Array | None) -> Chosen:
    """Choose the W best continuations of prefixes [B, W] among candidate next tokens [B, W or 1, C]."""
    (batch, width), count = log_probs.shape, tokens.shape[-1]
    tokens = jnp.broadcast_to(tokens, (batch, width, count))
    scores = (log_probs[:, :, None] + steps).reshape(batch, -1)
    scores, chosen = jax.lax.top_k(scores, width)
    last = jnp.take_along_axis(tokens.reshape(batch, -1), chosen, axis=1)
    if discount is not None:  # it affects the choice of tokens, not their scores
        scores = scores + jnp.take_along_axis(discount, last, axis=1)
    return Chosen(scores, last, chosen // count)


def _discount(previous: Array | None, group_chosen: Chosen, strength: float, shape: tuple[int, ...]) -> Array:
    """Return the discount [B, V] for later groups: `strength` for each beam that has chosen the token."""
    rows = jnp.arange(shape[0])[:, None]
    increase = jnp.where(jnp.isneginf(group_chosen.log_probs), 0.0, strength)
    discount = jnp.zeros((shape[0], shape[2]), jnp.float32) if previous is None else previous
    return discount.at[rows, group_chosen.last].add(increase)


def _collect(task: Task, state: State) -> State:
    """Move hypotheses that have just ended from the beam to the pool, into the slots of their group."""
    assert state.finished is not None
    ended, prefix_lengths = state.last == task.symbols.eos_id, state.prefix_lengths[:, None]
    scores = jnp.where(ended, _score(task, state, prefix_lengths), -jnp.inf)
    lengths = jnp.broadcast_to(prefix_lengths, scores.shape)
    offered = SearchResult(state.tokens, scores, state.log_probs, lengths)
    groups = task.options.diversity_groups
    merged = [
        _merge(_part(state.finished, group, groups), _part(offered, group, groups)) for group in range(groups)
    ]
    finished = _join(*merged)
    num_ended = state.num_ended
    if num_ended is not None:
        num_ended = num_ended + (~jnp.isneginf(scores)).sum(axis=1)
    log_probs = jnp.where(ended, -jnp.inf, state.log_probs)
    return state._replace(finished=finished, log_probs=log_probs, num_ended=num_ended)


def _score(task: Task, state: State, lengths: Array) -> Array:
    """Return the scores [B, W] of the prefixes as if they were hypotheses of these lengths."""
    scores = state.log_probs / length_penalty(lengths, task.options)
    if state.coverage is not None:
        scores = scores + coverage_penalty(state.coverage, state.lines.source_mask, task.options)
    return scores


def _join(*trees: Any) -> Any:
    """Concatenate trees of slots or beams along axis 1."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *trees)


def _part(tree: Any, group: int, groups: int) -> Any:
    """Return the slots or beams [B, X / groups, ...] of one group from leaves [B, X, ...]."""

    def take(leaf: Array) -> Array:
        size = leaf.shape[1] // groups
        return leaf[:, group * size : (group + 1) * size]

    return tree if groups == 1 else jax.tree.map(take, tree)


def _merge(pool: SearchResult, offered: SearchResult) -> SearchResult:
    """Return the best hypotheses of both the pool and the offered ones, as many as the pool has slots."""
    both = _join(pool, offered)
    _, chosen = jax.lax.top_k(both.scores, pool.scores.shape[1])
    return jax.tree.map(lambda leaf: take_beams(leaf, chosen), both)


def _freeze(before: State, after: State) -> State:
    """Return `after`, but restore the fields that determine results from `before` for finished sentences."""

    def keep(old: Array, new: Array) -> Array:
        return jnp.where(jnp.expand_dims(before.done, range(1, old.ndim)), old, new)

    names = ("tokens", "log_probs", "finished", "coverage", "met")
    restored = {name: jax.tree.map(keep, getattr(before, name), getattr(after, name)) for name in names}
    return after._replace(**restored)


def _is_done(task: Task, state: State) -> Array:
    """Return for each sentence [B] whether it is finished.

    It is finished at its length limit, or when no live prefix can reach a score that enters the pool. The
    bound on this score considers lengths up to `likely_lengths`, or up to the prefix's next length if that is
    longer. A sentence without a finished hypothesis is searched up to its limit. With inexact stopping, a
    sentence is also finished once patience * width of its hypotheses have ended.
    """
    assert state.finished is not None
    limits, groups = state.lines.max_lengths, task.options.diversity_groups
    likely = limits if state.lines.likely_lengths is None else state.lines.likely_lengths
    exhausted = jnp.ones_like(state.done)
    for group in range(groups):
        live, worst = (
            _part(state.log_probs, group, groups),
            _part(state.finished.scores, group, groups)[:, -1],
        )
        exhausted &= attainable(live, state.prefix_lengths + 1, likely, task.options) <= worst
    if state.num_ended is not None:
        exhausted |= state.num_ended.astype(jnp.float32) >= task.options.patience * task.width
    return exhausted | (state.prefix_lengths >= limits)


def _reorder(cache: Cache, parents: Array, position: Array) -> Cache:
    """Return the cache in which beam w continues beam parents[b, w]; parents are [B, W].

    If the cache has `ancestors`, tokens stay where they are, and only the ancestors' indices are reordered.
    """
    if cache.ancestors is None:
        return cache._replace(per_beam=jax.tree.map(lambda leaf: take_beams(leaf, parents), cache.per_beam))
    return cache._replace(ancestors=take_beams(cache.ancestors, parents).at[:, :, position].set(parents))


def finish_beams(task: Task, state: State) -> SearchResult:
    """Return the n_best hypotheses: finished ones (the pool) before those cut off at the length limit."""
    assert state.finished is not None
    pool = state.finished._replace(tokens=state.in_order(state.finished.tokens))
    state = state._replace(tokens=state.in_order(state.tokens))
    lengths = (state.tokens != task.symbols.pad_id).sum(axis=-1)
    cut_off = SearchResult(state.tokens, _score(task, state, lengths), state.log_probs, lengths)
    if state.met is not None:
        pool = pool._replace(satisfied=jnp.ones(pool.scores.shape, bool))
        cut_off = cut_off._replace(satisfied=state.met.all(axis=-1))
    both = _join(pool, cut_off)
    # Rank: finished, cut off, without all required sequences, nonexistent; within each, by score.
    kind = jnp.broadcast_to(jnp.arange(both.scores.shape[1]) >= pool.scores.shape[1], both.scores.shape)
    kind = kind.astype(jnp.int32)
    kind = kind if both.satisfied is None else jnp.where(both.satisfied, kind, 2)
    kind = jnp.where(jnp.isneginf(both.scores), 3, kind)
    if task.options.diversity_groups > 1:
        kind = jnp.where(_seen_before(both.tokens, kind, both.scores), 3, kind)
        both = both._replace(scores=jnp.where(kind == 3, -jnp.inf, both.scores))
    order = jnp.lexsort((-both.scores, kind), axis=1)[:, : task.n_best]
    best = jax.tree.map(lambda leaf: take_beams(leaf, order), both)
    exists = ~jnp.isneginf(best.scores)
    return best._replace(
        tokens=jnp.where(exists[:, :, None], best.tokens, task.symbols.pad_id),
        log_probs=jnp.where(exists, best.log_probs, -jnp.inf),
        lengths=jnp.where(exists, best.lengths, 0),
        satisfied=None if best.satisfied is None else best.satisfied & exists,
    )


def _seen_before(tokens: Array, kind: Array, scores: Array) -> Array:
    """Return for each hypothesis [B, N] whether it duplicates a higher-ranked one of another group."""
    positions = jnp.arange(kind.shape[1])
    rank = jnp.argsort(jnp.lexsort((jnp.broadcast_to(positions, kind.shape), -scores, kind), axis=1), axis=1)
    same = (tokens[:, :, None] == tokens[:, None, :]).all(axis=-1) & (kind < 3)[:, None, :]
    return (same & (rank[:, :, None] > rank[:, None, :])).any(axis=2)
