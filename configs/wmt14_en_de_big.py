"""English to German on WMT 2014 with the big model of "Attention Is All You Need" (Vaswani et al. 2017).

    pip install '.[tfds-build]'         # once: TFDS builds this set with TensorFlow
    python -m flaxformer_mt prepare --config=wmt14_en_de_big
    python train.py --config=wmt14_en_de_big

For several large GPUs (the paper: three and a half days on eight P100s). Data, vocabulary and schedule are
those of wmt14_en_de_base.py. As in the paper for this model: wider layers, dropout 0.3, 300,000 steps,
average of the last twenty checkpoints.
"""

import dataclasses
from pathlib import Path

from flaxformer_mt.config import Config
from flaxformer_mt.config.files import load_config


def get_config() -> Config:
    """Return the big model of the paper's table 3, derived from wmt14_en_de_base.py in the same folder."""
    base = load_config(Path(__file__).with_name("wmt14_en_de_base.py"))
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, model_dim=1024, num_heads=16, ffn_dim=4096, dropout_rate=0.3),
        train=dataclasses.replace(
            base.train, steps=300_000, checkpoint_every=600, keep_checkpoints=20, average_last=20
        ),
    )
