"""Which batches are computed without padding, and by programs of which sizes."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny_experiment import change

from flaxformer_mt.config import Config
from flaxformer_mt.data.batching import plan_epoch, plan_summary
from flaxformer_mt.data.buckets import Shape
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training.compile_ahead import find_unpadded_sizes, fitting_sizes
from flaxformer_mt.training.setup import set_up_training

CPU = SimpleNamespace(platform="cpu", device_count=1)


def facts(rows: int, source: int, target: int, tokens: tuple[int, int], *, batches: int = 3) -> dict:
    return {
        "rows": rows,
        "source": source,
        "target": target,
        "batches": batches,
        "likely_tokens": list(tokens),
    }


def test_sizes_are_whole_rows_of_likely_tokens_and_at_most_those_of_the_shape():
    shapes = [
        facts(40, 20, 16, (641, 500)),
        facts(10, 40, 30, (390, 299)),  # 2% of padding are not worth it
        facts(16, 48, 40, (700, 900), batches=0),
        facts(9, 50, 50, (449, 300)),  # one side is full
    ]
    sizes = find_unpadded_sizes(Config(), CPU, [shapes])
    assert sizes == {Shape(40, 20, 16): (660, 512), Shape(9, 50, 50): (450, 300)}
    # of several stages, the largest
    stages = [[facts(40, 20, 16, (641, 400))], [facts(40, 20, 16, (500, 500))]]
    assert find_unpadded_sizes(Config(), CPU, stages) == {Shape(40, 20, 16): (660, 512)}


@pytest.mark.parametrize(
    "fields",
    [
        {"model": {"padding_mask": "none"}},
        {"model": {"decoder_self_attention": "ssru"}},
        {"model": {"architecture": "decoder_only"}},
        {"data": {"batching": "pack"}},
        {"train": {"unpad": "none"}},
        {"platform": "gpu"},
        {"device_count": 2},
    ],
    ids=str,
)
def test_some_batches_keep_their_padding(fields):
    """Where a token reads padding, where there is next to none, and on all but a single CPU device."""
    sections = {name: value for name, value in fields.items() if isinstance(value, dict)}
    devices = SimpleNamespace(
        **{"platform": "cpu", "device_count": 1, **{k: v for k, v in fields.items() if k not in sections}}
    )
    config = change(Config(), **sections)
    assert find_unpadded_sizes(config, devices, [[facts(40, 20, 16, (600, 400))]]) == {}


def batch_of(source: int, target: int) -> Batch:
    """A batch of 4 x 5 and 4 x 6 with this many tokens."""
    masks = np.arange(20).reshape(4, 5) < source, np.arange(24).reshape(4, 6) < target
    return Batch(masks[0], masks[1], masks[1], *masks)


def test_a_batch_with_more_tokens_than_its_shape_usually_has_keeps_its_padding():
    sizes = {Shape(4, 5, 6): (15, 18)}
    assert fitting_sizes(batch_of(15, 18), sizes) == (15, 18)
    assert fitting_sizes(batch_of(16, 18), sizes) is fitting_sizes(batch_of(15, 19), sizes) is None
    assert fitting_sizes(batch_of(3, 3), {Shape(4, 5, 7): (15, 18)}) is None
    assert fitting_sizes(batch_of(3, 3), {}) is None


def test_likely_tokens_hold_nearly_all_batches_of_all_epochs():
    random = np.random.default_rng(0)
    lengths = random.integers(3, 40, 20_000), random.integers(3, 40, 20_000)
    config = change(Config(), data={"num_shapes": 3, "batch_tokens": 4096, "max_target_length": 40}).data
    plan = plan_epoch(*lengths, config=config, seed=1, epoch=0)
    summary = plan_summary(plan, *lengths)["shapes"]
    sizes = {Shape(s["rows"], s["source"], s["target"]): s["likely_tokens"] for s in summary if s["batches"]}
    least = {shape: [0, 0] for shape in sizes}
    for epoch in range(3):
        plan = plan_epoch(*lengths, config=config, seed=1, epoch=epoch, shapes=plan.shapes)
        for planned in (plan[index] for index in range(len(plan))):
            for side, of in enumerate(lengths):
                tokens = of[planned.examples].sum()
                assert tokens <= sizes[planned.shape][side]
                least[planned.shape][side] = max(least[planned.shape][side], tokens)
    # and not many more than the fullest
    pairs = [pair for shape in sizes for pair in zip(sizes[shape], least[shape], strict=True)]
    assert all(size < 1.06 * most for size, most in pairs) and len(pairs) == 6


def test_training_without_padding_is_training_with_it(tiny_config, tmp_path):
    """The update of a batch as training puts it on the device."""
    states = {}
    for unpad in ("auto", "none"):
        # The gradients of keys' biases are rounding alone, which Adam would scale up to its learning rate.
        config = change(
            tiny_config,
            data={"batch_tokens": 1024},
            model={"dropout_rate": 0.0},
            train={"unpad": unpad},
            optim={"epsilon": 1e-4},
        )
        setup = set_up_training(config, tmp_path / unpad, Checkpoints(tmp_path / unpad))
        assert bool(setup.unpadded) == (unpad == "auto")
        states[unpad] = setup
    setup = states["auto"]
    ((shape, sizes),) = setup.unpadded.items()
    random = np.random.default_rng(1)
    vocab = setup.prepared.vocabs.target
    lengths = [random.integers(2, side // 2, shape.rows) for side in (shape.source, shape.target)]
    masks = [np.arange(n) < of[:, None] for n, of in zip((shape.source, shape.target), lengths, strict=True)]
    ids = [random.integers(4, vocab.size, mask.shape).astype(np.int32) * mask for mask in masks]
    target_in = np.roll(ids[1], 1, axis=1) * masks[1]
    target_in[:, 0] = vocab.bos_id
    batch = Batch(ids[0], target_in, ids[1], *masks)
    after = {}
    for unpad, setup in states.items():
        array = setup.put(batch)
        assert array.unpadded == (sizes if unpad == "auto" else None)
        after[unpad], _ = setup.train_step(setup.state, setup.numbers, [array])
    for one, other in zip(*map(jax.tree.leaves, (after["none"].params, after["auto"].params)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
