"""The TPU kernel of attention, run on a CPU by Pallas' interpreter, against attention from plain products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from tiny_experiment import small_model

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels.attention_kernels import attend
from flaxformer_mt.kernels.masks import MaskRule
from flaxformer_mt.kernels.pallas_attention import Segments, attend_rows
from flaxformer_mt.kernels.product import Product
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.shapes import Batch

B, Q, M = 2, 16, 32

attend_plainly = functools.partial(attend, Product())


def test_values_and_gradients_are_those_of_plain_attention():
    """With heads that share a register's lanes and heads that fill one; a row of padding is averaged."""
    generator = np.random.default_rng(0)
    memory = np.repeat([[1, 2, 0], [0, 0, 0]], [10, 12, 10], axis=1).astype(np.int32)
    for heads, size, length, causal in ((4, 64, Q, False), (1, 128, M, True)):
        query_segments = np.repeat([[1, 2], [1, 1]], length // 2, axis=1).astype(np.int32)
        shapes = [(B, length, heads, size), (B, M, heads, size), (B, M, heads, size)]
        inputs = [jnp.asarray(generator.normal(size=shape), jnp.bfloat16) for shape in shapes]
        rule = MaskRule(query_segments, memory, causal=causal)

        def by_kernel(query, keys, values, heads=heads, size=size, rule=rule):
            flat = tuple(x.reshape(B, -1, heads * size) for x in (query, keys, values))
            segments = Segments(*(x[:, None] for x in rule.segments(query, keys)))
            return attend_rows(heads, rule.causal, True, flat, segments).reshape(query.shape)

        def by_products(query, keys, values, rule=rule):
            return attend_plainly(query, keys, values, rule)

        def total(attend, *inputs):
            output = attend(*inputs).astype(jnp.float32)
            return (output * jnp.sin(jnp.arange(output.size).reshape(output.shape))).sum(), output

        found, expected = (
            jax.jit(jax.value_and_grad(functools.partial(total, attend), (0, 1, 2), has_aux=True))(*inputs)
            for attend in (by_kernel, by_products)
        )
        (_, output), gradients = found
        (_, expected_output), expected_gradients = expected
        for one, other in zip((output, *gradients), (expected_output, *expected_gradients), strict=True):
            one, other = (np.asarray(x, np.float32) for x in (one, other))
            assert np.abs(other).max() > 0.1
            np.testing.assert_allclose(one, other, atol=0.02 * np.abs(other).max())


def lower_for_tpu(model_config: ModelConfig, batch: Batch) -> str:
    """The training step's forward and backward pass, as it is handed to a TPU's compiler."""
    model = make_model(model_config, source_size=40, target_size=40, platform="tpu")
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))

    def loss(params):
        return model.apply({"params": params}, batch, deterministic=True).sum()

    return jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=("tpu",)).as_text()


def test_a_model_for_tpus_keeps_no_scores():
    """Every attention is a kernel, forward and backward; without it there are scores [B, H, Q, M]."""
    config = small_model(1, 128, 2, 32, dropout_rate=0.1, dtype="bfloat16", attention_dropout_rate=0.0)
    source, target = jnp.ones((B, M), jnp.int32), jnp.ones((B, Q), jnp.int32)
    rows = Batch(source, target, target, source > 0, target > 0)
    packed = rows._replace(
        source_segments=source, target_segments=target, source_positions=source, target_positions=target
    )
    for batch in (rows, packed):
        text = lower_for_tpu(config, batch)
        assert text.count("tpu_custom_call") == 6
        assert "2x2x16x32xf32" not in text and "2x2x32x16xf32" not in text
    dropping = ModelConfig(**{**vars(config), "attention": "plain"})
    text = lower_for_tpu(dropping, rows)
    assert "tpu_custom_call" not in text and "2x2x16x32xf32" in text
