"""Losses, each as (sum, weight): sums over batches are divided once, by the total weight."""

from flaxformer_mt.losses.alignment_loss import AlignmentSums, alignment_cross_entropy
from flaxformer_mt.losses.cross_entropy import Output, TokenSums, projected_cross_entropy, sum_over_tokens
from flaxformer_mt.losses.reduction import Reduce, keep
from flaxformer_mt.losses.target_mixture import Mixture, mix_teacher

__all__ = [
    "AlignmentSums",
    "Mixture",
    "Output",
    "Reduce",
    "TokenSums",
    "alignment_cross_entropy",
    "keep",
    "mix_teacher",
    "projected_cross_entropy",
    "sum_over_tokens",
]
