"""Transformer-big on WMT 2014 English to German (wmt14_en_de_big.py) on 16 TPU v5e chips.

    pip install '.[tpu,tfds-build]'
    python -m flaxformer_mt prepare --config=wmt14_en_de_big_tpu_v5e_16
    python train.py --config=wmt14_en_de_big_tpu_v5e_16 --distributed      # the same on every host

Compiled for, not run (no TPU is needed for it):
`python -m flaxformer_mt show --config=wmt14_en_de_big_tpu_v5e_16 --target=v5e:4x4`.

Four times the tokens of wmt14_en_de_big.py per update and a fourth of the updates, with twice its learning
rate (the square root of four): 768 rows of 128 tokens, 48 on each chip (12 with the batch size of
wmt14_en_de_big.py). Lengths are multiples of 16, the rows of a bfloat16 tile. Every chip has all parameters.
The loss computes the logits of 1,536 tokens of a chip at a time.
"""

import dataclasses
from pathlib import Path

from flaxformer_mt.config import Config
from flaxformer_mt.config.files import load_config


def get_config() -> Config:
    """Return the big model with a batch for 16 chips, derived from wmt14_en_de_big.py in the same folder."""
    big = load_config(Path(__file__).with_name("wmt14_en_de_big.py"))
    return dataclasses.replace(
        big,
        data=dataclasses.replace(
            big.data, batch_tokens=98_304, row_multiple=16, length_multiple=16, num_shapes=4
        ),
        optim=dataclasses.replace(big.optim, learning_rate=2.0),
        train=dataclasses.replace(big.train, steps=75_000, checkpoint_every=150, loss_chunk_tokens=1536),
    )
