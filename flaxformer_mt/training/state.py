"""The state of training: everything an update reads and writes, as one pytree.

The random key is not in it: dropout's key is a function of the seed and the step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from flaxformer_mt.shapes import Array


@struct.dataclass
class TrainState:
    """Parameters and what goes with them.

    step: updates tried so far. ema_params: the moving average, or None. skipped: updates left out because
    their gradient was not finite; skipped_in_a_row: those since the last good one.
    """

    step: Array
    params: Any
    opt_state: Any
    ema_params: Any
    skipped: Array
    skipped_in_a_row: Array

    @property
    def inference_params(self) -> Any:
        """What evaluation and translation use: the moving average where there is one."""
        return self.params if self.ema_params is None else self.ema_params


def init_state(params: Any, optimizer: optax.GradientTransformation, *, ema: bool) -> TrainState:
    """The state before the first update."""
    zero = jnp.zeros((), jnp.int32)
    # A copy, since the step donates its buffers and no buffer can be given away twice.
    ema_params = jax.tree.map(jnp.copy, params) if ema else None
    return TrainState(zero, params, optimizer.init(params), ema_params, jnp.copy(zero), jnp.copy(zero))
