"""Vocabularies of other toolkits: lists of pieces in the order of ids, and what segments text into them.

A SentencePiece model in the model's folder segments text, and its pieces get the ids of the list. Without
one, text is separated at spaces, as the toolkit itself does: it must be segmented as for training.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flaxformer_mt.config.files import read_file
from flaxformer_mt.convert.sentencepiece_file import SPACE, Specials, make_word_model, renumber
from flaxformer_mt.convert.toolkits.toolkit_model import Languages
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.vocab import Vocab, Vocabs

_SUFFIXES = (".model", ".spm")
_FILE_BYTES = 1 << 30
_SIDES = {"source": ("source", "src"), "target": ("target", "tgt", "trg")}


class PieceList(NamedTuple):
    """The pieces of one side.

    names: in the order of ids. specials: those of them that are symbols. unused: those that occur in no text,
    such as the entries that fill a list up to a multiple of eight.
    """

    names: Sequence[str]
    specials: Specials
    unused: Collection[str] = ()


def read_vocabs(
    folder: Path,
    lists: Sequence[PieceList],
    languages: Languages,
    *,
    models: Mapping[str, Path] | None = None,
) -> Vocabs:
    """Return the vocabularies of two lists; one for both sides if the lists are equal.

    Args:
      lists: those of the source and of the target side.
      models: the SentencePiece model of each side. None: those in the folder.

    Raises:
      UserError: a list repeats a piece or lacks a special symbol, or the folder has SentencePiece models of
        which it is not clear which one belongs to a side.
    """
    source, target = lists
    joint = list(source.names) == list(target.names)
    models = _find_models(folder, languages) if models is None else models
    if not models:
        warn_user(
            f"{folder} has no SentencePiece model (.model or .spm): text is separated at spaces, and must be "
            "segmented as it was for training; else put the model into the folder and import again"
        )
    vocabs = {
        side: _make_vocab(pieces, models.get(side), folder)
        for side, pieces in (("source", source), ("target", target))
    }
    shared = joint and vocabs["source"].fingerprint == vocabs["target"].fingerprint
    return Vocabs(vocabs["source"], vocabs["source"] if shared else vocabs["target"], joint=joint)


def _make_vocab(pieces: PieceList, model: Path | None, folder: Path) -> Vocab:
    names = list(pieces.names)
    if len(set(names)) < len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise UserError(
            f"the vocabulary of {folder} has {twice!r:.60} twice; each piece needs an id of its own"
        )
    if absent := [name for name in pieces.specials if name is not None and name not in names]:
        raise UserError(f"the vocabulary of {folder} lacks {' and '.join(absent)}; the model needs them")
    if model is None:
        # SentencePiece's own sign for a space is none in a list of words.
        words = [name if name in pieces.specials else name.replace(SPACE, "_") for name in names]
        return Vocab(make_word_model(words, pieces.specials), name=str(folder))
    try:
        content = read_file(model, most=_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"{model} cannot be read: {error}; copy it again") from error
    numbered = renumber(content, names, pieces.specials, origin=str(model), unused=pieces.unused)
    return Vocab(numbered, name=str(model))


def _find_models(folder: Path, languages: Languages) -> dict[str, Path]:
    """Return the SentencePiece model of each side; {} if the folder has none."""
    found = sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES and file.is_file())
    return choose_sides(found, languages, what="SentencePiece models", folder=folder) if found else {}


def choose_sides(found: list[Path], languages: Languages, *, what: str, folder: Path) -> dict[str, Path]:
    """Return the file of each side, by names such as source.model or vocab.de.yml; a single file has both.

    Raises:
      UserError: several files, whose names do not say the side.
    """
    if len(found) == 1:
        return dict.fromkeys(_SIDES, found[0])
    marks = {
        side: {*marks, language} - {None}
        for (side, marks), language in zip(_SIDES.items(), languages, strict=True)
    }
    chosen = {
        side: [file for file in found if names & set(file.name.replace("_", ".").split("."))]
        for side, names in marks.items()
    }
    if any(len(files) != 1 for files in chosen.values()) or chosen["source"] == chosen["target"]:
        raise UserError(
            f"{folder} has several {what} ({', '.join(file.name for file in found)}); put source and target "
            "into their names, as in source.model, or leave one for both sides"
        )
    return {side: files[0] for side, files in chosen.items()}
