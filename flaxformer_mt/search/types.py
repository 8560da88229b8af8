"""Data types shared by the search methods: special tokens, inputs per line, state and result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, UInt

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.checks import search_width
from flaxformer_mt.shapes import Array, Cache

# Maps the last tokens [B, W] and the cache to the float32 logits [B, W, V] of the next tokens and the cache
# extended by one token.
NextLogits = Callable[[Array, Cache], tuple[Array, Cache]]

# Maps the cache after a step to the attention weights [B, W, S] of that step over the source; rows sum to 1.
AttentionOf = Callable[[Cache], Array]

# Padding of the shorter rows of `Lines.prefixes` and `Lines.required`.
NO_TOKEN = -1

# In `Lines.prefixes`, after a prefix: the next token begins a word or is eos.
WORD_START = -2


@dataclass(frozen=True)
class Symbols:
    """Token ids with a special role in the search."""

    pad_id: int
    # Precedes the first token.
    bos_id: int
    # Last token of a finished hypothesis.
    eos_id: int
    # Ids that are never chosen, in addition to pad and bos.
    never: tuple[int, ...] = ()
    # Ids of the subwords that begin a word, for `WORD_START`.
    word_starts: tuple[int, ...] = ()
    # Number of tokens at the start of every prefix that are part of the task, such as a language tag; scores
    # do not include their probability.
    num_free: int = 0

    def __post_init__(self) -> None:
        if self.eos_id == self.pad_id:
            raise ValueError(f"eos_id {self.eos_id} must differ from pad_id {self.pad_id}")
        if self.eos_id in self.never:
            raise ValueError(
                f"eos_id {self.eos_id} is among the ids that are never chosen; remove it from these ids"
            )

    @property
    def banned(self) -> tuple[int, ...]:
        """All ids that are never chosen; probabilities are not renormalized, so scores are the model's."""
        return (*self.reserved, *self.never)

    @property
    def reserved(self) -> tuple[int, ...]:
        """Ids never chosen, even in a prefix: pad, and bos (unless bos is also eos, as in BART)."""
        return (self.pad_id,) if self.bos_id == self.eos_id else (self.pad_id, self.bos_id)


class Lines(NamedTuple):
    """Inputs of a search, as arrays with one row per line; a field that no line of the batch uses is None.

    All lengths include eos. Shorter rows are padded with NO_TOKEN: if the first of two lines must start with
    [5 6] and the second has no prefix, prefixes are [[5 6] [-1 -1]].
    """

    # Maximum length of a hypothesis; 0: the row is empty and is not searched.
    max_lengths: Int[Array, "B"]
    # Length that a translation is not expected to exceed: beam search looks for no better translation beyond
    # it. None: max_lengths.
    likely_lengths: Int[Array, "B"] | None = None
    # Minimum length of a hypothesis.
    min_lengths: Int[Array, "B"] | None = None
    # Forced prefix of every hypothesis; may be followed by WORD_START.
    prefixes: Int[Array, "B P"] | None = None
    # Token sequences that every hypothesis must contain (beam search only).
    required: Int[Array, "B C R"] | None = None
    # Seed of each line's random numbers (for sampling, which requires it).
    seeds: UInt[Array, "B"] | None = None
    # Which source positions are tokens (coverage penalty only).
    source_mask: Bool[Array, "B S"] | None = None
    # The tokens of each line's shortlist that are not in `Shortlists.common`: ids plus 1; 0: padding.
    shortlist: Int[Array, "B C"] | None = None


class Shortlists(NamedTuple):
    """The shortlist tokens that all lines share; they precede each line's own tokens in the logits.

    A line's list contains no token twice and no banned token.
    """

    # Ids of tokens that all lines may use, eos first.
    common: np.ndarray
    # V: number of entries of the vocabulary.
    size: int


class SearchResult(NamedTuple):
    """The N best hypotheses of each sentence, best first.

    `tokens` contain no bos, end in eos if the hypothesis is finished, and are followed by padding; `lengths`
    include eos. `log_probs` are sums over tokens; `scores` are log_probs divided by the length penalty, plus
    the coverage penalty (at most 0). A missing hypothesis (the search space is smaller than N, or logits are
    NaN) has length 0, and its score and log-probability are -inf. With required sequences, `satisfied` is
    whether the hypothesis contains all of them.
    """

    tokens: Int[Array, "B N T"]
    scores: Float[Array, "B N"]
    log_probs: Float[Array, "B N"]
    lengths: Int[Array, "B N"]
    satisfied: Bool[Array, "B N"] | None = None


@dataclass(frozen=True)
class Task:
    """Parameters of a search that are constant over its steps and known at compile time."""

    next_logits: NextLogits
    options: SearchConfig
    symbols: Symbols
    # Upper bound of Lines.max_lengths; T of the result.
    max_length: int
    # Number of hypotheses to return per line.
    n_best: int = 1
    # Returns the attention weights that the coverage penalty needs.
    attention_of: AttentionOf | None = None
    # Set if logits [B, W, N + C] are for the lines' shortlists, -inf for padding; None: for the vocabulary.
    shortlists: Shortlists | None = None

    @property
    def width(self) -> int:
        """W: the number of hypotheses extended in parallel per line; the cache has as many beams per line."""
        return search_width(self.options, self.n_best)


class State(NamedTuple):
    """State of a search between two steps: a pytree of leaves [B, ...] or scalars (see `take_rows`)."""

    step: Int[Array, ""]
    # Live prefixes: last token, all tokens (see `in_order`) and log-probability; -inf: unused beam.
    last: Int[Array, "B W"]
    tokens: Int[Array, "B W T"]
    log_probs: Float[Array, "B W"]
    cache: Cache
    lines: Lines
    # Sentences whose search is complete.
    done: Bool[Array, "B"]
    # Greedy search and sampling: length of each path that has ended; 0: the path still grows.
    lengths: Int[Array, "B W"] | None = None
    # Beam search: the pool of finished hypotheses, best first within each group of beams.
    finished: SearchResult | None = None
    # Inexact stopping: number of hypotheses that have ended.
    num_ended: Int[Array, "B"] | None = None
    # Coverage penalty: attention that each source position has received so far.
    coverage: Float[Array, "B W S"] | None = None
    # Required sequences: which are met, and which beginnings of each the prefix ends in (see `follow`).
    met: Bool[Array, "B W C"] | None = None
    matched: Bool[Array, "B W C R"] | None = None

    @property
    def prefix_lengths(self) -> Array:
        """Length [B] of each line's live prefixes: `step` minus the line's first step."""
        start_steps = self.cache.start_steps
        return self.step - (jnp.zeros_like(self.done, jnp.int32) if start_steps is None else start_steps)

    @property
    def place(self) -> Array:
        """Index in `tokens` at which the next token is written."""
        return self.step % self.tokens.shape[2]

    def in_order(self, tokens: Array) -> Array:
        """Return tokens [B, X, T] in the order in which they were generated.

        With T = 4, a line that began at step 3 has its tokens at positions 3, 0, 1, 2.
        """
        start_steps = self.cache.start_steps
        if start_steps is None:
            return tokens
        length = tokens.shape[2]
        places = (start_steps[:, None] + jnp.arange(length)) % length
        return jnp.take_along_axis(tokens, places[:, None], axis=2)


def empty_prefixes(task: Task, cache: Cache, lines: Lines, log_probs: Array) -> State:
    """Return the state before the first token, with the log-probabilities [B, W] of the empty prefixes."""
    shape = log_probs.shape
    return State(
        step=jnp.zeros((), jnp.int32),
        last=jnp.full(shape, task.symbols.bos_id, jnp.int32),
        tokens=jnp.full((*shape, task.max_length), task.symbols.pad_id, jnp.int32),
        log_probs=log_probs.astype(jnp.float32),
        cache=cache,
        lines=lines,
        done=lines.max_lengths == 0,
    )


def take_rows(state: State, rows: Array) -> State:
    """Return the state of the sentences `rows` [N]: rows [2 0] give the third sentence, then the first."""
    return jax.tree.map(lambda leaf: leaf[rows] if leaf.ndim else leaf, state)


def take_beams(leaf: Array, beams: Array) -> Array:
    """Return the entries `beams` [B, Y] of a leaf [B, X, ...], as an array [B, Y, ...]."""
    rows = jnp.arange(leaf.shape[0])[:, None]
    return leaf.at[rows, beams].get(mode="promise_in_bounds")
