"""Learns shortlists from a token store: the most probable translations of each subword, by IBM model 1."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.corpus.word_alignment import Lexicon
from flaxformer_mt.data.token_store import TokenStore
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocabs
from flaxformer_mt.vocab.shortlist import Shortlist

# Maximum number of pairs; of more, evenly spaced ones are read.
_MAX_PAIRS = 500_000


def learn_lexicon(store: TokenStore) -> Lexicon:
    """Learn p(target subword | source subword), including eos, from up to 500,000 evenly spaced pairs."""
    rows = np.unique(np.linspace(0, len(store) - 1, min(len(store), _MAX_PAIRS)).astype(np.int64))
    return Lexicon(store.source, store.target, rows, empty=False, passes=5)


def make_shortlist(store: TokenStore, vocabs: Vocabs, *, candidates: int, common: int) -> Shortlist:
    """Make a shortlist with the `candidates` most probable translations of each source subword.

    The `common` most frequent target subwords are candidates for every sentence. A source subword that is
    also in the target vocabulary is always one of its own candidates, so that names can be copied.
    """
    _, counts = store.count_tokens(source_size=vocabs.source.size, target_size=vocabs.target.size)
    frequent = np.argsort(-counts, kind="stable")[:common]
    lexicon = learn_lexicon(store)
    sources, targets = lexicon.pairs
    order = np.lexsort((-lexicon.probabilities[: len(sources)], sources))
    sources, targets = sources[order], targets[order]
    starts = np.searchsorted(sources, np.arange(vocabs.source.size + 1))
    same = _equal_pieces(vocabs)
    rules: dict[tuple[int, ...], np.ndarray] = {}
    for piece in range(vocabs.source.size):
        some = [same[piece]] if piece in same else []
        some += targets[starts[piece] : min(starts[piece] + candidates, starts[piece + 1])].tolist()
        if some:
            rules[(piece,)] = np.array([*dict.fromkeys(some)], np.int32)
    return Shortlist(rules, frequent[counts[frequent] > 0], vocabs)


def _equal_pieces(vocabs: Vocabs) -> dict[int, int]:
    names = {name: number for number, name in enumerate(vocabs.target.pieces(range(vocabs.target.size)))}
    sources = enumerate(vocabs.source.pieces(range(vocabs.source.size)))
    return {number: names[name] for number, name in sources if name in names}


class ShortlistRequest(NamedTuple):
    file: Path
    candidates: int = 50
    common: int = 200


def write_shortlist(request: ShortlistRequest, store: TokenStore, vocabs: Vocabs) -> dict[str, Any]:
    path, candidates, common = request
    for name, number in (("candidates", candidates), ("common", common)):
        if number < 0:
            raise UserError(f"--shortlist_{name}={number} is negative; give 0 or more")
    if not store.source_lengths.any():
        raise UserError(
            f"--shortlist={path}: a language model has no source, so its data has no translations of "
            "subwords; leave --shortlist out"
        )
    make_shortlist(store, vocabs, candidates=candidates, common=common).write(path)
    return {"file": str(path), "candidates": candidates, "common": common}
