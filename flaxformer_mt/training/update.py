"""The training step, as pure functions: gradient, optimizer update and metrics.

Gradients are summed over tokens: `Parallel.over_rows` adds them up over devices, and `add_sums` over
microbatches. The total is divided once by the number of tokens, so the update does not depend on the number
of devices or microbatches.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from flaxformer_mt.config import Config, ModelConfig, OptimConfig
from flaxformer_mt.data.batch_array import BatchArray, as_batch
from flaxformer_mt.kernels import MaskRule
from flaxformer_mt.kernels.dropout import make_dropout_key
from flaxformer_mt.kernels.matmul import Product
from flaxformer_mt.kernels.unpad import Places, restore_padding, unpad
from flaxformer_mt.losses import (
    AlignmentSums,
    TokenSums,
    alignment_cross_entropy,
    smoothed_cross_entropy,
)
from flaxformer_mt.model import Model
from flaxformer_mt.model.attention import GUIDED
from flaxformer_mt.model.lora import merge_factors
from flaxformer_mt.model.scanned_layers import unstack_layers
from flaxformer_mt.parallel import Parallel
from flaxformer_mt.shapes import Array, Batch
from flaxformer_mt.training.optimizers import Hyperparameters, clip_factor, learning_rate, make_optimizer
from flaxformer_mt.training.state import TrainState
from flaxformer_mt.training.trained_parameters import replace_trained, select_trained


@dataclass(frozen=True)
class UpdateConfig:
    """The settings, apart from the model, that are compiled into the programs of a training step.

    Seed and learning rate are arguments of the programs instead (`Hyperparameters`), so that runs that differ
    only in these share compiled programs.
    """

    optim: OptimConfig
    label_smoothing: float
    loss_chunk_tokens: int
    log_accuracy: bool

    @classmethod
    def of(cls, config: Config) -> "UpdateConfig":
        """Select the settings from a config; fields that `Hyperparameters` replaces get constant values."""
        optim = dataclasses.replace(config.optim, learning_rate=1.0, schedule="constant", warmup_steps=0)
        train = config.train
        return cls(optim, train.label_smoothing, train.loss_chunk_tokens, train.log_accuracy)


class LossTerm(NamedTuple):
    """A term of the loss; training minimizes the weighted sum of all terms.

    sum_loss: a function that sums the term over a batch. Its arguments are the model, bound to its
    parameters, the model's hidden states [B, T, D] for the batch, and the batch.
    weight: the weight of the term.
    collections: the names of the model's Flax collections that `sum_loss` reads.
    """

    sum_loss: Callable[[Any, Array, Batch], TokenSums | AlignmentSums]
    weight: float = 1.0
    collections: tuple[str, ...] = ()


def sum_alignment_loss(config: ModelConfig, module: Any, hidden: Array, batch: Batch) -> AlignmentSums:
    """Sum the loss of guided alignment: the cross-entropy of an attention head against word alignments."""
    assert batch.alignment is not None
    stored, product = module.variables[GUIDED], module.kernels.product
    scores = head_scores(config, stored, batch, module.cross_rule(batch), product)
    delay = int(config.alignment.step == "read")
    return alignment_cross_entropy(scores, batch.alignment, delay=delay)


def head_scores(config: ModelConfig, stored: Any, batch: Batch, rule: MaskRule, product: Product) -> Array:
    """Compute the float32 scores [B, T, S], before the softmax, of the head that learns alignments."""
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


def make_loss_terms(model: ModelConfig, config: UpdateConfig) -> list[LossTerm]:
    """Return the loss terms of a config: cross-entropy and, with guided alignment, the alignment loss."""
    sum_tokens = functools.partial(
        smoothed_cross_entropy,
        smoothing=config.label_smoothing,
        chunk_tokens=config.loss_chunk_tokens,
        count=config.log_accuracy,
    )
    terms = [LossTerm(sum_tokens)]
    if guided := model.alignment.weight:
        sum_loss = functools.partial(sum_alignment_loss, model)
        terms.append(LossTerm(sum_loss, weight=guided, collections=(GUIDED,)))
    return terms


class Sums(NamedTuple):
    """Gradient and loss, summed over tokens; `weight` is the number of tokens, or the sum of their weights.

    gradients: the gradients of the trained parameters, as `select_trained` arranges them. correct_sum: the
    number of correctly predicted tokens; 0 without `train.log_accuracy`. alignment_sum: the alignment loss,
    before it is weighted; aligned: the number of aligned tokens; both 0 without guided alignment.
    """

    gradients: Any
    loss_sum: Array
    weight: Array
    correct_sum: Array
    alignment_sum: Array
    aligned: Array


class StepMetrics(NamedTuple):
    """The metrics of a training step, as scalars on the devices: reading one waits for the step.

    gradient_norm: the norm before clipping. learning_rate: the rate of the newest step that was not skipped.
    skipped, skipped_in_a_row: the counters of the new state. The other fields are as in `Sums`.
    """

    loss_sum: Array
    weight: Array
    gradient_norm: Array
    learning_rate: Array
    skipped: Array
    skipped_in_a_row: Array
    correct_sum: Array
    alignment_sum: Array
    aligned: Array


def add_sums(left: Sums, right: Sums) -> Sums:
    return jax.tree.map(jnp.add, left, right)


def sum_losses(
    model: nn.Module, params: Any, batch: Batch, key: Array, terms: Sequence[LossTerm]
) -> tuple[Array, list[Any]]:
    def run(module: Any) -> list[Any]:
        hidden = module.hidden(batch, deterministic=False)
        return [term.sum_loss(module, hidden, batch) for term in terms]

    collections = [name for term in terms for name in term.collections]
    sums, _ = nn.apply(run, model, mutable=collections)({"params": params}, rngs={"dropout": key})
    return sum(term.weight * one.loss_sum for term, one in zip(terms, sums, strict=True)), sums


def make_gradient_step(
    model: Model, config: UpdateConfig, *, loss_terms: Sequence[LossTerm] = ()
) -> Callable[..., Sums]:
    """Build the function that sums gradient and losses, including `loss_terms`, over a (micro)batch."""
    terms = [*make_loss_terms(model.config, config), *loss_terms]

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

        def loss_of(trained: Any) -> tuple[Array, list[Any]]:
            network = merge_factors(replace_trained(params, trained, config.optim))
            return sum_losses(model, network, batch, key, terms)

        gradients, sums = jax.grad(loss_of, has_aux=True)(select_trained(params, config.optim))
        tokens: TokenSums = sums[0]
        zero = jnp.zeros((), jnp.float32)
        correct_sum = zero if tokens.correct_sum is None else tokens.correct_sum
        alignment = sums[1] if model.config.alignment.weight else AlignmentSums(zero, zero)
        return Sums(gradients, tokens.loss_sum, tokens.weight, correct_sum, *alignment)

    return gradient_step


def make_update(
    config: UpdateConfig, *, platform: str = "cpu"
) -> Callable[[TrainState, Hyperparameters, Sums], tuple[TrainState, StepMetrics]]:
    """Build the state update: divide gradients by the weight, clip, optimize, update the moving average.

    If the loss or the gradient norm is NaN or infinite, only the counters of the state change.
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
            sums.alignment_sum,
            sums.aligned,
        )

    return update


def _take_if(finite: Array, apply: Callable[..., Any], *state: Any, platform: str) -> Any:
    """Return apply(*state) if `finite`, else the state.

    On a CPU this is a conditional, whose result XLA writes into the donated arrays. Elsewhere it is an
    elementwise selection, since the host of a GPU would wait for the gradient before it could launch a
    branch.
    """
    if platform == "cpu":
        return jax.lax.cond(finite, apply, lambda *same: same, *state)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), apply(*state), state)


def make_train_step(
    model: Model, config: UpdateConfig, parallel: Parallel, *, loss_terms: Sequence[LossTerm] = ()
) -> Callable[[TrainState, Hyperparameters, Any], tuple[TrainState, StepMetrics]]:
    """Build the training step of one batch, whose rows are split over the devices of `parallel`."""
    gradient_step = make_gradient_step(model, config, loss_terms=loss_terms)
    gradient_step = parallel.over_rows(gradient_step, batch=3)
    update = make_update(config, platform=parallel.platform)

    def train_step(
        state: TrainState, numbers: Hyperparameters, batch: Batch | BatchArray
    ) -> tuple[TrainState, StepMetrics]:
        return update(state, numbers, gradient_step(state.params, numbers, state.step, batch))

    return train_step
