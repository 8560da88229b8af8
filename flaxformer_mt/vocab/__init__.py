"""Text to ids and back: vocabularies as SentencePiece models, those of pretrained models, and sampling.

`vocabulary` trains, loads and applies a model, `pretrained` applies the tokenizers of pretrained models,
`vocabs` has both sides of a run, `subword_sampling` draws segmentations at random, and `model_file` reads
pieces and settings from the bytes of a model.
"""

from flaxformer_mt.vocab.pretrained import PretrainedFacts, PretrainedVocab
from flaxformer_mt.vocab.vocabs import Vocabs, load_vocabs, make_vocabs
from flaxformer_mt.vocab.vocabulary import TextPairs, Vocab

__all__ = [
    "PretrainedFacts",
    "PretrainedVocab",
    "TextPairs",
    "Vocab",
    "Vocabs",
    "load_vocabs",
    "make_vocabs",
]
