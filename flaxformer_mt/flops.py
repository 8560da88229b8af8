"""What training computes and what a device could compute: operations in closed form, and peak rates.

Owns the count of matrix products, two floating-point operations for each multiply-add, and the table of
devices. Everything else of a step (norms, softmax, the update) is small beside the products and not counted;
nor is what `model.remat` computes twice. Knows nothing of clocks, of devices at hand, or of traced programs.
"""

import math
import re
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from flaxformer_mt.config import Config, ModelConfig


@dataclass(frozen=True)
class Work:
    """What batches hold, as sums over their pairs; the work of several batches or processes is the sum.

    A pair of 2 source and 3 target tokens in a row of 4 and 4:
    source_tokens 2, target_tokens 3, predictions 3, places 8, source_by_source 4, target_by_target 9,
    target_by_source 6.
    """

    source_tokens: int = 0
    target_tokens: int = 0
    # Tokens whose logits are made.
    predictions: int = 0
    # What the arrays have room for on both sides, padding included.
    places: int = 0
    # Pairs of a query and a key of the same sentence pair, as attention multiplies them.
    source_by_source: int = 0
    target_by_target: int = 0
    target_by_source: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def padding(self) -> float:
        """The share of places that hold no token; nan where there are no places."""
        return 1 - (self.source_tokens + self.target_tokens) / self.places if self.places else math.nan


def real_work(
    source_mask: ArrayLike,
    target_mask: ArrayLike,
    source_segments: ArrayLike | None = None,
    target_segments: ArrayLike | None = None,
) -> Work:
    """The work of the tokens in a batch's arrays [B, S] and [B, T], padding left out.

    Attention counts every key of a query's own sentence: those after it too, although causal attention gives
    them no weight, and no key of another sentence of a packed row. That is the usual convention
    (Chowdhery et al. 2022, appendix B).
    """
    if source_segments is None or target_segments is None:
        source, target = (np.count_nonzero(mask, axis=1) for mask in (source_mask, target_mask))
    else:
        sources, targets = np.asarray(source_segments), np.asarray(target_segments)
        count = 1 + max(int(sources.max(initial=0)), int(targets.max(initial=0)))
        source, target = _lengths(sources, count), _lengths(targets, count)
    return Work(
        source_tokens=int(source.sum()),
        target_tokens=int(target.sum()),
        predictions=int(target.sum()),
        places=np.size(source_mask) + np.size(target_mask),
        source_by_source=int(source @ source),
        target_by_target=int(target @ target),
        target_by_source=int(target @ source),
    )


def _lengths(segments: np.ndarray, count: int) -> np.ndarray:
    """Tokens of every segment of every row; 0 is padding: [[1 1 2 0], [1 0 0 0]] with 3 is [2 1 1 0]."""
    rows = np.arange(len(segments))[:, None]
    numbers = (segments + rows * count).ravel()
    return np.bincount(numbers, minlength=len(segments) * count).reshape(-1, count)[:, 1:].ravel()


def padded_work(rows: int, source: int, target: int, *, loss_chunk_tokens: int = 0) -> Work:
    """What a batch of a shape makes a program compute, whether its places hold tokens or padding.

    With `loss_chunk_tokens` the loss pads the target to a whole number of chunks.
    """
    predictions = target
    if loss_chunk_tokens:
        predictions += -target % loss_chunk_width(rows, target, chunk_tokens=loss_chunk_tokens)
    return Work(
        source_tokens=rows * source,
        target_tokens=rows * target,
        predictions=rows * predictions,
        places=rows * (source + target),
        source_by_source=rows * source * source,
        target_by_target=rows * target * target,
        target_by_source=rows * target * source,
    )


def loss_chunk_width(rows: int, length: int, *, chunk_tokens: int) -> int:
    """How many target places of all rows are scored at a time, about `chunk_tokens` tokens.

    Up to a third fewer or half as many more, if so the last chunk needs less padding: 32 rows of 50 places
    and 256 tokens make 5 chunks of 10, not 7 of 8.
    """
    wanted = max(1, min(length, chunk_tokens // rows))
    widths = range(max(1, wanted * 2 // 3), min(length, wanted * 3 // 2) + 1)
    return min(widths, key=lambda width: (-length % width, abs(width - wanted)))


def training_flops(model: ModelConfig, work: Work, *, target_size: int) -> int:
    """Operations of the matrix products of forward and backward pass, exact for the padded work of a shape.

    Backward, each product has two: by either factor. So this is 6 for each token and each weight of a matrix
    that multiplies it, and 6 for each pair of query and key and each number of a head's key and value. A
    look-up in an embedding is no product; the output layer is one, tied or not. Left out is the sum of a
    table that `positions` one_vector makes once a batch.

    Args:
      model: the network.
      work: `real_work` for what the model needs, `padded_work` for what is computed.
      target_size: V, entries of the target vocabulary.
    """
    key_dim = model.key_dim or model.model_dim // model.num_heads
    value_dim = model.value_dim or model.model_dim // model.num_heads
    # Multiply-adds: a token as query (its projection and the output's), a token as key and value, a pair.
    projection = model.model_dim * model.num_heads * (key_dim + value_dim)
    pair = model.num_heads * (key_dim + value_dim)
    maps = 3 if model.activation == "swiglu" else 2
    block = 2 * projection + maps * model.model_dim * model.ffn_dim
    source, target = work.source_tokens, work.target_tokens
    if model.architecture == "decoder_only":
        pairs = work.source_by_source + 2 * work.target_by_source + work.target_by_target
        stacks = model.num_decoder_layers * ((source + target) * block + pairs * pair)
    else:
        encoder = source * block + work.source_by_source * pair
        cross = (target + source) * projection + work.target_by_source * pair
        decoder = target * block + work.target_by_target * pair + cross
        stacks = model.num_encoder_layers * encoder + model.num_decoder_layers * decoder
    return 3 * 2 * (stacks + work.predictions * model.model_dim * target_size)


# Peak rates of one device as JAX counts devices, in 1e12 operations a second, from the makers' data sheets,
# without structured sparsity: of bfloat16 products that add up in float32, and of float32 products as JAX
# does them unless told otherwise: in TF32 on GPUs from Ampere on, in plain float32 on older ones, in
# bfloat16 on TPUs. T4 and V100 have no unit for bfloat16: its products are done in float32.
_PEAKS = {
    "V100": (15.7, 15.7),
    "V100 PCIE": (14.0, 14.0),
    "T4": (8.1, 8.1),
    "A100": (312.0, 156.0),
    "A100 PCIE": (312.0, 156.0),
    "L4": (121.0, 60.0),
    "RTX 4090": (165.2, 82.6),
    "H100": (989.4, 494.7),
    "H100 PCIE": (756.5, 378.0),
    "H100 NVL": (835.5, 417.5),
    "H200": (989.4, 494.7),
    "H200 NVL": (835.5, 417.5),
    "TPU V2": (22.5, 22.5),  # of v2 and v3 a device is a core, half a chip
    "TPU V3": (61.5, 61.5),
    "TPU V4": (275.0, 275.0),
    "TPU V5 LITE": (197.0, 197.0),
    "TPU V5E": (197.0, 197.0),
    "TPU V5": (459.0, 459.0),
    "TPU V5P": (459.0, 459.0),
    "TPU V6 LITE": (918.0, 918.0),
    "TPU V6E": (918.0, 918.0),
}
# What names of GPUs say besides the model: maker, family, socket, memory. A part that is left over makes
# another device of it, with other rates: a laptop's, or a slice of one (MIG).
_DECORATION = re.compile(r"NVIDIA|TESLA|GEFORCE|SXM\d*|\d+GB|HBM\d+E?")


def peak_flops(config: Config, device_kind: str) -> float | None:
    """Most operations a second of one device in `model.dtype`; None if its kind is not in the table.

    `train.peak_flops` overrides the table.

    Args:
      device_kind: as JAX names it, e.g. "NVIDIA H100 80GB HBM3", "Tesla T4", "TPU v5 lite".
    """
    if config.train.peak_flops:
        return config.train.peak_flops
    words = re.split(r"[\s-]+", device_kind.upper().strip())
    name = " ".join(word for word in words if not _DECORATION.fullmatch(word))
    if name not in _PEAKS:
        return None
    return _PEAKS[name][config.model.dtype == "float32"] * 1e12
