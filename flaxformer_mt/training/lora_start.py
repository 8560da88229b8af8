"""How changes of low rank begin with `optim.lora.initializer=gradient`: along the gradient of the matrices.

Contains the gradient of the first batches and the directions that it gives to factors. Which matrices have
factors, and what is trained, are left to `training.frozen`, the factors themselves to `model.lora`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import Config, LoraConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import Model
from flaxformer_mt.model.lora import FACTORS, matrix_sizes, without_factors
from flaxformer_mt.model.scanned_layers import STACKED
from flaxformer_mt.parallel import Parallel
from flaxformer_mt.parallel.processes import take_from_first
from flaxformer_mt.shapes import Float
from flaxformer_mt.training.frozen import find_targets
from flaxformer_mt.training.state import TrainState
from flaxformer_mt.training.update import add_sums, make_gradient_step
from flaxformer_mt.trees import flatten_tree, nest_leaves

# Batches whose gradient is followed: enough words, and few beside a training.
BATCHES = 32


def start_along_gradient(
    state: TrainState, batches: Iterable[Any], *, model: Model, config: Config, parallel: Parallel
) -> TrainState:
    """Returns the state with factors along the gradient of the first `BATCHES` batches, by `find_directions`.

    Each matrix that optim.lora adapts has the gradient that full training would have, dropout included. The
    network stays as it is: of the two factors of a change, one is 0.

    Args:
      state: the state before the first update.
      batches: from `Parallel.put`, in the order of training.

    Raises:
      UserError: the gradient is not finite.
    """
    gradients = _sum_gradients(state, batches, model, config, parallel)
    if bad := sorted(path for path, leaf in gradients.items() if not np.isfinite(leaf).all()):
        raise UserError(
            f"the gradient of the first {BATCHES} batches is not finite for {len(bad)} matrices, such as "
            f"{bad[0]}, so that optim.lora.initializer=gradient finds no directions; check the model in "
            "--init, or set --config.optim.lora.initializer=random"
        )
    factors = state.params[FACTORS]
    shapes = {path: leaf.shape for path, leaf in flatten_tree(factors).items()}
    directions = parallel.place(nest_leaves(take_from_first(find_directions(gradients, shapes))))
    # The other leaves of the tree are the scale, and the chosen tokens with their changes.
    changed = flatten_tree({FACTORS: factors}) | flatten_tree(directions)
    params = {**state.params, **nest_leaves(changed)}
    ema_params = None if state.ema_params is None else jax.tree.map(jnp.copy, params)
    return dataclasses.replace(state, params=params, ema_params=ema_params)


def _sum_gradients(
    state: TrainState, batches: Iterable[Any], model: Model, config: Config, parallel: Parallel
) -> dict[str, np.ndarray]:
    """Returns the gradients of the adapted matrices by path, summed over the first batches."""
    base = without_factors(state.params)
    targets = set(find_targets(base, config.optim.lora))
    others = tuple(path for path in flatten_tree(base) if path not in targets)
    optim = dataclasses.replace(config.optim, lora=LoraConfig(), freeze=others)
    of_matrices = make_gradient_step(model, dataclasses.replace(config, optim=optim))
    gradient = parallel.compile(of_matrices, batch=2, partial=True)
    add = parallel.compile(add_sums, donate=(0,), partial=True)
    finish = parallel.compile(lambda sums: parallel.sum_parts(sums).gradients)
    total = None
    for number, batch in enumerate(itertools.islice(batches, BATCHES)):
        sums = gradient(base, state.step, batch, np.int32(number))
        total = sums if total is None else add(total, sums)
    return flatten_tree(parallel.fetch(finish(total)))


def find_directions(
    gradients: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Returns the factors of changes along gradients, by their paths `lora/PATH/down` and `lora/PATH/up`.

    `down` [I, R] has the R leading left singular vectors of a gradient [I, O], times sqrt(I / R), and `up` is
    0: the first update then changes the matrix along the projection of its gradient (Wang et al. 2024,
    LoRA-GA; Zhang et al. 2025, LoRA-One). In a table of embeddings [V, D], whose inputs are tokens, each has
    coordinates of its own from the start: `up` has the leading right singular vectors, times sqrt(D / R), and
    `down` is 0. The squares of a row of `down`, or of a column of `up`, add up to 1 on average, so an update
    of Adam changes the elements of a matrix by the learning rate times alpha / rank, whatever the rank: as in
    full training if alpha is the rank.

    Args:
      gradients: of the matrices, by path; [L, ...] if layers are stacked.
      shapes: of the factors, by their paths without `lora/`.
    """
    found: dict[str, np.ndarray] = {}
    for path, gradient in gradients.items():
        stacked = STACKED in path.split("/")
        inputs, outputs = matrix_sizes(path, gradient.shape)
        matrices = gradient.reshape(-1 if stacked else 1, inputs, outputs)
        down, up = (np.zeros(shapes[f"{path}/{name}"], np.float32) for name in ("down", "up"))
        rank = up.shape[-2]
        if path.endswith("/embedding"):
            up[...] = _stack([_lead(matrix.T, rank).T for matrix in matrices], stacked)
        else:
            down[...] = _stack([_lead(matrix, rank) for matrix in matrices], stacked)
        found |= {f"{FACTORS}/{path}/down": down, f"{FACTORS}/{path}/up": up}
    return found


def _stack(layers: list[np.ndarray], stacked: bool) -> np.ndarray:
    return np.stack(layers) if stacked else layers[0]


def _lead(matrix: Float[np.ndarray, "N M"], rank: int) -> Float[np.ndarray, "N R"]:
    """Returns the leading left singular vectors as columns, times sqrt(N / R).

    The eigenvectors of the smaller one of the two matrices of inner products are several times as fast as a
    singular value decomposition.
    """
    wide = matrix.astype(np.float64)
    if wide.shape[0] <= wide.shape[1]:
        vectors = np.linalg.eigh(wide @ wide.T)[1][:, : -rank - 1 : -1]
    else:
        vectors = np.linalg.qr(wide @ np.linalg.eigh(wide.T @ wide)[1][:, : -rank - 1 : -1])[0]
    return vectors * math.sqrt(len(wide) / rank)
