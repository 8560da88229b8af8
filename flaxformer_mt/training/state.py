"""The training state: everything that a training step reads and changes, as one pytree.

The state contains no random key, since the key of dropout is derived from the seed and the step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from flaxformer_mt.config import Config, ModelConfig, OptimConfig
from flaxformer_mt.data.buckets import make_longest_shape
from flaxformer_mt.flops import padded_work, peak_flops, training_flops
from flaxformer_mt.model import Model, init_params, make_model
from flaxformer_mt.model.lora import add_factors
from flaxformer_mt.parallel import Parallel
from flaxformer_mt.processor import core_count
from flaxformer_mt.shapes import Array
from flaxformer_mt.training.optimizers import make_optimizer
from flaxformer_mt.training.trained_parameters import find_targets

# Optimizers for which an array of stacked layers is not the same as its layers.
_BY_LAYER = ("muon", "adafactor")


# On GPUs, a scan over layers makes an update slower by this share, since it copies the activations that the
# backward pass needs, and saves these core-seconds of compiling per layer and batch shape: Transformer-big on
# an H100 takes 127.7 ms instead of 99.0, and compiles in 34 s on two cores instead of 77.
_SCAN_COST, _SCAN_SAVES = 0.25, 7.0
# FLOP/s of a GPU in training, as a share of its peak, and where the peak is not known.
_GPU_SHARE, _GPU_FLOPS = 0.3, 50e12
_LEAST_SCANNED = 3


def choose_scan(
    config: Config, *, platform: str, device_kind: str, devices: int = 1, cores: int | None = None
) -> tuple[ModelConfig, str]:
    """Replace model.scan_layers=auto by True or False; return the model config and, for the log, the reason.

    auto scans over the layers only on GPUs, and only if this saves more compile time than it adds to all
    steps. It never scans for Muon and Adafactor, which treat an array as a whole and so need one array per
    layer. `devices` share a batch, and `cores` compile (None: all cores that this process may use).
    """
    model = config.model
    depths = [model.num_decoder_layers]
    if model.architecture != "decoder_only":
        depths.append(model.num_encoder_layers)
    on_gpu = platform in ("gpu", "cuda") and min(depths) >= _LEAST_SCANNED
    if model.scan_layers != "auto":
        return model, f"model.scan_layers={model.scan_layers}"
    if not on_gpu or config.optim.optimizer in _BY_LAYER:
        return dataclasses.replace(model, scan_layers=False), "model.scan_layers=auto: not scanned"
    shape = make_longest_shape(config.data)
    work = padded_work(shape.rows, shape.source, shape.target)
    flops = training_flops(model, work, target_size=config.vocab.size) * config.optim.accumulation
    peak = peak_flops(config, device_kind)
    update = flops / devices / (_GPU_FLOPS if peak is None else _GPU_SHARE * peak)
    cost = config.train.steps * update * _SCAN_COST
    shapes = 1 if config.data.batching == "pack" else config.data.num_shapes
    saved = _SCAN_SAVES * sum(depths) * shapes / (cores or core_count())
    scanned = saved > cost
    return dataclasses.replace(model, scan_layers=scanned), (
        f"model.scan_layers=auto: {'' if scanned else 'not '}scanned, since {config.train.steps:,} steps "
        f"would take about {cost:,.0f} s longer, and compiling {saved:,.0f} s less"
    )


def make_training_model(config: Config, parallel: Parallel, *, sizes: tuple[int, int]) -> tuple[Model, str]:
    """Make the network for vocabularies of `sizes` (source, target); also return why it scans or not."""
    network, layers = choose_scan(
        config,
        platform=parallel.platform,
        device_kind=parallel.device_kind,
        devices=parallel.device_count,
    )
    model = make_model(
        network,
        source_size=sizes[0],
        target_size=sizes[1],
        platform=parallel.platform,
        gathers_twice=parallel.layout.gathers_twice,
    )
    return model, layers


@struct.dataclass
class TrainState:
    """Parameters, optimizer state, moving average and counters.

    step: the number of steps so far, including skipped ones. ema_params: the exponential moving average of
    the parameters, or None. skipped: how many steps were skipped because of a non-finite loss or gradient.
    skipped_in_a_row: how many steps were skipped since the last step that was not.
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


def init_training_params(model: Model, config: Config, seed: Array | int, **placement: Any) -> Any:
    """Initialize the network and, with optim.lora, LoRA factors; `placement` is passed to `init_params`."""
    key, lora = jax.random.key(seed), config.optim.lora
    params = init_params(model, key, **placement)
    if not lora.rank:
        return params
    targets = find_targets(params, lora)
    ranks = {"rank": lora.rank, "embedding_rank": lora.embedding_rank}
    return add_factors(params, targets, alpha=lora.alpha, key=key, **ranks)


def init_state(params: Any, config: OptimConfig) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    # A copy: an update donates the buffers of the state, and each buffer can be donated only once.
    ema_params = jax.tree.map(jnp.copy, params) if config.ema_decay > 0 else None
    optimizer = make_optimizer(config, lambda step: jnp.zeros(()))  # the state depends on no learning rate
    return TrainState(zero, params, optimizer.init(params), ema_params, jnp.copy(zero), jnp.copy(zero))
