"""Trains, loads and saves a SentencePiece model, and tokenizes and detokenizes text with it."""

import functools
import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import sentencepiece

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.config import VocabConfig
from flaxformer_mt.config.files import read_file
from flaxformer_mt.errors import UserError
from flaxformer_mt.unicode_text import INVISIBLE
from flaxformer_mt.vocab.model_file import SPACE, set_normalization
from flaxformer_mt.vocab.subword_sampling import SubwordSampler, make_sampler

# The zero-width non-joiner and joiner change the form of adjacent letters: without them, Persian and Hindi
# words are misspelled, and emoji fall apart.
_JOINERS = frozenset("\u200c\u200d")


def leave_out_invisible(rules: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return normalization rules with additional rules that delete invisible characters, except joiners."""
    visible = {text: replacement for text, replacement in rules if text not in _JOINERS}
    return visible | dict.fromkeys(sorted(INVISIBLE), "")


# Training lines are split into segments of at most this many characters: SentencePiece silently skips lines
# of more than max_sentence_length bytes, and its unigram trainer's time grows superlinearly with line length.
_TRAINING_CHARACTERS = 1000
# Maximum number of sentences that a vocabulary is trained on.
_MOST_SENTENCES = 2_000_000
_TRAINING_BYTES = 4 * _TRAINING_CHARACTERS
# The unigram trainer's sums depend on the number of threads; a fixed number gives one model on every machine.
_TRAINING_THREADS = 16
# Larger files are rejected: models have a few MiB, and protocol buffers have at most 2 GiB.
_MODEL_BYTES = 1 << 30
# SentencePiece's log level; this module reports problems as UserError instead.
_ONLY_FATAL = 3


class TextPairs(Protocol):
    """A collection of pairs with `.source` and `.target`; words in its `tags`, if any, become subwords."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def select(self, numbers: np.ndarray) -> "TextPairs":
        """Return the pairs with these numbers, which must be ascending."""
        ...


class Vocab:
    """A vocabulary, made of a SentencePiece model, that converts text to ids and back.

    size: number of subwords. pad_id, bos_id, eos_id, unk_id: ids of the special symbols. bos_id is the first
    id of decoder inputs; for a model without bos, it is pad_id, as in Marian and T5.
    fingerprint: hex digest of the model.
    Only for pretrained models: tags, the ids of language tags by name; silent_ids, the ids of tags and other
    symbols at the start of texts, which detokenizing removes; num_forced, the number of silent ids at the
    start of every translation.
    """

    tags: Mapping[str, int] = MappingProxyType({})
    silent_ids: frozenset[int] = frozenset()
    num_forced: int = 0

    def __init__(self, model: bytes, *, name: str = "the vocabulary") -> None:
        self._processor = load_processor(model, name=name)
        self.size: int = self._processor.get_piece_size()
        self.pad_id: int = self._processor.pad_id()
        bos_id: int = self._processor.bos_id()
        self.bos_id = self.pad_id if bos_id < 0 else bos_id
        self.eos_id: int = self._processor.eos_id()
        self.unk_id: int = self._processor.unk_id()
        ids = {"pad": self.pad_id, "eos": self.eos_id}
        if missing := [symbol for symbol, symbol_id in ids.items() if symbol_id < 0]:
            raise UserError(
                f"{name} has no {' and no '.join(missing)} symbol (ids: {ids}, -1 if absent); train it with "
                + " ".join(f"--{symbol}_id=N" for symbol in missing)
            )
        self.model = model
        self._samplers: dict[float, SubwordSampler] = {}
        self.fingerprint = hashlib.sha256(model).hexdigest()

    def __reduce__(self) -> tuple[type["Vocab"], tuple[Any, ...]]:
        """Pickle the vocabulary, for a worker process, as its model."""
        return Vocab, (self.model,)

    @classmethod
    def load(cls, path: str | Path, *, name: str = "SentencePiece model") -> "Vocab":
        """Load a `.model` file; errors call the file `name`, which may be the config field with its path."""
        try:
            model = read_file(path, most=_MODEL_BYTES)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            pair = [Path(path).with_name(f"{side}.model") for side in ("source", "target")]
            remedy = "check the path"
            if Path(path).name == "joint.model" and all(file.is_file() for file in pair):
                remedy = "its folder has one for each side: set vocab.source_model and vocab.target_model"
            raise UserError(f"{name} {path} cannot be read: {reason}; {remedy}") from error
        return cls(model, name=f"{name} {path}")

    def save(self, path: Path) -> None:
        """Write the model atomically."""
        write_atomically(path, self.model)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, with eos at the end and without bos; the empty text gives [eos]."""
        return self.tokenize_all([text])[0].tolist()

    def tokenize_all(
        self, texts: Sequence[str], *, sampling: float = 0.0, seed: int | None = None, threads: int = -1
    ) -> list[np.ndarray]:
        """Return the ids of each text as an int32 array that ends in eos.

        `sampling` is the dropout rate of merges for a BPE model (Provilkov et al. 2020), or the smoothing
        parameter alpha for a unigram model (Kudo 2018); 0: no sampling. The same texts, sampling and seed
        give the same ids in every process. `threads`: number of threads without sampling; -1: one per core.
        """
        try:
            if sampling:
                return self._sample(list(texts), sampling, np.random.SeedSequence(seed))
            if len(texts) == 1:  # a list starts threads, which takes longer than tokenizing a sentence
                return [self._processor.encode(texts[0], add_eos=True, return_type="numpy")]
            return self._processor.encode(list(texts), add_eos=True, return_type="numpy", num_threads=threads)
        except (RuntimeError, TypeError):
            check_unicode(texts)
            raise

    def _sample(self, texts: list[str], rate: float, seed: np.random.SeedSequence) -> list[np.ndarray]:
        if rate not in self._samplers:
            sampler = make_sampler(self.model, rate)
            if sampler is None:
                raise UserError(
                    f"vocab.sampling is {rate}, but the vocabulary is neither bpe nor unigram; set 0"
                )
            self._samplers = {rate: sampler}
        normalized = [self._processor.normalize(text) for text in texts]
        return self._samplers[rate].sample(normalized, seed=seed, end=self.eos_id)

    def detokenize(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids` up to the first eos, without pad and bos, as one line."""
        return self.detokenize_all([np.asarray(ids).tolist()])[0]

    def detokenize_all(self, all_ids: Sequence[list[int]]) -> list[str]:
        """Return the text of each list of ids as `detokenize` does, without blocking other threads."""
        silent = (self.pad_id, self.bos_id)
        shown = [[token for token in up_to(ids, self.eos_id) if token not in silent] for ids in all_ids]
        # A list starts threads, which takes longer than detokenizing a sentence.
        texts = [self._processor.decode(shown[0])] if len(shown) == 1 else self._processor.decode(shown)
        # Byte subwords, and in a word model each unknown word, can also produce the symbol for a space.
        return [clean_line(text.removeprefix(SPACE).replace(SPACE, " ")) for text in texts]

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Return the subwords of ids as strings, including special symbols, with U+2581 for a space."""
        return [self._processor.id_to_piece(token) for token in np.asarray(ids).tolist()]


def load_processor(model: bytes, *, name: str) -> sentencepiece.SentencePieceProcessor:
    sentencepiece.set_min_log_level(_ONLY_FATAL)
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
        size = processor.get_piece_size()
    except RuntimeError as error:
        raise UserError(f"{name} is not a SentencePiece model; give a .model file of spm_train") from error
    if not size:
        raise UserError(f"{name} is an empty SentencePiece model; give a .model file of spm_train")
    return processor


def up_to(ids: list[int], eos_id: int) -> list[int]:
    return ids[: ids.index(eos_id)] if eos_id in ids else ids


def clean_line(text: str) -> str:
    """Return a decoded text as one line, without U+FFFD, which replaces invalid bytes."""
    return text.replace("\n", " ").replace("\r", " ").replace("\ufffd", "")


def check_unicode(texts: Iterable[str]) -> None:
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"text {text[:60]!r} is not valid Unicode: {error.reason} at character {error.start}; "
                "decode it as UTF-8"
            ) from error


def train_model(config: VocabConfig, pairs: TextPairs, sides: tuple[str, ...]) -> bytes:
    """Train a model on the text of `sides`, normalized for each side; the model itself does not normalize.

    Raises UserError if the text is empty or does not fit the vocabulary size.
    """
    lines, model = list(_read_lines(config, pairs, sides)), io.BytesIO()
    tags = getattr(pairs, "tags", ()) if "source" in sides else ()
    sentencepiece.set_min_log_level(_ONLY_FATAL)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=config.kind,
            vocab_size=config.size or 1 << 16,  # has no effect with use_all_vocab, which keeps all words
            use_all_vocab=config.size == 0,
            byte_fallback=config.byte_fallback,
            character_coverage=config.character_coverage,
            normalization_rule_name="identity",
            pad_id=config.pad_id,
            bos_id=config.bos_id,
            eos_id=config.eos_id,
            unk_id=config.unk_id,
            user_defined_symbols=[*config.symbols, *(SPACE + tag for tag in tags)],
            max_sentence_length=_TRAINING_BYTES,
            num_threads=_TRAINING_THREADS,
            minloglevel=_ONLY_FATAL,
        )
    except RuntimeError as error:
        raise _explain(str(error), config, sides) from error
    size = Vocab(model.getvalue()).size
    # A char model has one subword per character, whatever size is requested.
    if config.size not in (0, size):
        raise VocabularyTooLarge(config, sides, size)
    return model.getvalue()


def _normalization_of(config: VocabConfig, side: str) -> str:
    return config.normalization if side == "source" else config.target_normalization


def normalize_like(config: VocabConfig, model: bytes, side: str) -> bytes:
    """Return the model with the normalization rules of a side, so that other programs apply these rules."""
    name = _normalization_of(config, side)
    return set_normalization(model, name, _make_normalizer(name).serialized_normalizer_spec())


@functools.cache
def _make_normalizer(name: str) -> sentencepiece.SentencePieceNormalizer:
    sentencepiece.set_min_log_level(_ONLY_FATAL)
    # White space is left to the model, which processes it after applying its rules.
    options = ("add_dummy_prefix", "escape_whitespaces", "remove_extra_whitespaces")
    plain: dict[str, Any] = dict.fromkeys(options, False)
    named = sentencepiece.SentencePieceNormalizer(rule_name=name, **plain)
    if name == "identity":
        return named
    rules = leave_out_invisible(named.Decompile())
    return sentencepiece.SentencePieceNormalizer(norm_map=list(rules.items()), **plain)


def _read_lines(config: VocabConfig, pairs: TextPairs, sides: tuple[str, ...]) -> Iterator[str]:
    """Yield normalized training sentences: at most `_MOST_SENTENCES`, evenly spaced over the data."""
    normalizers = {side: _make_normalizer(_normalization_of(config, side)) for side in sides}
    total, wanted = len(pairs), max(1, _MOST_SENTENCES // len(sides))
    if wanted < total:
        pairs = pairs.select((np.arange(1, wanted + 1) * total + wanted - 1) // wanted - 1)
    for pair in pairs:
        for side, normalizer in normalizers.items():
            yield from _split_line(normalizer.Normalize(getattr(pair, side)))


def _split_line(line: str) -> Iterator[str]:
    """Split a long line before spaces, else inside words.

    With a limit of 4 characters, "ab cdefg" becomes "ab", " cde", "fg".
    """
    start = 0
    while len(line) - start > _TRAINING_CHARACTERS:
        space = line.rfind(" ", start + 1, start + _TRAINING_CHARACTERS + 1)
        end = space if space > 0 else start + _TRAINING_CHARACTERS
        yield line[start:end]
        start = end
    yield line[start:]


class VocabularyTooLarge(UserError):
    """The text is too small for a vocabulary of `vocab.size`; `maximum` is the largest possible size."""

    def __init__(self, config: VocabConfig, sides: tuple[str, ...], maximum: int) -> None:
        super().__init__(
            f"vocab.size {config.size} is more than the {' and '.join(sides)} text supports: it gives "
            f"{maximum} {config.kind} subwords; set vocab.size={maximum} or less, or train on more text"
        )
        self.maximum = maximum


def _explain(problem: str, config: VocabConfig, sides: tuple[str, ...]) -> UserError:
    """Describe an error of SentencePiece's trainer in terms of config fields."""
    where = " and ".join(sides)
    if match := re.search(r"Vocabulary size too high \(\d+\).* <= (\d+)", problem):
        return VocabularyTooLarge(config, sides, int(match[1]))
    match = re.search(r"smaller than required_chars\. \d+ vs (\d+)", problem)
    if match or "(vocab_size) >= (0)" in problem:
        least = int(match[1]) if match else 4 + 256 * config.byte_fallback
        return UserError(
            f"vocab.size {config.size} is less than the {least} symbols, bytes and characters that a "
            f"{config.kind} vocabulary of the {where} text contains; set vocab.size to {least} or more, "
            f"better several thousand, or lower vocab.character_coverage ({config.character_coverage})"
        )
    if "sentences_.empty()" in problem or "all_chars_count" in problem:
        return UserError(f"the {where} text to train the vocabulary on is empty; check data.dataset")
    return UserError(
        f"SentencePiece cannot train a {config.kind} vocabulary of {config.size} subwords: {problem}"
    )
