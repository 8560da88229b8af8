"""Tokenizes and detokenizes text with SentencePiece models or tokenizers of pretrained models."""

from flaxformer_mt.vocab.pretrained_vocab import PretrainedMetadata, PretrainedVocab
from flaxformer_mt.vocab.run_vocabs import Vocabs, load_vocabs, make_vocabs
from flaxformer_mt.vocab.sentencepiece_vocab import TextPairs, Vocab
