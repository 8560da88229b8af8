"""Lexical translation probabilities of pieces, and the shortlists that are made of them."""

import numpy as np
import pytest

from flaxformer_mt.corpus import word_alignment
from flaxformer_mt.corpus.pairs import Part
from flaxformer_mt.data import lexical_table
from flaxformer_mt.data.lexical_table import ShortlistRequest, learn_lexicon, write_shortlist
from flaxformer_mt.data.token_store import Side, TokenStore
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab.shortlist import Shortlist

SIZE = 40


def make_side(sentences) -> Side:
    lengths = np.array([len(ids) for ids in sentences], np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return Side(np.concatenate([*sentences, []]).astype(np.uint16), offsets, lengths)


def make_store(number: int) -> TokenStore:
    """Source piece n in 3 to 12 translates to 2 n + 3; 13 to 30 and 31; eos is 2."""
    random = np.random.default_rng(7)
    sources = [random.permutation(np.arange(3, 14))[: random.integers(1, 6)] for _ in range(number)]
    targets = [
        np.concatenate([[30, 31] if piece == 13 else [2 * piece + 3] for piece in random.permutation(source)])
        for source in sources
    ]
    sides = [make_side([np.append(one, 2) for one in some]) for some in (sources, targets)]
    return TokenStore(None, *sides, (Part("memory", number, 1.0),))


class Pieces:
    """A vocabulary whose pieces are their ids; of a source, with a letter before."""

    eos_id, unk_id, size = 2, 1, SIZE

    def __init__(self, letter):
        self._letter = letter

    def pieces(self, ids):
        return [f"{self._letter}{number}" if number != 39 else "same" for number in ids]


class TwoVocabs:
    source, target = Pieces("s"), Pieces("t")


def learn(store) -> np.ndarray:
    lexicon = learn_lexicon(store)
    sources, targets = lexicon.pairs
    found = np.zeros((14, SIZE))
    found[sources, targets] = lexicon.probabilities[: len(sources)]
    return found


def test_probabilities_are_those_of_the_translations(monkeypatch):
    store = make_store(300)
    found = learn(store)
    np.testing.assert_allclose(found[2:].sum(axis=1), 1)
    for piece in range(3, 13):
        assert found[piece].argmax() == 2 * piece + 3 and found[piece].max() > 0.8
    assert set(np.argsort(found[13])[-2:]) == {30, 31} and found[2].argmax() == 2
    # in small blocks, which are read anew for each pass
    monkeypatch.setattr(word_alignment, "_BLOCK", 50)
    monkeypatch.setattr(word_alignment, "_KEPT", 0)
    np.testing.assert_allclose(learn(store), found)
    # without rare combinations if they are too many
    monkeypatch.setattr(word_alignment, "_MOST_KEYS", 60)
    monkeypatch.setattr(lexical_table, "_MAX_PAIRS", 100)
    few = learn(store)
    assert 0 < np.count_nonzero(few) <= 60 and np.isfinite(few).all()
    assert [few[piece].argmax() for piece in range(3, 13)] == [2 * piece + 3 for piece in range(3, 13)]


def test_a_shortlist_has_the_best_pieces_the_same_piece_and_the_frequent_ones(tmp_path):
    path, store = tmp_path / "shortlist.txt", make_store(300)
    facts = write_shortlist(ShortlistRequest(path, 2, 1), store, TwoVocabs)
    assert facts == {"file": str(path), "candidates": 2, "common": 1}
    shortlist = Shortlist.read(path, TwoVocabs)
    assert shortlist.common.tolist() == [1, 2]  # eos is the most frequent piece
    assert shortlist.find([5])[0] == 13 and len(shortlist.find([5])) == 2
    assert set(shortlist.find([13])) == {30, 31}
    assert shortlist.find([39]).tolist() == [39] and not len(shortlist.find([38]))
    empty = TokenStore.from_targets([np.array([5, 2])])
    for given, common, words in [
        (empty, 1, "a language model has no source"),
        (store, -1, "--shortlist_common=-1 is negative"),
    ]:
        with pytest.raises(UserError, match=words):
            write_shortlist(ShortlistRequest(path, 2, common), given, TwoVocabs)
