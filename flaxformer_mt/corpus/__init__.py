"""Corpora: TFDS sets, the generated toy set and the user's text files, all read as TFDS data sources."""

from flaxformer_mt.corpus.pairs import Pair, Pairs, Part
from flaxformer_mt.corpus.reader import has_split, read_pairs
from flaxformer_mt.corpus.tfds_cache import cache_dir
