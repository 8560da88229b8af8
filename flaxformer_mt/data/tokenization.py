"""The processing steps from the text of pairs to the arrays of a token store: noise, tags, tokenization, ...

Each step modifies a chunk of pairs. The seed of its random numbers depends on the chunk and on the step's
name, so that different steps draw different numbers.
"""

import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config import NoiseConfig
from flaxformer_mt.corpus.columns import Links, link_chunk
from flaxformer_mt.corpus.documents import Context, tokenize_before
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.data.text_noise import TextNoise, move_words
from flaxformer_mt.vocab import Vocabs

# Part of the key of stores with random numbers: raise it when the same seed gives other numbers.
_DRAWING_FORMAT = 3
NOTHING = np.zeros(0, np.int32)


class Drawing(NamedTuple):
    """The settings of random tokenization: subword sampling (on both sides) and text noise."""

    sampling: float = 0.0
    seed: int = 0
    noise: TextNoise = TextNoise(NoiseConfig())

    @property
    def active(self) -> bool:
        return bool(self.sampling) or self.noise.rates.active

    @property
    def identity(self) -> list[Any]:
        """JSON values that differ if two drawings may have different results; [] if nothing is random."""
        noise = self.noise.identity if self.noise.rates.active else None
        return [self.sampling, self.seed, _DRAWING_FORMAT, noise] if self.active else []


NO_DRAWING = Drawing()


@dataclass
class Chunk:
    """Consecutive pairs: their texts, the index of each pair's data set and, after tokenization, token ids.

    links: the word alignment [K, 2] of each pair, or None. before: the pairs that precede each pair in its
    document, the nearest last. context: the token ids of their sources that fit before the pair's source.
    """

    number: int
    name: str
    sources: list[str]
    targets: list[str]
    parts: np.ndarray
    links: list[np.ndarray] | None
    before: Sequence[tuple[Pair, ...]]
    source_ids: list[np.ndarray] = field(default_factory=list)
    target_ids: list[np.ndarray] = field(default_factory=list)
    context: list[np.ndarray] = field(default_factory=list)


Step = Callable[[Chunk, int], None]


def number_types(vocabs: Vocabs, *, has_links: bool) -> dict[str, np.dtype]:
    """Return the dtype of each array in a store, by array name, in the order of the store's files."""
    sizes = {"source": vocabs.source.size, "target": vocabs.target.size}
    types = {name: np.dtype(np.uint16 if size <= 1 << 16 else np.int32) for name, size in sizes.items()}
    return types | ({Links.name: np.dtype(np.uint32)} if has_links else {})


@dataclass
class TokenizeChunks:
    """Tokenizes chunks of pairs.

    threads: the number of SentencePiece's threads; -1: one per core. languages, target_tags: the languages
    and the target tag of each data set.
    """

    vocabs: Vocabs
    drawing: Drawing
    threads: int
    has_source: bool
    languages: Sequence[tuple[str, str]]
    target_tags: Sequence[str]
    context: Context | None = None

    def __call__(self, chunk: Chunk) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return, by array name, the values of all pairs, concatenated, and the number of values per pair."""
        for name, step in self.steps().items():
            step(chunk, step_seed(self.drawing.seed, chunk.number, name))
        numbers = {} if chunk.links is None else {Links.name: self._link_pieces(chunk, chunk.links)}
        if self.context:
            chunk.source_ids = list(map(np.concatenate, zip(chunk.context, chunk.source_ids, strict=True)))
        sides = {"source": chunk.source_ids or [NOTHING] * len(chunk.targets), "target": chunk.target_ids}
        numbers |= {name: (np.concatenate(ids), _count(ids)) for name, ids in sides.items()}
        types = number_types(self.vocabs, has_links=chunk.links is not None)
        return {name: (numbers[name][0].astype(dtype), numbers[name][1]) for name, dtype in types.items()}

    def steps(self) -> dict[str, Step]:
        """Return the tokenization steps in order; renaming a step would change its random numbers."""
        rates = self.drawing.noise.rates
        steps: dict[str, tuple[object, Step]] = {
            "noise": (rates.active, self._add_noise),
            "random words": (rates.moves, self._move_words),
            "target tags": (any(self.target_tags), self._tag_targets),
            "source": (self.has_source, self._tokenize_sources),
            "target": (True, self._tokenize_targets),
            "context": (self.context, self._tokenize_context),
        }
        return {name: step for name, (is_needed, step) in steps.items() if is_needed}

    def _add_noise(self, chunk: Chunk, seed: int) -> None:
        languages = [self.languages[part] for part in chunk.parts]
        _set_text(chunk, *self.drawing.noise.apply(*_text_of(chunk), seed=seed, languages=languages))

    def _move_words(self, chunk: Chunk, seed: int) -> None:
        _set_text(chunk, *move_words(*_text_of(chunk), self.drawing.noise.rates, seed=seed))

    def _tag_targets(self, chunk: Chunk, seed: int) -> None:
        leads = [tag and f"{tag} " for tag in self.target_tags]
        chunk.targets = [leads[part] + text for part, text in zip(chunk.parts, chunk.targets, strict=True)]

    def _tokenize_sources(self, chunk: Chunk, seed: int) -> None:
        chunk.source_ids = self._segment(self.vocabs.source, chunk.sources, seed)

    def _tokenize_targets(self, chunk: Chunk, seed: int) -> None:
        chunk.target_ids = self._segment(self.vocabs.target, chunk.targets, seed)

    def _segment(self, vocab: Any, texts: list[str], seed: int) -> list[np.ndarray]:
        return vocab.tokenize_all(texts, sampling=self.drawing.sampling, seed=seed, threads=self.threads)

    def _tokenize_context(self, chunk: Chunk, seed: int) -> None:
        """Tokenize the preceding lines of each source's document, without noise; keep as many as fit."""
        assert self.context is not None
        pairs = list(dict.fromkeys(itertools.chain(*chunk.before)))  # each with a segmentation of its own
        options = {"sampling": self.drawing.sampling, "seed": seed, "threads": self.threads}
        tokens = tokenize_before(self.vocabs.source, [pair.source for pair in pairs], **options)
        ids = dict(zip(pairs, tokens, strict=True))
        for source, before in zip(chunk.source_ids, chunk.before, strict=True):
            lines = self.context.choose(len(source), [ids[pair] for pair in before])
            chunk.context.append(np.concatenate([NOTHING, *lines]))

    def _link_pieces(self, chunk: Chunk, links: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        before = _count(chunk.context) if self.context else np.zeros(len(chunk.targets), np.int64)
        texts, ids = (chunk.sources, chunk.targets), (chunk.source_ids, chunk.target_ids)
        return link_chunk(self.vocabs, texts, ids, links, before)


def step_seed(seed: int, chunk: int, name: str) -> int:
    """Return the seed of the random numbers that a tokenization step uses for one chunk."""
    return fold(seed, chunk, zlib.crc32(name.encode()))


def fold(*numbers: int) -> int:
    """Derive one 64-bit seed from several integers of any size and sign."""
    words = [number & 0xFFFF_FFFF_FFFF_FFFF for number in numbers]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def _text_of(chunk: Chunk) -> tuple[list[Pair], list[np.ndarray] | None]:
    return list(map(Pair, chunk.sources, chunk.targets)), chunk.links


def _set_text(chunk: Chunk, pairs: Sequence[Pair], links: list[np.ndarray] | None) -> None:
    chunk.sources, chunk.targets, chunk.links = [p.source for p in pairs], [p.target for p in pairs], links


def _count(ids: list[np.ndarray]) -> np.ndarray:
    return np.fromiter(map(len, ids), np.int64, len(ids))
