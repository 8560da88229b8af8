"""Options of the lengths of translations. Part of the schema's `search`.

A field's comment is its `--help` text.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from flaxformer_mt.config.bounds import between


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """Minimum and maximum lengths of translations, and the length that is expected of them."""

    # ---- content and length of translations ----

    # Minimum translation length in tokens: min_length_ratio * source length + min_length_offset.
    min_length_ratio: Annotated[float, between(0, 1000)] = 0.0
    # Number of tokens added to min_length_ratio * source length to give the minimum translation length.
    min_length_offset: Annotated[int, between(0, 1_000_000)] = 0
    # Maximum translation length in tokens: max_length_ratio * source length + max_length_offset.
    max_length_ratio: Annotated[float, between(0, 1000)] = 1.5
    # Number of tokens added to max_length_ratio * source length to give the maximum translation length.
    max_length_offset: Annotated[int, between(0, 1_000_000)] = 20
    # Length up to which beam search expects a better translation, and that memory is reserved for.
    # learned: the one that 99.9% of the training pairs do not exceed, where the run knows it; limit: the
    # maximum.
    length_bound: Literal["learned", "limit"] = "learned"
