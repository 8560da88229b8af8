"""Floating-point operations of training in closed form, and peak rates of devices.

Only matrix products are counted, with two operations per multiply-add. The rest of a step (norms, softmax,
optimizer) is small in comparison; recomputation by `model.remat` is not counted either.
"""

import math
import re
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from flaxformer_mt.config import Config, ModelConfig


@dataclass(frozen=True)
class Work:
    """Token counts, summed over sentence pairs; `+` adds the counts of batches or processes.

    A pair of 2 source and 3 target tokens, padded to 4 slots each, has
    source_tokens 2, target_tokens 3, predictions 3, places 8, source_by_source 4, target_by_target 9,
    target_by_source 6.
    """

    source_tokens: int = 0
    target_tokens: int = 0
    # Tokens whose logits are computed.
    predictions: int = 0
    # Slots of the source and target arrays, padding included.
    places: int = 0
    # Query-key pairs of attention, within the same sentence pair.
    source_by_source: int = 0
    target_by_target: int = 0
    target_by_source: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def padding(self) -> float:
        """The share of slots that are padding; nan if there are no slots."""
        return 1 - (self.source_tokens + self.target_tokens) / self.places if self.places else math.nan


def real_work(
    source_mask: ArrayLike,
    target_mask: ArrayLike,
    source_segments: ArrayLike | None = None,
    target_segments: ArrayLike | None = None,
) -> Work:
    """Count the work of the real tokens, without padding, in a batch with masks [B, S] and [B, T].

    For attention, all keys of the query's own sentence count, even those that causal attention masks; keys of
    other sentences in a packed row do not. This is the usual convention (Chowdhery et al. 2022, appendix B).
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
    """Count the tokens of segments 1 to `count` - 1 in each row; segment 0 is padding.

    [[1 1 2 0], [1 0 0 0]] with count 3 gives [2 1 1 0].
    """
    rows = np.arange(len(segments))[:, None]
    numbers = (segments + rows * count).ravel()
    return np.bincount(numbers, minlength=len(segments) * count).reshape(-1, count)[:, 1:].ravel()


def padded_work(rows: int, source: int, target: int, *, loss_chunk_tokens: int = 0) -> Work:
    """Count the work that a compiled program executes for a batch shape, padding included.

    With `loss_chunk_tokens`, the loss pads the target to a whole number of chunks. All chunks are counted
    here, although on a CPU the loss skips chunks that consist of padding.
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
    """Choose how many target positions a loss chunk covers, so that it has about `chunk_tokens` tokens.

    The width may be up to a third smaller or a half larger if the last chunk then needs less padding: 32 rows
    of 50 positions and chunk_tokens 256 give 5 chunks of 10 positions instead of 7 chunks of 8.
    """
    wanted = max(1, min(length, chunk_tokens // rows))
    widths = range(max(1, wanted * 2 // 3), min(length, wanted * 3 // 2) + 1)
    return min(widths, key=lambda width: (-length % width, abs(width - wanted)))


def training_flops(model: ModelConfig, work: Work, *, target_size: int) -> int:
    """Count the operations of the matrix products that `work` needs in forward and backward pass.

    Each product of the forward pass needs two products in the backward pass, one per factor. In total, each
    weight costs 6 operations per token that it multiplies, and each element of a head's key and value costs 6
    operations per query-key pair. The output layer is counted, tied or not. Embedding look-ups are not, nor
    is the sum over the position table once per batch (model.positions=one_vector).

    `target_size` is V, the size of the target vocabulary. Pass `real_work` to count the operations that the
    model needs, or `padded_work` to count those executed.
    """
    key_dim = model.key_dim or model.model_dim // model.num_heads
    value_dim = model.value_dim or model.model_dim // model.num_heads
    # Multiply-adds of the two projections of a token (query and output, or key and value), and of a pair.
    projection = model.model_dim * model.num_heads * (key_dim + value_dim)
    pair = model.num_heads * (key_dim + value_dim)
    maps = 3 if model.activation in ("swiglu", "geglu_tanh") else 2
    block = 2 * projection + maps * model.model_dim * model.ffn_dim
    source, target = work.source_tokens, work.target_tokens
    if model.architecture == "decoder_only":
        pairs = work.source_by_source + 2 * work.target_by_source + work.target_by_target
        stacks = model.num_decoder_layers * ((source + target) * block + pairs * pair)
    else:
        encoder = source * block + work.source_by_source * pair
        cross = (target + source) * projection + work.target_by_source * pair
        if model.decoder_self_attention == "ssru":
            recurrence = 2 * model.model_dim**2  # in place of the four projections, and no pairs
            decoder = target * (block - 2 * projection + recurrence) + cross
        else:
            decoder = target * block + work.target_by_target * pair + cross
        stacks = model.num_encoder_layers * encoder + model.num_decoder_layers * decoder
    return 3 * 2 * (stacks + work.predictions * model.model_dim * target_size)


# Peak rates of one device as JAX counts devices, in 1e12 operations per second, from the makers' data sheets,
# without structured sparsity: of bfloat16 products with float32 accumulation, and of float32 products at
# JAX's default precision: TF32 on GPUs from Ampere on, plain float32 on older GPUs, bfloat16 on TPUs. T4 and
# V100 have no bfloat16 unit and compute bfloat16 products in float32.
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
    "B200": (2250.0, 1125.0),
    "TPU V2": (22.5, 22.5),  # v2 and v3: a device is a core, half a chip
    "TPU V3": (61.5, 61.5),
    "TPU V4": (275.0, 275.0),
    "TPU V5 LITE": (197.0, 197.0),
    "TPU V5E": (197.0, 197.0),
    "TPU V5": (459.0, 459.0),
    "TPU V5P": (459.0, 459.0),
    "TPU V6 LITE": (918.0, 918.0),
    "TPU V6E": (918.0, 918.0),
}
# Parts of a GPU name beside the model: maker, family, socket, memory. Any other part denotes a different
# device with different rates, such as a laptop GPU or a MIG slice.
_DECORATION = re.compile(r"NVIDIA|TESLA|GEFORCE|SXM\d*|\d+GB|HBM\d+E?")


def peak_flops(config: Config, device_kind: str) -> float | None:
    """Return the peak operations per second of one device in `model.dtype`; None if its kind is unknown.

    `train.peak_flops` overrides the table of known devices. `device_kind` is JAX's name of a device, such as
    "NVIDIA H100 80GB HBM3".
    """
    if config.train.peak_flops:
        return config.train.peak_flops
    words = re.split(r"[\s-]+", device_kind.upper().strip())
    name = " ".join(word for word in words if not _DECORATION.fullmatch(word))
    if name not in _PEAKS:
        return None
    return _PEAKS[name][config.model.dtype == "float32"] * 1e12
