"""Constraints on the next token of each line: forced prefix, minimum length, no repeated n-gram.

A constraint that no line uses is left out of the compiled program.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from flaxformer_mt.search.types import NO_TOKEN, WORD_START, Lines, State, Task
from flaxformer_mt.shapes import Array


def allowed_tokens(task: Task, state: State, size: int) -> Array | None:
    """Return a mask [B, W, V] or [B, 1, V] of the tokens that may come next; None: no line has a constraint.

    A forced prefix takes precedence over all other constraints. With required sequences, eos is excluded
    until all sequences are met.
    """
    lines, eos = state.lines, jnp.arange(size) == task.symbols.eos_id
    masks: list[Array] = []
    if lines.min_lengths is not None:
        long_enough = state.prefix_lengths + 1 >= lines.min_lengths
        masks.append(long_enough[:, None, None] | ~eos)
    if state.met is not None:
        masks.append(jnp.all(state.met, axis=-1)[:, :, None] | ~eos)
    if n := find_unrepeated(task):
        masks.append(~repeating_tokens(state.in_order(state.tokens), state.prefix_lengths, n=n, size=size))
    allowed: Array | None = None
    for mask in masks:
        allowed = mask if allowed is None else allowed & mask
    if lines.prefixes is not None:
        forced = forced_tokens(lines.prefixes, state.prefix_lengths)[:, None, None]
        not_suppressed = ~np.isin(np.arange(size), task.symbols.never)
        unforced = not_suppressed if allowed is None else allowed & not_suppressed
        begins_word = np.isin(np.arange(size), (*task.symbols.word_starts, task.symbols.eos_id))
        unforced = jnp.where(forced == WORD_START, unforced & begins_word, unforced)
        allowed = jnp.where(forced >= 0, jnp.arange(size) == forced, unforced)
    return allowed


def needs_mask(task: Task, state: State) -> bool:
    """Return whether a line has a constraint that needs a mask of the whole vocabulary."""
    lines = state.lines
    constrained = lines.prefixes is not None or lines.min_lengths is not None or state.met is not None
    return constrained or find_unrepeated(task) > 0


def find_unrepeated(task: Task) -> int:
    """Return the length n of the n-grams that no hypothesis may repeat; 0: repetition is allowed."""
    n = task.options.no_repeat_ngram
    return n if n <= task.max_length else 0


def banned_tokens(task: Task, state: State) -> tuple[int, ...]:
    """Return the ids that are banned for all beams.

    A prefix may force a suppressed token; with prefixes, `allowed_tokens` therefore excludes suppressed
    tokens instead. Shortlists contain no banned tokens, so nothing is banned with them.
    """
    symbols = task.symbols
    if task.shortlists is not None:
        return ()
    return symbols.banned if state.lines.prefixes is None else symbols.reserved


def forced_tokens(prefixes: Array, steps: Array) -> Array:
    """Return the token [B] at position `steps` [B] of each prefix [B, P]; NO_TOKEN after the prefix's end."""
    positions = jnp.minimum(steps, prefixes.shape[1] - 1)
    tokens = jnp.take_along_axis(prefixes, positions[:, None], axis=1)[:, 0]
    return jnp.where(steps < prefixes.shape[1], tokens, NO_TOKEN)


def repeating_tokens(tokens: Array, steps: Array, *, n: int, size: int) -> Array:
    """Return a mask [B, W, V] of tokens that would repeat an n-gram of the prefix [B, W, T].

    `steps` [B]: number of tokens in each line's prefixes. For n = 2, the prefix [5 6 7 5] excludes 6.
    """
    batch, width, length = tokens.shape
    starts = jnp.arange(length - n + 1)
    same = jnp.broadcast_to(starts + n - 1 < steps[:, None, None], (batch, width, starts.size))
    for offset in range(n - 1):
        position = jnp.maximum(steps - n + 1 + offset, 0)[:, None, None]
        suffix = jnp.take_along_axis(tokens, position, axis=2)
        same = same & (tokens[:, :, offset : offset + starts.size] == suffix)
    rows, beams = jnp.arange(batch)[:, None, None], jnp.arange(width)[None, :, None]
    return jnp.zeros((batch, width, size), bool).at[rows, beams, tokens[:, :, n - 1 :]].max(same)


def expand_to_vocabulary(task: Task, lines: Lines, logits: Array) -> tuple[Task, Array]:
    """Return the task without shortlists, and the logits [B, W, N + C] expanded to [B, W, V] with -inf."""
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
    """Convert tokens [B, W], which are indices into the logits, to ids of the vocabulary."""
    if task.shortlists is None:
        return tokens
    assert lines.shortlist is not None
    common = jnp.asarray(task.shortlists.common, jnp.int32)
    own = jnp.maximum(tokens - len(common), 0)
    own = jnp.take_along_axis(lines.shortlist, own, axis=1) - 1
    return jnp.where(tokens < len(common), common[jnp.minimum(tokens, len(common) - 1)], own)
