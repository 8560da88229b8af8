"""Segmenters of pretrained models: tokenizer.json, SentencePiece with the ids of the model, or bytes.

Special symbols and tags are added in pretrained_vocab.py.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from flaxformer_mt.errors import UserError, importing
from flaxformer_mt.vocab.model_file import SPACE
from flaxformer_mt.vocab.sentencepiece_vocab import load_processor

# json: tokenizer.json of the library tokenizers. m2m_100: SentencePiece subwords, with the ids of vocab.json.
# fairseq: SentencePiece ids plus 1, after four special symbols. sentencepiece: SentencePiece ids. bytes: the
# bytes of UTF-8 plus 3.
Kind = Literal["json", "m2m_100", "fairseq", "sentencepiece", "bytes"]

TOKENIZER_JSON = "tokenizer.json"
# The names under which models store their SentencePiece model.
SENTENCEPIECE_NAMES = ("sentencepiece.bpe.model", "spiece.model", "source.spm")
# The id of byte 0, after the ids of padding, end and unknown.
_BYTES_FROM = 3
# Limit for ids: a file with larger ids is rejected.
_MOST_IDS = 1 << 24
# How byte-level BPE writes a space at the start of a subword.
BYTE_SPACE = "\u0120"


class Segmenter(Protocol):
    """Converts text to ids and back, without special symbols; `pieces` are the subwords by id."""

    pieces: list[str]

    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: list[int]) -> str: ...


def make_segmenter(kind: Kind, files: Mapping[str, bytes], *, name: str) -> Segmenter:
    """Make a segmenter from `files` (bytes by file name); error messages call their folder `name`."""
    if kind == "json":
        return JsonSegmenter(_take(files, TOKENIZER_JSON, name), name=f"{name}/{TOKENIZER_JSON}")
    if kind == "bytes":
        return ByteSegmenter()
    size = next((file for file in SENTENCEPIECE_NAMES if file in files), SENTENCEPIECE_NAMES[0])
    origin = f"{name}/{size}"
    processor = load_processor(_take(files, size, name), name=origin)
    names = [processor.id_to_piece(number) for number in range(processor.get_piece_size())]
    if kind == "sentencepiece":
        return SentencePieceSegmenter(processor, list(range(len(names))), names)
    if kind == "fairseq":
        specials = ["<s>", "<pad>", "</s>", "<unk>"]
        ids = [3, 0, 2, *range(4, len(names) + 1)]
        return SentencePieceSegmenter(processor, ids, specials + names[3:])
    table = _read_ids(_take(files, "vocab.json", name), f"{name}/vocab.json")
    unknown = table.get("<unk>")
    if unknown is None:
        raise UserError(f"{name}/vocab.json has no <unk>; copy or download it again")
    pieces = [""] * len(table)
    for piece, number in table.items():
        pieces[number] = piece
    return SentencePieceSegmenter(processor, [table.get(piece, unknown) for piece in names], pieces)


class JsonSegmenter:
    """A tokenizer of the library `tokenizers`; names of special symbols in a text are treated as text."""

    def __init__(self, content: bytes, *, name: str) -> None:
        with importing("huggingface", what=name):
            import tokenizers
        self._name = name
        with _naming_damage(name):
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
            decoder: Any = (json.loads(content).get("decoder") or {}).get("type")
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        largest = max(ids.values(), default=-1)
        if largest >= _MOST_IDS:
            raise UserError(f"{name} has the id {largest}; ids are below {_MOST_IDS}")
        self.pieces = [""] * (largest + 1)
        for piece, number in ids.items():
            self.pieces[number] = piece
        if decoder == "ByteLevel":
            self.pieces = [piece.replace(BYTE_SPACE, SPACE) for piece in self.pieces]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        with _naming_damage(self._name):
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        with _naming_damage(self._name):
            return self._tokenizer.decode(ids, skip_special_tokens=True)


@contextlib.contextmanager
def _naming_damage(name: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # the library raises Exception, and a panic in Rust is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{name} is damaged: {error}; copy or download it again") from error


class SentencePieceSegmenter:
    """A SentencePiece model with its subwords renumbered to `ids`; ids without a subword decode to ""."""

    def __init__(self, processor: Any, ids: list[int], pieces: list[str]) -> None:
        self._processor, self._ids, self.pieces = processor, ids, pieces

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._ids[number] for number in tokens] for tokens in self._processor.encode(list(texts))]

    def decode(self, ids: list[int]) -> str:
        names = [self.pieces[number] for number in ids if number < len(self.pieces)]
        return self._processor.decode_pieces(names)


class ByteSegmenter:
    """Segments text into UTF-8 bytes, as ByT5 does; ids that are not bytes decode to ""."""

    def __init__(self) -> None:
        printable = [chr(byte) if 0x21 <= byte < 0x7F else f"<0x{byte:02X}>" for byte in range(256)]
        printable[0x20] = SPACE
        self.pieces = ["<pad>", "</s>", "<unk>", *printable]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[byte + _BYTES_FROM for byte in text.encode("utf-8")] for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Decode ids; bytes that are not valid UTF-8 are left out."""
        known = bytes(number - _BYTES_FROM for number in ids if 0 <= number - _BYTES_FROM < 256)
        return known.decode("utf-8", errors="ignore")


def _take(files: Mapping[str, bytes], name: str, folder: str) -> bytes:
    if name not in files:
        raise UserError(
            f"{folder} has no {name}, which its vocabulary needs; copy or download the files of the tokenizer"
        )
    return files[name]


def _read_ids(content: bytes, name: str) -> dict[str, int]:
    try:
        ids = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is damaged: {error}; copy or download it again") from error
    numbers: list[Any] = list(ids.values()) if isinstance(ids, dict) else [None]
    if not all(type(number) is int for number in numbers) or sorted(numbers) != list(range(len(numbers))):
        raise UserError(
            f"{name} is damaged: it must give the subwords the ids 0 to {len(numbers) - 1}, each once; "
            "copy or download it again"
        )
    return ids
