"""Batches with similar numbers of tokens, whose pairs are drawn at random all the same."""

import numpy as np

from flaxformer_mt.data.batching import deal_evenly


def deal(source, target, *, rows, seed=0):
    pairs = np.random.default_rng([7, seed]).permutation(len(source))
    lengths = np.asarray(source)[pairs], np.asarray(target)[pairs]
    return pairs, deal_evenly(pairs, *lengths, rows=rows, random=np.random.default_rng(seed))


def test_batches_have_pairs_of_all_lengths():
    # One of 3 and 4 and one of 8 and 9 tokens; the order of five pairs says which one is left over.
    target = np.array([9, 3, 8, 4, 5])
    random = np.random.default_rng(0)
    found = target[deal_evenly(np.arange(5), target, target, rows=2, random=random)].tolist()
    assert found[4] == 5
    batches = sorted([sorted(found[:2]), sorted(found[2:4])])
    assert batches in ([[3, 8], [4, 9]], [[3, 9], [4, 8]])


def test_batches_differ_by_far_less_than_at_random():
    random = np.random.default_rng(1)
    target = np.clip(random.normal(16, 4, 9640), 3, 24).astype(int)
    source = np.clip(target + random.normal(0, 4, 9640), 3, 30).astype(int)
    pairs, dealt = deal(source, target, rows=96)
    assert sorted(dealt) == sorted(pairs) and (dealt[9600:] == pairs[9600:]).all()
    for lengths, most in ((source, 0.05), (target, 0.1)):
        at_random = lengths[pairs[:9600]].reshape(-1, 96).sum(axis=1).std()
        assert lengths[dealt[:9600]].reshape(-1, 96).sum(axis=1).std() < most * at_random


def test_each_pair_is_in_each_batch_and_each_row_equally_often():
    source, target = [5, 9, 2, 7, 7, 3], [4, 9, 3, 6, 8, 2]
    times = np.zeros((6, 3, 2))
    for seed in range(900):
        _, dealt = deal(source, target, rows=2, seed=seed)
        times[dealt, np.arange(6) // 2, np.arange(6) % 2] += 1
    assert (abs(times - 150) < 5 * 150**0.5).all()


def test_fewer_pairs_than_a_batch_stay_as_they_are():
    pairs, dealt = deal([5, 2, 4], [1, 2, 3], rows=4)
    assert (dealt == pairs).all()
