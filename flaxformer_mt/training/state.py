"""The training state: everything that an update reads and writes, as one pytree.

The state contains no random key: the key of dropout is derived from the seed and the step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flaxformer_mt.config import Config, ModelConfig, OptimConfig
from flaxformer_mt.model import Model, init_params
from flaxformer_mt.model.lora import add_factors
from flaxformer_mt.shapes import Array
from flaxformer_mt.training.frozen import choose_tokens, find_targets
from flaxformer_mt.training.optimizers import make_optimizer

# Optimizers for which an array of stacked layers is not the same as its layers.
_BY_LAYER = ("muon", "adafactor")


def choose_scan(config: Config) -> ModelConfig:
    """Return the network to train; model.scan_layers=auto is off for optimizers that see whole arrays."""
    if config.model.scan_layers == "auto" and config.optim.optimizer in _BY_LAYER:
        return dataclasses.replace(config.model, scan_layers=False)
    return config.model


@struct.dataclass
class TrainState:
    """Parameters, optimizer state, moving average and counters.

    step: the number of updates so far, skipped ones included. ema_params: the exponential moving average of
    the parameters, or None. skipped: the number of updates that were skipped because of a non-finite loss or
    gradient. skipped_in_a_row: the number of updates skipped since the last finite one.
    """

    step: Array
    params: Any
    opt_state: Any
    ema_params: Any
    skipped: Array
    skipped_in_a_row: Array

    @property
    def inference_params(self) -> Any:
        """The parameters for evaluation and translation: the moving average if there is one."""
        return self.params if self.ema_params is None else self.ema_params


def init_training_params(
    model: Model,
    config: Config,
    seed: Array | int,
    *,
    counts: tuple[np.ndarray, np.ndarray] | None = None,
    **placement: Any,
) -> Any:
    """Draw the initial parameters of training: of the network, and the factors that optim.lora asks for.

    Args:
      placement: `sharding_of` of `init_params`.
      counts: how often each source token and each target token occurs, for `optim.lora.tokens`; without them
        the shapes are right, but not the choice of tokens.
    """
    key, lora = jax.random.key(seed), config.optim.lora
    params = init_params(model, key, **placement)
    if not lora.rank:
        return params
    tokens = choose_tokens(params, lora, counts)
    targets = find_targets(params, lora)
    ranks = {"rank": lora.rank, "embedding_rank": lora.embedding_rank}
    return add_factors(params, targets, alpha=lora.alpha, key=key, tokens=tokens, **ranks)


def init_state(params: Any, config: OptimConfig) -> TrainState:
    """Make the state before the first update."""
    zero = jnp.zeros((), jnp.int32)
    # A copy: an update donates the buffers of the state, and each buffer can be donated only once.
    ema_params = jax.tree.map(jnp.copy, params) if config.ema_decay > 0 else None
    optimizer = make_optimizer(config, lambda step: jnp.zeros(()))  # the state depends on no learning rate
    return TrainState(zero, params, optimizer.init(params), ema_params, jnp.copy(zero), jnp.copy(zero))
