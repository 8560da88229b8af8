"""Config of low-rank adaptation (LoRA). A section of the schema's `optim`.

A field's comment is its `--help` text.
"""

from dataclasses import dataclass
from typing import Annotated

from flaxformer_mt.config.bounds import above, at_least


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adaptation (Hu et al. 2022) of a trained model: small changes of frozen matrices."""

    # Rank of the trained change of each adapted matrix, such as 8 or 32; all other parameters are frozen.
    # Needs a trained model to start from, as with --init. 0: off.
    rank: Annotated[int, at_least(0)] = 0
    # Each change is multiplied by alpha / rank, so that another rank needs no other learning rate.
    alpha: Annotated[float, above(0, at_most=1_000_000)] = 16.0
    # Matrices that are adapted, as patterns of their paths: *attention*,decoder/*/kernel adapts those of all
    # attention and of the decoder.
    targets: tuple[str, ...] = ("*/kernel",)
    # Parameters that are trained as a whole besides, as patterns of their paths: *norm,*bias. Empty: none.
    also_train: tuple[str, ...] = ()
    # Rank of the changes of embeddings and of an output layer, if it is another one. 0: the same rank.
    embedding_rank: Annotated[int, at_least(0)] = 0
    # Number of tokens whose embeddings are trained as a whole besides: the most frequent ones of the training
    # set, such as 500. A change of low rank cannot teach the words of a new domain, each its own vector.
    tokens: Annotated[int, at_least(0)] = 0
