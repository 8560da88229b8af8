"""SentencePiece model files with their pieces numbered anew, so that ids are those of another system.

Owns the few fields of the file that this takes, as sentencepiece_model.proto of SentencePiece 0.2 numbers
them, and the wire format of protocol buffers. Knows nothing of where names and numbers come from.

A field is a tag, number * 8 + wire type, and a value; a field that occurs again replaces the one before, so
settings are changed by adding them at the end.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flaxformer_mt.errors import UserError

# Fields of the file; 4, examples with the pieces they should give, is left out: the numbers change.
_PIECE, _TRAINER, _EXAMPLES = 1, 2, 4
# Fields of the trainer's settings.
_MODEL_TYPE, _VOCAB_SIZE, _BYTE_FALLBACK = 3, 4, 35
_UNK_PIECE, _BOS_PIECE, _EOS_PIECE, _PAD_PIECE = 45, 46, 47, 48
# Fields of the normaliser's settings, which are field 3 of the file.
_NORMALIZER, _NORMALIZER_NAME = 3, 1
_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
# Types of pieces.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_NUM_BYTES = 256
_SPACE = "\u2581"


class Specials(NamedTuple):
    """The names of the special pieces; bos None: there is none."""

    unk: str
    eos: str
    pad: str
    bos: str | None = None


class Settings(NamedTuple):
    """How a model was trained, as far as it shows in its use."""

    kind: str
    byte_fallback: bool
    normalization: str


class _Field(NamedTuple):
    number: int
    value: int | bytes
    raw: bytes


def read_settings(model: bytes) -> Settings:
    """The settings of a SentencePiece model. Raises UserError if it is none."""
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
    """The piece of a name; a language code includes the space that SentencePiece puts before a text."""
    return _SPACE + name if name.startswith(">>") and name.endswith("<<") else name


def name_of(piece: str) -> str:
    """The inverse of `piece_of`."""
    bare = piece.removeprefix(_SPACE)
    return bare if piece_of(bare) == piece else piece


def renumber(model: bytes, names: Sequence[str], specials: Specials, *, origin: str) -> bytes:
    """A model that cuts text as `model` does, but numbers its pieces as they stand in `names`.

    Names that the model lacks are there to be decoded, but no text gives them, save language codes (>>fr<<)
    that begin a text, and names of nothing but characters that the model does not know: what it calls unknown
    is looked up as it is spelled. Pieces that have no name are left out: text is cut into others.

    Raises:
      UserError: no SentencePiece model, a special symbol that has no name, or names that the model lacks
        where it is not a unigram model: others would cut text with them.
    """
    fields = _read(model, origin)
    settings = read_settings(model)
    known = dict(_read_piece(part) for part in _parts(fields, _PIECE))
    absent = [name for name in specials if name is not None and name not in names]
    if absent:
        raise UserError(f"{origin} has no {' and no '.join(absent)} among its pieces; the model needs them")
    is_code = {name for name in names if piece_of(name) != name}
    lacking = [name for name in names if name not in known and name not in specials and name not in is_code]
    if lacking and settings.kind != "unigram":
        raise UserError(
            f"{origin} is a {settings.kind} model without {len(lacking)} of the vocabulary's pieces "
            f"({', '.join(lacking[:3])}, ...); only unigram models can be numbered anew then"
        )
    has_bytes = sum(known.get(name, (0.0, 0))[1] == _BYTE for name in names) == _NUM_BYTES
    letters = set("".join(known))
    lowest = min((score for score, kind in known.values() if kind == _NORMAL), default=0.0)
    written = []
    for name in names:
        spelled = not settings.byte_fallback and letters.isdisjoint(name)
        score, kind = known.get(name, (lowest, _NORMAL) if spelled else (0.0, _UNUSED))
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
        # What is no control symbol counts as absent, and <s> was made none.
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
        return list(_walk(data))
    except (IndexError, ValueError) as error:
        raise UserError(
            f"{origin} is not a SentencePiece model: it is damaged, or another kind of file"
        ) from error


def _walk(data: bytes) -> Iterator[_Field]:
    place = 0
    while place < len(data):
        start = place
        tag, place = _read_varint(data, place)
        value: int | bytes
        if tag % 8 == 0:
            value, place = _read_varint(data, place)
        else:
            if tag % 8 == 2:
                size, place = _read_varint(data, place)
            else:
                size = {1: 8, 5: 4}.get(tag % 8, -1)
            if size < 0 or place + size > len(data):
                raise ValueError(f"no field at byte {start}")
            value, place = data[place : place + size], place + size
        yield _Field(tag // 8, value, data[start:place])


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    """Seven bits a byte, the lowest first; the eighth says that another byte follows."""
    value, shift = 0, 0
    while data[place] >= 128:
        value |= (data[place] - 128) << shift
        place, shift = place + 1, shift + 7
    return value | data[place] << shift, place + 1


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
