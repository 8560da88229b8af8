"""Token ids on disk: every pair is tokenized once, then memory-mapped.

A store is built once for the same pairs, vocabularies and sampling, by workers,
and appears complete or not at all, even when several processes build it at the same time.
"""

import contextlib
import hashlib
import itertools
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt import file_lock
from flaxformer_mt.corpus.caches import read_cached, write_cached
from flaxformer_mt.corpus.pairs import Pair, Pairs, Part
from flaxformer_mt.corpus.score_files import ScoreFile, checksum
from flaxformer_mt.data.piece_links import ChunkLinks, PieceLinker, PieceLinks, open_piece_links
from flaxformer_mt.data.text_noise import TextNoise, spread_languages
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.runs import atomic_folder
from flaxformer_mt.shapes import TeacherTokens
from flaxformer_mt.vocab import Vocab, Vocabs
from flaxformer_mt.workers.worker_pool import NO_POOL, PoolOptions, factory_of, open_pool


class GrowingArray:
    """A one-dimensional .npy file that grows at its end; its header has space for the largest size."""

    def __init__(self, path: Path, dtype: type | np.dtype, *, size: int = 0) -> None:
        """Make a file, or go on after the first `size` values of an unfinished one."""
        self.size = size
        self._dtype = np.dtype(dtype)
        self._file = path.open("r+b" if size else "wb")
        self._write_header()
        self._start = self._file.tell()
        self._file.truncate(self._start + size * self._dtype.itemsize)
        self._file.seek(0, os.SEEK_END)

    def append(self, values: np.ndarray) -> None:
        self._file.write(values.astype(self._dtype, copy=False).tobytes())
        self.size += len(values)

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()
            assert self._file.tell() == self._start, "the .npy header exceeds its reserved space"
            self.flush()

    def _write_header(self) -> None:
        np.lib.format.write_array_header_1_0(
            self._file, {"descr": self._dtype.str, "fortran_order": False, "shape": (self.size,)}
        )


class Drawing(NamedTuple):
    """What is drawn at random in a store: the segmentation, and the noise of the text."""

    sampling: float
    seed: int
    noise: TextNoise | None


class TextChunk(NamedTuple):
    """Consecutive pairs; languages only with noise, target tags (put before targets after it) and links
    [K, 2], positions of source and target words, only if there are any.
    """

    number: int
    sources: list[str]
    targets: list[str]
    languages: Sequence[tuple[str, str]] | None
    target_tags: list[str] | None
    links: list[np.ndarray] | None


class TokenizedChunk(NamedTuple):
    """For source and target, the token ids of all pairs one after the other, and the number of each pair."""

    sides: list[tuple[np.ndarray, np.ndarray]]
    links: ChunkLinks | None


@dataclass
class TokenizeChunks:
    """Tokenizes chunks of pairs to ids of `dtypes`; `threads` are SentencePiece's, -1: one for each core."""

    vocabs: Vocabs
    drawing: Drawing
    dtypes: tuple[np.dtype, ...]
    has_source: bool
    linked: bool
    threads: int

    def __post_init__(self) -> None:
        self._linker = PieceLinker(self.vocabs) if self.linked else None

    def __call__(self, block: TextChunk) -> TokenizedChunk:
        """A function of the chunk's number, its texts and the seed."""
        sampling, seed, noise = self.drawing
        texts = (block.sources, block.targets)
        if noise is not None and block.languages is not None:
            pairs = [Pair(*both) for both in zip(*texts, strict=True)]
            # Sides have the numbers 0 and 1 in the seeds of their segmentations.
            pairs = noise.apply(pairs, seed=fold(seed, block.number, 2), languages=block.languages)
            texts = ([pair.source for pair in pairs], [pair.target for pair in pairs])
        if block.target_tags is not None:
            targets = map("".join, zip(block.target_tags, texts[1], strict=True))
            texts = (texts[0], list(targets))
        sides, ids = [], []
        for which, vocab in enumerate((self.vocabs.source, self.vocabs.target)):
            if which == 0 and not self.has_source:
                sides.append((np.zeros(0, self.dtypes[0]), np.zeros(len(texts[0]), np.int64)))
                continue
            tokens = vocab.tokenize_all(
                texts[which], sampling=sampling, seed=fold(seed, block.number, which), threads=self.threads
            )
            lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
            sides.append((np.concatenate(tokens).astype(self.dtypes[which]), lengths))
            ids.append(tokens)
        links = None
        if self._linker is not None and block.links is not None:
            links = self._linker.link(texts, ids, block.links)
        return TokenizedChunk(sides, links)

    def describe(self) -> dict[str, Any]:
        return {"vocabularies": [self.vocabs.source.fingerprint, self.vocabs.target.fingerprint]}


def fold(*numbers: int) -> int:
    """Derive one 64-bit seed from several integers of any size and sign."""
    words = [number & 0xFFFF_FFFF_FFFF_FFFF for number in numbers]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


# Number of pairs whose token ids are compared; the lengths of all are.
_COMPARED = 4096


class TeacherScores:
    """The scores of all pairs of a token store; pairs whose data set has none have no probabilities."""

    def __init__(self, pairs: Pairs, vocab: Vocab, tokens: np.ndarray, offsets: np.ndarray) -> None:
        self.files: Sequence[ScoreFile | None] = pairs.scores
        present = [file for file in self.files if file is not None]
        for file in present:
            if file.vocabulary != vocab.fingerprint:
                raise UserError(
                    f"{file.path} has scores of the target vocabulary {file.vocabulary[:12]}, but this "
                    f"training has {vocab.fingerprint[:12]}; train with the vocabulary of the teacher, with "
                    "--config.vocab.source_model=RUN/vocab/source.model "
                    "--config.vocab.target_model=RUN/vocab/target.model, or both as RUN/vocab/joint.model"
                )
        self.top_k = max(file.top_k for file in present)
        self._part, rows = pairs.find_scores()
        self._starts = np.full(len(rows), -1, np.int64)  # -1: no scores
        lengths = np.diff(offsets)
        for number, scored in enumerate(self.files):
            if scored is None:
                continue
            members = np.flatnonzero(self._part == number)
            counts = np.diff(scored.offsets)[rows[members]]
            wrong = (counts != lengths[members]) & (counts > 0)
            for index in members[np.linspace(0, len(members) - 1, min(_COMPARED, len(members))).astype(int)]:
                start, end = offsets[index], offsets[index + 1]
                if scored.offsets[rows[index] + 1] > scored.offsets[rows[index]]:
                    wrong[np.searchsorted(members, index)] |= (
                        checksum(tokens[start:end]) != scored.checks[rows[index]]
                    )
            if wrong.any():
                raise UserError(
                    f"{scored.path} has scores of other targets than the text, first in row "
                    f"{rows[members[wrong]].min() + 1}; make them for this text with distil --teacher_scores"
                )
            self._starts[members[counts > 0]] = scored.offsets[rows[members[counts > 0]]]

    def lay_out(
        self,
        examples: np.ndarray,
        lengths: np.ndarray,
        places: tuple[np.ndarray, np.ndarray],
        shape: tuple[int, int],
    ) -> TeacherTokens:
        """Scores of a batch of `shape` (B, T): ids and probabilities [B, T, K], 0 where there are none.

        `lengths` are the target tokens of each pair; `places` the row and column of each token.
        """
        ids = np.zeros((*shape, self.top_k), np.int32)
        probs = np.zeros((*shape, self.top_k), np.float16)
        index = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        starts, parts = (np.repeat(values[examples], lengths) for values in (self._starts, self._part))
        for number, file in enumerate(self.files):
            if file is None:
                continue
            inside = (parts == number) & (starts >= 0)
            at = (places[0][inside], places[1][inside], slice(file.top_k))
            ids[at] = file.ids[starts[inside] + index[inside]]
            probs[at] = file.probs[starts[inside] + index[inside]]
        return TeacherTokens(ids, probs)


# Part of every store's key: raise it when the file format changes, or when the same inputs give other ids.
_FORMAT = 1
# Part of the key of stores with subword sampling: raise it when the same seed gives other segmentations.
_SAMPLING_FORMAT = 2
# Pairs tokenized at a time. Each chunk has its own sampling seed, so this number is part of the format.
CHUNK = 16384
# Chunks up to which the start of workers takes longer than they save.
_FEW_CHUNKS = 5
_META, _PROGRESS = "meta.json", "progress.json"
# Seconds after which a build makes sure that what it has written is on the disk, and notes how much it is.
_SAVE_SECONDS = 2.0
# Seconds between two looks at the build of another process.
_WAIT = 0.1
_SIDES = ("source", "target")
# The folder of a killed build is removed after this time without a change in it.
_STALE_SECONDS = 24 * 3600

# Tokens that are counted at a time.
_COUNTED = 1 << 22


class BuildStopped(Exception):
    """The `stop` event of a build is set."""


class Side(NamedTuple):
    """One language: `tokens[offsets[i]:offsets[i + 1]]` are the `lengths[i]` token ids of sentence i."""

    tokens: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray


class TokenStore:
    """Token ids of all pairs of a split, without padding; each sentence ends in eos.

    source, target: the two sides as flat arrays; the sources of a language model have no tokens, not even
    eos. parts: the data sets of a mixture, in order. folder: None: in memory. weights: of the pairs in the
    loss; None: all are 1.
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
        pool: PoolOptions = NO_POOL,
        count: Callable[[int], object] = lambda pairs: None,
    ) -> "TokenStore":
        """Open the store of these pairs and vocabularies under `root`; write a missing store first.

        The digests of all files are verified. A damaged store is written again, with a warning. Pairs are
        read once, in order, with bounded memory. `sampling` is the subword regularization of both sides, see
        `Vocab.tokenize_all`; `seed` that of sampling and noise. When another thread sets `stop`, a build in
        progress removes its files and raises `BuildStopped`. `count` receives numbers of pairs written.
        """
        if not len(pairs):
            raise UserError("there are no sentence pairs to tokenize; check data.dataset and data.clean")
        drawing = Drawing(sampling, seed, noise)
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
            _write_store(folder, pairs, _TokenizedChunks(pairs, vocabs, drawing, stop, pool), stop, count)
        raise UserError(
            f"the token store {folder} is damaged again whenever it is written: {damage}; set "
            "data.cache_dir to a folder on another disk"
        )

    @classmethod
    def from_targets(cls, sentences: Sequence[np.ndarray]) -> "TokenStore":
        """Make a store in memory, without sources; each sentence ends in eos."""
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
        """Numbers of tokens, eos included; int32, 0 where there is no source."""
        return self.source.lengths

    @property
    def target_lengths(self) -> np.ndarray:
        return self.target.lengths

    def count_tokens(self, *, source_size: int, target_size: int) -> tuple[np.ndarray, np.ndarray]:
        """How often each id of both vocabularies occurs, int64."""
        counts = []
        for side, size in ((self.source, source_size), (self.target, target_size)):
            total = np.zeros(size, np.int64)
            for start in range(0, len(side.tokens), _COUNTED):  # memory stays bounded
                total += np.bincount(side.tokens[start : start + _COUNTED], minlength=size)
            counts.append(total)
        return counts[0], counts[1]


def _key(pairs: Pairs, vocabs: Vocabs, drawing: Drawing) -> str:
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
    """Verify the digests of all files and map them; raise _Damage, UserError if they cannot be read."""
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


class _TokenizedChunks:
    """The token ids of chunks of pairs, as workers make them, from any chunk on."""

    def __init__(
        self, pairs: Pairs, vocabs: Vocabs, drawing: Drawing, stop: threading.Event | None, pool: PoolOptions
    ) -> None:
        self._pairs, self._stop, self._noisy = pairs, stop, drawing.noise is not None
        self._pool = pool.for_work(len(pairs) / CHUNK, least=_FEW_CHUNKS)
        self.dtypes = tuple(
            np.dtype(np.uint16 if vocab.size <= 1 << 16 else np.int32)
            for vocab in (vocabs.source, vocabs.target)
        )
        self.drawing = drawing
        self._work = TokenizeChunks(
            vocabs,
            drawing,
            self.dtypes,
            has_source=pairs.has_source,
            linked=bool(pairs.links_identity),
            # In this process, SentencePiece's own threads do the work of workers.
            threads=-1 if self._pool == NO_POOL and pool.workers != 1 else 1,
        )

    def read(self, first: int) -> Iterator[TokenizedChunk]:
        """Yield the chunks from number `first` on; raise BuildStopped once `stop` is set."""
        with open_pool(factory_of(self._work), workers=self._pool.workers, ray=self._pool.ray) as worker_pool:
            yield from worker_pool.map(self._read_texts(first), name=_name_chunk)

    def _read_texts(self, first: int) -> Iterator[TextChunk]:
        pairs, links = self._pairs, self._pairs.read_links() if self._pairs.links_identity else None
        iterator: Iterator[Pair] = iter(pairs)
        tags = pairs.read_target_tags() if pairs.target_tags else None
        languages = iter(spread_languages(pairs.parts, pairs.languages)) if self._noisy else None
        for number in itertools.count():
            chunk = []
            for pair in itertools.islice(iterator, CHUNK):
                if self._stop is not None and self._stop.is_set():
                    raise BuildStopped
                chunk.append(pair)
            if not chunk:
                return
            own_links = None if links is None else list(itertools.islice(links, len(chunk)))
            own_tags = None if tags is None else list(itertools.islice(tags, len(chunk)))
            own_languages = None if languages is None else list(itertools.islice(languages, len(chunk)))
            if number >= first:
                sources, targets = [pair.source for pair in chunk], [pair.target for pair in chunk]
                yield TextChunk(number, sources, targets, own_languages, own_tags, own_links)


def _name_chunk(chunk: TextChunk) -> str:
    first = chunk.number * CHUNK + 1
    return f"pairs {first:,} to {first + len(chunk.targets) - 1:,}"


def _write_store(
    folder: Path,
    pairs: Pairs,
    chunks: _TokenizedChunks,
    stop: threading.Event | None,
    count: Callable[[int], object],
) -> None:
    """Write a hidden folder and rename it; go on with what a killed process has written.

    A process that finds another one at it waits for the store of that one.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder.parent)
        with _claim(folder, stop) as partial:
            if partial is None:
                return
            try:
                meta = _write_arrays(partial, pairs, chunks, count)
            except (UserError, BuildStopped):  # nobody will go on
                shutil.rmtree(partial, ignore_errors=True)
                raise
            (partial / _META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
            (partial / _PROGRESS).unlink(missing_ok=True)
            atomic_folder.seal_folder(partial, {})
            try:
                os.rename(partial, folder)
            except OSError:
                if not folder.is_dir():
                    raise
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(folder.with_name(f".{folder.name}"), ignore_errors=True)
        raise UserError(
            f"the token store {folder} cannot be written: {error}; free disk space or set data.cache_dir"
        ) from error


@contextlib.contextmanager
def _claim(folder: Path, stop: threading.Event | None) -> Iterator[Path | None]:
    """Yield the hidden folder of a store that this process alone writes to; None once there is the store.

    Where the file system has no locks, the folder has a name of its own, and nobody goes on with it.
    """
    partial = folder.with_name(f".{folder.name}")
    while True:
        partial.mkdir(exist_ok=True)
        file = os.open(partial, os.O_RDONLY)
        try:
            try:
                file_lock.lock(file)
            except BlockingIOError:
                if stop is not None and stop.is_set():
                    raise BuildStopped from None
                time.sleep(_WAIT)
                continue
            except file_lock.FileHasNoLock:
                private = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
                private.mkdir()
                try:
                    yield private
                finally:
                    shutil.rmtree(private, ignore_errors=True)
                return
            if os.path.lexists(folder):  # it was finished in the meantime
                with contextlib.suppress(OSError):
                    partial.rmdir()  # empty, if it was made above
                yield None
                return
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), partial.stat()):
                    yield partial
                    return
        finally:
            os.close(file)


def _write_arrays(
    folder: Path, pairs: Pairs, chunks: _TokenizedChunks, count: Callable[[int], object]
) -> dict[str, Any]:
    """Write the arrays of a store, from the last chunk that is known to be on the disk; return the meta."""
    known = read_cached(folder / _PROGRESS) or {"chunks": 0, "sizes": {}}
    types = _list_arrays(chunks.dtypes, linked=bool(pairs.links_identity))
    for path in folder.iterdir():
        if path.name not in (_PROGRESS, *(f"{name}.npy" for name, _ in types)):
            path.unlink()  # what a killed process was about to rename, or its manifest
    arrays = {
        name: GrowingArray(folder / f"{name}.npy", dtype, size=known["sizes"].get(name, 0))
        for name, dtype in types
    }
    written, saved = known["chunks"], time.monotonic()
    try:
        if not known["chunks"]:
            for name in arrays:
                if name.endswith("offsets"):
                    arrays[name].append(np.zeros(1, np.int64))
        count(min(written * CHUNK, len(pairs)))
        for chunk in chunks.read(written):
            for side, (tokens, lengths) in zip(_SIDES, chunk.sides, strict=True):
                arrays[f"{side}.offsets"].append(arrays[f"{side}.tokens"].size + np.cumsum(lengths))
                arrays[f"{side}.tokens"].append(tokens)
            if chunk.links is not None:
                before = arrays["links.points"].size // 2
                arrays["links.points"].append(chunk.links.points.reshape(-1))
                arrays["links.offsets"].append(before + np.cumsum(chunk.links.counts))
            written += 1
            count(len(lengths))
            if time.monotonic() - saved > _SAVE_SECONDS:
                for array in arrays.values():
                    array.flush()
                sizes = {name: array.size for name, array in arrays.items()}
                write_cached(folder / _PROGRESS, {"chunks": written, "sizes": sizes})
                saved = time.monotonic()
    finally:
        for array in arrays.values():
            array.close()
    drawing = chunks.drawing
    tokens_written = {side: arrays[f"{side}.tokens"].size for side in _SIDES}
    return {"format": _FORMAT, "tokens": tokens_written, "sampling": drawing.sampling, "seed": drawing.seed}


def _list_arrays(dtypes: tuple[np.dtype, ...], *, linked: bool) -> list[tuple[str, np.dtype]]:
    offsets, points = np.dtype(np.int64), np.dtype(np.uint16)
    arrays = [(f"{side}.tokens", dtype) for side, dtype in zip(_SIDES, dtypes, strict=True)]
    arrays += [(f"{side}.offsets", offsets) for side in _SIDES]
    return arrays + ([("links.points", points), ("links.offsets", offsets)] if linked else [])


def remove_store(store: TokenStore) -> None:
    """Remove a store from the disk; the folder is renamed first, so that it disappears at once."""
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
    """Remove the folders of builds that were killed more than a day ago."""
    for partial in root.glob(".tokens-*"):
        try:
            changed = max(path.stat().st_mtime for path in (partial, *partial.iterdir()))
        except FileNotFoundError:
            continue  # the build has just finished
        if time.time() - changed > _STALE_SECONDS:
            shutil.rmtree(partial, ignore_errors=True)
