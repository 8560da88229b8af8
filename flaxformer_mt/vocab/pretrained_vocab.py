"""The vocabulary of a pretrained model: its tokenizer, special symbols and language tags.

A run stores the vocabulary as a metadata file and the tokenizer files of the model, so that an export can
write these files again; an import may have changed them:

    pretrained.json   tokenizer/tokenizer.json   tokenizer/tokenizer_config.json   ...

In multilingual models, each text begins with a language tag (`deu_Latn Hallo`): a source with the tag of the
source language, a translation with the tag of the target language.
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.config.files import read_file, read_json_object
from flaxformer_mt.errors import UserError
from flaxformer_mt.unicode_text import BLANKS
from flaxformer_mt.vocab.model_file import SPACE
from flaxformer_mt.vocab.pretrained_tokenizers import Kind, make_segmenter
from flaxformer_mt.vocab.sentencepiece_vocab import Vocab, check_unicode, clean_line, up_to


def choose_pieces(pieces: Sequence[str], used: Iterable[int], *, always: Collection[int]) -> list[int]:
    """Return the ids to keep, ascending: `used` ids, `always` ids, byte subwords and single characters.

    Single characters are kept if the other kept subwords contain them, with and without a space before them,
    so that any text of these characters can be written.
    """
    ids = {*always, *used}
    letters = {letter for number in ids if number < len(pieces) for letter in pieces[number]}
    for number, piece in enumerate(pieces):
        bare = piece.removeprefix(SPACE)
        is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
        if is_byte or (len(bare) <= 1 and piece and set(bare) <= letters):
            ids.add(number)
    return sorted(ids)


METADATA_NAME = "pretrained.json"
FILES_NAME = "tokenizer"
# Larger files are not read.
_FILE_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class PretrainedMetadata:
    """Facts about a vocabulary that its tokenizer files do not state, or state in different ways.

    kind: kind of tokenizer, see `pretrained_tokenizers`. size: number of ids, including those without a
    subword. pad_id, eos_id, unk_id: ids of the special symbols. bos_id: the first id of decoder inputs, which
    may be one of these ids. first_ids: ids that every text begins with, such as BART's <s>. tags: ids of
    language tags, by name. target_tags: whether translations begin with a tag. family: the model type.
    """

    kind: Kind
    size: int
    pad_id: int
    bos_id: int
    eos_id: int
    unk_id: int
    first_ids: tuple[int, ...] = ()
    tags: Mapping[str, int] = dataclasses.field(default_factory=dict)
    target_tags: bool = False
    family: str = ""

    def check(self, name: str) -> None:
        """Raise UserError if an id is outside the vocabulary or a value is invalid."""
        ids = {field: getattr(self, field) for field in ("pad_id", "bos_id", "eos_id", "unk_id")}
        ids |= {f"first_ids {number}": number for number in self.first_ids} | dict(self.tags)
        if type(self.size) is not int or not 1 <= self.size <= 1 << 24:
            raise UserError(f"{name}: size is {self.size!r:.40}; it must be a number from 1 to {1 << 24}")
        for field, number in ids.items():
            if type(number) is not int or not 0 <= number < self.size:
                raise UserError(
                    f"{name}: {field} is {number!r:.40}, but the model has the ids 0 to {self.size - 1}; the "
                    "files belong to different models"
                )
        if self.pad_id == self.eos_id:
            raise UserError(f"{name}: padding and the end symbol are both {self.pad_id}; they must differ")
        if self.kind not in get_args(Kind):
            kinds = ", ".join(get_args(Kind))
            raise UserError(f"{name}: kind is {self.kind!r:.40}; it must be one of {kinds}")


class PretrainedVocab(Vocab):
    """The vocabulary of a pretrained model, with the interface of `Vocab`.

    A text may begin with the name of a tag and a space, as in `deu_Latn Hallo`; the name becomes the tag's
    id. `files` are the tokenizer files, as bytes by file name.
    """

    def __init__(
        self, metadata: PretrainedMetadata, files: Mapping[str, bytes], *, name: str = "the vocabulary"
    ) -> None:
        metadata.check(name)
        self.metadata, self.files = metadata, dict(files)
        self._segmenter = make_segmenter(metadata.kind, files, name=name)
        problem = self._segmenter.pieces
        if len(problem) > metadata.size and any(problem[metadata.size :]):
            raise UserError(
                f"the tokenizer of {name} has {len(problem)} subwords, but the model has {metadata.size} "
                "ids; the files belong to different models"
            )
        self.size = metadata.size
        self.pad_id, self.bos_id = metadata.pad_id, metadata.bos_id
        self.eos_id, self.unk_id = metadata.eos_id, metadata.unk_id
        self.tags = dict(metadata.tags)
        self.silent_ids = frozenset((*metadata.first_ids, *self.tags.values()))
        self.num_forced = len(metadata.first_ids) + metadata.target_tags
        named = [problem[number] if number < len(problem) else "" for number in range(metadata.size)]
        for tag, number in self.tags.items():
            named[number] = tag
        self._names = [piece or f"<unnamed {number}>" for number, piece in enumerate(named)]
        self._dropped = self.silent_ids | {self.pad_id, self.bos_id}
        digest = hashlib.sha256(json.dumps(dataclasses.asdict(metadata), sort_keys=True).encode())
        for file in sorted(self.files):
            digest.update(file.encode() + hashlib.sha256(self.files[file]).digest())
        self.fingerprint = digest.hexdigest()

    def __reduce__(self) -> tuple[type[Vocab], tuple[Any, ...]]:
        """Pickle the vocabulary, for a worker process, as its metadata and files."""
        return PretrainedVocab, (self.metadata, self.files)

    def save(self, path: Path) -> None:
        """Raise UserError, since this vocabulary is not a single file; see `save_files`."""
        raise UserError(
            f"{path} cannot be written: the vocabulary of a pretrained model is not one SentencePiece model; "
            "use an export format of its own system, such as hf or ctranslate2"
        )

    def save_files(self, directory: Path) -> None:
        """Write the metadata and the tokenizer files, each atomically, to the vocabulary folder of a run."""
        metadata = json.dumps(dataclasses.asdict(self.metadata), indent=1, ensure_ascii=False) + "\n"
        (directory / FILES_NAME).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            write_atomically(directory / FILES_NAME / name, content)
        write_atomically(directory / METADATA_NAME, metadata.encode())

    @classmethod
    def load_files(cls, directory: Path) -> "PretrainedVocab":
        path = directory / METADATA_NAME
        try:
            stored = read_json_object(path)
            if stored.get("kept") is not None:
                raise UserError(
                    f"{path}: its vocabulary was cut by an earlier version; import the model again, with "
                    "--vocab_text"
                )
            names = {field.name for field in dataclasses.fields(PretrainedMetadata)}
            metadata = PretrainedMetadata(**{name: stored[name] for name in names})
            first = tuple(metadata.first_ids)
            metadata = dataclasses.replace(metadata, first_ids=first, tags=dict(metadata.tags))
            files = {
                file.name: read_file(file, most=_FILE_BYTES)
                for file in sorted((directory / FILES_NAME).iterdir())
                if file.is_file() and not file.name.startswith(".")
            }
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UserError(
                f"{path} is damaged: {type(error).__name__}: {error}; restore it from a copy of the run, or "
                "import the model again"
            ) from error
        return cls(metadata, files, name=str(directory / FILES_NAME))

    def tokenize_all(
        self, texts: Sequence[str], *, sampling: float = 0.0, seed: int | None = None, threads: int = -1
    ) -> list[np.ndarray]:
        """Tokenize as `Vocab.tokenize_all` does, but ignore `threads`, and raise UserError for `sampling`."""
        if sampling:
            raise UserError(
                f"vocab.sampling is {sampling}, but a pretrained model segments text in one way; set it to 0"
            )
        check_unicode(texts)
        split = [self._split_tag(text) for text in texts]
        first, encoded = self.metadata.first_ids, self._segmenter.encode([rest for _, rest in split])
        # Some segmenters turn names of special symbols in a text into their ids; these must not end the text.
        special = {self.eos_id, self.pad_id}
        encoded = [[self.unk_id if tokens in special else tokens for tokens in ids] for ids in encoded]
        return [
            np.array([*first, *tag, *ids, self.eos_id], np.int32)
            for (tag, _), ids in zip(split, encoded, strict=True)
        ]

    def _split_tag(self, text: str) -> tuple[tuple[int, ...], str]:
        """Return the id of the tag at the start of a text, or (), and the rest of the text."""
        if not self.metadata.target_tags:  # tags are part of the text, for the segmenter
            return (), text
        plain = text.lstrip(BLANKS)
        first = (plain.split(maxsplit=1) or [""])[0]
        number = self.tags.get(first)
        return ((), text) if number is None else ((number,), plain[len(first) + 1 :])

    def detokenize_all(self, all_ids: Sequence[list[int]]) -> list[str]:
        """Return the text of each list of ids up to its first eos, without pad, bos and tags."""
        texts = []
        for ids in all_ids:
            plain = [token for token in up_to(ids, self.eos_id) if token not in self._dropped]
            texts.append(clean_line(self._segmenter.decode(plain)))
        return texts

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        return [self._names[token] for token in np.asarray(ids).tolist()]


def read_tags(directory: Path) -> dict[str, int]:
    """Return the ids of the language tags of a pretrained vocabulary; {} if `directory` has none."""
    try:
        tags = read_json_object(directory / METADATA_NAME).get("tags")
    except (ValueError, OSError):
        return {}
    return dict(tags) if isinstance(tags, dict) else {}
