"""Typed configs of experiments; config files import the config classes from here.

`schema` defines the classes, `field_values` bounds and reads values, `checks` validates, `files` finds, reads
and writes configs.
"""

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
