"""Typed configs of experiments; config files import the config classes from here.

`schema` defines the classes, `field_values` bounds and reads values, `checks` validates, `files` finds, reads
and writes configs.
"""

from typing import NoReturn

from flaxformer_mt.config.removed import find_removed
from flaxformer_mt.config.schema import (
    CleanConfig,
    Config,
    DataConfig,
    Dtype,
    GuidedAlignmentConfig,
    LoraConfig,
    MbrConfig,
    ModelConfig,
    NoiseConfig,
    OptimConfig,
    ParallelConfig,
    Quantization,
    SearchConfig,
    StageConfig,
    TrainConfig,
    VocabConfig,
)
from flaxformer_mt.errors import UserError

__all__ = [
    "CleanConfig",
    "Config",
    "DataConfig",
    "Dtype",
    "LoraConfig",
    "MbrConfig",
    "GuidedAlignmentConfig",
    "ModelConfig",
    "NoiseConfig",
    "OptimConfig",
    "ParallelConfig",
    "Quantization",
    "SearchConfig",
    "StageConfig",
    "TrainConfig",
    "VocabConfig",
]


def __getattr__(name: str) -> NoReturn:
    """Say of a removed class what to use, where a config file of an earlier version imports it."""
    if removed := find_removed(name):
        raise UserError(f"{removed.describe(name)}; leave it out")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
