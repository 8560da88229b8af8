"""Losses, each as (sum, weight): sums over batches are divided once, by the total weight."""

from flaxformer_mt.losses.alignment_loss import AlignmentSums, alignment_cross_entropy
from flaxformer_mt.losses.target_mixture import mix_teacher
from flaxformer_mt.losses.token_loss import TokenSums, sum_over_tokens

__all__ = ["AlignmentSums", "TokenSums", "alignment_cross_entropy", "mix_teacher", "sum_over_tokens"]
