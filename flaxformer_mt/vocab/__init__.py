"""Text to ids and back: SentencePiece models, the tokenizers of pretrained models, and sampling."""

from flaxformer_mt.vocab.pretrained import PretrainedMetadata, PretrainedVocab
from flaxformer_mt.vocab.vocabs import Vocabs, load_vocabs, make_vocabs
from flaxformer_mt.vocab.vocabulary import TextPairs, Vocab
