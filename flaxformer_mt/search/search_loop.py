"""The search loop: one compiled loop for all search methods."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.checks import check_n_best, check_search
from flaxformer_mt.search.beam import advance_beams, finish_beams, start_beams
from flaxformer_mt.search.sampling import advance_paths, finish_paths, start_paths
from flaxformer_mt.search.types import AttentionOf, Lines, NextLogits, SearchResult, State, Symbols, Task
from flaxformer_mt.shapes import Cache


@dataclass(frozen=True)
class Search(Task):
    """A search: call `start`, then `step` until all sentences are done, then `finish`.

    Raises UserError if the options are invalid, or n_best exceeds the number of hypotheses.
    """

    def __post_init__(self) -> None:
        check_search(self.options, where="")
        check_n_best(self.options, self.n_best)

    def start(self, cache: Cache, lines: Lines, *, clip: bool = True) -> State:
        """Return the state before the first token; the cache must have `width` beams per line.

        With clip=False, lines may have larger max_lengths, and the caller must stop the search at max_length.
        """
        lines = jax.tree.map(jnp.asarray, lines)
        if clip:
            lines = lines._replace(max_lengths=jnp.clip(lines.max_lengths, 0, self.max_length))
        if lines.min_lengths is not None:  # a hypothesis may always end at its limit
            lines = lines._replace(min_lengths=jnp.minimum(lines.min_lengths, lines.max_lengths))
        return (start_beams if self.options.method == "beam" else start_paths)(self, cache, lines)

    def step(self, state: State) -> State:
        """Extend every unfinished sentence by one token."""
        return (advance_beams if self.options.method == "beam" else advance_paths)(self, state)

    def finish(self, state: State) -> SearchResult:
        """Return the best hypotheses of a state; they are final if every sentence is done."""
        return (finish_beams if self.options.method == "beam" else finish_paths)(self, state)


def search(
    next_logits: NextLogits,
    cache: Cache,
    lines: Lines,
    *,
    options: SearchConfig,
    symbols: Symbols,
    max_length: int,
    n_best: int = 1,
    attention_of: AttentionOf | None = None,
) -> SearchResult:
    """Return the n_best hypotheses of each line by greedy search, beam search or sampling.

    Call it under `jax.jit`, so that it is compiled together with the model. Options for other parts of
    decoding (max_length_*, min_length_*, suppress, seed, batch_tokens) have no effect here: the caller
    converts them to lines and symbols. `attention_of` is needed for a coverage penalty. `max_length` is an
    upper bound of lines.max_lengths, and T of the result. How the cache is reordered is explained in
    `shapes.Cache`.

    Raises UserError if the options are invalid, or n_best exceeds beam_size or the number of samples.
    """
    task = Search(next_logits, options, symbols, max_length, n_best, attention_of)
    state = jax.lax.while_loop(lambda state: ~jnp.all(state.done), task.step, task.start(cache, lines))
    return task.finish(state)
