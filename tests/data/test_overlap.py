"""Overlap of the sets: what the training set shares with held-out data is counted, stored and warned of."""

from hashlib import blake2b

import numpy as np

from flaxformer_mt.config import CleanConfig
from flaxformer_mt.corpus.pair_checks import CheckBlocks
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.data.corpus_diagnostics import describe_overlap, find_overlap


class Split(list):
    """Pairs with the hashes that cleaning finds, and tags."""

    tags = ()

    def read_hashes(self):
        sides = [[blake2b(text.encode(), digest_size=8).digest() for text in pair] for pair in self]
        yield self.tags, np.frombuffer(b"".join(sum(sides, [])), "<u8").reshape(-1, 2)


def test_hashes_are_those_of_cleaning():
    pairs = [(b"a", b"bc"), (b"", b"x")]
    actions = dict.fromkeys(("invalid_utf8", "empty", "too_long", "length_ratio"), "keep")
    actions |= {"numbers": "off", "script": "off", "language": "off"}
    found = CheckBlocks(CleanConfig(), actions, ("de", "en"))(pairs).hashes
    ((_, expected),) = Split([Pair("a", "bc"), Pair("", "x")]).read_hashes()
    np.testing.assert_array_equal(found, expected)


def test_shared_pairs_and_sources_are_counted_and_warned_of():
    train = Split([Pair("a", "x"), Pair("b", "y"), Pair("ab", "c"), Pair("b", "y"), Pair("", "z")])
    test = Split([Pair("a", "x"), Pair("a", "x"), Pair("b", "other"), Pair("a", "bc"), Pair("", "new")])
    held_out = {"valid": Split([Pair("new", "x")]), "test": test}
    found = find_overlap(train, held_out)
    assert found == {
        "valid": {"of": 1, "pairs": 0, "sources": 0},
        "test": {"of": 5, "pairs": 2, "sources": 4},
    }
    (warning,) = describe_overlap(found)
    assert warning.startswith("2 of the 5 pairs of the test set (40.0%) also occur in the training set")
    test.tags = (">>fr<<",)  # the sources begin with other words
    assert find_overlap(train, held_out)["test"] == {"of": 5, "pairs": 0, "sources": 0}
