"""Search for translations: greedy search, beam search, sampling and continuous batching.

A search handles token ids and a callable `next_logits(tokens, cache) -> (logits, cache)`. This package
imports neither models nor vocabularies (tests enforce this). Axis letters such as B and W are defined in
shapes.py.
"""

from flaxformer_mt.config.checks import search_width
from flaxformer_mt.search.continuous_batching import (
    NO_LINE,
    OVER_CAPACITY,
    UNLIMITED,
    Leaf,
    QueueResult,
    Size,
    StateLayout,
    align_prefixes,
    begin_lines,
    begin_prefixed_lines,
    empty_rows,
    find_layout,
    pack,
    search_queue,
    take_first_step,
)
from flaxformer_mt.search.ensemble import average_logits, ensemble, ensemble_caches
from flaxformer_mt.search.search_loop import Search, search
from flaxformer_mt.search.types import (
    NO_TOKEN,
    WORD_START,
    Lines,
    NextLogits,
    SearchResult,
    Shortlists,
    State,
    Symbols,
)
