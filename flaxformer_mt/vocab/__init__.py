"""Text to ids and back: vocabularies as SentencePiece models, and subword regularization.

`vocabulary` trains, loads and applies the models, `subword_sampling` draws segmentations at random, and
`model_file` reads pieces and settings from the bytes of a model.
"""

from flaxformer_mt.vocab.vocabulary import TextPairs, Vocab, Vocabs, load_vocabs, make_vocabs

__all__ = ["TextPairs", "Vocab", "Vocabs", "load_vocabs", "make_vocabs"]
