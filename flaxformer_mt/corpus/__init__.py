"""Text in: named, generated or the user's own sentence pairs, all read through TFDS data sources."""

from flaxformer_mt.corpus.pairs import Pair, Pairs, Part
from flaxformer_mt.corpus.prepared import cache_dir
from flaxformer_mt.corpus.reader import has_split, read_pairs

__all__ = ["Pair", "Pairs", "Part", "cache_dir", "has_split", "read_pairs"]
