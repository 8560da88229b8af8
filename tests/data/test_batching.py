"""Plans of epochs: every pair once, nothing over its shape, little padding, and all of it repeatable."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from flaxformer_mt.commands.show import longest_batch
from flaxformer_mt.config import Config, DataConfig
from flaxformer_mt.corpus.pairs import Part
from flaxformer_mt.data import batching
from flaxformer_mt.data.batching import (
    _promote_leftovers,
    deal_evenly,
    pack_rows,
    plan_epoch,
    plan_in_order,
    plan_summary,
)
from flaxformer_mt.data.buckets import Shape, make_shapes, make_training_shapes, smallest_shape
from flaxformer_mt.errors import UserError

LONGEST = {"max_source_length": 40, "max_target_length": 40}
CONFIG = DataConfig(**LONGEST, batch_tokens=320, num_shapes=5, row_multiple=4)
MODES = ("bucket", "pack", "shuffle")


def make_lengths(number: int, *, seed: int = 0, longest: int | None = 40) -> tuple[np.ndarray, np.ndarray]:
    """Lengths like those of short sentences, mean 16; target and source correlated."""
    random = np.random.default_rng(seed)
    source = np.exp(random.normal(2.65, 0.4, number))
    target = source * np.exp(random.normal(0.0, 0.2, number))
    return tuple(np.clip(side.astype(np.int32) + 1, 2, longest) for side in (source, target))


def config_for(batching: str, **changes) -> DataConfig:
    return replace(CONFIG, batching=batching, **changes)


def plan_of(batching: str, lengths, *, seed: int = 1, epoch: int = 0, **options):
    return plan_epoch(*lengths, config=config_for(batching), seed=seed, epoch=epoch, **options)


def batches_of(plan) -> list[tuple[list[int], list[int], Shape]]:
    batches = [plan[i] for i in range(len(plan))]
    return [(batch.examples.tolist(), batch.rows.tolist(), batch.shape) for batch in batches]


@pytest.mark.parametrize("batching", MODES)
@pytest.mark.parametrize("number", [1, 3, 1000, 3000])
def test_every_pair_is_in_an_epoch_once_and_fits(batching, number):
    source, target = make_lengths(number)
    plan = plan_of(batching, (source, target))
    seen: list[int] = []
    for i in range(len(plan)):
        examples, rows, shape, _ = plan[i]
        seen += examples.tolist()
        assert 0 < len(examples) == len(rows)
        assert (np.diff(rows) >= 0).all() and rows.min() == 0 and rows.max() < shape.rows
        assert len(np.unique(rows)) == rows.max() + 1  # no empty row between others
        assert np.bincount(rows, source[examples]).max() <= shape.source
        assert np.bincount(rows, target[examples]).max() <= shape.target
    assert sorted(seen) == list(range(number))
    assert plan.num_pairs == number and plan.skipped == 0
    assert (plan.tokens[0], plan.tokens[1]) == (source.sum(), target.sum())


def test_only_the_last_batch_of_a_shape_is_filled_partly():
    for mode in MODES:
        plan = plan_of(mode, make_lengths(3000))
        partly: dict[Shape, int] = {}
        for _, rows, shape in batches_of(plan):
            partly[shape] = partly.get(shape, 0) + (max(rows) + 1 < shape.rows)
        assert max(partly.values()) <= 1


@pytest.mark.parametrize("batching", MODES)
def test_a_plan_is_a_function_of_seed_and_epoch(batching):
    lengths = make_lengths(1000)
    first = batches_of(plan_of(batching, lengths, seed=3, epoch=2))
    assert batches_of(plan_of(batching, lengths, seed=3, epoch=2)) == first
    for seed, epoch in [(3, 3), (4, 2), (2, 3), (-3, 2)]:
        assert batches_of(plan_of(batching, lengths, seed=seed, epoch=epoch)) != first


@pytest.mark.parametrize("batching", MODES)
def test_pairs_are_shuffled_over_the_whole_epoch_and_so_are_batches(batching):
    source, target = make_lengths(4000)
    plan = plan_of(batching, (source, target))
    spans = [np.ptp(plan[i].examples) for i in range(len(plan)) if len(plan[i].examples) >= 8]
    assert np.mean(spans) > 4000 / 2
    if batching == "bucket":
        targets = [plan[i].shape.target for i in range(len(plan))]
        assert targets != sorted(targets) and targets != sorted(targets, reverse=True)
    # Which pairs share a batch changes from epoch to epoch.
    other = plan_of(batching, (source, target), epoch=1)
    first, second = ({frozenset(e) for e, _, _ in batches_of(one)} for one in (plan, other))
    assert not first & second


@pytest.mark.parametrize("batching", MODES)
def test_pairs_that_are_too_long_are_left_out_and_counted(batching):
    source, target = make_lengths(500)
    source[[3, 77]], target[[77, 200]] = 41, 41
    plan = plan_of(batching, (source, target))
    seen = sorted(itertools.chain.from_iterable(examples for examples, _, _ in batches_of(plan)))
    assert seen == [i for i in range(500) if i not in (3, 77, 200)]
    assert plan.skipped == 3


def test_nothing_within_the_limits_is_the_users_mistake():
    lengths = np.array([50, 60]), np.array([45, 9])
    with pytest.raises(UserError, match=r"all 2 training pairs .*max_source_length 40 .* 50 and 9\); raise"):
        plan_of("bucket", lengths)


def test_shapes_that_are_given_are_used_and_bound_the_pairs():
    shapes = (Shape(8, 8, 8), Shape(4, 12, 20))
    plan = plan_of("bucket", (np.array([8, 9, 13, 3, 5]), np.array([8, 8, 8, 20, 21])), shapes=shapes)
    assert plan.shapes == shapes and plan.skipped == 2
    assert sorted(itertools.chain.from_iterable(examples for examples, _, _ in batches_of(plan))) == [0, 1, 3]


def padded_work(shapes, source, target) -> int:
    pairs = zip(source, target, strict=True)
    costs = [min(s + 2 * t for _, s, t in shapes if s >= a and t >= b) for a, b in pairs]
    return sum(costs)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_shapes", [1, 2, 3])
def test_no_chain_of_shapes_wastes_less(seed, num_shapes):
    random = np.random.default_rng(seed)
    source, target = random.integers(1, 18, 25), random.integers(1, 18, 25)
    config = config_for("bucket", num_shapes=num_shapes, length_multiple=3)
    shapes = make_shapes(source, target, config=config)
    steps = range(3, 19, 3)
    last = (0, -(-source.max() // 3) * 3, -(-target.max() // 3) * 3)
    candidates = [(0, s, t) for s in steps for t in steps if s <= last[1] and t <= last[2]]
    best = min(
        padded_work([*chosen, last], source, target)
        for chosen in itertools.combinations(candidates, num_shapes - 1)
        if all(a[2] <= b[2] for a, b in itertools.pairwise(chosen))
    )
    assert padded_work(shapes, source, target) == best
    assert len(shapes) <= num_shapes


def test_shapes_are_multiples_and_hold_the_batch():
    source, target = make_lengths(2000)
    shapes = make_training_shapes(source, target, config=CONFIG)
    assert 1 < len(shapes) <= CONFIG.num_shapes
    for rows, source_length, target_length in shapes:
        assert source_length % 4 == target_length % 4 == 0
        assert rows == 320 // max(source_length, target_length) // 4 * 4
    for before, after in itertools.pairwise(shapes):
        assert before.source <= after.source and before.target <= after.target and before[1:] != after[1:]
    assert shapes[-1].source - 4 < source.max() <= shapes[-1].source
    assert shapes[-1].target - 4 < target.max() <= shapes[-1].target
    order = np.random.default_rng(0).permutation(2000)
    assert make_training_shapes(source[order], target[order], config=CONFIG) == shapes
    tight = replace(CONFIG, batch_tokens=100)
    assert make_training_shapes(source, target, config=tight)[-1].rows == CONFIG.row_multiple


def test_batch_pairs_bounds_the_rows_of_every_batch():
    """A batch of short pairs holds fewer than the tokens would allow; one of long pairs as many as before."""
    source, target = make_lengths(2000)
    free = make_training_shapes(source, target, config=CONFIG)
    bound = config_for("bucket", batch_pairs=12)
    shapes = make_training_shapes(source, target, config=bound)
    assert [shape[1:] for shape in shapes] == [shape[1:] for shape in free]
    assert [shape.rows for shape in shapes] == [min(shape.rows, 12) for shape in free]
    assert free[0].rows > 12 > free[-1].rows
    for plan in (
        plan_epoch(source, target, config=bound, seed=1, epoch=0),
        plan_in_order(source, target, config=bound),
    ):
        assert plan.num_pairs == 2000
        assert max(len(plan[i].examples) for i in range(len(plan))) == 12
    assert longest_batch(Config(data=bound)).shape[:2] == (8, 40)
    assert longest_batch(Config(data=config_for("bucket", batch_pairs=4))).shape[:2] == (4, 40)


def test_many_different_lengths_still_get_their_shapes_and_hold_all():
    source, target = make_lengths(5000, longest=None)
    source[0], target[1] = 997, 613
    config = replace(CONFIG, length_multiple=1, num_shapes=8)
    shapes = make_shapes(source * 9, target * 9, config=config)
    assert shapes[-1][1:] == (997 * 9, 613 * 9)
    assert (smallest_shape(source * 9, target * 9, shapes) < len(shapes)).all()


def test_headroom_makes_the_last_shape_as_long_as_allowed():
    lengths = np.array([3, 9]), np.array([4, 6])
    config = replace(CONFIG, max_source_length=30, max_target_length=22)
    assert make_training_shapes(*lengths, config=config)[-1][1:] == (12, 8)
    assert make_training_shapes(*lengths, config=config, headroom=True)[-1] == Shape(8, 30, 22)
    assert make_training_shapes(*lengths, config=config_for("pack")) == (Shape(8, 40, 40),)


def test_leftovers_fill_up_larger_batches():
    shapes = (Shape(4, 8, 8), Shape(4, 8, 12), Shape(2, 16, 16))
    groups = [np.arange(0, 5), np.arange(10, 13), np.arange(20, 22)]
    moved = [group.tolist() for group in _promote_leftovers(groups, shapes)]
    assert moved == [[0, 1, 2, 3], [10, 11, 12, 4], [20, 21]]
    # Without room above, they stay: another batch there would be more work than their own.
    groups = [np.arange(0, 5), np.arange(10, 14), np.arange(20, 22)]
    assert [group.tolist() for group in _promote_leftovers(groups, shapes)] == [g.tolist() for g in groups]


def test_packs_are_dense():
    source, target = make_lengths(20_000)
    config = replace(config_for("pack", batch_tokens=2048), max_source_length=64, max_target_length=64)
    plan = plan_epoch(source, target, config=config, seed=1, epoch=0)
    places = len(plan) * plan.shapes[0].rows * 64
    assert plan.packed and len(plan.shapes) == 1
    assert max(source.sum(), target.sum()) / places > 0.95
    assert sum(len(set(rows)) for _, rows, _ in batches_of(plan)) < 0.5 * 20_000


def first_fit(pairs, source: int, target: int) -> list[int]:
    left: list[list[int]] = []
    rows = [0] * len(pairs)
    for i in sorted(range(len(pairs)), key=lambda i: (-max(pairs[i][0] / source, pairs[i][1] / target), i)):
        row = next((r for r, (a, b) in enumerate(left) if a >= pairs[i][0] and b >= pairs[i][1]), len(left))
        if row == len(left):
            left.append([source, target])
        left[row][0] -= pairs[i][0]
        left[row][1] -= pairs[i][1]
        rows[i] = row
    return rows


@pytest.mark.parametrize("number", [1, 16, 17, 95, 200])
def test_packing_many_windows_equals_first_fit_in_each(number, monkeypatch):
    monkeypatch.setattr(batching, "_WINDOW", 16)
    monkeypatch.setattr(batching, "_WINDOWS_AT_ONCE", 3)
    random = np.random.default_rng(number)
    source, target = random.integers(1, 31, number), random.integers(1, 23, number)
    rows, num_rows = pack_rows(source, target, source=30, target=22)
    expected: list[int] = []
    for start in range(0, number, 16):
        window = list(zip(source[start : start + 16], target[start : start + 16], strict=True))
        first = max(expected, default=-1) + 1
        expected += [first + row for row in first_fit(window, 30, 22)]
    assert rows.tolist() == expected
    assert num_rows == max(expected) + 1


def test_weights_say_how_often_a_set_is_seen():
    source, target = make_lengths(30)
    source[5] = 99  # left out, whatever the weights
    parts = [Part("a", 10, 2.25), Part("b", 10, 1.0), Part("c", 10, 0.25)]
    shapes = (Shape(16, 40, 40),)
    counts = np.zeros((400, 30))
    for epoch in range(400):
        plan = plan_of(MODES[epoch % 2], (source, target), epoch=epoch, parts=parts, shapes=shapes)
        for examples, _, _ in batches_of(plan):
            counts[epoch] += np.bincount(examples, minlength=30)
    fitting = np.arange(30) != 5
    assert set(counts[:, :10][:, fitting[:10]].ravel()) == {2, 3}
    assert (counts[:, 10:20] == 1).all()
    assert set(counts[:, 20:].ravel()) == {0, 1}
    assert not counts[:, 5].any()
    # The expectation is exact: 9 pairs of weight 2.25, 10 of weight 0.25; 400 tosses of a coin are 0.025 off.
    assert counts[:, :10].sum(1).mean() == pytest.approx(9 * 2.25, abs=0.1)
    assert counts[:, 20:].sum(1).mean() == pytest.approx(2.5, abs=0.1)
    assert np.ptp(counts[:, 20:].sum(0)) < 60  # and no pair is preferred: each about 100 times


def test_shuffled_batches_hold_pairs_of_any_lengths_in_equally_many_rows():
    """In shapes whose padding is near that of batches as long as their longest sentences."""
    source, target = make_lengths(3000)
    config = config_for("shuffle", batch_pairs=16, batch_tokens=640, num_shapes=8, length_multiple=1)
    plan = plan_epoch(source, target, config=config, seed=1, epoch=0)
    assert {shape.rows for shape in plan.shapes} == {16} and 1 < len(plan.shapes) <= 8
    assert len(plan) == -(-3000 // 16)
    least = padded = 0
    spread = []
    for i in range(len(plan)):
        examples, _, shape, _ = plan[i]
        least += 16 * (source[examples].max() + target[examples].max())
        padded += 16 * (shape.source + shape.target)
        spread.append(np.ptp(source[examples]))
    assert np.median(spread) > 12  # buckets of one length have few
    assert padded < 1.1 * least


def test_an_epoch_may_be_empty():
    for mode in MODES:
        parts = [Part("a", 2, 0.1)]
        plans = [plan_of(mode, make_lengths(2), epoch=epoch, parts=parts) for epoch in range(20)]
        empty = [plan for plan in plans if not len(plan)]
        assert 0 < len(empty) < 20
        assert empty[0].padding_share == 0.0 and empty[0].num_pairs == 0


def test_a_plan_in_order_has_all_pairs_and_no_chance():
    source, target = make_lengths(300)
    source[7], target[9] = 90, 143
    plan = plan_in_order(source, target, config=CONFIG)
    batches = batches_of(plan)
    assert sorted(itertools.chain.from_iterable(examples for examples, _, _ in batches)) == list(range(300))
    assert plan.skipped == 0 and plan.shapes[-1][1:] == (90, 143)
    assert batches == batches_of(plan_in_order(source, target, config=config_for("pack")))
    for i in range(len(plan)):
        examples, _, shape, _ = plan[i]
        assert source[examples].max() <= shape.source and target[examples].max() <= shape.target


def test_the_summary_adds_up():
    source, target = make_lengths(1000)
    source[0] = 99
    plan = plan_of("bucket", (source, target))
    summary = json.loads(json.dumps(plan_summary(plan, source, target)))
    assert summary["batches"] == len(plan) == sum(shape["batches"] for shape in summary["shapes"])
    assert (summary["pairs"], summary["skipped"]) == (999, 1)
    places = sum(s["batches"] * s["rows"] * (s["source"] + s["target"]) for s in summary["shapes"])
    tokens = summary["source_tokens"] + summary["target_tokens"]
    assert tokens == source[1:].sum() + target[1:].sum()
    assert summary["padding"] == pytest.approx(1 - tokens / places, abs=1e-4)


# ---- even batches ----
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
