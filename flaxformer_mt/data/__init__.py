"""Data pipeline from sentence pairs to batches of token ids: token store, epoch plan, loader."""

from flaxformer_mt.data.batching import EpochPlan, plan_epoch, plan_summary
from flaxformer_mt.data.buckets import Shape, make_training_shapes
from flaxformer_mt.data.epoch_stores import EpochStores
from flaxformer_mt.data.loader import make_batch, train_batches, valid_batches
from flaxformer_mt.data.position import Position
from flaxformer_mt.data.token_store import TokenStore

__all__ = [
    "EpochPlan",
    "EpochStores",
    "Position",
    "Shape",
    "TokenStore",
    "make_batch",
    "make_training_shapes",
    "plan_epoch",
    "plan_summary",
    "train_batches",
    "valid_batches",
]
