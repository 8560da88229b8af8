"""Names of targets, and the descriptions of devices behind them."""

import re

import pytest

from flaxformer_mt.commands.compile_for_target import ACCELERATORS, describe_gpu, parse_target
from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.flops import peak_flops


def test_names_give_the_kind_the_shape_and_the_number_of_chips():
    found = {
        name: (target.kind, target.shape, target.groups, target.chips, target.name)
        for name in ("v5e:2x2", "v5e:16x16:2", "v6e", "v5p", "v5p:2x2x4", "h100:8", "h200", "H100:8:3")
        if (target := parse_target(name))
    }
    assert found == {
        "v5e:2x2": ("v5e", "2x2", 1, 4, "v5e:2x2"),
        "v5e:16x16:2": ("v5e", "16x16", 2, 512, "v5e:16x16:2"),
        "v6e": ("v6e", "1x1", 1, 1, "v6e:1x1"),
        "v5p": ("v5p", "1x1x1", 1, 1, "v5p:1x1x1"),
        "v5p:2x2x4": ("v5p", "2x2x4", 1, 16, "v5p:2x2x4"),
        "h100:8": ("h100", "8", 1, 8, "h100:8"),
        "h200": ("h200", "1", 1, 1, "h200:1"),
        "H100:8:3": ("h100", "8", 3, 24, "h100:8:3"),
    }


@pytest.mark.parametrize(
    "name, near",
    [("v5:2x2", "did you mean v5[ep]:2x2"), ("h10:8", "did you mean h[12]00:8"), ("tpu", "known: v4, v5e"),
     ("v5e:3x3", "nearest is --target=v5e:2x4"), ("v5e:4", "nearest is --target=v5e:2x2"),
     ("v5e:2x2x1", "nearest is --target=v5e:2x2"), ("v5e:big", "slices: 1x1, 2x2"),
     ("v5e:0x0", "nearest is --target=v5e:1x1"), ("v5e:2x2:0", "KIND:SHAPE:NUMBER"),
     ("v5e:2x2:1:1", "KIND:SHAPE:NUMBER"), ("h100:2x2", "h100:8"), ("h100:0", "h100:8"),
     ("", "unknown accelerator ''")],
)  # fmt: skip
def test_an_unknown_target_is_refused_with_the_nearest_one(name, near):
    with pytest.raises(UserError, match=near) as error:
        parse_target(name)
    assert f"--target={name}" in str(error.value)


def test_every_accelerator_has_a_peak_rate_and_gpus_a_description():
    config = Config(model=ModelConfig(dtype="bfloat16"))
    for kind, accelerator in ACCELERATORS.items():
        assert peak_flops(config, accelerator.device_kind) is not None, kind
        if accelerator.platform == "cuda":
            text = describe_gpu(kind)
            assert text.count("{") == text.count("}")
            assert re.search(rf"device_memory_size: {accelerator.memory}\b", text)
            assert f"memory_bandwidth: {accelerator.bandwidth:.0f} " in text
