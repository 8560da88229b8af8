"""Renumbers the pieces of a SentencePiece model file, so that its ids are those of another system.

Contains the required fields of the file, numbered as in sentencepiece_model.proto of SentencePiece 0.2, and
the wire format of protocol buffers. Piece names and their numbers come from tokenizer_files.py.

A field is a tag (number * 8 + wire type) and a value. A repeated occurrence of a field replaces the earlier
value, so settings are changed by appending fields.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flaxformer_mt.errors import UserError

# Fields of the file. Field 4, examples with their expected pieces, is dropped, because the numbers change.
_PIECE, _TRAINER, _EXAMPLES = 1, 2, 4
# Fields of the trainer settings (field 2 of the file).
_MODEL_TYPE, _VOCAB_SIZE, _BYTE_FALLBACK = 3, 4, 35
_UNK_PIECE, _BOS_PIECE, _EOS_PIECE, _PAD_PIECE = 45, 46, 47, 48
# The normalizer settings are field 3 of the file; their field 1 is the name.
_NORMALIZER, _NORMALIZER_NAME = 3, 1
_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
# Piece types.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_NUM_BYTES = 256
_SPACE = "\u2581"


class Specials(NamedTuple):
    """Names of the special pieces; bos is None if the model has no start symbol."""

    unk: str
    eos: str
    pad: str
    bos: str | None = None


class Settings(NamedTuple):
    """Training settings of a model that affect how it segments text."""

    kind: str
    byte_fallback: bool
    normalization: str


class _Field(NamedTuple):
    number: int
    value: int | bytes
    raw: bytes


def read_settings(model: bytes) -> Settings:
    """Reads the settings of a SentencePiece model.

    Raises:
      UserError: the bytes are not a SentencePiece model.
    """
    fields = _read(model)
    trainer = {f.number: f.value for part in _parts(fields, _TRAINER) for f in _read(part)}
    names = [f.value for part in _parts(fields, _NORMALIZER) for f in _read(part) if f.number == 1]
    name = names[-1] if names else b""
    return Settings(
        kind=_KINDS.get(int(trainer.get(_MODEL_TYPE, 1)), "unigram"),
        byte_fallback=bool(trainer.get(_BYTE_FALLBACK, 0)),
        normalization=name.decode() if isinstance(name, bytes) else "",
    )


def piece_of(name: str) -> str:
    """The piece of a name; a language code gets the space that SentencePiece puts before a text."""
    return _SPACE + name if name.startswith(">>") and name.endswith("<<") else name


def name_of(piece: str) -> str:
    """The name of a piece; the inverse of `piece_of`."""
    bare = piece.removeprefix(_SPACE)
    return bare if piece_of(bare) == piece else piece


def renumber(model: bytes, names: Sequence[str], specials: Specials, *, origin: str) -> bytes:
    """Returns a model that segments text like `model` but numbers the pieces in the order of `names`.

    Names that `model` lacks can be decoded but do not occur in segmented text, with two exceptions: language
    codes (>>fr<<) at the start of a text, and names that consist of characters unknown to `model`, because
    transformers looks up unknown characters by their spelling. Pieces of `model` without a name are dropped:
    text is segmented into other pieces.

    Raises:
      UserError: `model` is not a SentencePiece model, a special symbol is not in `names`, or `model` lacks
        names and is not a unigram model: other kinds would segment text with the added pieces.
    """
    fields = _read(model, origin)
    settings = read_settings(model)
    known = dict(_read_piece(part) for part in _parts(fields, _PIECE))
    absent = [name for name in specials if name is not None and name not in names]
    if absent:
        raise UserError(f"{origin} has no {' and no '.join(absent)} among its pieces; the model needs them")
    is_code = {name for name in names if piece_of(name) != name}
    missing = [name for name in names if name not in known and name not in specials and name not in is_code]
    if missing and settings.kind != "unigram":
        raise UserError(
            f"{origin} is a {settings.kind} model that lacks {len(missing)} pieces of the vocabulary "
            f"({', '.join(missing[:3])}, ...); only unigram models may lack pieces"
        )
    has_bytes = sum(known.get(name, (0.0, 0))[1] == _BYTE for name in names) == _NUM_BYTES
    letters = set("".join(known))
    lowest = min((score for score, kind in known.values() if kind == _NORMAL), default=0.0)
    written = []
    for name in names:
        is_unknown_text = not settings.byte_fallback and letters.isdisjoint(name)
        score, kind = known.get(name, (lowest, _NORMAL) if is_unknown_text else (0.0, _UNUSED))
        if name in specials:
            score, kind = 0.0, _UNKNOWN if name == specials.unk else _CONTROL
        elif name in is_code:
            score, kind = 0.0, _USER_DEFINED
        elif kind == _UNKNOWN or kind == _CONTROL or (kind == _BYTE and not has_bytes):
            kind = _UNUSED
        written.append(_write_piece(piece_of(name), score, kind))
    trainer = b"".join(_parts(fields, _TRAINER)) + _write_settings(len(names), specials, has_bytes)
    rest = b"".join(f.raw for f in fields if f.number not in (_PIECE, _TRAINER, _EXAMPLES))
    return b"".join(written) + _write(_TRAINER, trainer) + rest


def _write_settings(size: int, specials: Specials, has_bytes: bool) -> bytes:
    return (
        _tag(_VOCAB_SIZE, 0)
        + _varint(size)
        + _tag(_BYTE_FALLBACK, 0)
        + _varint(has_bytes)
        + _write(_UNK_PIECE, specials.unk.encode())
        # SentencePiece treats a bos name as absent if it is not a control piece. Without bos, `renumber` has
        # given <s> another type.
        + _write(_BOS_PIECE, (specials.bos or "<s>").encode())
        + _write(_EOS_PIECE, specials.eos.encode())
        + _write(_PAD_PIECE, specials.pad.encode())
    )


def _read_piece(data: bytes) -> tuple[str, tuple[float, int]]:
    text, score, kind = "", 0.0, _NORMAL
    for field in _read(data):
        if field.number == 1 and isinstance(field.value, bytes):
            text = field.value.decode()
        elif field.number == 2 and isinstance(field.value, bytes):
            (score,) = struct.unpack("<f", field.value)
        elif field.number == 3 and isinstance(field.value, int):
            kind = field.value
    return text, (score, kind)


def _write_piece(text: str, score: float, kind: int) -> bytes:
    body = _write(1, text.encode()) + _tag(2, 5) + struct.pack("<f", score) + _tag(3, 0) + _varint(kind)
    return _write(_PIECE, body)


def _parts(fields: list[_Field], number: int) -> list[bytes]:
    return [f.value for f in fields if f.number == number and isinstance(f.value, bytes)]


def _read(data: bytes, origin: str = "the file") -> list[_Field]:
    try:
        return list(_iterate_fields(data))
    except (IndexError, ValueError) as error:
        raise UserError(
            f"{origin} is not a SentencePiece model: it is damaged or has another file format"
        ) from error


def _iterate_fields(data: bytes) -> Iterator[_Field]:
    offset = 0
    while offset < len(data):
        start = offset
        tag, offset = _read_varint(data, offset)
        value: int | bytes
        if tag % 8 == 0:
            value, offset = _read_varint(data, offset)
        else:
            if tag % 8 == 2:
                size, offset = _read_varint(data, offset)
            else:
                size = {1: 8, 5: 4}.get(tag % 8, -1)
            if size < 0 or offset + size > len(data):
                raise ValueError(f"no field at byte {start}")
            value, offset = data[offset : offset + size], offset + size
        yield _Field(tag // 8, value, data[start:offset])


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Reads a varint: seven bits per byte, lowest first; the eighth bit marks that another byte follows."""
    value, shift = 0, 0
    while data[offset] >= 128:
        value |= (data[offset] - 128) << shift
        offset, shift = offset + 1, shift + 7
    return value | data[offset] << shift, offset + 1


def _write(number: int, body: bytes) -> bytes:
    return _tag(number, 2) + _varint(len(body)) + body


def _tag(number: int, wire: int) -> bytes:
    return _varint(number * 8 + wire)


def _varint(value: int) -> bytes:
    written = bytearray()
    while value >= 128:
        written.append(value % 128 + 128)
        value //= 128
    return bytes([*written, value])
