"""Small models in bfloat16 of each kind of layer, for tests of what their programs compute."""

import dataclasses
from typing import Any

from tiny_experiment import small_model

from flaxformer_mt.model import make_model

V = 24
CONFIG = small_model(1, 16, 2, 24, dtype="bfloat16")
KINDS: dict[str, dict[str, Any]] = {
    "encoder-decoder": {},
    "convolution, untied, with biases": {
        "ffn_layer": "convolution",
        "tying": "none",
        "attention_bias": True,
        "output_bias": True,
    },
    "decoder-only, gated": {"architecture": "decoder_only", "activation": "swiglu", "value_dim": 4},
}


def make_bfloat16(fields: dict[str, Any]) -> Any:
    config = dataclasses.replace(CONFIG, **fields)
    return make_model(config, source_size=V, target_size=V, platform="cpu")
