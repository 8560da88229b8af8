"""The guided head: computed apart, its attention is that of the layer, however the layers are run."""

import dataclasses

import jax
import numpy as np
from tiny_experiment import random_params, small_model

from flaxformer_mt.config import GuidedAlignmentConfig, ModelConfig
from flaxformer_mt.losses import alignment_cross_entropy
from flaxformer_mt.model import make_model
from flaxformer_mt.model.attention import GUIDED
from flaxformer_mt.model.scanned_layers import stack_layers
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training.update import head_scores

V = 11
ALIGNMENT = GuidedAlignmentConfig(weight=0.1, layer=-2)
CONFIG = small_model(3, 8, 2, 10, num_encoder_layers=1, alignment=ALIGNMENT)


def make_batch(packed: bool) -> Batch:
    generator = np.random.default_rng(4)
    source, target = generator.integers(4, V, (3, 5)), generator.integers(4, V, (3, 7))
    source_segments = np.array([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    target_segments = np.array([[1, 1, 1, 2, 2, 2, 0], [1] * 7, [1, 1, 0, 0, 0, 0, 0]])
    batch = Batch(source, target, target, source_segments > 0, target_segments > 0)
    if not packed:
        return batch
    positions = [np.tile(np.arange(side.shape[1]), (3, 1)) for side in (source, target)]
    return Batch(*batch[:5], source_segments, target_segments, *positions)


def read_head(config: ModelConfig, params: object, batch: Batch, *more: str) -> tuple[np.ndarray, dict]:
    """The attention of the head, and the other collections `more` of the same forward pass."""
    model = make_model(config, source_size=V, target_size=V)

    @jax.jit
    def weights(params, batch):
        apply = {"deterministic": True, "mutable": [GUIDED, *more], "method": "hidden"}
        _, stored = model.apply({"params": params}, batch, **apply)
        rule = model.apply({"params": params}, batch, method="cross_rule")
        scores = head_scores(config, stored[GUIDED], batch, rule, model.kernels.product)
        return jax.nn.softmax(scores, axis=-1), stored

    return weights(params, batch)


def test_the_head_attends_as_its_layer_does_in_all_ways_of_running_it():
    params = random_params(make_model(CONFIG, source_size=V, target_size=V))
    for packed in (False, True):
        batch = make_batch(packed)
        found, stored = read_head(CONFIG, params, batch, "intermediates")
        layer = stored["intermediates"]["decoder"]["layers_1"]["cross_attention"]
        np.testing.assert_allclose(found, layer["attention_weights"][0][:, 0], atol=1e-6)
    looped = dataclasses.replace(CONFIG, scan_layers=True, remat="full")
    np.testing.assert_allclose(read_head(looped, stack_layers(params), batch)[0], found, atol=1e-6)


def test_the_loss_is_the_cross_entropy_of_equal_shares():
    generator = np.random.default_rng(5)
    scores = generator.standard_normal((2, 3, 11)).astype(np.float32)
    scores[:, :, 9:] = np.finfo(np.float32).min
    links = generator.random((2, 3, 11)) < 0.3
    links[:, :, 9:] = links[0, 1] = False
    bits = np.packbits(links, axis=2, bitorder="little")
    compute = jax.jit(alignment_cross_entropy, static_argnames="delay")
    found = compute(scores, bits)
    log_probs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    aligned = links.any(-1)
    rows = [-log_probs[b, t][links[b, t]].mean() for b, t in np.argwhere(aligned)]
    np.testing.assert_allclose(found.loss_sum, sum(rows), rtol=1e-5)
    assert found.weight == len(rows) and 0 < len(rows) < 6
    gradient = np.asarray(jax.grad(lambda scores: compute(scores, bits).loss_sum)(scores))
    assert np.isfinite(gradient).all() and not np.any(gradient[~aligned])
    # One step later: the token at 1 is aligned by the scores at 2; the last one, eos, by none.
    later = compute(scores, bits, delay=1)
    rows = [-log_probs[b, t + 1][links[b, t]].mean() for b, t in np.argwhere(aligned) if t < 2]
    np.testing.assert_allclose(later.loss_sum, sum(rows), rtol=1e-5)
    assert later.weight == len(rows) < found.weight
