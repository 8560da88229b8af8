"""Vocabularies that the user gives to an import: SentencePiece models, or lists of words.

A list of words has a word a line, in the order of their ids, as torchtext's `vocab.get_itos()` gives them. It
becomes a SentencePiece model of kind word, which separates words at spaces and has the same ids; adjacent
unknown words get one id, as in every such model.
"""

from pathlib import Path

from flaxformer_mt.config.files import read_file
from flaxformer_mt.convert.sentencepiece_file import Specials, make_word_model
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocab, Vocabs, load_vocabs
from flaxformer_mt.vocab.model_file import SPACE

# Spellings of the special symbols.
_SPECIALS = {
    "pad": ("<pad>", "<blank>", "[PAD]"),
    "bos": ("<bos>", "<s>", "<sos>", "[BOS]"),
    "eos": ("<eos>", "</s>", "[EOS]"),
    "unk": ("<unk>", "[UNK]"),
}


def read_given_vocabs(path: Path) -> Vocabs:
    """Read the vocabularies at a path.

    Args:
      path: a folder with joint.model, or with source.model and target.model; or a folder with joint.txt, or
        with source.txt and target.txt, which are lists of words; or the file of a joint vocabulary.

    Raises:
      UserError: files are missing or damaged, or a list lacks a special symbol or repeats a word.
    """
    if path.is_file():
        vocab = _read_vocab(path)
        return Vocabs(vocab, vocab, joint=True)
    joint, source, target = (path / f"{name}.txt" for name in ("joint", "source", "target"))
    if joint.is_file():
        return read_given_vocabs(joint)
    if source.is_file() and target.is_file():
        return Vocabs(_read_vocab(source), _read_vocab(target), joint=False)
    return load_vocabs(path)


def _read_vocab(path: Path) -> Vocab:
    return Vocab.load(path) if path.suffix == ".model" else _read_words(path)


def _read_words(path: Path) -> Vocab:
    try:
        text = read_file(path, most=1 << 30).decode().replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a list of words that can be read: {error}") from error
    words = text.removesuffix("\n").split("\n")
    numbers: dict[str, int] = {}
    for number, word in enumerate(words):
        if not word or SPACE in word:
            what = f"contains {SPACE!r}, the symbol for a space" if word else "is empty"
            raise UserError(f"line {number + 1} of {path} {what}; each line is one word, in the order of ids")
        if word in numbers:
            raise UserError(f"lines {numbers[word] + 1} and {number + 1} of {path} are both {word!r}")
        numbers[word] = number
    found = {
        name: next((word for word in spellings if word in numbers), None)
        for name, spellings in _SPECIALS.items()
    }
    if missing := [f"{name} ({', '.join(_SPECIALS[name])})" for name, word in found.items() if word is None]:
        raise UserError(
            f"{path} lacks {' and '.join(missing)}; each special symbol needs a line, and so an id"
        )
    return Vocab(make_word_model(words, Specials(**found)), name=str(path))  # type: ignore[arg-type]
