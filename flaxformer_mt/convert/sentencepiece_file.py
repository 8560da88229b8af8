"""SentencePiece model files with the ids of another system: renumbered pieces, or a list of words.

Contains the writing of pieces and settings; vocab/model_file.py reads them, and writes fields. Piece names
and their numbers come from the callers.

A repeated occurrence of a field replaces the earlier value, so settings are changed by appending fields.
"""

import struct
from collections.abc import Collection, Sequence
from typing import NamedTuple

from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab.model_file import (
    BYTE,
    BYTE_FALLBACK,
    CONTROL,
    MODEL_TYPE,
    NORMAL,
    NORMALIZER,
    NORMALIZER_NAME,
    PIECE,
    SPACE,
    TRAINER,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    read_fields,
    read_pieces,
    read_settings,
    select,
    write_field,
    write_tag,
    write_varint,
)

# Field of the file with examples and their expected pieces; it is dropped, because the numbers change.
_EXAMPLES = 4
# Fields of the trainer settings.
_VOCAB_SIZE = 4
_UNK_PIECE, _BOS_PIECE, _EOS_PIECE, _PAD_PIECE = 45, 46, 47, 48
_WORD = 3
_NUM_BYTES = 256


class Specials(NamedTuple):
    """Names of the special pieces; bos is None if the model has no start symbol."""

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
    """Return a model that segments text like `model` but numbers the pieces in the order of `names`.

    Names that `model` lacks can be decoded but do not occur in segmented text, with two exceptions: language
    codes (>>fr<<) at the start of a text, and names that consist of characters unknown to `model`, because
    transformers looks up unknown characters by their spelling. Pieces of `model` without a name are dropped:
    text is segmented into other pieces. Names in `unused` occur in no text, neither before nor after.
    """
    settings = read_settings(model, origin=origin)
    known = {piece.text: (piece.score, piece.kind) for piece in read_pieces(model, origin=origin)}
    fields = read_fields(model)
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
    written = []
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
        written.append(_write_piece(piece_of(name), score, kind))
    trainer = b"".join(select(fields, TRAINER)) + _write_settings(len(names), specials, has_bytes)
    rest = b"".join(f.raw for f in fields if f.number not in (PIECE, TRAINER, _EXAMPLES))
    return b"".join(written) + write_field(TRAINER, trainer) + rest


def make_word_model(words: Sequence[str], specials: Specials) -> bytes:
    """Return a model that separates words at spaces and numbers them in this order, without normalization.

    A word that contains a space can be decoded, but does not occur in segmented text.
    """
    written = []
    for word in words:
        kind = UNUSED if any(character.isspace() for character in word) else NORMAL
        if word in specials:
            kind = UNKNOWN if word == specials.unk else CONTROL
        written.append(_write_piece(word if word in specials else SPACE + word, 0.0, kind))
    trainer = write_tag(MODEL_TYPE, 0) + write_varint(_WORD) + _write_settings(len(words), specials, False)
    normalizer = write_field(NORMALIZER_NAME, b"identity")
    return b"".join(written) + write_field(TRAINER, trainer) + write_field(NORMALIZER, normalizer)


def _write_settings(size: int, specials: Specials, has_bytes: bool) -> bytes:
    return (
        write_tag(_VOCAB_SIZE, 0)
        + write_varint(size)
        + write_tag(BYTE_FALLBACK, 0)
        + write_varint(has_bytes)
        + write_field(_UNK_PIECE, specials.unk.encode())
        # SentencePiece treats a bos name as absent if it is not a control piece. Without bos, `renumber` has
        # given <s> another type.
        + write_field(_BOS_PIECE, (specials.bos or "<s>").encode())
        + write_field(_EOS_PIECE, specials.eos.encode())
        + write_field(_PAD_PIECE, specials.pad.encode())
    )


def _write_piece(text: str, score: float, kind: int) -> bytes:
    number = write_tag(2, 5) + struct.pack("<f", score)
    return write_field(PIECE, write_field(1, text.encode()) + number + write_tag(3, 0) + write_varint(kind))
