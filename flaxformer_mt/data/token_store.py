"""Token stores: token ids on disk, which are computed once (by tokenization.py) and then memory-mapped.

A store is built only once for the same pairs, vocabularies and sampling. It becomes visible only when it is
complete, even if several processes build it at the same time.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.atomic_folder import BuildStopped, artifact
from flaxformer_mt.corpus.columns import Column, Links
from flaxformer_mt.corpus.pairs import Pairs, Part, Side
from flaxformer_mt.data.tokenization import NO_DRAWING, NOTHING, Chunk, Drawing, TokenizeChunks, number_types
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocabs
from flaxformer_mt.workers.worker_pool import NO_POOL, PoolOptions, open_workers

# Part of every store's key: raise it when the file format changes, or when the same inputs give other ids.
_FORMAT = 2
# Pairs tokenized at a time. Each chunk has its own seeds, so this number is part of the format.
CHUNK = 16384
# Below this number of chunks, starting workers takes longer than they save.
_FEW_CHUNKS = 5
_PROGRESS = "progress.json"
# Seconds after which a build flushes its files to disk and records their sizes.
_SAVE_SECONDS = 2.0
# Number of tokens that are counted at a time.
_COUNTED = 1 << 22


class TokenStore:
    """Token ids of all pairs of a split, without padding; each sentence ends in eos.

    source, target: the two sides as flat arrays; the sources of a language model have no tokens, not even
    eos. parts: the data sets of a mixture, in order. folder: the folder of the store; None: it is in memory.
    columns: further data of the pairs, such as alignments, by name.
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
        drawing: Drawing = NO_DRAWING,
        *,
        stop: threading.Event | None = None,
        pool: PoolOptions = NO_POOL,
        count: Callable[[int], object] = lambda pairs: None,
    ) -> "TokenStore":
        """Open the store of these pairs and vocabularies below `root`; if there is none, build it first.

        The digests of all files are verified. A build reads the pairs once, in order, with bounded memory.
        When another thread sets `stop`, a build in progress removes its files and raises `BuildStopped`.
        `count` is called with the number of pairs whenever some have been written.
        """
        if not len(pairs):
            raise UserError("there are no sentence pairs to tokenize; check data.dataset and data.clean")
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
        """Make a store in memory, without columns, from the token ids of each sentence."""
        return cls(None, _join(sources), _join(targets))

    def __len__(self) -> int:
        return len(self.target.lengths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids (source, target) of one pair, with eos; a missing source is an empty array."""
        index = range(len(self))[index]
        sides = (self.source, self.target)
        source, target = (side.tokens[side.offsets[index] : side.offsets[index + 1]] for side in sides)
        return source, target

    @property
    def source_lengths(self) -> np.ndarray:
        """The number of source tokens of each pair, including eos, int32 [N]; 0 for a pair without source."""
        return self.source.lengths

    @property
    def target_lengths(self) -> np.ndarray:
        return self.target.lengths

    def count_tokens(self, *, source_size: int, target_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Count how often each id of the source and the target vocabulary occurs: two int64 arrays [V]."""
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
    return Side(np.concatenate([*sentences, NOTHING]), offsets, lengths)


def _key(pairs: Pairs, vocabs: Vocabs, drawing: Drawing) -> str:
    identity = [
        _FORMAT,
        pairs.fingerprint,
        len(pairs),
        vocabs.source.fingerprint,
        vocabs.target.fingerprint,
        *drawing.identity,
        *(() if pairs.has_source else ("target alone",)),
        *([(Links.name, links.key)] if (links := pairs.columns.get(Links.name)) else ()),
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


def _read_chunks(pairs: Pairs, links: Links | None, stop: threading.Event | None) -> Iterator[Chunk]:
    texts = pairs.with_lines_before() if pairs.context else ((pair, ()) for pair in pairs)
    for number, start in enumerate(range(0, len(pairs), CHUNK)):
        sources, targets, before = [], [], []
        for pair, earlier in itertools.islice(texts, CHUNK):
            if stop is not None and stop.is_set():
                raise BuildStopped
            sources.append(pair.source)
            targets.append(pair.target)
            before.append(earlier)
        parts, rows = pairs.locate(np.arange(start, start + len(targets)))
        alignments = None if links is None else links.take(parts, rows)
        name = f"pairs {start + 1:,} to {start + len(targets):,}"
        yield Chunk(number, name, sources, targets, parts, alignments, before)


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
    """Write the arrays, resuming after the last chunk that is safely on disk; return their dtypes by name."""
    workers = NO_POOL if len(pairs) / CHUNK < _FEW_CHUNKS else pool
    # In this process, SentencePiece's own threads do the work of workers.
    threads = -1 if workers == NO_POOL and pool.workers != 1 else 1
    links = pairs.columns.get(Links.name)
    facts = pairs.has_source, pairs.languages, pairs.target_tags, pairs.context
    make = functools.partial(TokenizeChunks, vocabs, drawing, threads, *facts)
    types = number_types(vocabs, has_links=links is not None)
    with contextlib.ExitStack() as stack:
        written, files = _open_files(folder, types, stack)
        map_chunks = stack.enter_context(open_workers(make, workers))
        count(min(written * CHUNK, len(pairs)))
        chunks = itertools.islice(_read_chunks(pairs, links, stop), written, None)
        saved = time.monotonic()
        for chunk in map_chunks(chunks, name=lambda chunk: chunk.name):
            for name, (values, counts) in chunk.items():
                before = files[f"{name}.values"].tell() // values.itemsize
                files[f"{name}.offsets"].write((before + np.cumsum(counts)).tobytes())
                files[f"{name}.values"].write(values.tobytes())
            written += 1
            count(len(counts))
            if time.monotonic() - saved > _SAVE_SECONDS:
                _save(folder, written, files)
                saved = time.monotonic()
    (folder / _PROGRESS).unlink(missing_ok=True)
    return {name: dtype.str for name, dtype in types.items()}


def _open_files(
    folder: Path, names: Iterable[str], stack: contextlib.ExitStack
) -> tuple[int, dict[str, BinaryIO]]:
    """Open the files after the last chunk that is safely on disk; return the number of chunks, and files."""
    written, sizes, files = 0, dict[str, int](), dict[str, BinaryIO]()
    with contextlib.suppress(FileNotFoundError, ValueError):
        written, sizes = json.loads((folder / _PROGRESS).read_bytes())
    for path in folder.iterdir():
        if path.name not in sizes:
            path.unlink()
    for name in (f"{name}.{kind}" for name in names for kind in ("values", "offsets")):
        files[name] = stack.enter_context((folder / name).open("r+b" if name in sizes else "wb"))
        files[name].truncate(sizes.get(name, 0))
        if not files[name].seek(0, os.SEEK_END) and name.endswith("offsets"):
            files[name].write(bytes(8))
    return written, files


def _save(folder: Path, written: int, files: Mapping[str, BinaryIO]) -> None:
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())
    sizes = {name: file.tell() for name, file in files.items()}
    write_atomically(folder / _PROGRESS, json.dumps([written, sizes]).encode())
