"""Token ids on disk: every pair is tokenized once, then memory-mapped.

A store is built once for the same pairs, vocabularies and sampling, by workers,
and appears complete or not at all, even when several processes build it at the same time.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.atomic_folder import BuildStopped, artifact, discard
from flaxformer_mt.corpus.columns import Column, Links, Side
from flaxformer_mt.corpus.documents import Context, tokenize_before
from flaxformer_mt.corpus.pairs import Pair, Pairs, Part
from flaxformer_mt.data.text_noise import TextNoise, move_words
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocab, Vocabs
from flaxformer_mt.workers.worker_pool import NO_POOL, PoolOptions, open_workers


class Drawing(NamedTuple):
    """What is drawn at random in a store: the segmentation, and the noise of the text."""

    sampling: float
    seed: int
    noise: TextNoise | None


class TextChunk(NamedTuple):
    """Consecutive pairs: texts, the part of each pair, and what the columns with a tokenizer give it.

    before: the pairs whose sources are read before that of each pair, the nearest last.
    """

    number: int
    texts: tuple[list[str], list[str]]
    parts: np.ndarray
    columns: dict[str, Any]
    before: Sequence[tuple[Pair, ...]] = ()

    @property
    def name(self) -> str:
        first = self.number * CHUNK + 1
        return f"pairs {first:,} to {first + len(self.parts) - 1:,}"


# By name, the numbers of all pairs one after the other, and how many of them each pair has.
TokenizedChunk = dict[str, tuple[np.ndarray, np.ndarray]]


@dataclass
class TokenizeChunks:
    """Tokenizes chunks of pairs; `threads` are SentencePiece's, -1: one for each core.

    languages, target_tags: of each part; tags are put before targets after the noise.
    """

    vocabs: Vocabs
    drawing: Drawing
    has_source: bool
    languages: Sequence[tuple[str, str]]
    target_tags: Sequence[str]
    columns: Sequence[type[Column]]
    threads: int
    context: Context | None = None

    def __post_init__(self) -> None:
        self._tokenizers = {column.name: column.make_tokenizer(self.vocabs) for column in self.columns}

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """The types of the numbers of a store, in the order of its files."""
        sizes = {"source": self.vocabs.source.size, "target": self.vocabs.target.size}
        types = {name: np.dtype(np.uint16 if size <= 1 << 16 else np.int32) for name, size in sizes.items()}
        return types | dict.fromkeys(self._tokenizers, np.dtype(np.uint32))

    def __call__(self, block: TextChunk) -> TokenizedChunk:
        """A function of the chunk's number, its texts and the seed."""
        sampling, seed, noise = self.drawing
        sources, targets = block.texts
        if noise is not None:
            pairs = list(map(Pair, sources, targets))
            languages = (self.languages[part] for part in block.parts)
            # Sides have the numbers 0 and 1 in the seeds of their segmentations.
            links, drawn = block.columns.get(Links.name), fold(seed, block.number, 2)
            pairs, links = noise.apply(pairs, links, seed=drawn, languages=languages)
            if noise.rates.moves:
                drawn = fold(seed, block.number, 5)
                pairs, links = move_words(pairs, links, noise.rates, seed=drawn)
            if links is not None:
                block = block._replace(columns=block.columns | {Links.name: links})
            sources, targets = [pair.source for pair in pairs], [pair.target for pair in pairs]
        if any(self.target_tags):
            leads = [tag and f"{tag} " for tag in self.target_tags]
            targets = [leads[part] + target for part, target in zip(block.parts, targets, strict=True)]
        ids: list[list[np.ndarray]] = [[], []]
        if self.has_source:
            ids[0] = self._tokenize(self.vocabs.source, sources, fold(seed, block.number, 0))
        ids[1] = self._tokenize(self.vocabs.target, targets, fold(seed, block.number, 1))
        before = self._find_before(block, ids[0])
        sizes = np.fromiter(map(len, before), np.int64, len(before))
        chunk = {"source": (_NOTHING, np.zeros(len(targets), np.int64))}
        for name, tokenize in self._tokenizers.items():
            chunk[name] = tokenize((sources, targets), ids, block.columns[name], sizes)
        if self.context:
            ids[0] = list(map(np.concatenate, zip(before, ids[0], strict=True)))
        for name, tokens in zip(("source", "target"), ids, strict=True):
            if tokens:
                chunk[name] = np.concatenate(tokens), np.fromiter(map(len, tokens), np.int64, len(tokens))
        return {name: (chunk[name][0].astype(dtype), chunk[name][1]) for name, dtype in self.dtypes.items()}

    def _find_before(self, block: TextChunk, sources: list[np.ndarray]) -> list[np.ndarray]:
        """What is read before the ids of each source: lines of its document, without noise."""
        if self.context is None:
            return [_NOTHING] * len(block.parts)
        sampling, seed, _ = self.drawing
        pairs = list(dict.fromkeys(itertools.chain(*block.before)))  # each with a segmentation of its own
        how = {"sampling": sampling, "seed": fold(seed, block.number, 3), "threads": self.threads}
        tokenized = tokenize_before(self.vocabs.source, [pair.source for pair in pairs], **how)
        ids = dict(zip(pairs, tokenized, strict=True))
        before = []
        for own, earlier in zip(sources, block.before, strict=True):
            chosen = self.context.choose(len(own), [ids[pair] for pair in earlier])
            before.append(np.concatenate([_NOTHING, *chosen]))
        return before

    def _tokenize(self, vocab: Vocab, texts: list[str], seed: int) -> list[np.ndarray]:
        return vocab.tokenize_all(texts, sampling=self.drawing.sampling, seed=seed, threads=self.threads)


def fold(*numbers: int) -> int:
    """Derive one 64-bit seed from several integers of any size and sign."""
    words = [number & 0xFFFF_FFFF_FFFF_FFFF for number in numbers]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


# Part of every store's key: raise it when the file format changes, or when the same inputs give other ids.
_FORMAT = 2
# Part of the key of stores with subword sampling: raise it when the same seed gives other segmentations.
_SAMPLING_FORMAT = 2
# Pairs tokenized at a time. Each chunk has its own sampling seed, so this number is part of the format.
CHUNK = 16384
# Chunks up to which the start of workers takes longer than they save.
_FEW_CHUNKS = 5
_PROGRESS = "progress.json"
_NOTHING = np.zeros(0, np.int32)
# Seconds after which a build makes sure that what it has written is on the disk, and records how much it is.
_SAVE_SECONDS = 2.0
# Tokens that are counted at a time.
_COUNTED = 1 << 22


class TokenStore:
    """Token ids of all pairs of a split, without padding; each sentence ends in eos.

    source, target: the two sides as flat arrays; the sources of a language model have no tokens, not even
    eos. parts: the data sets of a mixture, in order. folder: None: in memory. columns: what pairs have beside
    their text, by name.
    """

    def __init__(
        self,
        folder: Path | None,
        source: Side,
        target: Side,
        parts: tuple[Part, ...] = (),
        columns: Mapping[str, Column] = MappingProxyType({}),
    ) -> None:
        self.folder, self.parts = folder, parts
        self.source, self.target, self.columns = source, target, columns

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

        The digests of all files are verified. Pairs are read once, in order, with bounded memory. `sampling`
        is the subword regularization of both sides, see `Vocab.tokenize_all`; `seed` that of sampling and
        noise. When another thread sets `stop`, a build in progress removes its files and raises
        `BuildStopped`. `count` receives numbers of pairs written.
        """
        if not len(pairs):
            raise UserError("there are no sentence pairs to tokenize; check data.dataset and data.clean")
        drawing = Drawing(sampling, seed, noise)
        folder = Path(root) / f"tokens-{_key(pairs, vocabs, drawing)}"
        build = functools.partial(_write_arrays, pairs, vocabs, drawing, stop=stop, pool=pool, count=count)
        try:
            sides = artifact(folder, build, _open_arrays, resume=True, stop=stop)
        except OSError as error:
            raise UserError(
                f"the token store {folder} cannot be written: {error}; free disk space or set data.cache_dir"
            ) from error
        columns = {name: column.open(pairs, sides) for name, column in pairs.columns.items()}
        return cls(folder, sides["source"], sides["target"], pairs.parts, columns)

    @classmethod
    def of_ids(cls, sources: Sequence[Any], targets: Sequence[Any]) -> "TokenStore":
        """Make a store in memory, without columns."""
        return cls(None, _join(sources), _join(targets))

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


def _join(sentences: Sequence[Any]) -> Side:
    sentences = [np.asarray(ids, np.int32) for ids in sentences]
    lengths = np.fromiter(map(len, sentences), np.int32, len(sentences))
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return Side(np.concatenate([*sentences, _NOTHING]), offsets, lengths)


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
        *((name, column.key) for name, column in pairs.columns.items() if column.key),
    ]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]


def _open_arrays(folder: Path, dtypes: dict[str, str]) -> dict[str, Side]:
    sides = {}
    for name, dtype in dtypes.items():
        offsets = _map(folder / f"{name}.offsets", np.int64)
        sides[name] = Side(_map(folder / f"{name}.values", dtype), offsets, np.diff(offsets).astype(np.int32))
    return sides


def _map(path: Path, dtype: Any) -> np.ndarray:
    empty = path.stat().st_size == 0
    return np.zeros(0, dtype) if empty else np.memmap(path, dtype, "r").view(np.ndarray)


def _read_chunks(
    pairs: Pairs, columns: Mapping[str, Column], stop: threading.Event | None
) -> Iterator[TextChunk]:
    texts = pairs.with_lines_before() if pairs.context else ((pair, ()) for pair in pairs)
    for number, start in enumerate(range(0, len(pairs), CHUNK)):
        sources, targets, before = [], [], []
        for pair, earlier in itertools.islice(texts, CHUNK):
            if stop is not None and stop.is_set():
                raise BuildStopped
            sources.append(pair.source)
            targets.append(pair.target)
            before.append(earlier)
        places = pairs.locate(np.arange(start, start + len(targets)))
        values = {name: column.take(*places) for name, column in columns.items()}
        yield TextChunk(number, (sources, targets), places[0], values, before)


def _write_arrays(
    pairs: Pairs,
    vocabs: Vocabs,
    drawing: Drawing,
    folder: Path,
    *,
    stop: threading.Event | None,
    pool: PoolOptions,
    count: Callable[[int], object],
) -> dict[str, str]:
    """Write the arrays, from the last chunk that is known to be on the disk; return their types."""
    workers = pool.for_work(len(pairs) / CHUNK, least=_FEW_CHUNKS)
    # In this process, SentencePiece's own threads do the work of workers.
    threads = -1 if workers == NO_POOL and pool.workers != 1 else 1
    columns = {name: column for name, column in pairs.columns.items() if column.key}
    make = functools.partial(
        TokenizeChunks,
        vocabs,
        drawing,
        pairs.has_source,
        pairs.languages,
        pairs.target_tags,
        tuple(map(type, columns.values())),
        threads,
        pairs.context,
    )
    dtypes = make().dtypes
    written, sizes = 0, {}
    with contextlib.suppress(FileNotFoundError, ValueError):
        written, sizes = json.loads((folder / _PROGRESS).read_bytes())
    for path in folder.iterdir():
        if path.name not in sizes:
            path.unlink()
    chunks = itertools.islice(_read_chunks(pairs, columns, stop), written, None)
    with (
        contextlib.ExitStack() as stack,
        open_workers(make, workers) as map_chunks,
    ):
        files: dict[str, BinaryIO] = {}
        for name in (f"{name}.{kind}" for name in dtypes for kind in ("values", "offsets")):
            files[name] = stack.enter_context((folder / name).open("r+b" if name in sizes else "wb"))
            files[name].truncate(sizes.get(name, 0))
            if not files[name].seek(0, os.SEEK_END) and name.endswith("offsets"):
                files[name].write(bytes(8))
        count(min(written * CHUNK, len(pairs)))
        saved = time.monotonic()
        for chunk in map_chunks(chunks, name=lambda chunk: chunk.name):
            for name, (values, counts) in chunk.items():
                before = files[f"{name}.values"].tell() // values.itemsize
                files[f"{name}.offsets"].write((before + np.cumsum(counts)).tobytes())
                files[f"{name}.values"].write(values.tobytes())
            written += 1
            count(len(counts))
            if time.monotonic() - saved > _SAVE_SECONDS:
                for file in files.values():
                    file.flush()
                    os.fsync(file.fileno())
                sizes = {name: file.tell() for name, file in files.items()}
                write_atomically(folder / _PROGRESS, json.dumps([written, sizes]).encode())
                saved = time.monotonic()
    (folder / _PROGRESS).unlink(missing_ok=True)
    return {name: dtype.str for name, dtype in dtypes.items()}


def remove_store(store: TokenStore) -> None:
    """Remove a store from the disk; the folder is renamed first, so that it disappears at once."""
    assert store.folder is not None, "a store in memory has no folder to remove"
    discard(store.folder)
