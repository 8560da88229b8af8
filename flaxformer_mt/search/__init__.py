"""The search for a good translation: ids in, ids out, over a callable that gives the next logits.

Knows neither text nor models: `next_logits(tokens, cache) -> (logits, cache)` is all it sees of a network.
"""

from flaxformer_mt.search.beam import beam_search
from flaxformer_mt.search.candidates import NextLogits, SearchResult
from flaxformer_mt.search.greedy import greedy_search

__all__ = ["NextLogits", "SearchResult", "beam_search", "greedy_search"]
