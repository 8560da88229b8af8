"""Prefixes in the arrays of one pass; its results are those of forced tokens: see test_scheduler.py."""

import numpy as np

from flaxformer_mt.search import NO_TOKEN, WORD_START, align_prefixes


def test_prefixes_end_at_the_same_step():
    """Each token is fed one step after the one before; the first is fed the start symbol."""
    prefixes = np.array([[5, 6, 7], [8, WORD_START, NO_TOKEN], [NO_TOKEN] * 3, [9, 4, NO_TOKEN]])
    aligned, fed, starts = align_prefixes(prefixes, bos_id=1, pad_id=0)
    assert np.asarray(aligned).tolist() == [[5, 6, 7], [0, 0, 8], [0, 0, 0], [0, 9, 4]]
    assert np.asarray(fed).tolist() == [[1, 5, 6], [0, 0, 1], [0, 0, 0], [0, 1, 9]]
    assert np.asarray(starts).tolist() == [0, 2, 3, 1]
