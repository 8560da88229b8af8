"""The search itself: one compiled loop for every method, run to its end or a few steps at a time.

Row 12 of the data path. Owns the choice of the method. Knows neither text nor models.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.checks import check_search
from flaxformer_mt.errors import UserError
from flaxformer_mt.search.beam import advance_beams, finish_beams, start_beams
from flaxformer_mt.search.greedy_and_sampling import advance_paths, finish_paths, start_paths
from flaxformer_mt.search.types import (
    AttentionOf,
    Lines,
    NextLogits,
    SearchResult,
    State,
    Symbols,
    Task,
    search_width,
)
from flaxformer_mt.shapes import Array, Cache


@dataclass(frozen=True)
class Search(Task):
    """A search that can be run in segments: `start`, then `run` as often as it takes, then `finish`.

    Between segments the state may be cut down to the sentences that are not done (`take_rows`), and leaves of
    its cache may be given more room. All three may be traced or called as they are.

    Raises:
      UserError: options that cannot be, or n_best hypotheses of a search that keeps fewer.
    """

    def __post_init__(self) -> None:
        check_search(self.options, where="")
        width = search_width(self.options, self.n_best)
        if not 1 <= self.n_best <= width:
            raise UserError(
                f"n_best is {self.n_best}, but {self.options.method} search keeps {width} hypotheses; ask "
                f"for 1 to {width}, or use beam search with beam_size {max(self.n_best, 1)}"
            )

    def start(self, cache: Cache, lines: Lines, *, clip: bool = True) -> State:
        """The state before the first token; the cache has `width` beams a line.

        Without `clip`, lines may have max_lengths above the search's own, and whoever runs it stops in time.
        """
        lines = jax.tree.map(jnp.asarray, lines)
        if clip:
            lines = lines._replace(max_lengths=jnp.clip(lines.max_lengths, 0, self.max_length))
        if lines.min_lengths is not None:  # at the limit a hypothesis may end
            lines = lines._replace(min_lengths=jnp.minimum(lines.min_lengths, lines.max_lengths))
        return (start_beams if self.options.method == "beam" else start_paths)(self, cache, lines)

    def step(self, state: State) -> State:
        """One more token of every sentence that is not done."""
        return (advance_beams if self.options.method == "beam" else advance_paths)(self, state)

    def run(self, state: State, *, steps: int | None = None) -> State:
        """Goes on until every sentence is done, or for so many steps at most."""
        end = None if steps is None else state.step + steps

        def goes_on(state: State) -> Array:
            waiting = ~jnp.all(state.done)
            return waiting if end is None else waiting & (state.step < end)

        return jax.lax.while_loop(goes_on, self.step, state)

    def finish(self, state: State) -> SearchResult:
        """The best hypotheses of a state: the final ones if every sentence is done, else the best so far."""
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
    """The n_best hypotheses of each line, by greedy search, beam search or sampling; jit it with the model.

    The options' fields that are not about how hypotheses are found (max_length_*, min_length_*, suppress,
    allow_unknown, seed, batch_tokens, ensemble_mean) are whoever calls to turn into lines, symbols and
    next_logits.

    Args:
      next_logits: gives the logits [B, W, V] after the last tokens [B, W], and the cache grown by one.
      cache: before the first token. `per_beam` leaves [B, W, ...] are reordered with their hypotheses; with
        `ancestors` they stay where they are and only those move (see `shapes.Cache`).
      lines: lengths, prefixes and so on, a row a line.
      max_length: bounds `lines.max_lengths`; the result's T.
      n_best: at most beam_size; sampling: how many samples.
      attention_of: where a coverage penalty finds the attention over the source.

    Raises:
      UserError: options that cannot be.
    """
    task = Search(next_logits, options, symbols, max_length, n_best, attention_of)
    return task.finish(task.run(task.start(cache, lines)))
