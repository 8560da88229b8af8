"""Transformer-big on WMT 2014 English to German (wmt14_en_de_big.py) on a machine with eight H100 GPUs.

    pip install '.[cuda13,tfds-build]'
    python -m flaxformer_mt prepare --config=wmt14_en_de_big_h100_8
    python train.py --config=wmt14_en_de_big_h100_8

Compiled for, not run (no GPU is needed for it):
`python -m flaxformer_mt show --config=wmt14_en_de_big_h100_8 --target=h100:8`.

The batch and the schedule of wmt14_en_de_big_tpu_v5e_16.py: 768 rows of 128 tokens, 96 on each GPU. Attention
is cuDNN's, which needs even lengths; every GPU has all parameters.
"""

import dataclasses
from pathlib import Path

from flaxformer_mt.config import Config
from flaxformer_mt.config.files import load_config


def get_config() -> Config:
    """Return the config for TPUs with what a GPU prefers, derived from wmt14_en_de_big_tpu_v5e_16.py."""
    tpu = load_config(Path(__file__).with_name("wmt14_en_de_big_tpu_v5e_16.py"))
    return dataclasses.replace(
        tpu,
        data=dataclasses.replace(tpu.data, row_multiple=8, length_multiple=8, num_shapes=8),
        train=dataclasses.replace(tpu.train, loss_chunk_tokens=0),
    )
