"""Reads the subwords and settings of a SentencePiece model file, and sets its normalization."""

from typing import NamedTuple

from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto, NormalizerSpec

from flaxformer_mt.errors import UserError

# The symbol for a space.
SPACE = "\u2581"
# Types of subwords.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


class Settings(NamedTuple):
    """Training settings of a SentencePiece model that affect how it segments text."""

    kind: str
    byte_fallback: bool
    normalization: str


class Piece(NamedTuple):
    """A subword of a SentencePiece model; `kind` is its type, such as NORMAL or BYTE."""

    text: str
    score: float
    kind: int


def parse_model(model: bytes, *, origin: str = "the file") -> ModelProto:
    """Parse a SentencePiece model; if it is damaged, raise UserError, which calls the file `origin`."""
    try:
        proto = ModelProto.FromString(model)
        # Where a text is not UTF-8, protobuf returns its bytes, or raises an error.
        texts = [proto.normalizer_spec.name, *(piece.piece for piece in proto.pieces)]
        if bytes in map(type, texts):
            raise ValueError("a name is not UTF-8 text")
    except (DecodeError, ValueError) as error:
        raise UserError(
            f"{origin} is not a SentencePiece model: it is damaged or has another file format ({error}); "
            "copy or download it again"
        ) from error
    return proto


def read_settings(model: bytes, *, origin: str = "the file") -> Settings:
    proto = parse_model(model, origin=origin)
    trainer = proto.trainer_spec
    kind = trainer.ModelType.Name(trainer.model_type).lower()
    return Settings(kind, trainer.byte_fallback, proto.normalizer_spec.name)


def read_pieces(model: bytes, *, origin: str = "the file") -> list[Piece]:
    pieces = parse_model(model, origin=origin).pieces
    return [Piece(piece.piece, piece.score, piece.type) for piece in pieces]


def set_normalization(model: bytes, name: str, normalizer: bytes) -> bytes:
    """Return the model with the rules of `normalizer`, a serialized NormalizerSpec, under the name `name`."""
    proto = ModelProto.FromString(model)
    rules = NormalizerSpec.FromString(normalizer).precompiled_charsmap
    proto.normalizer_spec.MergeFrom(NormalizerSpec(name=name, precompiled_charsmap=rules))
    # The model must not contain the path of the rules file, or each training would give a different model.
    proto.normalizer_spec.ClearField("normalization_rule_tsv")
    return proto.SerializeToString(deterministic=True)
