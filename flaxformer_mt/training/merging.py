"""LoRA's changes that are merged into their matrices now and then, and begin anew.

This is ReLoRA (Lialin et al. 2023, "High-rank training through low-rank updates").

A change of rank R has R directions; the sum of N of them, one after the other, has up to N * R, while the
gradient's sums and the optimizer's state remain those of one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from flaxformer_mt.config import Config
from flaxformer_mt.model.lora import FACTORS, add_factors, merge_factors
from flaxformer_mt.training.frozen import find_targets
from flaxformer_mt.training.state import TrainState
from flaxformer_mt.trees import flatten_tree


def merges_after(config: Config, step: int) -> bool:
    """Whether the changes are merged after this update; those of the last one remain."""
    every = config.optim.lora.merge_every
    return every > 0 and step % every == 0 and step < config.train.steps


def make_merging(
    optimizer: optax.GradientTransformation, config: Config
) -> Callable[[TrainState], TrainState]:
    """Builds the pure function that merges the changes into their matrices and begins new ones.

    The network remains the same, up to rounding: `up` is 0 again, and `down` is drawn from the seed and the
    step. The optimizer forgets what it knew of the factors, whose numbers mean something else now; of whole
    parameters (`optim.lora.also_train`) it keeps it. The moving average is merged by its own factors, and
    from then on its matrices follow those of the parameters.
    """
    lora = config.optim.lora

    def begin(params: Any, key: Any) -> Any:
        merged = merge_factors(params)
        return add_factors(
            merged,
            find_targets(merged, lora),
            rank=lora.rank,
            embedding_rank=lora.embedding_rank,
            alpha=lora.alpha,
            key=key,
            tokens=_chosen_tokens(params),
        )

    def merge(state: TrainState) -> TrainState:
        key = jax.random.fold_in(jax.random.key(config.seed, impl="threefry2x32"), state.step)
        params = begin(state.params, key)
        ema_params = None if state.ema_params is None else begin(state.ema_params, key)
        opt_state = jax.tree_util.tree_map_with_path(
            lambda path, old, new: new if _is_of_factor(path) else old,
            state.opt_state,
            optimizer.init(params),
        )
        return dataclasses.replace(state, params=params, opt_state=opt_state, ema_params=ema_params)

    return merge


def _chosen_tokens(params: Any) -> dict[str, Any]:
    """The ids of `optim.lora.tokens`, by the path of their table."""
    leaves = flatten_tree(params)
    ends = f"{FACTORS}/", "/ids"
    return {
        path.removeprefix(ends[0]).removesuffix(ends[1]): leaf
        for path, leaf in leaves.items()
        if path.startswith(ends[0]) and path.endswith(ends[1])
    }


def _is_of_factor(path: tuple[Any, ...]) -> bool:
    """Whether a leaf of the optimizer's state belongs to a factor; counters do not."""
    return any(getattr(key, "key", None) == FACTORS for key in path)
