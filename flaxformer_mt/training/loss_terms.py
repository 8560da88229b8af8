"""The terms of the training loss: cross-entropy of the target tokens, and what guided alignment adds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from flaxformer_mt.config import Config, ModelConfig, TrainConfig
from flaxformer_mt.kernels import MaskRule
from flaxformer_mt.kernels.product import Product
from flaxformer_mt.kernels.unpad import Places, restore_padding
from flaxformer_mt.losses import (
    AlignmentSums,
    TokenSums,
    alignment_cross_entropy,
    mix_teacher,
    sum_over_tokens,
)
from flaxformer_mt.model.attention import GUIDED
from flaxformer_mt.model.scanned_layers import unstack_layers
from flaxformer_mt.shapes import Array, Batch


@dataclass(frozen=True)
class TokenLoss:
    """Cross-entropy with the smoothed targets, or with a mixture of them and a teacher's distribution."""

    config: TrainConfig
    name: str = "tokens"
    weight: float = 1.0
    # Collections of the model that the term reads.
    collections: tuple[str, ...] = ()

    def __call__(self, module: Any, hidden: Array, batch: Batch) -> TokenSums:
        """Sum the loss over the tokens of a batch, by a model that is bound to its parameters."""
        train, mixture = self.config, None
        if train.teacher_weight and batch.teacher is not None:
            shares = {"weight": train.teacher_weight, "smoothing": train.label_smoothing}
            mixture = mix_teacher(batch.teacher, **shares)
        return sum_over_tokens(
            module,
            hidden,
            batch.target_out,
            batch.target_mask,
            smoothing=train.label_smoothing,
            chunk_tokens=train.loss_chunk_tokens,
            count=train.log_accuracy,
            token_weights=batch.target_weights,
            mixture=mixture,
        )


@dataclass(frozen=True)
class AlignmentLoss:
    """Cross-entropy of one head of cross-attention with given word alignments (guided alignment)."""

    config: ModelConfig
    weight: float
    name: str = "alignment"
    collections: tuple[str, ...] = (GUIDED,)

    def __call__(self, module: Any, hidden: Array, batch: Batch) -> AlignmentSums:
        """Sum the loss over the aligned tokens, by the head in the forward pass of `hidden`."""
        assert batch.alignment is not None
        stored, product = module.variables[GUIDED], module.kernels.product
        scores = head_scores(self.config, stored, batch, module.cross_rule(batch), product)
        delay = int(self.config.alignment.step == "read")
        return alignment_cross_entropy(scores, batch.alignment, delay=delay)


def head_scores(config: ModelConfig, stored: Any, batch: Batch, rule: MaskRule, product: Product) -> Array:
    """Compute the float32 scores [B, T, S], before the softmax, of the head of `config.alignment`.

    Args:
      stored: the collection `GUIDED` of a forward pass of an encoder-decoder.
      rule: the rule of cross-attention.
    """
    layer = config.alignment.layer % config.num_decoder_layers
    head = unstack_layers(stored["decoder"])[f"layers_{layer}"]["cross_attention"]
    (query,), (keys,) = head["head_query"], head["head_keys"]
    if isinstance(batch.source_segments, Places) and isinstance(batch.target_segments, Places):
        query, keys = (
            restore_padding(query, batch.target_segments),
            restore_padding(keys, batch.source_segments),
        )
        rule = MaskRule(None, batch.source_segments.is_token)
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    scores = product("BTK,BSK->BTS", query, keys)
    mask = rule.dense(query.shape[1])
    return scores if mask is None else jnp.where(mask[:, 0], scores, jnp.finfo(jnp.float32).min)


def make_loss_terms(config: Config) -> Sequence[TokenLoss | AlignmentLoss]:
    """List the terms that a config asks for; their weighted sum is minimised."""
    guided = config.model.alignment.weight
    return [TokenLoss(config.train), *([AlignmentLoss(config.model, guided)] if guided else [])]
