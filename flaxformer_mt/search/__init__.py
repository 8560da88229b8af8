"""The search for a good translation: ids in, ids out, over a callable that gives the next logits.

Knows neither text nor models: `next_logits(tokens, cache) -> (logits, cache)` is all it sees of a network.
"""

from flaxformer_mt.search.ensemble import ensemble, ensemble_caches
from flaxformer_mt.search.loop import Search, search
from flaxformer_mt.search.queue import OUTGROWN, search_queue
from flaxformer_mt.search.task import (
    NO_TOKEN,
    Lines,
    NextLogits,
    SearchResult,
    State,
    Symbols,
    search_width,
    take_rows,
)

__all__ = [
    "NO_TOKEN",
    "OUTGROWN",
    "Lines",
    "NextLogits",
    "Search",
    "SearchResult",
    "State",
    "Symbols",
    "ensemble",
    "ensemble_caches",
    "search",
    "search_queue",
    "search_width",
    "take_rows",
]
