"""Reads the pieces and settings of a SentencePiece model from its bytes, and writes fields of such a file.

Contains the fields of the file, numbered as in sentencepiece_model.proto of SentencePiece 0.2, and the wire
format of protocol buffers. A field is a tag (number * 8 + wire type) and a value.
"""

import contextlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

from flaxformer_mt.errors import UserError

# Fields of the file.
PIECE, TRAINER, NORMALIZER = 1, 2, 3
# Fields of the trainer settings.
MODEL_TYPE, BYTE_FALLBACK = 3, 35
# Fields of the normalizer settings: the name of the rules, the compiled rules, and the path of the file that
# they were read from. A path would make each training of a model give other bytes.
NORMALIZER_NAME, _COMPILED_RULES, _RULES_PATH = 1, 2, 6
_RULES_OF_TEXT = (NORMALIZER_NAME, _COMPILED_RULES, _RULES_PATH)
_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
# The symbol for a space.
SPACE = "\u2581"
# Types of pieces.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


class Settings(NamedTuple):
    """Training settings of a model that affect how it segments text."""

    kind: str
    byte_fallback: bool
    normalization: str


class Piece(NamedTuple):
    """A piece of a model; `kind` is one of the types of pieces above."""

    text: str
    score: float
    kind: int


class Field(NamedTuple):
    """A field of the file: its number, its value, and all of its bytes with the tag."""

    number: int
    value: int | bytes
    raw: bytes


@contextlib.contextmanager
def naming_damage(origin: str) -> Iterator[None]:
    """Raise a UserError that names the file, `origin`, instead of the errors of reading damaged bytes."""
    try:
        yield
    except (IndexError, ValueError, TypeError, struct.error) as error:  # ValueError: also invalid UTF-8
        raise UserError(
            f"{origin} is not a SentencePiece model: it is damaged or has another file format ({error}); "
            "copy or download it again"
        ) from error


def read_settings(model: bytes, *, origin: str = "the file") -> Settings:
    """Read the settings of a SentencePiece model; `origin` names the file in messages."""
    with naming_damage(origin):
        fields = read_fields(model)
        trainer = {f.number: f.value for part in select(fields, TRAINER) for f in read_fields(part)}
        normalizer = [field for part in select(fields, NORMALIZER) for field in read_fields(part)]
        name = (select(normalizer, NORMALIZER_NAME) or [b""])[-1]
        return Settings(
            kind=_KINDS.get(int(trainer.get(MODEL_TYPE, 1)), "unigram"),
            byte_fallback=bool(trainer.get(BYTE_FALLBACK, 0)),
            normalization=name.decode(),
        )


def read_pieces(model: bytes, *, origin: str = "the file") -> list[Piece]:
    """Read the pieces of a SentencePiece model, by id; `origin` names the file in messages."""
    with naming_damage(origin):
        return [read_piece(part) for part in select(read_fields(model), PIECE)]


def read_piece(data: bytes) -> Piece:
    """Read one piece from the value of its field."""
    text, score, kind = "", 0.0, NORMAL
    for field in read_fields(data):
        if field.number == 1 and isinstance(field.value, bytes):
            text = field.value.decode()
        elif field.number == 2 and isinstance(field.value, bytes):
            (score,) = struct.unpack("<f", field.value)
        elif field.number == 3 and isinstance(field.value, int):
            kind = field.value
    return Piece(text, score, kind)


def select(fields: list[Field], number: int) -> list[bytes]:
    """Return the values of all fields with this number that hold bytes."""
    return [f.value for f in fields if f.number == number and isinstance(f.value, bytes)]


def read_fields(data: bytes) -> list[Field]:
    """Read a message as its fields; raise ValueError or IndexError if the bytes are no message."""
    return list(_iterate_fields(data))


def _iterate_fields(data: bytes) -> Iterator[Field]:
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
        yield Field(tag // 8, value, data[start:offset])


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Read a varint: seven bits per byte, lowest first; the eighth bit marks that another byte follows."""
    value, shift = 0, 0
    while data[offset] >= 128:
        if shift > 63:
            raise ValueError(f"no number at byte {offset}")
        value |= (data[offset] - 128) << shift
        offset, shift = offset + 1, shift + 7
    return value | data[offset] << shift, offset + 1


def set_normalization(model: bytes, name: str, rules: bytes) -> bytes:
    """Return a model with these normalization rules under this name, in place of its own."""
    written = []
    for field in read_fields(model):
        if field.number == NORMALIZER and isinstance(field.value, bytes):
            kept = [f.raw for f in read_fields(field.value) if f.number not in _RULES_OF_TEXT]
            settings = write_field(NORMALIZER_NAME, name.encode()) + write_field(_COMPILED_RULES, rules)
            written.append(write_field(NORMALIZER, settings + b"".join(kept)))
        else:
            written.append(field.raw)
    return b"".join(written)


def read_compiled_rules(normalizer: bytes) -> bytes:
    """Return the compiled rules in the settings of a normalizer."""
    return (select(read_fields(normalizer), _COMPILED_RULES) or [b""])[-1]


def write_field(number: int, body: bytes) -> bytes:
    """Write a field whose value is bytes."""
    return write_tag(number, 2) + write_varint(len(body)) + body


def write_tag(number: int, wire: int) -> bytes:
    """Write the tag before a value: the number of its field and its wire type."""
    return write_varint(number * 8 + wire)


def write_varint(value: int) -> bytes:
    """Write a varint; the inverse of reading one."""
    written = bytearray()
    while value >= 128:
        written.append(value % 128 + 128)
        value //= 128
    return bytes([*written, value])
