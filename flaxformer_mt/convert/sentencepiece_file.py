"""Makes SentencePiece models with the ids of another system, from a model or from a list of words."""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from sentencepiece.sentencepiece_model_pb2 import ModelProto

from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab.model_file import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    parse_model,
    read_settings,
)

_NUM_BYTES = 256


class Specials(NamedTuple):
    """Names of the special symbols; bos is None if the model has no start symbol."""

    unk: str
    eos: str
    pad: str
    bos: str | None = None


def piece_of(name: str) -> str:
    return SPACE + name if name.startswith(">>") and name.endswith("<<") else name


def name_of(piece: str) -> str:
    bare = piece.removeprefix(SPACE)
    return bare if piece_of(bare) == piece else piece


def renumber(
    model: bytes, names: Sequence[str], specials: Specials, *, origin: str, unused: Collection[str] = ()
) -> bytes:
    """Return a model that segments text like `model` but numbers the subwords in the order of `names`.

    Names that `model` lacks can be decoded but do not occur in segmented text, with two exceptions: language
    codes (>>fr<<) at the start of a text, and names that consist of characters unknown to `model`, because
    transformers looks up unknown characters by their spelling. Subwords of `model` that are not in `names`
    are dropped, so text is segmented into other subwords. Names in `unused` occur in no text. Raises
    UserError if the special symbols are not in `names`, or if a model that is not unigram lacks names.
    """
    settings = read_settings(model, origin=origin)
    proto = parse_model(model, origin=origin)
    known = {piece.piece: (piece.score, piece.type) for piece in proto.pieces}
    absent = [name for name in specials if name is not None and name not in names]
    if absent:
        raise UserError(f"{origin} has no {' and no '.join(absent)} among its pieces; the model needs them")
    is_code = {name for name in names if piece_of(name) != name}
    named = {*specials, *is_code, *unused}
    missing = [name for name in names if name not in known and name not in named]
    if missing and settings.kind != "unigram":
        raise UserError(
            f"{origin} is a {settings.kind} model that lacks {len(missing)} pieces of the vocabulary "
            f"({', '.join(missing[:3])}, ...); only unigram models may lack pieces"
        )
    has_bytes = sum(known.get(name, (0.0, 0))[1] == BYTE for name in names) == _NUM_BYTES
    letters = set("".join(known))
    lowest = min((score for score, kind in known.values() if kind == NORMAL), default=0.0)
    del proto.pieces[:]
    for name in names:
        is_unknown_text = not settings.byte_fallback and letters.isdisjoint(name)
        score, kind = known.get(name, (lowest, NORMAL) if is_unknown_text else (0.0, UNUSED))
        if name in specials:
            score, kind = 0.0, UNKNOWN if name == specials.unk else CONTROL
        elif name in unused:
            score, kind = 0.0, CONTROL
        elif name in is_code:
            score, kind = 0.0, USER_DEFINED
        elif kind == UNKNOWN or kind == CONTROL or (kind == BYTE and not has_bytes):
            kind = UNUSED
        proto.pieces.add(piece=piece_of(name), score=score, type=kind)
    proto.trainer_spec.byte_fallback = has_bytes
    proto.DiscardUnknownFields()  # older files have examples with ids of subwords
    return _serialize(proto, specials)


def make_word_model(words: Sequence[str], specials: Specials) -> bytes:
    """Return a model that splits text at spaces, without normalization; ids follow the order of `words`.

    A word that contains a space can be decoded, but does not occur in segmented text.
    """
    proto = ModelProto()
    for word in words:
        kind = UNUSED if any(character.isspace() for character in word) else NORMAL
        if word in specials:
            kind = UNKNOWN if word == specials.unk else CONTROL
        proto.pieces.add(piece=word if word in specials else SPACE + word, score=0.0, type=kind)
    proto.trainer_spec.model_type = proto.trainer_spec.WORD
    proto.normalizer_spec.name = "identity"
    return _serialize(proto, specials)


def drop_fillers(model: bytes) -> tuple[bytes, int]:
    """Remove padding symbol and fillers from a model's end; also return the number of remaining subwords."""
    proto = parse_model(model)
    while re.fullmatch(r"<(pad|padding|nothing|unnamed \d+)>", proto.pieces[-1].piece):
        del proto.pieces[-1]
    size = len(proto.pieces)
    if size == proto.trainer_spec.vocab_size:
        return model, size
    proto.trainer_spec.vocab_size, proto.trainer_spec.pad_id = size, -1
    return proto.SerializeToString(deterministic=True), size


def add_fillers(model: bytes, multiple: int) -> tuple[bytes, int]:
    """Add fillers until the number of subwords is a multiple of `multiple`; also return this number."""
    proto = parse_model(model)
    size = len(proto.pieces)
    if size % multiple == 0:
        return model, size
    for number in range(size, size + -size % multiple):
        proto.pieces.add(piece=f"<unnamed {number}>", score=0.0, type=UNUSED)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return proto.SerializeToString(deterministic=True), len(proto.pieces)


def _serialize(proto: ModelProto, specials: Specials) -> bytes:
    trainer = proto.trainer_spec
    trainer.vocab_size = len(proto.pieces)
    trainer.unk_piece, trainer.eos_piece, trainer.pad_piece = specials.unk, specials.eos, specials.pad
    # SentencePiece treats a bos name as absent if it is not a control symbol. Without bos, `renumber` gives
    # <s> another type.
    trainer.bos_piece = specials.bos or "<s>"
    return proto.SerializeToString(deterministic=True)
