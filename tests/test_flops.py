"""Accounting: closed forms against the traced step, real lengths against sums by hand, peaks by name."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from tiny_experiment import change

from flaxformer_mt.commands.show import longest_batch
from flaxformer_mt.config import Config, DataConfig, ModelConfig, TrainConfig
from flaxformer_mt.flops import Work, padded_work, peak_flops, real_work, training_flops
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.training.optimizers import make_hyperparameters
from flaxformer_mt.training.update import UpdateConfig, make_gradient_step

# All sizes differ, so that none can stand in for another.
MODEL = ModelConfig(
    num_encoder_layers=2, num_decoder_layers=3, model_dim=10, num_heads=5, ffn_dim=14, dropout_rate=0.1
)
DATA = DataConfig(max_source_length=7, max_target_length=11, batch_tokens=44, row_multiple=4)
VOCABULARY = 23


def count_product_flops(jaxpr: Jaxpr) -> int:
    """Count two operations per multiply-add of all matrix products: [3, 5] times [5, 7] has 2 * 3 * 5 * 7."""
    total = 0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = parameters["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval
            features = kernel.shape[parameters["dimension_numbers"].rhs_spec[0]]
            total += 2 * equation.outvars[0].aval.size * kernel.size // features
        else:
            parts = jax.tree.leaves(list(parameters.values()), is_leaf=lambda part: isinstance(part, Jaxpr))
            parts = [part.jaxpr if isinstance(part, ClosedJaxpr) else part for part in parts]
            counts = [count_product_flops(part) for part in parts if isinstance(part, Jaxpr)]
            if name == "cond":  # only one branch runs: that of all platforms without one of their own
                platforms = parameters.get("branches_platforms")
                counts = [max(counts) if platforms is None else counts[platforms.index(None)]]
            total += sum(counts) * (parameters["length"] if name == "scan" else 1)
    return total


def traced_flops(config: Config) -> int:
    model = make_model(config.model, source_size=VOCABULARY, target_size=VOCABULARY)
    params = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))
    number = jax.ShapeDtypeStruct((), np.int32)
    step = make_gradient_step(model, UpdateConfig.of(config))
    return count_product_flops(
        jax.make_jaxpr(step)(params, make_hyperparameters(config), number, longest_batch(config)).jaxpr
    )


def closed_flops(config: Config) -> int:
    batch = longest_batch(config)
    rows, source, target = batch.shape
    work = padded_work(rows, source, target, loss_chunk_tokens=config.train.loss_chunk_tokens)
    return training_flops(config.model, work, target_size=VOCABULARY)


# One encoder and two decoder layers: less to trace where the number of layers does not matter.
FEWER = {"num_encoder_layers": 1, "num_decoder_layers": 2}
CASES = {
    "encoder-decoder": {},
    # 44 tokens of 4 rows in chunks of 4 x 4, not 4 x 5: the third lacks one place, not four
    "head sizes and gated; untied, post norm, biases; loss in chunks": {
        "model": {
            **FEWER,
            **{"key_dim": 6, "value_dim": 3, "activation": "swiglu"},
            **{"tying": "none", "norm_position": "post", "output_bias": True, "embedding_bias": True},
        },
        "train": {"loss_chunk_tokens": 20, "log_accuracy": True},
    },
    "bfloat16, rotary, convolutions": {
        "model": {
            **FEWER,
            **{"dtype": "bfloat16", "positions": "rotary", "key_dim": 4, "ffn_layer": "convolution"},
        }
    },
    "packed": {"data": {"batching": "pack"}, "model": {**FEWER, "positions": "learned"}},
    "layers in a loop": {"model": {"scan_layers": True, "key_dim": 6}},
    "recurrent": {"model": {**FEWER, "decoder_self_attention": "ssru", "key_dim": 6}},
    "decoder-only": {"model": {**FEWER, "architecture": "decoder_only", "key_dim": 6, "value_dim": 3}},
    "language model": {
        "model": {**FEWER, "architecture": "decoder_only", "activation": "swiglu", "tying": "none"},
        "data": {"source_language": ""},
    },
}


def make_config(sections: dict) -> Config:
    base = Config(data=DATA, model=MODEL, train=TrainConfig(label_smoothing=0.1))
    return change(base, **sections)


@pytest.mark.parametrize("case", CASES)
def test_the_closed_form_is_what_the_traced_step_computes(case):
    config = make_config(CASES[case])
    assert closed_flops(config) == traced_flops(config) > 0


def test_what_is_computed_twice_is_not_counted_twice():
    """`remat` adds to what the program computes, not to what the model needs; at most one more forward."""
    plain, again = make_config({"model": FEWER}), make_config({"model": {**FEWER, "remat": "full"}})
    assert closed_flops(again) == closed_flops(plain) < traced_flops(again) <= closed_flops(plain) * 4 // 3


def test_six_operations_a_token_and_weight():
    """With attention's own products left out and V = 0, it is 6 times the weights of the matrices."""
    model = dataclasses.replace(MODEL, architecture="decoder_only")
    attention, ffn = 4 * 10 * 10, 2 * 10 * 14
    tokens = Work(source_tokens=3, target_tokens=4)
    assert training_flops(model, tokens, target_size=0) == 6 * 7 * 3 * (attention + ffn)
    assert training_flops(model, Work(predictions=4), target_size=23) == 6 * 4 * 23 * 10
    assert training_flops(model, Work(target_by_source=1), target_size=23) == 2 * 6 * 3 * (5 * 2 + 5 * 2)


def masks(lengths: list[int], width: int) -> np.ndarray:
    return np.arange(width) < np.asarray(lengths)[:, None]


def test_the_work_of_a_bucket_is_that_of_its_sentences():
    work = real_work(masks([2, 4, 0], 4), masks([3, 1, 0], 5))
    assert work == Work(
        source_tokens=6,
        target_tokens=4,
        predictions=4,
        places=12 + 15,
        source_by_source=4 + 16,
        target_by_target=9 + 1,
        target_by_source=2 * 3 + 4 * 1,
    )
    assert work.padding == pytest.approx(1 - 10 / 27)
    assert real_work(masks([4, 4], 4), masks([5, 5], 5)) == padded_work(2, 4, 5)
    assert padded_work(2, 4, 5).padding == 0 and np.isnan(Work().padding)


def test_the_work_of_a_pack_is_that_of_the_same_sentences_in_rows_of_their_own():
    """Pairs of (2, 3), (1, 1) and (4, 2) tokens in two rows, and a pair whose source is empty."""
    source = np.asarray([[1, 1, 2, 0, 0], [1, 1, 1, 1, 0]])
    target = np.asarray([[1, 1, 1, 2, 3, 3], [1, 1, 0, 0, 0, 0]])
    packed = real_work(source > 0, target > 0, source, target)
    alone = real_work(masks([2, 1, 4, 0], 5), masks([3, 1, 2, 2], 6))
    assert packed == dataclasses.replace(alone, places=source.size + target.size)


def test_a_text_without_sources_has_only_its_own_pairs():
    work = real_work(np.zeros((2, 0), bool), masks([3, 1], 4))
    assert work == Work(target_tokens=4, predictions=4, places=8, target_by_target=10)


def test_work_adds_up_over_batches():
    first, second = (masks([2, 4], 4), masks([3, 1], 5)), (masks([1], 4), masks([5], 5))
    both = [np.concatenate(sides) for sides in zip(first, second, strict=True)]
    assert real_work(*first) + real_work(*second) == real_work(*both)


def config_of(dtype: str, peak: float = 0.0) -> Config:
    return Config(model=ModelConfig(dtype=dtype), train=TrainConfig(peak_flops=peak))


def test_devices_are_found_by_the_name_that_jax_gives_them():
    """A name that is not in the table has no peak but the config's."""
    for kind, bfloat16, float32 in (
        ("NVIDIA A100-SXM4-40GB", 312, 156),
        ("NVIDIA H100 80GB HBM3", 989.4, 494.7),
        ("NVIDIA H100 PCIe", 756.5, 378),
        ("Tesla V100-SXM2-16GB", 15.7, 15.7),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("TPU v5 lite", 197, 197),
    ):
        assert peak_flops(config_of("bfloat16"), kind) == pytest.approx(bfloat16 * 1e12)
        assert peak_flops(config_of("float32"), kind) == pytest.approx(float32 * 1e12)
    laptop, slice_of_gpu = "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    for kind in ("cpu", "", "TPU v4 lite", "NVIDIA L40S", laptop, slice_of_gpu):
        assert peak_flops(config_of("bfloat16"), kind) is None
        assert peak_flops(config_of("bfloat16", 3e12), kind) == 3e12
    assert peak_flops(config_of("bfloat16", 3e12), "NVIDIA H200") == 3e12
