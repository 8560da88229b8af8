"""What a search is asked and what it gives: symbols, what is known of lines, the state, the result.

Owns the names and shapes that the methods share. Knows nothing of how any of them works, of text, of models.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, UInt

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.shapes import Array, Cache

# From the last tokens [B, W] and the cache: float32 logits [B, W, V] of the next ones, and the cache grown
# by one.
NextLogits = Callable[[Array, Cache], tuple[Array, Cache]]

# From the cache after a step: the weights [B, W, S] with which that step looked at the source; rows sum to 1.
AttentionOf = Callable[[Cache], Array]

# What fills up the shorter rows of `Lines.prefixes` and `Lines.required`.
NO_TOKEN = -1


@dataclass(frozen=True)
class Symbols:
    """Ids with a meaning to the search."""

    pad_id: int
    # Before the first token.
    bos_id: int
    # After the last one.
    eos_id: int
    # Ids that are never chosen, beside pad and bos.
    never: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.eos_id in (self.pad_id, self.bos_id):
            raise ValueError(
                f"eos_id {self.eos_id} must differ from pad_id {self.pad_id} and bos_id {self.bos_id}"
            )
        if self.eos_id in self.never:
            raise ValueError(
                f"eos_id {self.eos_id} is among the ids that are never chosen; nothing would end"
            )

    @property
    def banned(self) -> tuple[int, ...]:
        """All ids that are never chosen; their probability stays, so that scores are those of the model."""
        return (self.pad_id, self.bos_id, *self.never)


class Lines(NamedTuple):
    """What is known of each line, one row a line; None is what no line of the batch asks for.

    All lengths count the end symbol. Rows of different lengths are filled up with NO_TOKEN: two lines, one
    that must start with [5 6], have prefixes [[5 6] [-1 -1]].
    """

    # The longest hypothesis; 0: the row is not searched at all.
    max_lengths: Int[Array, "B"]
    # The shortest one.
    min_lengths: Int[Array, "B"] | None = None
    # Tokens that every hypothesis starts with.
    prefixes: Int[Array, "B P"] | None = None
    # Sequences of tokens that every hypothesis contains (beam search only).
    required: Int[Array, "B C R"] | None = None
    # One random number stream a line (sampling only, which cannot do without).
    seeds: UInt[Array, "B"] | None = None
    # Which source positions are tokens (coverage penalty only).
    source_mask: Bool[Array, "B S"] | None = None


class SearchResult(NamedTuple):
    """The N best hypotheses of each sentence, best first.

    `tokens` have no bos, end in eos where the hypothesis is finished, and are pad after that; `lengths`
    count them with their eos. `log_probs` are plain sums, `scores` those divided by the length penalty, less
    the coverage penalty. A hypothesis that does not exist (a search space smaller than N, logits that are not
    numbers) has length 0 and -inf twice. `satisfied`, where sequences were required: it contains them all.
    """

    tokens: Int[Array, "B N T"]
    scores: Float[Array, "B N"]
    log_probs: Float[Array, "B N"]
    lengths: Int[Array, "B N"]
    satisfied: Bool[Array, "B N"] | None = None


@dataclass(frozen=True)
class Task:
    """What stays the same from step to step, and is known when the search is compiled."""

    next_logits: NextLogits
    options: SearchConfig
    symbols: Symbols
    # Bounds all of Lines.max_lengths; the result's T.
    max_length: int
    # How many hypotheses of a line are wanted.
    n_best: int = 1
    # Where the coverage penalty finds the attention weights.
    attention_of: AttentionOf | None = None

    @property
    def width(self) -> int:
        """W: how many hypotheses of a line grow at a time, which the cache must have beams for."""
        return search_width(self.options, self.n_best)


def search_width(options: SearchConfig, n_best: int) -> int:
    """How many hypotheses of a line a search follows: one, as many as the beam is wide, or all samples."""
    return {"greedy": 1, "beam": options.beam_size, "sample": n_best}[options.method]


class State(NamedTuple):
    """A search between two steps: a pytree whose leaves are [B, ...] or scalars (see `take_rows`)."""

    step: Int[Array, ""]
    # Live prefixes: the last token, all (see `in_order`), and their log-probability; -inf leads nowhere.
    last: Int[Array, "B W"]
    tokens: Int[Array, "B W T"]
    log_probs: Float[Array, "B W"]
    cache: Cache
    lines: Lines
    # Sentences that are searched to their end.
    done: Bool[Array, "B"]
    # Greedy search and sampling: how long each path is; 0 while it grows.
    lengths: Int[Array, "B W"] | None = None
    # Beam search: the best hypotheses that have ended, best first within each group of beams.
    finished: SearchResult | None = None
    # Inexact stopping: how many hypotheses have ended.
    num_ended: Int[Array, "B"] | None = None
    # Coverage penalty: the attention that each source position had so far.
    coverage: Float[Array, "B W S"] | None = None
    # Required sequences: which occur, and which beginnings of each the prefix ends in (see `required`).
    met: Bool[Array, "B W C"] | None = None
    matched: Bool[Array, "B W C R"] | None = None

    @property
    def ages(self) -> Array:
        """How many tokens the prefixes of each line have, [B]: `step` of them, less those before it began."""
        begun = self.cache.begun
        return self.step - (jnp.zeros_like(self.done, jnp.int32) if begun is None else begun)

    @property
    def place(self) -> Array:
        """Where in `tokens` the next one goes."""
        return self.step % self.tokens.shape[2]

    def in_order(self, tokens: Array) -> Array:
        """Tokens [B, X, T], each line's from its first one on.

        With T = 4, a line that began at step 3 has its tokens in places 3, 0, 1, 2.
        """
        begun = self.cache.begun
        if begun is None:
            return tokens
        length = tokens.shape[2]
        places = (begun[:, None] + jnp.arange(length)) % length
        return jnp.take_along_axis(tokens, places[:, None], axis=2)


def take_rows(state: State, rows: Array) -> State:
    """The same search for the sentences that `rows` [N] name, in that order: what is done may be left out.

    Rows [2 0] of a state of three sentences: the third, then the first.
    """
    return jax.tree.map(lambda leaf: leaf[rows] if leaf.ndim else leaf, state)


def take_beams(leaf: Array, beams: Array) -> Array:
    """From a leaf [B, X, ...] the entries that `beams` [B, Y] name: [B, Y, ...]."""
    rows = jnp.arange(leaf.shape[0])[:, None]
    return leaf.at[rows, beams].get(mode="promise_in_bounds")
