"""Batches without padding: where tokens go, that gradients stay, and what is multiplied."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_experiment import array_of, change, mark_slow, random_params, small_model

from flaxformer_mt.config import Config, GuidedAlignmentConfig, OptimConfig, TrainConfig
from flaxformer_mt.kernels.unpad import find_places, remove_padding, restore_padding
from flaxformer_mt.model import make_model
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training.optimizers import make_hyperparameters
from flaxformer_mt.training.update import UpdateConfig, make_gradient_step

V, ROWS, SOURCE, TARGET = 23, 17, 7, 11
SIZES = (10 * SOURCE, 12 * TARGET)
CONFIG = Config(
    model=small_model(2, 12, 3, 20, num_encoder_layers=1, norm_position="pre"),
    optim=OptimConfig(),
    train=TrainConfig(label_smoothing=0.1, log_accuracy=True, loss_chunk_tokens=48),
)


NUMBERS = make_hyperparameters(CONFIG)


def make_batch(*, extra: bool = False) -> Batch:
    """Sentences of different lengths, and a row of padding; `extra`: weights and alignments."""
    random = np.random.default_rng(3)
    lengths = random.integers(1, SOURCE - 1, ROWS), random.integers(2, TARGET - 1, ROWS)
    for side in lengths:
        side[4] = 0
    source_mask, target_mask = (
        np.arange(length) < side[:, None] for side, length in zip(lengths, (SOURCE, TARGET), strict=True)
    )
    assert source_mask.sum() < SIZES[0] < source_mask.size and target_mask.sum() < SIZES[1] < target_mask.size
    masks = source_mask, target_mask
    source, target = (random.integers(3, V, mask.shape).astype(np.int32) * mask for mask in masks)
    target_in = np.concatenate([np.ones((ROWS, 1), np.int32), target[:, :-1]], axis=1) * target_mask
    batch = Batch(source, target_in, target, source_mask, target_mask)
    if not extra:
        return batch
    links = random.random((ROWS, TARGET, SOURCE)) < 0.3
    links &= target_mask[..., None] & source_mask[:, None]
    return batch._replace(
        target_weights=random.uniform(0.5, 2, target.shape).astype(np.float32) * target_mask,
        alignment=np.packbits(links, axis=-1, bitorder="little"),
    )


def test_real_tokens_come_first():
    places = find_places(jnp.array([[True, True, False], [True, False, False]]), 3)
    assert places.slots.tolist() == [[0, 1, 3]]
    assert places.entries.tolist() == [[0, 1, 3], [2, 4, 5]]


def test_padding_is_taken_out_and_put_back_and_each_is_the_gradient_of_the_other():
    mask = make_batch().source_mask
    places = find_places(mask, SIZES[0])
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, SOURCE, 5)), dtype)
        taken, back = jax.vjp(jax.jit(lambda x: remove_padding(x, places)), x)
        assert taken.shape == (10, SOURCE, 5) and taken.dtype == dtype
        number = int(mask.sum())
        np.testing.assert_array_equal(taken.reshape(-1, 5)[:number], x[np.nonzero(mask)])
        restored, again = jax.vjp(jax.jit(lambda y: restore_padding(y, places)), taken)
        np.testing.assert_array_equal(restored[mask], x[mask])
        assert not restored[np.asarray(places.entries) >= SIZES[0]].any()
        np.testing.assert_array_equal(back(taken)[0], restored)
        np.testing.assert_array_equal(again(restored)[0], taken)
    ids = jnp.arange(ROWS * SOURCE).reshape(ROWS, SOURCE)
    assert remove_padding(ids, places).ravel().tolist() == places.slots.ravel().tolist()


VARIANTS = {
    "post, rotary, gated, own tables": {
        "norm_position": "post",
        "positions": "rotary",
        "activation": "swiglu",
        "tying": "none",
    },
    "learned, rms, biases, target padding masked": {
        "positions": "learned",
        "max_positions": 16,
        "norm": "rms",
        "output_bias": True,
    }
    | {"padding_mask": "both"},
    "relative, unscaled, stacked, recomputed": {
        "positions": "relative",
        "relative_buckets": 8,
        "relative_distance": 6,
        "attention_scale": False,
        "activation": "geglu_tanh",
        "norm": "rms",
        "scan_layers": True,
        "remat": "full",
    },
}


@pytest.mark.parametrize("name", mark_slow(VARIANTS, "learned, rms, biases, target padding masked"))
def test_losses_and_gradients_are_those_with_padding(name):
    check_gradients(change(CONFIG, model=VARIANTS[name]), make_batch())


def test_weights_and_alignments_are_taken_along():
    guided = GuidedAlignmentConfig(weight=0.5, layer=0)
    check_gradients(change(CONFIG, model={"alignment": guided}), make_batch(extra=True))


def check_gradients(config: Config, batch: Batch) -> None:
    model = make_model(config.model, source_size=V, target_size=V, platform="cpu")
    params = random_params(model, scale=0.3)
    gradient = jax.jit(make_gradient_step(model, UpdateConfig.of(config)))
    arrays = [array_of(batch, unpadded=sizes) for sizes in (None, SIZES)]
    padded, unpadded = (gradient(params, NUMBERS, np.int32(2), array) for array in arrays)
    assert jax.tree.structure(padded) == jax.tree.structure(unpadded)
    assert float(padded.weight) == pytest.approx(float(unpadded.weight), rel=1e-6)
    for one, other in zip(jax.tree.leaves(padded), jax.tree.leaves(unpadded), strict=True):
        largest = float(jnp.abs(one).max())
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5 * max(largest, 1))


def test_the_compiled_update_multiplies_parameters_with_real_tokens_only():
    """All products but those of attention have the rows of the batch without padding."""
    model = make_model(CONFIG.model, source_size=V, target_size=V, platform="cpu")
    params, batch = random_params(model), make_batch()
    found = {}
    for sizes in (None, SIZES):
        array = array_of(batch, unpadded=sizes)
        gradient = jax.jit(make_gradient_step(model, UpdateConfig.of(CONFIG)))
        text = gradient.lower(params, NUMBERS, np.int32(0), array).compile().as_text()
        shapes = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text)
        found[sizes] = {math.prod(map(int, shape.split(",")[:-1])) for shape in shapes}
    slots = {ROWS * SOURCE, ROWS * TARGET}
    assert slots <= found[None]
    assert not slots & found[SIZES] and set(SIZES) <= found[SIZES]
