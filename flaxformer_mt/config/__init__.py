"""Typed configs of experiments; config files import the config classes from here.

`schema` defines the config classes, `field_values` reads values and checks their bounds, `checks` validates
whole configs, and `files` finds, reads and writes them.
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
    """Raise an error that says what to use when an older config file imports a removed class."""
    if removed := find_removed(name):
        raise UserError(f"{removed.describe(name)}; leave it out")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
