"""Beam search with exact early stopping.

Row 12 of the data path. Knows neither text nor models: it sees `next_logits`, and reorders the cache it is
given.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from flaxformer_mt.search.candidates import NextLogits, SearchResult, penalty_of, top_candidates
from flaxformer_mt.shapes import Array, Cache, typed


class _Beams(NamedTuple):
    """The live prefixes, all of one length; -inf is a beam that leads nowhere."""

    tokens: Array  # [B, W, T]
    log_probs: Array  # [B, W]


class _State(NamedTuple):
    step: Array  # []
    last: Array  # [B, W]
    beams: _Beams
    finished: SearchResult  # the best so far, best first
    done: Array  # [B]
    cache: Cache


class _Task(NamedTuple):
    """What stays the same from step to step."""

    next_logits: NextLogits
    limits: Array  # [B]
    alpha: float
    bos_id: int
    eos_id: int
    pad_id: int


@typed
def beam_search(
    next_logits: NextLogits,
    cache: Cache,
    *,
    batch_size: int,
    beam_size: int,
    length_penalty: float,
    max_lengths: Int[Array, "B"],
    max_length: int,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    n_best: int = 1,
) -> SearchResult:
    """Finds the n_best hypotheses with the highest log-probability over length penalty.

    Every step keeps the beam_size best continuations of all live prefixes. Those that end in eos leave the
    beam for the pool of finished hypotheses, so width 1 is greedy search. A sentence is done once no live
    prefix can enter its n_best even if all its further tokens were certain, or when its limit is reached.
    Prefixes that the limit cuts off only fill places that finished hypotheses leave empty.

    With eos 2, width 2, no penalty and log-probabilities [5] -0.5, [2] -1.2 at the first step, [5 6] -0.9,
    [5 2] -1.1 at the second: the pool holds [2], then [5 2]; and [5 6 ...] may still beat it.

    `max_lengths` bound each sentence, counting eos (0: a row that is not searched); `max_length` bounds
    them all and is the result's T. Only the cache's per_beam leaves [B, W, ...] are reordered.

    Raises:
      ValueError: eos is pad or bos, or n_best is not from 1 to beam_size.
    """
    if eos_id in (pad_id, bos_id):
        raise ValueError(f"eos_id {eos_id} must differ from pad_id {pad_id} and bos_id {bos_id}")
    if not 1 <= n_best <= beam_size:
        raise ValueError(f"n_best is {n_best}; it must be from 1 to beam_size {beam_size}")
    limits = jnp.clip(jnp.asarray(max_lengths), 0, max_length)
    task = _Task(next_logits, limits, length_penalty, bos_id, eos_id, pad_id)
    state = _start(task, cache, shape=(batch_size, beam_size, max_length), n_best=n_best)
    state = jax.lax.while_loop(lambda state: ~jnp.all(state.done), partial(_advance, task), state)
    return _result(task, state)


def _start(task: _Task, cache: Cache, *, shape: tuple[int, int, int], n_best: int) -> _State:
    batch_size, beam_size, max_length = shape
    nothing = jnp.full((batch_size, n_best), -jnp.inf, jnp.float32)
    return _State(
        step=jnp.zeros((), jnp.int32),
        last=jnp.full((batch_size, beam_size), task.bos_id, jnp.int32),
        beams=_Beams(
            tokens=jnp.full(shape, task.pad_id, jnp.int32),
            # One empty prefix: were more beams alive at the start, they would stay copies of each other.
            log_probs=jnp.full((batch_size, beam_size), -jnp.inf, jnp.float32).at[:, 0].set(0.0),
        ),
        finished=SearchResult(
            tokens=jnp.full((batch_size, n_best, max_length), task.pad_id, jnp.int32),
            scores=nothing,
            log_probs=nothing,
            lengths=jnp.zeros((batch_size, n_best), jnp.int32),
        ),
        done=task.limits == 0,
        cache=cache,
    )


def _advance(task: _Task, state: _State) -> _State:
    """One more token on every live prefix of every sentence."""
    logits, cache = task.next_logits(state.last, state.cache)
    grown, last, parents = _extend(state.beams, logits, state.step, banned=(task.pad_id, task.bos_id))
    length = state.step + 1
    ended = last == task.eos_id
    scores = jnp.where(ended, grown.log_probs / penalty_of(length, task.alpha), -jnp.inf)
    finished = _merge(state.finished, grown, scores, length)
    beams = grown._replace(log_probs=jnp.where(ended, -jnp.inf, grown.log_probs))
    # A sentence that is done stays as it is, whatever the rest of the batch still needs.
    beams, finished = jax.tree.map(
        lambda old, new: jnp.where(jnp.expand_dims(state.done, range(1, old.ndim)), old, new),
        (state.beams, state.finished),
        (beams, finished),
    )
    hopeless = _attainable(task, beams.log_probs, length) <= finished.scores[:, -1]
    return _State(
        step=length,
        last=last,
        beams=beams,
        finished=finished,
        done=state.done | hopeless | (length >= task.limits),
        cache=cache._replace(per_beam=jax.tree.map(lambda leaf: _take(leaf, parents), cache.per_beam)),
    )


def _take(leaf: Array, rows: Array) -> Array:
    """From a leaf [B, X, ...] the entries that `rows` [B, Y] name: [B, Y, ...]."""
    return leaf.at[jnp.arange(leaf.shape[0])[:, None], rows].get(mode="promise_in_bounds")


def _extend(
    beams: _Beams, logits: Array, step: Array, *, banned: tuple[int, ...]
) -> tuple[_Beams, Array, Array]:
    """The W best one-token continuations of a sentence's prefixes, their last tokens, and their parents."""
    batch_size, beam_size = beams.log_probs.shape
    count = min(beam_size, logits.shape[-1])  # the W best of all are among the W best of each
    log_probs, tokens = top_candidates(logits, count=count, banned=banned)
    log_probs = (beams.log_probs[:, :, None] + log_probs).reshape(batch_size, -1)
    log_probs, chosen = jax.lax.top_k(log_probs, beam_size)
    last = jnp.take_along_axis(tokens.reshape(batch_size, -1), chosen, axis=1)
    parents = chosen // count
    return _Beams(_take(beams.tokens, parents).at[:, :, step].set(last), log_probs), last, parents


def _merge(pool: SearchResult, beams: _Beams, scores: Array, length: Array) -> SearchResult:
    """The pool with those beams that score [B, W] better than what it holds (-inf: not offered)."""
    offered = SearchResult(beams.tokens, scores, beams.log_probs, jnp.broadcast_to(length, scores.shape))
    both = jax.tree.map(lambda held, new: jnp.concatenate([held, new], axis=1), pool, offered)
    _, chosen = jax.lax.top_k(both.scores, pool.scores.shape[1])
    return jax.tree.map(lambda leaf: _take(leaf, chosen), both)


def _attainable(task: _Task, log_probs: Array, length: Array) -> Array:
    """The best score [B] that any live prefix of log-probability [B, W] could still reach.

    Log-probabilities only fall, so at best they stay. The penalty is monotone in the length, so the best
    score lies at the next length or at the last one, whichever sign alpha has.
    """
    best = log_probs.max(axis=1)
    return jnp.maximum(best / penalty_of(length + 1, task.alpha), best / penalty_of(task.limits, task.alpha))


def _result(task: _Task, state: _State) -> SearchResult:
    """The pool, its empty places filled with the best prefixes that the limit cut off."""
    prefixes, pool = state.beams, state.finished
    limits = jnp.broadcast_to(task.limits[:, None], prefixes.log_probs.shape)
    scores = prefixes.log_probs / penalty_of(limits, task.alpha)
    cut_off = SearchResult(prefixes.tokens, scores, prefixes.log_probs, limits)
    both = jax.tree.map(lambda held, new: jnp.concatenate([held, new], axis=1), pool, cut_off)
    n_best, num_both = pool.scores.shape[1], both.scores.shape[1]
    # Finished before cut off before nothing; within each the higher score first.
    kind = jnp.where(jnp.isneginf(both.scores), 2, (jnp.arange(num_both) >= n_best).astype(jnp.int32))
    order = jnp.lexsort((-both.scores, kind), axis=1)[:, :n_best]
    best = jax.tree.map(lambda leaf: _take(leaf, order), both)
    exists = ~jnp.isneginf(best.scores)
    return SearchResult(
        tokens=jnp.where(exists[:, :, None], best.tokens, task.pad_id),
        scores=best.scores,
        log_probs=jnp.where(exists, best.log_probs, -jnp.inf),
        lengths=jnp.where(exists, best.lengths, 0),
    )
