"""Sizes of batches without padding: one pair for each batch shape, so that few programs are compiled.

Computing without padding is left to the network (kernels/unpad.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flaxformer_mt.config import Config
from flaxformer_mt.data.buckets import Shape
from flaxformer_mt.parallel import Parallel
from flaxformer_mt.shapes import Batch

# Numbers of source and target tokens, by the shape of the batch with padding.
UnpaddedSizes = Mapping[Shape, tuple[int, int]]

# Padding is removed only from shapes with at least this share of it: to take tokens out and to put them back
# for attention costs about as much as so much padding.
_LEAST_PADDING = 0.05


def find_unpadded_sizes(
    config: Config, parallel: Parallel, plans: Iterable[Sequence[Mapping[str, Any]]]
) -> UnpaddedSizes:
    """Return the sizes of all shapes whose padding is worth removing; {}: batches keep their padding.

    Padding is removed on a CPU that is a single device, from models in which no token reads it.

    Args:
      plans: the shapes of an epoch, as `plan_summary` describes them, for each stage of training.
    """
    model = config.model
    reads_padding = model.padding_mask == "none" or model.decoder_self_attention == "ssru"
    if model.architecture != "encoder_decoder" or reads_padding or config.data.batching == "pack":
        return {}
    if not model.source_end:  # the end symbols of sources are masked in their padded rows
        return {}
    if config.train.unpad == "none" or parallel.platform != "cpu" or parallel.device_count > 1:
        return {}
    found: dict[Shape, tuple[int, int]] = {}
    for shape_facts in (facts for plan in plans for facts in plan if facts["batches"]):
        shape = Shape(shape_facts["rows"], shape_facts["source"], shape_facts["target"])
        slots = shape.rows * shape.source, shape.rows * shape.target
        before = found.get(shape, (0, 0))
        sizes = [
            max(held, min(-(-tokens // length) * length, of))
            for tokens, of, held, length in zip(
                shape_facts["likely_tokens"], slots, before, (shape.source, shape.target), strict=True
            )
        ]
        found[shape] = (sizes[0], sizes[1])
    return {
        shape: sizes
        for shape, sizes in found.items()
        if sum(sizes) <= (1 - _LEAST_PADDING) * shape.rows * (shape.source + shape.target)
    }


def fitting_sizes(batch: Batch, sizes: UnpaddedSizes) -> tuple[int, int] | None:
    """Return the sizes of a batch without padding; None if it keeps its padding, or has too many tokens."""
    rows, source = batch.source.shape
    shape = Shape(rows, source, batch.target_in.shape[1])
    room = sizes.get(shape)
    if room is None or batch.source_mask.sum() > room[0] or batch.target_mask.sum() > room[1]:
        return None
    return room
