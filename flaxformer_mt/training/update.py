"""The update of one batch, as pure functions.

Row 9 of the data path. Gradients are sums over tokens. They are added over devices by `reduce` and over
microbatches by `add_sums`, then divided once by the number of tokens, so neither the number of devices nor
the number of microbatches changes the update.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from flaxformer_mt.config import Config
from flaxformer_mt.losses import (
    Output,
    Reduce,
    TokenSums,
    count_correct,
    keep,
    projected_cross_entropy,
    smoothed_cross_entropy,
)
from flaxformer_mt.shapes import Array, Batch
from flaxformer_mt.training.state import TrainState


_PRNG = {"rbg": "unsafe_rbg", "threefry": "threefry2x32"}


class Sums(NamedTuple):
    """Gradient and loss of some tokens, summed; weight is how many they are.

    correct_sum: how many of them were predicted rightly; None without `train.log_accuracy`.
    """

    gradients: Any
    loss_sum: Array
    weight: Array
    correct_sum: Array | None = None


class StepMetrics(NamedTuple):
    """What an update reports, as device scalars: reading one waits for the step.

    correct_sum is None without `train.log_accuracy`.
    """

    loss_sum: Array
    weight: Array
    gradient_norm: Array
    skipped: Array
    skipped_in_a_row: Array
    correct_sum: Array | None = None


def add_sums(left: Sums, right: Sums) -> Sums:
    """The sums of two microbatches together."""
    return jax.tree.map(jnp.add, left, right)


def make_gradient_step(model: nn.Module, config: Config) -> Callable[..., Sums]:
    """Builds the pure function from parameters and a batch to the sums of its gradients."""

    def gradient_step(
        params: Any, step: Array, batch: Batch, microbatch: int = 0, *, reduce: Reduce = keep
    ) -> Sums:
        key = jax.random.key(config.seed, impl=_PRNG[config.train.prng])
        dropout_key = jax.random.fold_in(jax.random.fold_in(key, step), microbatch)
        if reduce.shard is not None:  # parts of a batch draw numbers of their own
            dropout_key = jax.random.fold_in(dropout_key, reduce.shard)

        def loss_of(params: Any) -> tuple[Array, TokenSums]:
            def run(module: Any) -> TokenSums:
                hidden = module.hidden(batch, deterministic=False)
                return _training_loss(module, hidden, batch, config)

            sums = nn.apply(run, model)({"params": params}, rngs={"dropout": dropout_key})
            return sums.loss_sum, sums

        (_, sums), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        return reduce(Sums(gradients, *sums))

    return gradient_step


def _training_loss(module: Any, hidden: Array, batch: Batch, config: Config) -> TokenSums:
    train, target, mask = config.train, batch.target_out, batch.target_mask
    if train.loss_chunk_tokens:
        return projected_cross_entropy(
            hidden,
            Output(*module.output_layer()),
            target,
            mask,
            smoothing=train.label_smoothing,
            chunk_tokens=train.loss_chunk_tokens,
            count=train.log_accuracy,
        )
    logits = module.logits(hidden)
    loss_sum, weight = smoothed_cross_entropy(logits, target, mask, train.label_smoothing)
    correct_sum = count_correct(logits, target, mask)[0] if train.log_accuracy else None
    return TokenSums(loss_sum, weight, correct_sum)


def make_update(
    optimizer: optax.GradientTransformation, config: Config
) -> Callable[[TrainState, Sums], tuple[TrainState, StepMetrics]]:
    """Builds the pure update: divide by the weight, clip, step, move the average.

    A gradient with a NaN or an infinity leaves everything but the counters as it was.
    """

    def update(state: TrainState, sums: Sums) -> tuple[TrainState, StepMetrics]:
        def divide() -> Any:
            return jax.tree.map(lambda g: g / sums.weight, sums.gradients)  # the only division by a count

        norm = optax.tree.norm(divide())
        good = jnp.isfinite(norm) & jnp.isfinite(sums.loss_sum)

        def move(params: Any, opt_state: Any, ema_params: Any) -> tuple[Any, Any, Any]:
            updates, opt_state = optimizer.update(divide(), opt_state, params)
            params = optax.apply_updates(params, updates)
            if ema_params is not None:
                # Early averages forget faster, so that the start does not linger.
                number = state.step.astype(jnp.float32)
                decay = jnp.minimum(config.optim.ema_decay, (1 + number) / (10 + number))
                ema_params = jax.tree.map(lambda a, p: a + (1 - decay) * (p - a), ema_params, params)
            return params, opt_state, ema_params

        # A branch, not a choice between two results: so the donated arrays are overwritten where they are.
        params, opt_state, ema_params = jax.lax.cond(
            good, move, lambda *same: same, state.params, state.opt_state, state.ema_params
        )
        skipped_now = jnp.where(good, 0, 1)
        after = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            ema_params=ema_params,
            skipped=state.skipped + skipped_now,
            skipped_in_a_row=jnp.where(good, 0, state.skipped_in_a_row + 1),
        )
        # Copies: the state is donated to the next step, its counters must outlive it.
        return after, StepMetrics(
            sums.loss_sum,
            sums.weight,
            norm,
            after.skipped + 0,
            after.skipped_in_a_row + 0,
            sums.correct_sum,
        )

    return update


def make_train_step(
    model: nn.Module, optimizer: optax.GradientTransformation, config: Config
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """Builds the pure update from one batch; `reduce` sums a pytree over devices (`keep` under jit)."""
    gradient_step = make_gradient_step(model, config)
    update = make_update(optimizer, config)

    def train_step(
        state: TrainState, batch: Batch, *, reduce: Reduce = keep
    ) -> tuple[TrainState, StepMetrics]:
        return update(state, gradient_step(state.params, state.step, batch, reduce=reduce))

    return train_step
