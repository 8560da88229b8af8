"""The table of kernels that a model computes with, chosen once from the config and the platform."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import cross_entropy, int8, matmul
from flaxformer_mt.kernels.attention_kernels import attend, attend_fused, attend_unpadded, resolve_attention
from flaxformer_mt.kernels.cross_entropy import CrossEntropy
from flaxformer_mt.kernels.matmul import Product
from flaxformer_mt.shapes import Array


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of models and losses; the defaults are reference kernels, which run on all platforms.

    product: `product(spec, x, y)`, an einsum with sums in float32. integer_product: the same for 8-bit
    integers, with sums in int32. attention: see `attend`. cross_entropy: see `CrossEntropy`. materialize:
    forces arrays to be written to memory before they are used; otherwise a GPU program would compute the mean
    of a row again for each entry. sums_biases: whether attention takes the biases of queries, keys and
    values, which were added as constants, and sums their gradients. one_pass: whether the variance of rows in
    bfloat16 is computed as E[x^2] - E[x]^2, which a TPU can do at the end of a product; this loses 2^-24 of
    the squared mean, while rounding to bfloat16 has already lost 2^-20.
    """

    product: Product = Product()
    integer_product: Callable[[str, Array, Array], Array] = int8.integer_product
    attention: Callable[..., Array] = functools.partial(attend, Product())
    cross_entropy: CrossEntropy = CrossEntropy()
    materialize: Callable[[Any], Any] = lambda x: x
    sums_biases: bool = False
    one_pass: bool = False


@functools.cache  # equal models have the same table, so that JAX compiles for them once
def choose_kernels(config: ModelConfig, platform: str, *, gathers_twice: bool = False) -> Kernels:
    """Choose the kernels for a platform, by its JAX name: cpu, gpu (or cuda), tpu.

    `gathers_twice`: whether parameters that are split over devices are gathered again for the backward pass.
    """
    on_cpu = platform == "cpu"
    multiply = matmul.multiply_on_cpu if on_cpu else matmul.multiply
    products = Product(multiply, gathers_twice)
    plain = functools.partial(attend, products)
    kinds = resolve_attention(config.attention, platform)
    attention = functools.partial(attend_fused, kinds, plain) if kinds else plain
    score = {
        "cpu": cross_entropy.score_rounded,
        "tpu": cross_entropy.score_in_two_passes,
    }.get(platform, cross_entropy.score_in_bfloat16)
    return Kernels(
        product=products,
        integer_product=int8.integer_product_on_cpu if on_cpu else int8.integer_product,
        attention=functools.partial(attend_unpadded, attention) if on_cpu else attention,
        cross_entropy=CrossEntropy(multiply, score),
        sums_biases=kinds == ("pallas",),
        materialize=jax.lax.optimization_barrier if platform in ("gpu", "cuda") else Kernels.materialize,
        one_pass=platform == "tpu",
    )
