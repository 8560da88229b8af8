"""Batches: their layout by hand, links, one array, and the same sequence from wherever one starts."""

import dataclasses
import itertools
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from test_token_store import FakePairs
from tiny_experiment import change, text_data

from flaxformer_mt.commands.show import longest_batch
from flaxformer_mt.config import (
    Config,
    DataConfig,
    GuidedAlignmentConfig,
    ModelConfig,
    ParallelConfig,
    VocabConfig,
)
from flaxformer_mt.corpus import read_pairs
from flaxformer_mt.corpus.columns import Weights, link_pieces
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.data import batch_array
from flaxformer_mt.data import loader as loader_module
from flaxformer_mt.data.batch_array import BatchArray, RowShare, make_empty_batch
from flaxformer_mt.data.batching import PlannedBatch, plan_epoch
from flaxformer_mt.data.buckets import Shape, make_training_shapes
from flaxformer_mt.data.epoch_stores import EpochStores
from flaxformer_mt.data.loader import BEGINNING, Position, train_batches, valid_batches
from flaxformer_mt.data.token_store import TokenStore
from flaxformer_mt.data.tokenization import Drawing
from flaxformer_mt.errors import UserError
from flaxformer_mt.parallel import make_parallel
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training.setup import TrainingSetup
from flaxformer_mt.vocab import Vocabs, make_vocabs
from flaxformer_mt.vocab.words_of_pieces import find_words, number_pieces

PAD, BOS = 0, 1
IDS = {"pad_id": PAD, "bos_id": BOS}
CONFIG = DataConfig(
    max_source_length=24,
    max_target_length=24,
    batch_tokens=192,
    num_shapes=3,
    row_multiple=4,
)
MODES = ("bucket", "pack")


def make_pairs(number: int = 150) -> FakePairs:
    words = ["hund", "katze", "haus", "baum", "see"]
    texts = ((" ".join(words[: 1 + i % 5]), " ".join(words[i % 3 :]) + f" {i}") for i in range(number))
    return FakePairs(Pair(*text) for text in texts)


def store_of(pairs: list[tuple[list[int], list[int]]]) -> TokenStore:
    return TokenStore.of_ids(*zip(*pairs, strict=True))


def planned(examples: list[int], rows: list[int], shape: Shape, packed: bool = False) -> PlannedBatch:
    return PlannedBatch(np.array(examples), np.array(rows), shape, packed)


def make_batch(store: TokenStore, batch: PlannedBatch, **options) -> Batch:
    return batch_array.make_batch(store, batch, **options).to_batch(np)


def equal(one: Batch, two: Batch) -> bool:
    return all(
        (a is None and b is None) or (a.dtype == b.dtype and np.array_equal(a, b))
        for a, b in zip(one, two, strict=True)
    )


@pytest.fixture(scope="module")
def vocabs(tmp_path_factory) -> Vocabs:
    return make_vocabs(VocabConfig(size=300), make_pairs(), tmp_path_factory.mktemp("vocab"))


@pytest.fixture(scope="module")
def stores(vocabs, tmp_path_factory) -> EpochStores:
    return EpochStores(make_pairs(), vocabs, tmp_path_factory.mktemp("cache"), Drawing(0.0, 1))


def test_a_bucketed_batch_by_hand():
    store = store_of([([9, 2], [9, 9, 2]), ([5, 6, 2], [7, 8, 9, 2])])
    batch = make_batch(store, planned([1, 0], [0, 1], Shape(3, 4, 6)), **IDS)
    assert batch.source.tolist() == [[5, 6, 2, 0], [9, 2, 0, 0], [0, 0, 0, 0]]
    assert batch.target_in.tolist() == [[1, 7, 8, 9, 0, 0], [1, 9, 9, 0, 0, 0], [0] * 6]
    assert batch.target_out.tolist() == [[7, 8, 9, 2, 0, 0], [9, 9, 2, 0, 0, 0], [0] * 6]
    assert batch.source_mask.tolist() == [[True] * 3 + [False], [True] * 2 + [False] * 2, [False] * 4]
    assert batch.target_mask.tolist() == [[True] * 4 + [False] * 2, [True] * 3 + [False] * 3, [False] * 6]
    assert set(batch[5:]) == {None}
    assert {array.dtype for array in batch[:3]} == {np.dtype(np.int32)}


def test_rows_that_devices_cannot_share_evenly_are_padded():
    """Three rows, and packed ones in two, on any number of devices: the whole batch and rows of padding."""
    store = store_of([([9, 2], [9, 9, 2]), ([5, 6, 2], [7, 8, 9, 2]), ([4, 2], [5, 2])])
    for one in (
        planned([2, 0, 1], [0, 1, 2], Shape(3, 4, 6)),
        planned([2, 0, 1], [0, 0, 1], Shape(2, 8, 9), packed=True),
    ):
        whole = make_batch(store, one, **IDS)
        rows = len(whole.source)
        for parts in range(1, 8):
            shares = [RowShare(parts, (part,)) for part in range(parts)] + [RowShare(parts, (*range(parts),))]
            batches = [make_batch(store, one, **IDS, share=share) for share in shares]
            height = -(-rows // parts)
            assert all(len(batch.source) == height for batch in batches[:-1])
            for name, expected in whole._asdict().items():
                if expected is None:
                    continue
                together = np.concatenate([getattr(batch, name) for batch in batches[:-1]])
                np.testing.assert_array_equal(getattr(batches[-1], name), together)
                np.testing.assert_array_equal(together[:rows], expected)
                if "mask" in name or "segments" in name:
                    assert not together[rows:].any()


def test_each_token_has_the_weight_of_its_pair_in_every_batching():
    pairs = [([9] * (1 + n % 5), [10 + n] * (1 + n % 7)) for n in range(40)]
    unweighted, store = store_of(pairs), store_of(pairs)
    weights = Weights([np.arange(1, 41, dtype=np.float32) / 8], [])
    store.columns = {"target_weights": weights.open(FakePairs(pairs), {})}
    for batching in ("bucket", "pack", "shuffle"):
        config = dataclasses.replace(CONFIG, batching=batching)
        plan = plan_epoch(store.source_lengths, store.target_lengths, config=config, seed=1, epoch=0)
        for index in range(len(plan)):
            batch = make_batch(store, plan[index], **IDS)
            assert batch.target_weights.dtype == np.float32
            expected = np.where(batch.target_mask, (batch.target_out - 9) / 8, 0)
            np.testing.assert_array_equal(batch.target_weights, expected)
            plain = make_batch(unweighted, plan[index], **IDS)
            assert plain.target_weights is None
            assert equal(batch._replace(target_weights=None), plain)


def test_a_packed_batch_by_hand():
    store = store_of([([5, 2], [6, 7, 2]), ([8, 9, 2], [2]), ([4, 2], [5, 2])])
    one = planned([2, 0, 1], [0, 0, 1], Shape(3, 5, 6), packed=True)
    batch = make_batch(store, one, pad_id=99, bos_id=1)
    assert batch.source.tolist() == [[4, 2, 5, 2, 99], [8, 9, 2, 99, 99], [99] * 5]
    assert batch.target_in.tolist() == [[1, 5, 1, 6, 7, 99], [1, 99, 99, 99, 99, 99], [99] * 6]
    assert batch.target_out.tolist() == [[5, 2, 6, 7, 2, 99], [2, 99, 99, 99, 99, 99], [99] * 6]
    assert batch.source_segments.tolist() == [[1, 1, 2, 2, 0], [1, 1, 1, 0, 0], [0] * 5]
    assert batch.target_segments.tolist() == [[1, 1, 2, 2, 2, 0], [1, 0, 0, 0, 0, 0], [0] * 6]
    assert batch.source_positions.tolist() == [[0, 1, 0, 1, 0], [0, 1, 2, 0, 0], [0] * 5]
    assert batch.target_positions.tolist() == [[0, 1, 0, 1, 2, 0], [0] * 6, [0] * 6]
    assert np.array_equal(batch.source_mask, batch.source_segments > 0)
    assert np.array_equal(batch.target_mask, batch.target_segments > 0)


def read_back(batch: Batch) -> list[tuple[list[int], list[int]]]:
    if batch.source_segments is None:
        segments = batch.source_mask.astype(int), batch.target_mask.astype(int)
    else:
        segments = batch.source_segments, batch.target_segments
    pairs = []
    for row in range(len(batch.source)):
        for number in range(1, segments[0][row].max() + 1):
            source, target = (side[row] == number for side in segments)
            before = batch.target_out[row][target][:-1].tolist()
            assert batch.target_in[row][target].tolist() == [BOS, *before]
            pairs.append((batch.source[row][source].tolist(), batch.target_out[row][target].tolist()))
    return pairs


def take(number: int, stores, config=CONFIG, start=BEGINNING, seed=1) -> list[tuple[Position, Batch]]:
    batches = train_batches(stores, config, seed=seed, start=start, **IDS)
    try:
        return [(position, batch.to_batch(np)) for position, batch in itertools.islice(batches, number)]
    finally:
        batches.close()


@pytest.mark.parametrize("batching", MODES)
def test_the_sequence_is_that_of_the_plans(stores, batching):
    config = dataclasses.replace(CONFIG, batching=batching)
    store = stores.base
    expected = []
    for epoch in range(3):
        plan = plan_epoch(store.source_lengths, store.target_lengths, config=config, seed=1, epoch=epoch)
        for index in range(len(plan)):
            after = Position(epoch, index + 1) if index + 1 < len(plan) else Position(epoch + 1, 0)
            expected.append((after, make_batch(store, plan[index], **IDS)))
    found = take(len(expected), stores, config)
    assert [position for position, _ in found] == [position for position, _ in expected]
    assert all(equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True))


def test_training_resumes_at_any_position_as_if_it_had_never_stopped(stores):
    whole = take(30, stores)
    assert whole[-1][0].epoch >= 2
    for done in (1, 5, *(i + 1 for i, (position, _) in enumerate(whole[:-1]) if position.index == 0)):
        rest = take(30 - done, stores, start=whole[done - 1][0])
        assert [position for position, _ in rest] == [position for position, _ in whole[done:]]
        assert all(equal(a, b) for (_, a), (_, b) in zip(rest, whole[done:], strict=True))
    assert not equal(take(1, stores, seed=2)[0][1], whole[0][1])


def test_the_end_of_an_epoch_is_the_beginning_of_the_next(stores):
    length = next(i for i, (position, _) in enumerate(take(30, stores)) if position.epoch == 1) + 1
    at_end, at_beginning = (take(2, stores, start=start) for start in (Position(0, length), Position(1, 0)))
    assert [position for position, _ in at_end] == [Position(1, 1), Position(1, 2)]
    assert equal(at_end[0][1], at_beginning[0][1])
    with pytest.raises(UserError, match=rf"batch {length + 1} of epoch 0, which has {length} batches"):
        take(1, stores, start=Position(0, length + 1))


def test_epochs_shorter_than_what_is_kept_ready(vocabs, tmp_path):
    stores = EpochStores(make_pairs(3), vocabs, tmp_path, Drawing(0.0, 1))
    config = dataclasses.replace(CONFIG, batching="pack")
    found = take(40, stores, config)
    assert [position for position, _ in found] == [Position(epoch, 0) for epoch in range(1, 41)]
    assert all(len(read_back(batch)) == 3 for _, batch in found)


def test_batches_go_on_while_the_next_epoch_is_planned(stores, monkeypatch):
    release, planning = threading.Event(), threading.Event()

    def slow_plan(*args, epoch, **options):
        if epoch == 1:
            planning.set()
            assert release.wait(60)
        return plan_epoch(*args, epoch=epoch, **options)

    monkeypatch.setattr(loader_module, "plan_epoch", slow_plan)
    batches = train_batches(stores, CONFIG, seed=1, **IDS)
    try:
        first = [next(batches)]
        assert planning.wait(60)  # at the first batch of epoch 0, epoch 1 is under way already
        while first[-1][0].epoch == 0:
            first.append(next(batches))  # would hang if it waited for the plan
        release.set()
        assert next(batches)[0] == Position(1, 1)
    finally:
        release.set()
        batches.close()


def test_mistakes_come_through_as_they_are(vocabs, tmp_path, monkeypatch):
    stores = EpochStores(make_pairs(20), vocabs, tmp_path, Drawing(0.0, 1))
    short = dataclasses.replace(CONFIG, max_source_length=2, max_target_length=2)
    with pytest.raises(UserError, match="all 20 training pairs are longer"):
        take(1, stores, short)

    def full_disk(epoch):
        raise UserError("the token store cannot be written")

    monkeypatch.setattr(stores, "store", full_disk)
    with pytest.raises(UserError) as mistake:
        take(1, stores)
    assert str(mistake.value) == "the token store cannot be written"


def test_closing_ends_the_threads(stores):
    before = set(threading.enumerate())
    batches = train_batches(stores, CONFIG, seed=1, **IDS)
    next(batches)
    started = set(threading.enumerate()) - before
    assert started
    batches.close()
    for thread in started:
        thread.join(10)
    assert not [thread for thread in started if thread.is_alive()]


def test_with_sampling_shapes_stay_and_ids_change(vocabs, tmp_path):
    stores = EpochStores(make_pairs(60), vocabs, tmp_path / "one", Drawing(0.4, 1))
    whole = take(40, stores)
    store = stores.base
    shapes = make_training_shapes(store.source_lengths, store.target_lengths, config=CONFIG, headroom=True)
    assert {batch.source.shape for _, batch in whole} <= {(shape.rows, shape.source) for shape in shapes}
    assert shapes[-1][1:] == (24, 24)
    start = next(i for i, (position, _) in enumerate(whole) if position == Position(2, 1))
    resumed = EpochStores(make_pairs(60), vocabs, tmp_path / "two", Drawing(0.4, 1))
    rest = take(5, resumed, start=whole[start][0])
    assert all(equal(a, b) for (_, a), (_, b) in zip(rest, whole[start + 1 : start + 6], strict=True))
    for epoch in (0, 1):
        # Batches of an epoch: those after which the position is within it, and the one that ends it.
        batches = [b for p, b in whole if (p.epoch, p.index > 0) in ((epoch, True), (epoch + 1, False))]
        ids = sorted(itertools.chain.from_iterable(map(read_back, batches)))
        store = stores.store(epoch)
        pairs = [(store[i][0].tolist(), store[i][1].tolist()) for i in range(60)]
        assert ids == sorted(pair for pair in pairs if max(map(len, pair)) <= 24)
    assert not np.array_equal(stores.store(0).source.tokens, stores.store(1).source.tokens)


def test_valid_batches_hold_all_pairs_in_fixed_order(vocabs, tmp_path):
    pairs = FakePairs([*make_pairs(60), Pair("hund " * 70, "katze"), Pair("see", "baum " * 90)])
    store = TokenStore.build(pairs, vocabs, tmp_path)
    batches = [batch.to_batch(np) for batch in valid_batches(store, CONFIG, **IDS)]
    found = list(itertools.chain.from_iterable(map(read_back, batches)))
    assert sorted(found) == sorted(tuple(side.tolist() for side in store[i]) for i in range(62))
    assert len({batch.source.shape + batch.target_in.shape for batch in batches}) <= CONFIG.num_shapes
    again = valid_batches(store, dataclasses.replace(CONFIG, batching="pack"), **IDS)
    assert all(equal(a, b.to_batch(np)) for a, b in zip(batches, again, strict=True))


# ---- batch array ----
BATCH_ARRAY_IDS = {"pad_id": 3, "bos_id": 1}
# Ids as large as any, and equal to those of padding and of the beginning: nothing is told by an id.
IDS_OF_TOKENS = [0, 1, 2, 3, 5, 2**30 - 1]


def random_store(source: list[int], target: list[int]) -> TokenStore:
    """Random sentences of these lengths; without a source if all its lengths are 0."""
    draw = np.random.default_rng(0).choice
    return store_of(
        [[draw(IDS_OF_TOKENS, n).tolist() for n in pair] for pair in zip(source, target, strict=True)]
    )


@pytest.mark.parametrize(
    ("lengths", "rows", "shape", "packed"),
    [
        (([3, 1, 4], [1, 5, 2]), [0, 1, 3], Shape(5, 4, 6), False),
        (([3, 1, 4, 2], [1, 5, 2, 3]), [0, 0, 0, 2], Shape(4, 9, 8), True),
        (([0, 0], [7, 2]), [0, 1], Shape(2, 0, 7), False),
        (([0, 0, 0], [3, 2, 2]), [0, 0, 1], Shape(3, 0, 7), True),
    ],
    ids=["rows of one pair", "packed", "a language model", "a packed language model"],
)
def test_the_array_is_the_batch(lengths, rows, shape, packed):
    """On the host as on the devices, against one sentence after the other."""
    store = random_store(*lengths)
    one = planned([*range(len(rows))], rows, shape, packed)
    array = batch_array.make_batch(store, one, **BATCH_ARRAY_IDS)
    assert array.numbers.shape == (shape.rows, shape.source + shape.target)
    assert array.shape == shape
    batch = array.to_batch(np)
    assert equal(jax.device_get(jax.jit(BatchArray.to_batch)(array)), batch)
    for which, (ids, mask) in enumerate(
        [(batch.source, batch.source_mask), (batch.target_out, batch.target_mask)]
    ):
        for row in range(shape.rows):
            pairs = [store[number][which] for number, place in enumerate(rows) if place == row]
            written = np.concatenate([*pairs, np.zeros(0, int)])
            assert ids[row].tolist() == [*written, *[3] * (ids.shape[1] - len(written))]
            assert mask[row].tolist() == [True] * len(written) + [False] * (ids.shape[1] - len(written))
    assert (batch.source_segments is not None) == packed
    empty = make_empty_batch(shape, {}, packed=packed, **BATCH_ARRAY_IDS)
    assert jax.tree.structure(empty) == jax.tree.structure(array)
    assert empty.numbers.shape == array.numbers.shape and (empty.numbers == -1).all()


@pytest.mark.parametrize("backend", ["pmap", "mesh"])
def test_training_transfers_one_array_split_by_rows(monkeypatch, backend):
    config = change(Config(), parallel={"data": 2, "backend": backend})
    assert config.parallel == ParallelConfig(data=2, backend=backend)
    vocabs = SimpleNamespace(target=SimpleNamespace(**BATCH_ARRAY_IDS))
    setup = TrainingSetup(**dict.fromkeys(TrainingSetup._fields))._replace(
        parallel=make_parallel(config), prepared=SimpleNamespace(vocabs=vocabs), unpadded={}
    )
    one = planned([0, 1], [0, 1], Shape(2, 3, 4))
    batch = batch_array.make_batch(random_store([2, 3], [4, 1]), one, **BATCH_ARRAY_IDS)
    sent = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *others: sent.append(x) or put(x, *others))
    [numbers] = jax.tree.leaves(setup.put(batch))
    assert len(sent) == 1
    for row, shard in enumerate(numbers.addressable_shards):
        np.testing.assert_array_equal(np.asarray(shard.data).reshape(1, -1), batch.numbers[row : row + 1])


# ---- piece links ----
def test_each_piece_is_linked_to_each_piece_of_the_aligned_word():
    words = [[np.array([0, 0, 1]), np.array([0])], [np.array([0, 1, 1]), np.array([0, 1])]]
    # The last point belongs to a word of the second pair that has no pieces.
    points, owners = link_pieces(np.array([[0, 0], [1, 1], [0, 1], [1, 0]]), np.array([0, 0, 1, 1]), words)
    assert points.tolist() == [[0, 0], [1, 0], [2, 1], [2, 2], [0, 1]]
    assert owners.tolist() == [0, 0, 0, 0, 1]
    nothing = link_pieces(np.zeros((0, 2), np.int64), np.zeros(0, np.int64), words)
    assert nothing[0].shape == (0, 2) and nothing[1].shape == (0,)


def test_pieces_with_a_space_inside_are_numbered_by_their_words():
    """As many pieces begin with a space as there are words; the second of them is no word."""
    assert find_words(["\u2581a\u2581b", "\u2581", "\u2581c"], "a b c", lambda words: []) == [0, 2, 2]


def test_links_reach_the_right_places_of_batches(tmp_path):
    generator = np.random.default_rng(2)
    words = ["hund", "katze", "haus", "½", "see", "\u00adbaum", "ich", "100\u00a0km"]
    sources, targets, points = [], [], []
    for _ in range(60):
        source, target = (generator.choice(words, int(generator.integers(1, 6))).tolist() for _ in range(2))
        sources.append("  ".join(source))
        targets.append(" ".join(target))
        chosen = generator.random((len(source), len(target))) < 0.3
        points.append(" ".join(f"{i}-{j}" for i, j in np.argwhere(chosen)))
    for name, lines in (("train.xx", sources), ("train.yy", targets), ("train.align", points)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    sizes = {"max_source_length": 30, "max_target_length": 30, "batch_tokens": 240, "num_shapes": 2}
    config = text_data(tmp_path, "xx-yy", alignments=("train.align",), **sizes)
    pairs = read_pairs(config, "train")
    vocabs = make_vocabs(VocabConfig(size=40, byte_fallback=False), pairs, tmp_path / "vocab")
    plain = read_pairs(dataclasses.replace(config, alignments=()), "train")
    assert TokenStore.build(plain, vocabs, tmp_path / "tokens").columns == {}
    guided = ModelConfig(alignment=GuidedAlignmentConfig(weight=0.1))
    longest = longest_batch(Config(data=config, model=guided))
    assert longest.columns["alignment"].shape == (longest.shape.rows, longest.shape.target, 4)
    stores = EpochStores(pairs, vocabs, tmp_path / "tokens", Drawing(0.3, 7))
    for store in (stores.base, stores.store(1)):
        for batching in ("bucket", "pack"):
            seen = check_batches(store, dataclasses.replace(config, batching=batching), pairs, vocabs)
            assert seen == len(pairs)


def check_batches(store, config, pairs, vocabs) -> int:
    lengths = store.source_lengths, store.target_lengths
    shapes = make_training_shapes(*lengths, config=config, headroom=True)
    plan = plan_epoch(*lengths, config=config, seed=1, epoch=0, parts=store.parts, shapes=shapes)
    alignments, seen = pairs.columns["alignment"].take(*pairs.locate(np.arange(len(pairs)))), 0
    for index in range(len(plan)):
        batch = make_batch(store, plan[index], pad_id=0, bos_id=1)
        halves = [make_batch(store, plan[index], pad_id=0, bos_id=1, share=RowShare(2, (i,))) for i in (0, 1)]
        width = batch.source.shape[1]
        bits = np.unpackbits(batch.alignment, axis=2, bitorder="little")[:, :, :width]
        together = np.concatenate([half.alignment for half in halves])
        np.testing.assert_array_equal(together[: len(batch.alignment)], batch.alignment)
        expected = np.zeros_like(bits)
        rows, starts = plan[index].rows, {}
        for example, row in zip(plan[index].examples, rows, strict=True):
            s, t = starts.get(row, (0, 0))
            source, target = store[example]
            pair = pairs[int(example)]
            of_source = number_pieces(vocabs.source, source[:-1], pair.source)
            of_target = number_pieces(vocabs.target, target[:-1], pair.target)
            for i, j in alignments[example]:
                for p in np.flatnonzero(np.array(of_source) == i):
                    expected[row, t + np.flatnonzero(np.array(of_target) == j), s + p] = 1
            starts[row] = s + len(source), t + len(target)
            seen += 1
        np.testing.assert_array_equal(bits, expected)
    return seen
