"""Config of guided alignment: one attention head learns word alignments. A section of the schema's `model`.

A field's comment is its `--help` text.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from flaxformer_mt.config.bounds import at_least, between


@dataclass(frozen=True)
class GuidedAlignmentConfig:
    """Training of one head of cross-attention on the word alignments in data.alignments."""

    # Weight of the cross-entropy between the head's attention and the given alignments, added to the loss of
    # the translation; 0.05 to 0.5 is usual. 0: no guided alignment.
    weight: Annotated[float, between(0, 100)] = 0.0
    # Decoder layer of the head. 0: first layer; -1: last.
    layer: Annotated[int, between(-10_000, 10_000)] = -1
    # Number of the head in its layer, from 0.
    head: Annotated[int, at_least(0)] = 0
    # Decoder step whose attention aligns a target token. predict: the step that predicts the token; read: the
    # next one, which reads it, and so knows what it aligns. read is more accurate, best in layer 0 or 1.
    step: Literal["predict", "read"] = "predict"
