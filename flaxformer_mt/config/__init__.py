"""Typed configs of experiments; config files import the config classes from here.

The classes are defined in `schema`, with bounds of numbers from `bounds`, and validated in `checks`; `files`
reads and writes configs, `find_config` locates them.
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
    TypoConfig,
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
    "TypoConfig",
    "VocabConfig",
]
