"""The aligner finds the words of a made-up lexicon in any order; two directions are joined by hand."""

import numpy as np

from flaxformer_mt.corpus.word_alignment import align_corpus, symmetrize


def test_words_of_a_lexicon_are_found_wherever_they_stand():
    generator = np.random.default_rng(1)
    words = [f"w{number}" for number in range(30)]
    pairs, truth = [], []
    for _ in range(400):
        chosen = generator.choice(30, int(generator.integers(2, 7)), replace=False)
        order = list(range(len(chosen)))
        if len(order) > 3:  # the last word goes to the front, as a verb does
            order = [order[-1], *order[:-1]]
        pairs.append(([words[n] for n in chosen], [f"{words[chosen[i]].upper()}x." for i in order]))
        truth.append(sorted((i, place) for place, i in enumerate(order)))
    found = [sorted(map(tuple, points.tolist())) for points in align_corpus(pairs)]
    right = sum(len(set(a) & set(b)) for a, b in zip(found, truth, strict=True))
    assert right > 0.98 * sum(map(len, truth)) and right > 0.98 * sum(map(len, found))
    # Of a word said twice, both are joined; in both directions there are fewer points, which are one to one.
    twice = [(source, [target[0], *target]) for source, target in pairs]
    joined, both = (
        [set(map(tuple, points.tolist())) for points in align_corpus(twice, intersect=only)]
        for only in (False, True)
    )
    assert all(few <= many for few, many in zip(both, joined, strict=True))
    assert all(len({p[side] for p in few}) == len(few) for few in both for side in (0, 1))
    assert 0 < sum(map(len, both)) < sum(map(len, joined))


def test_blank_sides_have_no_points_and_marks_and_case_do_not_count():
    said = []
    found = align_corpus(
        [([], ["a"]), (["Haus"], []), ([], []), (["Das", "Haus!"], ["The", "house"]), (["haus"], ["House,"])],
        say=said.append,
    )
    assert [points.shape for points in found[:3]] == [(0, 2)] * 3 and len(said) == 2
    assert found[3].tolist() == [[0, 0], [1, 1]] and found[4].tolist() == [[0, 0]]
    assert align_corpus([]) == []


def test_directions_are_joined_by_grow_diag_final_and():
    def join(forward, backward):
        return symmetrize(np.array(forward), np.array(backward), (len(backward), len(forward))).tolist()

    assert join([0, 1], [0, 1]) == [[0, 0], [1, 1]]
    # (1, 1) is a neighbour of (0, 0) with a free word; (3, 0) is none, and word 0 of the target is taken.
    assert join([0, 1], [0, -1, -1, 0]) == [[0, 0], [1, 1]]
    # Far from all others, and both words are free: the last step takes it.
    assert join([0, -1, 3], [0, -1, -1, -1]) == [[0, 0], [3, 2]]
