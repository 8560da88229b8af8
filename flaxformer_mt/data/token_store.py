"""Token ids on disk: every pair is tokenized once, then memory-mapped.

Row 3 of the data path. Contains the files of a token store and their lifetime: a store is built once for the
same pairs, vocabularies and sampling, and appears complete or not at all, even when several processes build
it at the same time.
"""

import hashlib
import itertools
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flaxformer_mt.corpus.pairs import Pair, Pairs, Part
from flaxformer_mt.data.growing_array import GrowingArray
from flaxformer_mt.data.piece_links import PieceLinks, PieceLinkWriter, open_piece_links
from flaxformer_mt.data.teacher_scores import TeacherScores
from flaxformer_mt.data.text_noise import TextNoise, spread_languages
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.runs import atomic_folder
from flaxformer_mt.vocab import Vocabs

# Part of every store's key: raise it when the file format changes, or when the same inputs give other ids.
_FORMAT = 1
# Part of the key of stores with subword sampling: raise it when the same seed gives other segmentations.
_SAMPLING_FORMAT = 2
# Pairs tokenized at a time. Each chunk has its own sampling seed, so this number is part of the format.
_CHUNK = 16384
_META = "meta.json"
_SIDES = ("source", "target")
# The folder of a killed build is removed after this time without a change in it.
_STALE_SECONDS = 24 * 3600

# Tokens that are counted at a time.
_COUNTED = 1 << 22


class BuildStopped(Exception):
    """Raised when a build ends because its `stop` event is set; callers that pass no event never see it."""


class Side(NamedTuple):
    """One language: `tokens[offsets[i]:offsets[i + 1]]` are the `lengths[i]` token ids of sentence i."""

    tokens: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray


class _Drawing(NamedTuple):
    """What is drawn at random in a store: the segmentation, and the noise of the text."""

    sampling: float
    seed: int
    noise: TextNoise | None


class TokenStore:
    """Token ids of all pairs of a split, without padding; each sentence ends in eos.

    source, target: the two sides as flat arrays; the sources of a language model have no tokens, not even
    eos. parts: the data sets of a mixture, in order. folder: the folder of the store; None: in memory.
    weights: of the pairs in the loss; None: all are 1. links: the alignments of the pairs, if they have any.
    teacher: the teacher's scores of the targets, if there are any.
    """

    def __init__(
        self,
        folder: Path | None,
        source: Side,
        target: Side,
        parts: tuple[Part, ...],
        weights: np.ndarray | None = None,
        links: PieceLinks | None = None,
        teacher: TeacherScores | None = None,
    ) -> None:
        self.folder, self.parts = folder, parts
        self.source, self.target = source, target
        self.weights, self.links, self.teacher = weights, links, teacher

    @classmethod
    def build(
        cls,
        pairs: Pairs,
        vocabs: Vocabs,
        root: str | Path,
        *,
        sampling: float = 0.0,
        seed: int = 0,
        noise: TextNoise | None = None,
        stop: threading.Event | None = None,
    ) -> "TokenStore":
        """Opens the store of these pairs and vocabularies under `root`; writes a missing store first.

        The digests of all files are verified. A damaged store is written again, with a warning.

        Args:
          pairs: read once, in order, with bounded memory.
          vocabs: of both sides; the source vocabulary is unused if `pairs` have no source.
          root: a cache folder; it may hold many stores.
          sampling: subword regularisation of both sides, see `Vocab.tokenize_all`. 0: none.
          seed: seed of the sampling and of the noise.
          noise: what is changed in the text before it is tokenized; None: nothing.
          stop: when another thread sets this event, a build in progress removes its files and raises
            `BuildStopped`.

        Raises:
          UserError: there are no pairs, `root` is not writable, or a teacher's scores are of other targets.
        """
        if not len(pairs):
            raise UserError("there are no sentence pairs to tokenize; check data.dataset and data.clean")
        drawing = _Drawing(sampling, seed, noise)
        folder = Path(root) / f"tokens-{_key(pairs, vocabs, drawing)}"
        damage = ""
        for _ in range(3):  # another run on the same cache may remove a sampled store before it is opened
            if os.path.lexists(folder):
                try:
                    linked = bool(pairs.links_identity)
                    source, target, links = _open_arrays(folder, len(pairs), linked=linked)
                    teacher = None
                    if pairs.scores:
                        teacher = TeacherScores(pairs, vocabs.target, target.tokens, target.offsets)
                    return cls(folder, source, target, pairs.parts, pairs.weights, links, teacher)
                except _Damage as error:
                    if os.path.lexists(folder):
                        damage = str(error)
                        warn_user(f"the token store {folder} is damaged: {damage}; it is built again")
                        _remove_folder(folder)
            present = _SIDES if pairs.has_source else _SIDES[1:]
            word_links = pairs.read_links() if pairs.links_identity else None
            texts = _noisy_chunks(pairs, stop, drawing)
            _write_store(folder, texts, vocabs, present, drawing, word_links)
        raise UserError(
            f"the token store {folder} is damaged again whenever it is written: {damage}; set "
            "data.cache_dir to a folder on another disk"
        )

    @classmethod
    def from_targets(cls, sentences: Sequence[np.ndarray]) -> "TokenStore":
        """Makes a store in memory from given token ids, without sources; each sentence ends in eos."""
        lengths = np.array([len(ids) for ids in sentences], np.int32)
        nothing = Side(np.zeros(0, np.int32), np.zeros(len(lengths) + 1, np.int64), np.zeros_like(lengths))
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        target = Side(np.concatenate(sentences), offsets, lengths)
        return cls(None, nothing, target, (Part("memory", len(lengths), 1.0),))

    def __len__(self) -> int:
        return len(self.target.lengths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (source, target) of one pair, with eos, without padding; no source: an empty array."""
        if not 0 <= index < len(self):
            raise IndexError(f"pair index {index} is out of range: the store has {len(self)} pairs")
        sides = (self.source, self.target)
        source, target = (side.tokens[side.offsets[index] : side.offsets[index + 1]] for side in sides)
        return source, target

    @property
    def source_lengths(self) -> np.ndarray:
        """Number of tokens of each source sentence, eos included; int32, 0 where there is no source."""
        return self.source.lengths

    @property
    def target_lengths(self) -> np.ndarray:
        """Number of tokens of each target sentence, eos included; int32."""
        return self.target.lengths

    def count_tokens(self, *, source_size: int, target_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns how often each id of the source vocabulary, and of the target vocabulary, occurs: int64."""
        counts = []
        for side, size in ((self.source, source_size), (self.target, target_size)):
            total = np.zeros(size, np.int64)
            for start in range(0, len(side.tokens), _COUNTED):  # memory stays bounded
                total += np.bincount(side.tokens[start : start + _COUNTED], minlength=size)
            counts.append(total)
        return counts[0], counts[1]


def fold(*numbers: int) -> int:
    """Derives one 64-bit seed from several integers of any size and sign."""
    words = [number & 0xFFFF_FFFF_FFFF_FFFF for number in numbers]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def _key(pairs: Pairs, vocabs: Vocabs, drawing: _Drawing) -> str:
    sampling, seed, noise = drawing
    identity = [
        _FORMAT,
        pairs.fingerprint,
        len(pairs),
        vocabs.source.fingerprint,
        vocabs.target.fingerprint,
        *((sampling, seed, _SAMPLING_FORMAT) if sampling else ()),
        *(("noise", seed, noise.identity) if noise else ()),
        *(() if pairs.has_source else ("target alone",)),
        *(("links", pairs.links_identity) if pairs.links_identity else ()),
    ]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]


class _Damage(Exception):
    """The files of a store are not those that were written."""


def _open_arrays(folder: Path, size: int, *, linked: bool) -> tuple[Side, Side, PieceLinks | None]:
    """Verifies the digests of all files and maps them; raises _Damage, UserError if they cannot be read."""
    try:
        if damage := atomic_folder.find_damage(folder):
            raise _Damage(damage)
        counts = json.loads((folder / _META).read_bytes())["tokens"]
        source, target = (_open_side(folder, name) for name in _SIDES)
        links = open_piece_links(folder) if linked else None
    except PermissionError as error:
        raise UserError(
            f"the token store {folder} cannot be read: {error}; set data.cache_dir to another folder"
        ) from error
    except (OSError, ValueError, KeyError, EOFError) as error:
        # removed meanwhile by another run, or another program wrote the files and their manifest
        raise _Damage(f"{type(error).__name__} while the files were opened") from error
    for name, side in zip(_SIDES, (source, target), strict=True):
        sentences, tokens = len(side.lengths), len(side.tokens)
        if (sentences, tokens, side.offsets[-1]) != (size, counts[name], counts[name]):
            raise _Damage(
                f"it has {sentences} {name} sentences and {tokens} tokens, but {size} and {counts[name]} "
                "were written"
            )
    return source, target, links


def _open_side(folder: Path, name: str) -> Side:
    tokens = np.load(folder / f"{name}.tokens.npy", mmap_mode="r").view(np.ndarray)
    offsets = np.load(folder / f"{name}.offsets.npy", mmap_mode="r").view(np.ndarray)
    return Side(tokens, offsets, np.diff(offsets).astype(np.int32))


def _write_store(
    folder: Path,
    chunks: Iterable[list[Pair]],
    vocabs: Vocabs,
    sides: tuple[str, ...],
    drawing: _Drawing,
    word_links: Iterator[np.ndarray] | None,
) -> None:
    """Writes a partial folder and renames it to `folder`; the store of a faster process is kept instead."""
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        _remove_leftovers(folder.parent)
        counts = {
            name: writer.size
            for name, writer in _tokenize_into(partial, chunks, vocabs, sides, drawing, word_links).items()
        }
        meta = {"format": _FORMAT, "tokens": counts, "sampling": drawing.sampling, "seed": drawing.seed}
        (partial / _META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        atomic_folder.seal_folder(partial, {})
        try:
            os.rename(partial, folder)
        except OSError:
            if not folder.is_dir():
                raise
    except OSError as error:
        raise UserError(
            f"the token store {folder} cannot be written: {error}; free disk space or set data.cache_dir"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _tokenize_into(
    folder: Path,
    chunks: Iterable[list[Pair]],
    vocabs: Vocabs,
    present: tuple[str, ...],
    drawing: _Drawing,
    word_links: Iterator[np.ndarray] | None,
) -> dict[str, GrowingArray]:
    """Writes both sides; a side that is not in `present` gets the same number of empty sentences."""
    sides = list(zip(_SIDES, (vocabs.source, vocabs.target), strict=True))
    tokens = {
        name: GrowingArray(folder / f"{name}.tokens.npy", np.uint16 if vocab.size <= 1 << 16 else np.int32)
        for name, vocab in sides
    }
    offsets = {name: GrowingArray(folder / f"{name}.offsets.npy", np.int64) for name, _ in sides}
    linked = None if word_links is None else PieceLinkWriter(folder, vocabs, word_links)
    try:
        for name in offsets:
            offsets[name].append(np.zeros(1, np.int64))
        for number, chunk in enumerate(chunks):
            found: list[list[np.ndarray]] = []
            for which, (name, vocab) in enumerate(sides):
                if name not in present:
                    offsets[name].append(np.zeros(len(chunk), np.int64))
                    continue
                ids = vocab.tokenize_all(
                    [pair[which] for pair in chunk],
                    sampling=drawing.sampling,
                    seed=fold(drawing.seed, number, which),
                )
                lengths = np.fromiter(map(len, ids), np.int64, len(ids))
                offsets[name].append(tokens[name].size + np.cumsum(lengths))
                tokens[name].append(np.concatenate(ids))
                found.append(ids)
            if linked is not None:
                linked.add(chunk, found)
    finally:
        for writer in itertools.chain(tokens.values(), offsets.values()):
            writer.close()
        if linked is not None:
            linked.close()
    return tokens


def _noisy_chunks(pairs: Pairs, stop: threading.Event | None, drawing: _Drawing) -> Iterator[list[Pair]]:
    """Reads the pairs in chunks, with noise and tags of targets; raises BuildStopped once `stop` is set."""
    noise, iterator = drawing.noise, iter(pairs)
    tags = pairs.read_target_tags() if pairs.target_tags else None
    languages = spread_languages(pairs.parts, pairs.languages) if noise else None
    for number in itertools.count():
        chunk = []
        for pair in itertools.islice(iterator, _CHUNK):
            if stop is not None and stop.is_set():
                raise BuildStopped
            chunk.append(pair)
        if not chunk:
            return
        if noise and languages:
            # Sides have the numbers 0 and 1 in the seeds of their segmentations.
            chunk = noise.apply(chunk, seed=fold(drawing.seed, number, 2), languages=languages)
        if tags is not None:
            chunk = [pair._replace(target=next(tags) + pair.target) for pair in chunk]
        yield chunk


def remove_store(store: TokenStore) -> None:
    """Removes a store from the disk; the folder is renamed first, so that it disappears at once."""
    assert store.folder is not None, "a store in memory has no folder to remove"
    _remove_folder(store.folder)


def _remove_folder(folder: Path) -> None:
    doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        os.rename(folder, doomed)
    except FileNotFoundError:
        return  # another run on the same cache was faster
    except OSError as error:
        raise UserError(
            f"the token store {folder} cannot be removed: {error}; remove it, or set data.cache_dir to "
            "another folder"
        ) from error
    if doomed.is_dir() and not doomed.is_symlink():
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        doomed.unlink(missing_ok=True)  # a file or a link in the place of a store


def _remove_leftovers(root: Path) -> None:
    """Removes the folders of builds that were killed more than a day ago."""
    for partial in root.glob(".tokens-*"):
        try:
            changed = max(path.stat().st_mtime for path in (partial, *partial.iterdir()))
        except FileNotFoundError:
            continue  # the build has just finished
        if time.time() - changed > _STALE_SECONDS:
            shutil.rmtree(partial, ignore_errors=True)
