"""The update of one batch, as pure functions.

Gradients are sums over tokens. They are added over devices by `reduce` and over
microbatches by `add_sums`, then divided once by the number of tokens, so the update is the same for any
number of devices and of microbatches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from flaxformer_mt.config import Config, ModelConfig, TrainConfig
from flaxformer_mt.data.batch_array import BatchArray, as_batch
from flaxformer_mt.kernels import MaskRule
from flaxformer_mt.kernels.dropout import make_dropout_key
from flaxformer_mt.kernels.product import Product
from flaxformer_mt.kernels.unpad import Places, restore_padding, unpad
from flaxformer_mt.losses import (
    AlignmentSums,
    TokenSums,
    alignment_cross_entropy,
    sum_divergence,
    sum_over_tokens,
)
from flaxformer_mt.model.attention import GUIDED
from flaxformer_mt.model.lora import merge_factors
from flaxformer_mt.model.scanned_layers import unstack_layers
from flaxformer_mt.parallel import Parallel
from flaxformer_mt.shapes import Array, Batch
from flaxformer_mt.training.frozen import replace_trained, select_trained
from flaxformer_mt.training.optimizers import Hyperparameters, clip_factor, learning_rate, make_optimizer
from flaxformer_mt.training.state import TrainState


@dataclass(frozen=True)
class TokenLoss:
    """Cross-entropy with the smoothed targets."""

    config: TrainConfig
    name: str = "tokens"
    weight: float = 1.0
    # Collections of the model that the term reads.
    collections: tuple[str, ...] = ()

    def __call__(self, module: Any, hidden: Array, batch: Batch) -> TokenSums:
        """Sum the loss over the tokens of a batch, by a model that is bound to its parameters."""
        return sum_over_tokens(
            module,
            hidden,
            batch.target_out,
            batch.target_mask,
            smoothing=self.config.label_smoothing,
            chunk_tokens=self.config.loss_chunk_tokens,
            count=self.config.log_accuracy,
            token_weights=batch.target_weights,
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
    """Compute the float32 scores [B, T, S], before the softmax, of the head of `config.alignment`."""
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


@dataclass(frozen=True)
class RDropLoss:
    """A second pass with other dropout, and its divergence from the first (R-Drop, Liang et al. 2021).

    Equations 2 to 4: the sum of both cross-entropies, plus `rdrop_weight` times the mean of the two KL
    divergences between the passes. With half the weight of each term, a token's loss keeps its size.
    """

    config: TrainConfig
    name: str = "rdrop"
    weight: float = 0.5
    collections: tuple[str, ...] = ()

    def __call__(self, module: Any, hidden: Array, batch: Batch) -> TokenSums:
        """Sum the cross-entropy of the second pass and the weighted divergence over the tokens of a batch."""
        other = module.hidden(batch, deterministic=False)
        tokens = TokenLoss(self.config)(module, other, batch)
        divergence = sum_divergence(
            module,
            (hidden, other),
            batch.target_mask,
            chunk_tokens=self.config.loss_chunk_tokens,
            token_weights=batch.target_weights,
        )
        return tokens._replace(loss_sum=tokens.loss_sum + self.config.rdrop_weight * divergence)


LossTerm = TokenLoss | AlignmentLoss | RDropLoss


def make_loss_terms(config: Config) -> Sequence[LossTerm]:
    """List the terms of a config, in the order in which they run; their weighted sum is minimized."""
    guided, rdrop = config.model.alignment.weight, config.train.rdrop_weight
    return [
        TokenLoss(config.train, weight=RDropLoss.weight if rdrop else 1.0),
        *([AlignmentLoss(config.model, guided)] if guided else []),
        # Last, since a second pass adds to what the first has stored in collections.
        *([RDropLoss(config.train)] if rdrop else []),
    ]


class Sums(NamedTuple):
    """Gradient and loss, summed over tokens; weight is the number of tokens, or the sum of their weights.

    gradients: of the trained parameters, as `select_trained` returns them.
    correct_sum: the number of correctly predicted tokens; None without `train.log_accuracy`. alignment: the
    loss of alignments, without its weight; None without guided alignment.
    """

    gradients: Any
    loss_sum: Array
    weight: Array
    correct_sum: Array | None = None
    alignment: AlignmentSums | None = None


class StepMetrics(NamedTuple):
    """The metrics of an update, as device scalars: reading one waits for the update.

    gradient_norm: before clipping. learning_rate: of the newest update that was not skipped. skipped,
    skipped_in_a_row: the counters of the new state.
    correct_sum: None without `train.log_accuracy`. alignment: None without guided alignment.
    """

    loss_sum: Array
    weight: Array
    gradient_norm: Array
    learning_rate: Array
    skipped: Array
    skipped_in_a_row: Array
    correct_sum: Array | None = None
    alignment: AlignmentSums | None = None


def add_sums(left: Sums, right: Sums) -> Sums:
    """Add the sums of two microbatches."""
    return jax.tree.map(jnp.add, left, right)


def sum_losses(
    model: nn.Module, params: Any, batch: Batch, key: Array, terms: Sequence[LossTerm]
) -> tuple[Array, dict[str, Any]]:
    """Return the weighted sum of all loss terms of a batch, and the sums of each term by its name."""

    def run(module: Any) -> dict[str, Any]:
        hidden = module.hidden(batch, deterministic=False)
        return {term.name: term(module, hidden, batch) for term in terms}

    collections = [name for term in terms for name in term.collections]
    sums, _ = nn.apply(run, model, mutable=collections)({"params": params}, rngs={"dropout": key})
    return sum(term.weight * sums[term.name].loss_sum for term in terms), sums


def make_gradient_step(model: nn.Module, config: Config) -> Callable[..., Sums]:
    """Build the pure function from parameters, numbers, step and batch to the summed gradient and losses."""
    terms = make_loss_terms(config)

    def gradient_step(
        params: Any,
        numbers: Hyperparameters,
        step: Array,
        batch: Batch | BatchArray,
        microbatch: Array | int = 0,
        *,
        part: Array | None = None,
    ) -> Sums:
        sizes = batch.unpadded if isinstance(batch, BatchArray) else None
        batch = as_batch(batch)
        batch = batch if sizes is None else unpad(batch, sizes)
        key = make_dropout_key(numbers.seed, step, microbatch, part)

        def loss_of(trained: Any) -> tuple[Array, dict[str, Any]]:
            network = merge_factors(replace_trained(params, trained, config.optim))
            return sum_losses(model, network, batch, key, terms)

        gradients, sums = jax.grad(loss_of, has_aux=True)(select_trained(params, config.optim))
        tokens: TokenSums = sums["tokens"]
        return Sums(gradients, tokens.loss_sum, tokens.weight, tokens.correct_sum, sums.get("alignment"))

    return gradient_step


def make_update(
    config: Config, *, platform: str = "cpu"
) -> Callable[[TrainState, Hyperparameters, Sums], tuple[TrainState, StepMetrics]]:
    """Build the pure update: division by the weight, clipping, optimizer, moving average.

    If the loss or the gradient norm is NaN or infinite, the update changes only the counters.

    Args:
      platform: the platform that the program is compiled for; see `_take_if`.
    """

    def update(state: TrainState, numbers: Hyperparameters, sums: Sums) -> tuple[TrainState, StepMetrics]:
        optimizer = make_optimizer(config.optim, lambda step: learning_rate(numbers, step))
        inverse = 1 / sums.weight  # the only division by a count
        norm = optax.tree.norm(sums.gradients) * inverse
        finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss_sum)

        def apply(params: Any, opt_state: Any, ema_params: Any) -> tuple[Any, Any, Any]:
            trained = select_trained(params, config.optim)
            # One factor: XLA repeats a product wherever it is used, and writes a quotient to memory.
            scale = inverse * clip_factor(norm, config.optim)
            gradients = jax.tree.map(lambda g: g * scale, sums.gradients)
            updates, opt_state = optimizer.update(gradients, opt_state, trained)
            params = replace_trained(params, optax.apply_updates(trained, updates), config.optim)
            if ema_params is not None:
                # The decay is lower in early updates, so that the initial parameters soon lose their weight.
                number = state.step.astype(jnp.float32)
                decay = jnp.minimum(config.optim.ema_decay, (1 + number) / (10 + number))
                ema_params = jax.tree.map(lambda a, p: a + (1 - decay) * (p - a), ema_params, params)
            return params, opt_state, ema_params

        params, opt_state, ema_params = _take_if(
            finite, apply, state.params, state.opt_state, state.ema_params, platform=platform
        )
        skipped_now = jnp.where(finite, 0, 1)
        new_state = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            ema_params=ema_params,
            skipped=state.skipped + skipped_now,
            skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
        )
        # `+ 0` copies the counters: metrics are read after the next update has received the state's buffers.
        return new_state, StepMetrics(
            sums.loss_sum,
            sums.weight,
            norm,
            learning_rate(numbers, jnp.maximum(state.step - new_state.skipped, 0)),
            new_state.skipped + 0,
            new_state.skipped_in_a_row + 0,
            sums.correct_sum,
            sums.alignment,
        )

    return update


def _take_if(finite: Array, apply: Callable[..., Any], *state: Any, platform: str) -> Any:
    """Return apply(*state) if the gradient is finite, else the state.

    On a GPU, the host waits for the gradient before it can launch a branch of a conditional, so that there
    each element is selected, inside of the loop that computes it. On a CPU, XLA writes a selection into new
    arrays, and the result of a branch into the donated ones. A TPU decides by itself.
    """
    if platform == "cpu":
        return jax.lax.cond(finite, apply, lambda *same: same, *state)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), apply(*state), state)


def make_train_step(
    model: nn.Module, config: Config, parallel: Parallel
) -> Callable[[TrainState, Hyperparameters, Any], tuple[TrainState, StepMetrics]]:
    """Build the pure update from one batch, whose rows the devices of `parallel` share."""
    gradient_step = parallel.over_rows(make_gradient_step(model, config), batch=3)
    update = make_update(config, platform=parallel.platform)

    def train_step(
        state: TrainState, numbers: Hyperparameters, batch: Batch | BatchArray
    ) -> tuple[TrainState, StepMetrics]:
        return update(state, numbers, gradient_step(state.params, numbers, state.step, batch))

    return train_step
