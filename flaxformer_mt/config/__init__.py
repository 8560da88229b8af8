"""Experiments as typed configs; config files import their sections from here.

The fields are in `schema`, the checks that span fields in `checks`, reading and writing in `files`.
"""

from flaxformer_mt.config.schema import (
    CleanConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    SearchConfig,
    TrainConfig,
    VocabConfig,
)

__all__ = [
    "CleanConfig",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "SearchConfig",
    "TrainConfig",
    "VocabConfig",
]
