"""Overlap of the sets: what the training set shares with held-out data is counted, stored and warned of."""

from types import SimpleNamespace

from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.data.overlap import describe_overlap, find_overlap


class Split(list):
    """Pairs with the fingerprint that the real ones have."""

    fingerprint = "1"


def test_shared_pairs_and_sources_are_counted_and_warned_of(tmp_path):
    train = Split([Pair("a", "x"), Pair("b", "y"), Pair("ab", "c"), Pair("b", "y"), Pair("", "z")])
    test = Split([Pair("a", "x"), Pair("a", "x"), Pair("b", "other"), Pair("a", "bc"), Pair("", "new")])
    held_out = {"valid": Split([Pair("new", "x")]), "test": test}
    found = find_overlap(train, held_out, tmp_path / "new")
    assert found == {
        "valid": {"of": 1, "pairs": 0, "sources": 0},
        "test": {"of": 5, "pairs": 2, "sources": 4},
    }
    (warning,) = describe_overlap(found)
    assert warning.startswith("2 of the 5 pairs of the test set (40.0%) also occur in the training set")
    # stored: the training set is not read again while the text is the same
    unread = SimpleNamespace(fingerprint="1")
    assert find_overlap(unread, held_out, tmp_path / "new") == found
    changed = Split([Pair("new", "x")])
    changed.fingerprint = "2"
    assert find_overlap(changed, held_out, tmp_path / "new")["valid"]["pairs"] == 1
    # a stored result that was damaged is computed again
    for path in (tmp_path / "new").iterdir():
        path.write_bytes(path.read_bytes().replace(b": 5", b": 7")[:-1])
    assert find_overlap(train, held_out, tmp_path / "new") == found
