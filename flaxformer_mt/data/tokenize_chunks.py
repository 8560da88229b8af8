"""The work of a worker that tokenizes: a chunk of texts in, its token ids out.

Row 2 of the data path, for many pairs at once: noise, segmentation, and the links of alignments. Imports no
JAX, so that workers start quickly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.data.piece_links import ChunkLinks, PieceLinker
from flaxformer_mt.data.text_noise import TextNoise
from flaxformer_mt.vocab import Vocabs


class Drawing(NamedTuple):
    """What is drawn at random in a store: the segmentation, and the noise of the text."""

    sampling: float
    seed: int
    noise: TextNoise | None


class TextChunk(NamedTuple):
    """Consecutive pairs: the number of the chunk, the texts, and for each pair its languages and alignment.

    languages: only with noise. target_tags: what is put before each target after the noise; None: nothing.
    links: positions of source and target words [K, 2], if there are alignments.
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
    """Tokenizes chunks of pairs.

    dtypes: types of source and target ids. has_source: without, sources have no tokens. linked: whether pairs
    have alignments. threads: of SentencePiece; -1: one for each core.
    """

    vocabs: Vocabs
    drawing: Drawing
    dtypes: tuple[np.dtype, ...]
    has_source: bool
    linked: bool
    threads: int

    def __post_init__(self) -> None:
        """Tabulate the pieces, for links."""
        self._linker = PieceLinker(self.vocabs) if self.linked else None

    def __call__(self, block: TextChunk) -> TokenizedChunk:
        """Return the token ids of a chunk, a function of its number, its texts and the seed."""
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
            found = vocab.tokenize_all(
                texts[which], sampling=sampling, seed=fold(seed, block.number, which), threads=self.threads
            )
            lengths = np.fromiter(map(len, found), np.int64, len(found))
            sides.append((np.concatenate(found).astype(self.dtypes[which]), lengths))
            ids.append(found)
        links = None
        if self._linker is not None and block.links is not None:
            links = self._linker.link(texts, ids, block.links)
        return TokenizedChunk(sides, links)

    def describe(self) -> dict[str, Any]:
        """Return what ids depend on besides the texts."""
        return {"vocabularies": [self.vocabs.source.fingerprint, self.vocabs.target.fingerprint]}


def fold(*numbers: int) -> int:
    """Derive one 64-bit seed from several integers of any size and sign."""
    words = [number & 0xFFFF_FFFF_FFFF_FFFF for number in numbers]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
