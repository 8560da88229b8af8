"""The program of a model for TPUs has the kernel of attention; its values: test_variants.py."""

import jax
import jax.numpy as jnp
from tiny_experiment import small_model

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.shapes import Batch

B, Q, M = 2, 16, 32


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
