"""What a mesh does with single layers: dtypes of collectives, sizes of parts, kernels on the parts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_text import read_compiled
from flaxformer_mt.parallel.pmap import PmapParallel

from flaxformer_mt.config import Config, ParallelConfig
from flaxformer_mt.kernels.masks import MaskRule
from flaxformer_mt.kernels.product import contract
from flaxformer_mt.model import fused_attention
from flaxformer_mt.model.attention import attention_weights, weighted_values
from flaxformer_mt.parallel import make_parallel
from flaxformer_mt.shapes import local_shape


def make_mesh(**layout: int) -> Any:
    parallel = make_parallel(Config(parallel=ParallelConfig(backend="mesh", devices=8, **layout)))
    assert not isinstance(parallel, PmapParallel)
    return parallel


def test_parts_have_the_rows_and_the_heads_of_a_device():
    for layout, part in (
        ({}, (2, 3, 16, 5)),
        ({"fsdp": 8}, (2, 3, 16, 5)),
        ({"tensor": 8}, (16, 3, 2, 5)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (4, 3, 8, 5)),
    ):
        with make_mesh(**layout).pin_activations():
            assert local_shape((16, 3, 16, 5), "BTHK") == part


@pytest.mark.parametrize("gathers", ["once", "twice"])
def test_parameters_are_gathered_in_the_dtype_of_products_and_gradients_summed_in_float32(gathers):
    """Read in the program before XLA has changed it: which arrays have which sharding."""
    parallel = make_mesh(fsdp=4, tensor=2, fsdp_gathers=gathers)

    def gradients(x, kernel):
        with parallel.pin_activations():
            product = functools.partial(contract, "...D,DHK->...HK", parameter=True)
            return jax.value_and_grad(lambda x, kernel: product(x, kernel).sum(), (0, 1))(x, kernel)

    x = parallel.put(np.ones((8, 3, 24), jnp.bfloat16))
    kernel = jax.device_put(np.ones((24, 4, 5), np.float32), parallel.replicated)
    text = jax.jit(gradients).lower(x, kernel).as_text()
    pinned = [line for line in text.split("\n") if "sdy.sharding_constraint" in line and "24x4x5" in line]
    *gathered, summed = pinned
    assert len(gathered) == {"once": 1, "twice": 2}[gathers], text
    assert all("tensor<24x4x5xbf16>" in line and '[{}, {"tensor"}, {}]' in line for line in gathered)
    assert "tensor<24x4x5xf32>" in summed and '[{"fsdp"}, {"tensor"}, {}]' in summed


def test_matrices_that_are_gathered_twice_are_not_kept_between_the_passes():
    """Of eight matrices; XLA's CPU compiler must neither merge nor move the gathers of the second pass."""
    width, layers = 64, 8
    x, kernels = np.ones((8, 2, width), np.float32), np.full((layers, width, width), 0.01, np.float32)
    programs = {}
    for gathers in ("once", "twice"):
        parallel = make_mesh(fsdp=8, fsdp_gathers=gathers)

        def gradient(x, kernels, parallel=parallel):
            def loss(x):
                for kernel in kernels:
                    x = jnp.sin(contract("...D,DF->...F", x, kernel, parameter=True))
                return x.sum()

            with parallel.pin_activations():
                return jax.grad(loss)(x)

        split = parallel.sharding_of("layers_0/feedforward/input/kernel", (width, width))
        placed = [jax.device_put(kernel, split) for kernel in kernels]
        programs[gathers] = jax.jit(gradient).lower(parallel.put(x), placed).compile(), placed
    found = {name: program(parallel.put(x), placed) for name, (program, placed) in programs.items()}
    assert np.abs(found["once"]).max() > 0
    np.testing.assert_allclose(found["twice"], found["once"], rtol=1e-6)
    count, memory = (
        {name: read(program) for name, (program, _) in programs.items()}
        for read in (
            lambda program: read_compiled(program.as_text()).count()["all-gather"],
            lambda program: program.memory_analysis().temp_size_in_bytes,
        )
    )
    assert count == {"once": layers, "twice": 2 * layers}
    matrix = 4 * width**2
    assert memory["once"] > layers * matrix and memory["twice"] < 3 * matrix, memory


def test_the_kernel_of_attention_runs_on_the_parts_of_each_device(monkeypatch):
    """By Pallas' interpreter, with the gradients of all inputs."""
    kernel = fused_attention.attend_rows

    def interpreted(heads, causal, _, *arrays):
        return kernel(heads, causal, True, *arrays)

    monkeypatch.setattr(fused_attention, "attend_rows", interpreted)
    parallel, generator = make_mesh(data=2, fsdp=2, tensor=2), np.random.default_rng(0)
    projected = generator.normal(size=(4, 16, 3, 4, 64)).astype(jnp.bfloat16)
    tokens = np.arange(16) < np.array([16, 5, 9, 1])[:, None]
    rule = MaskRule(None, tokens, causal=True, padded_at_end=True)

    def by_kernel(projected):
        with parallel.pin_activations():
            return fused_attention.attend_pallas([projected], rule)

    def by_products(projected):
        query, keys, values = (projected[:, :, n] for n in range(3))
        return weighted_values(attention_weights(query, keys, rule.dense(16)), values)

    def total(attend, projected):
        output = attend(projected).astype(jnp.float32)
        output = jnp.where(tokens[..., None, None], output, 0)  # what padding attends to is read by nothing
        return (output * jnp.sin(jnp.arange(output.size).reshape(output.shape))).sum()

    found, expected = (
        np.asarray(jax.jit(jax.grad(functools.partial(total, attend)))(parallel.put(projected)), np.float32)
        for attend in (by_kernel, by_products)
    )
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())
