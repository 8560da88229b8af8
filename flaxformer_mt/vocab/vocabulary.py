"""Text to ids and back: training, loading and saving of SentencePiece models.

Row 2 of the data path, and the only importer of sentencepiece. Contains the ids of pad, bos, eos and unk.
corpus/ reads text files, and data/ makes batches.
"""

import dataclasses
import functools
import hashlib
import io
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import sentencepiece

from flaxformer_mt.config import VocabConfig
from flaxformer_mt.config.files import read_file
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab.invisible_characters import leave_out_invisible
from flaxformer_mt.vocab.model_file import read_compiled_rules, set_normalization
from flaxformer_mt.vocab.subword_sampling import SubwordSampler, make_sampler
from flaxformer_mt.vocab.symbols import check_symbols

# SentencePiece's symbol for a space, U+2581.
_SPACE = "\u2581"
# Training lines are split into segments of at most this many characters: SentencePiece silently skips lines
# of more than max_sentence_length bytes, and its unigram trainer's time grows superlinearly with line length.
_TRAINING_CHARACTERS = 1000
_TRAINING_BYTES = 4 * _TRAINING_CHARACTERS
# The unigram trainer's sums depend on the number of threads; a fixed number gives one model on every machine.
_TRAINING_THREADS = 16
# Larger files are not read: protocol buffers end at 2 GiB, and models have a few MiB.
_MODEL_BYTES = 1 << 30
# SentencePiece's log level; this module reports problems as UserError instead.
_ONLY_FATAL = 3

_JOINT, _SOURCE, _TARGET = "joint.model", "source.model", "target.model"


class TextPairs(Protocol):
    """Sized, iterable pairs, each with `.source` and `.target`; words in `tags`, if any, become pieces."""

    def __len__(self) -> int:
        """The number of pairs."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """The pairs in order."""
        ...


class Vocab:
    """One SentencePiece model: text <-> ids.

    size: number of pieces. pad_id, bos_id, eos_id, unk_id: the special symbols. bos starts targets; for a
    model without bos, bos_id is pad_id, as in Marian and T5.
    fingerprint: hex digest of the model.
    """

    def __init__(self, model: bytes, *, name: str = "the vocabulary") -> None:
        """Load a serialized model; error messages refer to it as `name`.

        Raises:
          UserError: `model` is not a SentencePiece model, or has no pad or eos symbol.
        """
        sentencepiece.set_min_log_level(_ONLY_FATAL)
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
            self.size: int = self._processor.get_piece_size()
        except RuntimeError as error:
            raise UserError(
                f"{name} is not a SentencePiece model; give a .model file of spm_train"
            ) from error
        if not self.size:
            raise UserError(f"{name} is an empty SentencePiece model; give a .model file of spm_train")
        self.pad_id: int = self._processor.pad_id()
        bos_id: int = self._processor.bos_id()
        self.bos_id = self.pad_id if bos_id < 0 else bos_id
        self.eos_id: int = self._processor.eos_id()
        self.unk_id: int = self._processor.unk_id()
        ids = {"pad": self.pad_id, "eos": self.eos_id}
        missing = [symbol for symbol, symbol_id in ids.items() if symbol_id < 0]
        if missing:
            raise UserError(
                f"{name} has no {' and no '.join(missing)} symbol (ids: {ids}, -1 if absent); train it with "
                + " ".join(f"--{symbol}_id=N" for symbol in missing)
            )
        self._model = model
        self._samplers: dict[float, SubwordSampler] = {}
        self.fingerprint = hashlib.sha256(model).hexdigest()

    @classmethod
    def load(cls, path: str | Path, *, name: str = "SentencePiece model") -> "Vocab":
        """Load a `.model` file; `name` says in error messages where the path came from.

        Raises:
          UserError: the file is absent or unreadable, is not a model, or has no pad or eos symbol.
        """
        try:
            model = read_file(path, most=_MODEL_BYTES)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            pair = Path(path).with_name(_SOURCE), Path(path).with_name(_TARGET)
            remedy = "check the path"
            if Path(path).name == _JOINT and all(file.is_file() for file in pair):
                remedy = f"its folder has {_SOURCE} and {_TARGET}: set vocab.source_model and .target_model"
            raise UserError(f"{name} {path} cannot be read: {reason}; {remedy}") from error
        return cls(model, name=f"{name} {path}")

    def save(self, path: Path) -> None:
        """Write the model atomically: an existing file is replaced completely or not at all."""
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            partial.write_bytes(self._model)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`, with eos at the end and without bos; the empty text gives [eos]."""
        return self.tokenize_all([text])[0].tolist()

    def tokenize_all(
        self, texts: Sequence[str], *, sampling: float = 0.0, seed: int | None = None
    ) -> list[np.ndarray]:
        """Return the ids of many texts, each as an int32 array that ends in eos.

        Args:
          texts: any strings.
          sampling: subword regularisation, 0 for none: the merge dropout of a BPE model (Provilkov et al.
            2020), or the smoothing alpha of samples from all segmentations of a unigram model (Kudo 2018).
          seed: the seed of sampling; the same texts, sampling and seed give the same ids in every process.

        Raises:
          UserError: a text is not valid Unicode, or `sampling` is on for a char or word model.
        """
        if sampling and seed is None:
            raise ValueError("sampling needs a seed")
        try:
            if sampling:
                return self._sample(list(texts), sampling, np.random.SeedSequence(seed))
            if len(texts) == 1:  # a list starts threads, which takes longer than a sentence
                return [self._processor.encode(texts[0], add_eos=True, return_type="numpy")]
            return self._processor.encode(list(texts), add_eos=True, return_type="numpy")
        except (RuntimeError, TypeError):
            _check_unicode(texts)
            raise

    def _sample(self, texts: list[str], rate: float, seed: np.random.SeedSequence) -> list[np.ndarray]:
        if rate not in self._samplers:
            sampler = make_sampler(self._model, rate)
            if sampler is None:
                raise UserError(
                    f"vocab.sampling is {rate}, but the vocabulary is neither bpe nor unigram; set 0"
                )
            self._samplers = {rate: sampler}
        normalized = [self._processor.normalize(text) for text in texts]
        return self._samplers[rate].sample(normalized, seed=seed, end=self.eos_id)

    def detokenize(self, ids: Sequence[int] | np.ndarray) -> str:
        r"""Return the text of `ids` up to the first eos, without pad and bos, always as a single line.

        A model with byte fallback can produce any byte, so "\n" and "\r" are replaced by spaces.
        """
        kept = []
        for token in np.asarray(ids).tolist():
            if token == self.eos_id:
                break
            if token not in (self.pad_id, self.bos_id):
                kept.append(token)
        text = self._processor.decode(kept)
        # Byte pieces, and a word model before each unknown word, can also produce the symbol for a space.
        return text.removeprefix(_SPACE).replace(_SPACE, " ").replace("\n", " ").replace("\r", " ")

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Return the pieces of `ids` as strings, with special symbols, and spaces as U+2581."""
        return [self._processor.id_to_piece(token) for token in np.asarray(ids).tolist()]


def _check_unicode(texts: Iterable[str]) -> None:
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"text {text[:60]!r} is not valid Unicode: {error.reason} at character {error.start}; "
                "decode it as UTF-8"
            ) from error


@dataclass(frozen=True)
class Vocabs:
    """The source and the target vocabulary; if `joint`, both have the same pieces and ids."""

    source: Vocab
    target: Vocab
    joint: bool

    def __post_init__(self) -> None:
        """Refuse models with different pad ids: a batch has one pad id."""
        if self.source.pad_id != self.target.pad_id:
            raise UserError(
                f"the source vocabulary has pad id {self.source.pad_id}, the target vocabulary "
                f"{self.target.pad_id}; train both with the same --pad_id"
            )

    def save(self, directory: str | Path) -> None:
        """Write joint.model, or source.model and target.model if the two differ."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if self.joint and self.source.fingerprint == self.target.fingerprint:
            self.source.save(directory / _JOINT)
        else:
            self.source.save(directory / _SOURCE)
            self.target.save(directory / _TARGET)

    @classmethod
    def load(cls, directory: str | Path) -> "Vocabs":
        """Load the vocabularies that `save` wrote.

        Raises:
          UserError: the models are absent or damaged, or both joint and separate models exist.
        """
        directory = Path(directory)
        joint, source, target = (directory / name for name in (_JOINT, _SOURCE, _TARGET))
        separate = source.is_file() and target.is_file()
        if joint.is_file() and separate:
            raise UserError(
                f"{directory} holds both {_JOINT} and {_SOURCE} + {_TARGET}; remove the unused files"
            )
        if joint.is_file():
            vocab = Vocab.load(joint)
            return cls(vocab, vocab, joint=True)
        if separate:
            one, other = Vocab.load(source), Vocab.load(target)
            alike = one.pieces(range(one.size)) == other.pieces(range(other.size))
            # Different models with the same pieces are one imported vocabulary with two segmentations.
            return cls(one, other, joint=alike and one.fingerprint != other.fingerprint)
        raise UserError(f"{directory} holds no vocabulary: it needs {_JOINT}, or {_SOURCE} and {_TARGET}")


def load_vocabs(directory: str | Path) -> Vocabs:
    """Load the vocabularies of a run; see `Vocabs.load`."""
    return Vocabs.load(directory)


def make_vocabs(
    config: VocabConfig, pairs: TextPairs, directory: str | Path, *, target_only: bool = False
) -> Vocabs:
    """Load the vocabularies in `directory`; if it has none, save the given models or trained ones there.

    Training is deterministic: the same pairs and config give the same bytes. With `target_only` one model is
    trained on the targets, whatever `config.joint` says. The models of a joint vocabulary have the same
    pieces, and differ in the normalization of the text.

    Raises:
      UserError: the saved or given models contradict `config`, or `pairs` are too few for it.
    """
    directory = Path(directory)
    if target_only:
        own = config.target_normalization
        config = dataclasses.replace(config, joint=True, source_size=None, normalization=own)
    if (directory / _JOINT).is_file() or (
        (directory / _SOURCE).is_file() and (directory / _TARGET).is_file()
    ):
        vocabs = Vocabs.load(directory)
        if vocabs.source is not vocabs.target and not config.joint:
            # Two vocabularies that happen to have the same pieces, of two texts that are equal.
            vocabs = dataclasses.replace(vocabs, joint=False)
        _check_agrees(vocabs, config, directory)
        return vocabs
    if config.joint:
        vocabs = _load_or_train_joint(config, pairs, target_only=target_only)
    else:
        vocabs = Vocabs(
            _load_or_train(dataclasses.replace(config, size=config.size_of_source), pairs, "source"),
            _load_or_train(config, pairs, "target"),
            joint=False,
        )
    vocabs.save(directory)
    return vocabs


def _check_agrees(vocabs: Vocabs, config: VocabConfig, directory: Path) -> None:
    remedy = f"set it back, or remove {directory} or use another run directory for a new vocabulary"
    if vocabs.joint != config.joint:
        raise UserError(f"vocab.joint is {config.joint}, but {directory} holds {vocabs.joint}; {remedy}")
    for side, given in [("source", config.source_model), ("target", config.target_model or config.joint)]:
        size = getattr(vocabs, side).size
        wanted = config.size_of_source if side == "source" else config.size
        if not given and wanted and size != wanted:
            raise UserError(f"vocab.size is {wanted}, but {directory} holds {size} {side} pieces; {remedy}")


def _load_or_train_joint(config: VocabConfig, pairs: TextPairs, *, target_only: bool) -> Vocabs:
    if config.target_model and target_only:
        raise UserError(
            f"vocab.target_model is {config.target_model}, but one model serves all text; set it as "
            "vocab.source_model"
        )
    if config.target_model and not config.source_model:
        raise UserError(
            f"vocab.target_model is {config.target_model}, but vocab.source_model is empty and vocab.joint "
            "is True; set vocab.source_model to the model of the same vocabulary, or vocab.joint=False"
        )
    if config.source_model:
        source = _load(config, "source")
        target = _load(config, "target") if config.target_model else source
        if source.pieces(range(source.size)) != target.pieces(range(target.size)):
            raise UserError(
                f"vocab.source_model {config.source_model} and vocab.target_model {config.target_model} have "
                "different pieces, but vocab.joint is True; give two models of one joint vocabulary, or set "
                "vocab.joint=False"
            )
        return Vocabs(source, target, joint=True)
    model = _train(config, pairs, ("target",) if target_only else ("source", "target"))
    source, target = (Vocab(_normalize_like(config, model, side)) for side in ("source", "target"))
    return Vocabs(source, source if source.fingerprint == target.fingerprint else target, joint=True)


def _load_or_train(config: VocabConfig, pairs: TextPairs, side: str) -> Vocab:
    if getattr(config, f"{side}_model"):
        return _load(config, side)
    return Vocab(_normalize_like(config, _train(config, pairs, (side,)), side))


def _load(config: VocabConfig, side: str) -> Vocab:
    given = getattr(config, f"{side}_model")
    vocab = Vocab.load(given, name=f"vocab.{side}_model")
    check_symbols(vocab, config.symbols, name=given)
    return vocab


def _train(config: VocabConfig, pairs: TextPairs, sides: tuple[str, ...]) -> bytes:
    """Train a model without normalization on text that is normalized as that of its side."""
    lines, model = _Lines(config, pairs, sides), io.BytesIO()
    tags = getattr(pairs, "tags", ()) if "source" in sides else ()
    sentencepiece.set_min_log_level(_ONLY_FATAL)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=config.kind,
            vocab_size=config.size or 1 << 16,  # any number, where use_all_vocab keeps all words
            use_all_vocab=config.size == 0,
            byte_fallback=config.byte_fallback,
            character_coverage=config.character_coverage,
            normalization_rule_name="identity",
            pad_id=config.pad_id,
            bos_id=config.bos_id,
            eos_id=config.eos_id,
            unk_id=config.unk_id,
            user_defined_symbols=[*config.symbols, *(_SPACE + tag for tag in tags)],
            max_sentence_length=_TRAINING_BYTES,
            num_threads=_TRAINING_THREADS,
            minloglevel=_ONLY_FATAL,
        )
    except RuntimeError as error:
        if lines.error is not None:
            raise lines.error from None
        raise _explain(str(error), config, sides) from error
    size = Vocab(model.getvalue()).size
    # A char model has one piece per character, whatever size is requested.
    if config.size not in (0, size):
        raise VocabularyTooLarge(config, sides, size)
    return model.getvalue()


def _normalization_of(config: VocabConfig, side: str) -> str:
    return config.normalization if side == "source" else config.target_normalization


def _normalize_like(config: VocabConfig, model: bytes, side: str) -> bytes:
    """Return a model with the normalization of a side, which foreign programs apply too."""
    name = _normalization_of(config, side)
    rules = read_compiled_rules(_make_normalizer(name).serialized_normalizer_spec())
    return set_normalization(model, name, rules)


@functools.cache
def _make_normalizer(name: str) -> sentencepiece.SentencePieceNormalizer:
    """Make the normalizer of a name: its rules, and those that leave out what nobody sees."""
    sentencepiece.set_min_log_level(_ONLY_FATAL)
    # White space is left to the model, which treats it after its rules.
    options = ("add_dummy_prefix", "escape_whitespaces", "remove_extra_whitespaces")
    plain: dict[str, Any] = dict.fromkeys(options, False)
    named = sentencepiece.SentencePieceNormalizer(rule_name=name, **plain)
    if name == "identity":
        return named
    rules = leave_out_invisible(named.Decompile())
    return sentencepiece.SentencePieceNormalizer(norm_map=list(rules.items()), **plain)


class _Lines:
    """The normalized sentences to train on, at most `max_sentences`, evenly spaced over the data.

    error: the exception raised by reading the pairs, which SentencePiece would convert to its own error.
    """

    def __init__(self, config: VocabConfig, pairs: TextPairs, sides: tuple[str, ...]) -> None:
        self._pairs = pairs
        self._normalizers = {side: _make_normalizer(_normalization_of(config, side)) for side in sides}
        self._wanted = min(len(pairs), max(1, config.max_sentences // len(sides)))
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        total, wanted = len(self._pairs), self._wanted
        try:
            for index, pair in enumerate(self._pairs):
                if (index + 1) * wanted // total > index * wanted // total:
                    for side, normalizer in self._normalizers.items():
                        yield from _split_line(normalizer.Normalize(getattr(pair, side)))
        except BaseException as error:
            self.error = error
            raise


def _split_line(line: str) -> Iterator[str]:
    """Split a long line before spaces or else inside words; at limit 4, "ab cdefg" -> "ab", " cde", "fg"."""
    start = 0
    while len(line) - start > _TRAINING_CHARACTERS:
        space = line.rfind(" ", start + 1, start + _TRAINING_CHARACTERS + 1)
        end = space if space > 0 else start + _TRAINING_CHARACTERS
        yield line[start:end]
        start = end
    yield line[start:]


class VocabularyTooLarge(UserError):
    """The text does not support as many pieces as `vocab.size`; `maximum` is the number that it supports."""

    def __init__(self, config: VocabConfig, sides: tuple[str, ...], maximum: int) -> None:
        super().__init__(
            f"vocab.size {config.size} is more than the {' and '.join(sides)} text supports: it gives "
            f"{maximum} {config.kind} pieces; set vocab.size={maximum} or less, or train on more text"
        )
        self.maximum = maximum


def _explain(problem: str, config: VocabConfig, sides: tuple[str, ...]) -> UserError:
    """Describe an error of SentencePiece's trainer in terms of config fields."""
    where = " and ".join(sides)
    if match := re.search(r"Vocabulary size too high \(\d+\).* <= (\d+)", problem):
        return VocabularyTooLarge(config, sides, int(match[1]))
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", problem):
        return UserError(
            f"vocab.size {config.size} is less than the {match[1]} symbols, bytes and characters that a "
            f"{config.kind} vocabulary of the {where} text contains; set vocab.size to {match[1]} or more, "
            f"better several thousand, or lower vocab.character_coverage ({config.character_coverage})"
        )
    if "(vocab_size) >= (0)" in problem:
        least = 4 + 256 * config.byte_fallback
        symbols = f"special symbols{' and bytes' * config.byte_fallback}"
        return UserError(
            f"vocab.size {config.size} is less than the {least} {symbols}; set vocab.size above {least}"
        )
    if "sentences_.empty()" in problem or "all_chars_count" in problem:
        return UserError(f"the {where} text to train the vocabulary on is empty; check data.dataset")
    return UserError(
        f"SentencePiece cannot train a {config.kind} vocabulary of {config.size} pieces: {problem}"
    )
