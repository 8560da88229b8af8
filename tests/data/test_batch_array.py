"""A batch as one array: the devices make the same batch from it."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny_experiment import change

from flaxformer_mt.config import Config, ParallelConfig
from flaxformer_mt.data.batch_array import BatchArray, as_batch, to_array
from flaxformer_mt.data.batching import PlannedBatch
from flaxformer_mt.data.buckets import Shape
from flaxformer_mt.data.loader import make_batch
from flaxformer_mt.data.token_store import Side, TokenStore
from flaxformer_mt.parallel import make_parallel
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training.setup import TrainingSetup

IDS = {"pad_id": 3, "bos_id": 1}
# Ids as large as any, and equal to those of padding and of the beginning: nothing is told by an id.
IDS_OF_TOKENS = [0, 1, 2, 3, 5, 2**30 - 1]


def make_store(source: list[int], target: list[int]) -> TokenStore:
    """Random sentences of these lengths; without a source if all its lengths are 0."""
    random = np.random.default_rng(0)
    sides = []
    for lengths in (np.array(source), np.array(target)):
        tokens = random.choice(IDS_OF_TOKENS, lengths.sum()).astype(np.uint32)
        sides.append(Side(tokens, np.concatenate([[0], lengths.cumsum()]), lengths))
    return TokenStore("memory", *sides, ())


class OneBatch(dict):
    """A plan whose only batch has these rows."""

    def __init__(self, rows: list[int], shape: Shape, *, packed: bool) -> None:
        super().__init__({0: PlannedBatch(np.arange(len(rows)), np.array(rows), shape)})
        self.packed = packed


def same(left: Batch, right: Batch) -> None:
    for name, a, b in zip(Batch._fields, left, right, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.dtype == b.dtype, name
            np.testing.assert_array_equal(a, b, err_msg=name)


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
    """Rows of padding, full rows, sentences of one token, and ids that are those of special symbols."""
    batch = make_batch(make_store(*lengths), OneBatch(rows, shape, packed=packed), 0, **IDS)
    assert (batch.source_segments is not None) == packed
    array = to_array(batch, **IDS)
    assert array.numbers.shape == (shape.rows, shape.source + shape.target)
    same(jax.device_get(jax.jit(BatchArray.to_batch)(array)), batch)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    assert jax.tree.structure(to_array(shapes, **IDS)) == jax.tree.structure(array)
    assert to_array(shapes, **IDS).numbers == jax.ShapeDtypeStruct(array.numbers.shape, np.int32)
    assert as_batch(batch) is batch


@pytest.mark.parametrize("backend", ["pmap", "mesh"])
def test_training_transfers_one_array_split_by_rows(monkeypatch, backend):
    """Each of two devices gets its rows of all tokens; no other array is sent."""
    config = change(Config(), parallel={"devices": 2, "backend": backend})
    assert config.parallel == ParallelConfig(devices=2, backend=backend)
    vocabs = SimpleNamespace(target=SimpleNamespace(**IDS))
    setup = TrainingSetup(make_parallel(config), SimpleNamespace(vocabs=vocabs), *[None] * 7, {})
    batch = make_batch(make_store([2, 3], [4, 1]), OneBatch([0, 1], Shape(2, 3, 4), packed=False), 0, **IDS)
    sent = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *others: sent.append(x) or put(x, *others))
    [numbers] = jax.tree.leaves(setup.put(batch))
    assert len(sent) == 1
    expected = to_array(batch, **IDS).numbers
    for row, shard in enumerate(numbers.addressable_shards):
        np.testing.assert_array_equal(np.asarray(shard.data).reshape(1, -1), expected[row : row + 1])
