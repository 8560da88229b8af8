"""The fields of a config that make its vocabularies.

Contains no rules that relate them to other fields, which are in `checks`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from flaxformer_mt.config.bounds import at_least, between

Normalization = Literal["identity", "nfkc", "nmt_nfkc", "nmt_nfkc_cf"]


@dataclass(frozen=True)
class VocabConfig:
    """SentencePiece vocabularies, trained on the training split unless model files are given."""

    # Type of the SentencePiece model: byte-pair encoding, unigram language model, characters or words; or
    # pretrained: the tokenizer of an imported model, as import sets it.
    kind: Literal["bpe", "unigram", "char", "word", "pretrained"] = "bpe"
    # Number of pieces, special symbols and byte pieces included; with joint=False of each vocabulary. 0: all
    # words (kind=word) or characters (kind=char) of the training text.
    size: Annotated[int, at_least(0)] = 8000
    # With joint=False, number of pieces of the source vocabulary; 0 as in size. None: the value of size.
    source_size: Annotated[int | None, at_least(0)] = None
    # True: one vocabulary shared by both languages. False: one vocabulary for each.
    joint: bool = True
    # Existing SentencePiece .model file for the source language (joint: for both). Empty: train one.
    source_model: str = ""
    # Existing SentencePiece .model file for the target language. Empty: with joint=True that of source_model,
    # else train one.
    target_model: str = ""
    # Whether to encode characters outside the vocabulary as UTF-8 bytes (256 pieces) instead of unknown.
    byte_fallback: bool = True
    # Fraction of the characters in the training text that get a piece: 1, or about 0.9995 for scripts of
    # thousands of characters, such as Chinese.
    character_coverage: Annotated[float, between(0.98, 1)] = 1.0
    # SentencePiece's Unicode normalization of sources, which also removes characters that nobody sees (soft
    # hyphens, zero-width spaces, marks of direction); identity: none; nmt_nfkc_cf: also case folding.
    normalization: Normalization = "nmt_nfkc"
    # The same of targets. identity: a model can produce every character of its training text; any other
    # normalization replaces characters, which translations then lack, and costs BLEU in many languages.
    target_normalization: Normalization = "identity"
    # Symbols of any characters that are always one piece, such as <BT> before back-translated sources;
    # vocab.size includes them. Given models must have them.
    symbols: tuple[str, ...] = ()
    # Maximum number of sentences that a vocabulary is trained on, spread evenly over the training split.
    max_sentences: Annotated[int, at_least(1)] = 2_000_000
    # Token id of padding; a given source_model or target_model keeps its own id.
    pad_id: Annotated[int, at_least(0)] = 0
    # Token id of the start symbol (bos); a given source_model or target_model keeps its own id.
    bos_id: Annotated[int, at_least(0)] = 1
    # Token id of the end symbol (eos); a given source_model or target_model keeps its own id.
    eos_id: Annotated[int, at_least(0)] = 2
    # Token id of the unknown symbol; a given source_model or target_model keeps its own id.
    unk_id: Annotated[int, at_least(0)] = 3
    # Subword regularization: segment training text anew in each epoch, with this rate of merge dropout for
    # bpe (usually 0.1) or this smoothing parameter alpha for unigram (0.1 to 0.5). 0: off.
    sampling: Annotated[float, between(0, 1)] = 0.0

    @property
    def size_of_source(self) -> int:
        """The number of pieces of a source vocabulary of its own."""
        return self.size if self.source_size is None else self.source_size
