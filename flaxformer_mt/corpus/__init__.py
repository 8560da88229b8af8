"""Corpora: sentence pairs from TFDS, the Hugging Face Hub, the user's text files or the generated toy set."""

from flaxformer_mt.corpus.pairs import Pair, Pairs, Part
from flaxformer_mt.corpus.reader import has_split, read_pairs
from flaxformer_mt.corpus.tfds_cache import cache_dir
