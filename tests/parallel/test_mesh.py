"""What a mesh does with single layers: dtypes of collectives, memory, kernels on the parts."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_text import read_compiled
from jax.sharding import PartitionSpec

from flaxformer_mt.config import Config, ParallelConfig
from flaxformer_mt.kernels import attention_kernels, triton_attention
from flaxformer_mt.kernels.attention_kernels import Drop, attend, attend_fused
from flaxformer_mt.kernels.dropout import make_dropout_key
from flaxformer_mt.kernels.masks import MaskRule
from flaxformer_mt.kernels.matmul import Product
from flaxformer_mt.parallel import Parallel, make_parallel
from flaxformer_mt.parallel.sharding import map_parts

KERNEL = "layers_0/feedforward/input/kernel"


def make_mesh(**layout: int) -> Parallel:
    return make_parallel(Config(parallel=ParallelConfig(backend="mesh", **layout)))


def on_rows(parallel: Parallel, function: Any, *specs: PartitionSpec) -> Any:
    """A function of the rows of each device, whose results are rows, and of further arrays."""
    rows = PartitionSpec(("data", "fsdp"))
    return jax.shard_map(
        function,
        mesh=parallel.mesh,
        in_specs=(rows, *specs),
        out_specs=rows,
        axis_names={"data", "fsdp"},
        check_vma=False,
    )


def test_parts_have_the_rows_and_the_heads_of_a_device():
    """A function sees its rows, and a kernel its heads as well."""
    for layout, part in (
        ({}, (2, 3, 16, 5)),
        ({"fsdp": 8}, (2, 3, 16, 5)),
        ({"tensor": 8}, (16, 3, 2, 5)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (4, 3, 8, 5)),
    ):
        seen = []

        def look(x, seen=seen):
            seen.append(x.shape)
            return x

        def total(x, part, look=look):
            return map_parts(look, (x, "BTHK"), result=(x.shape, "BTHK")).sum()

        parallel = make_mesh(**layout)
        result = parallel.compile(parallel.over_rows(total, batch=0))(parallel.put(np.ones((16, 3, 16, 5))))
        assert seen == [part] and result == 16 * 3 * 16 * 5


@pytest.mark.parametrize("gathers", ["once", "twice"])
def test_parameters_are_gathered_in_the_dtype_of_products_and_gradients_summed_in_float32(gathers):
    """Read in the program before XLA has changed it."""
    parallel = make_mesh(fsdp=4, tensor=2)
    product = Product(gathers_twice=gathers == "twice")

    def gradients(params, x, part):
        def total(params, x):
            kernel = params["self_attention"]["query"]["kernel"]
            return jnp.sin(product("...D,DHK->...HK", x, kernel, parameter=True)).sum()

        of_params, of_x = jax.grad(total, (0, 1))(params, x)
        return of_params, of_x.astype(jnp.float32).sum()

    params = {"self_attention": {"query": {"kernel": np.ones((24, 4, 5), np.float32)}}}
    batch = parallel.put(np.ones((8, 3, 24), jnp.bfloat16))
    text = jax.jit(parallel.over_rows(gradients, batch=1)).lower(parallel.place(params), batch).as_text()
    gathered = re.findall(r"all_gather.*?-> \(?tensor<(\w+)>", text, re.S)
    summed = re.findall(r"reduce_scatter.*?\}\) : \(tensor<(\w+)>\) -> tensor<(\w+)>", text, re.S)
    assert gathered == ["24x2x5xbf16"] * {"once": 1, "twice": 2}[gathers], text
    assert summed == [("24x2x5xf32", "6x2x5xf32")], text


def test_matrices_that_are_gathered_twice_are_not_kept_between_the_passes():
    """Of eight matrices; XLA's CPU compiler must neither merge nor move the gathers of the second pass."""
    width, layers = 64, 8
    x, kernels = np.ones((8, 2, width), np.float32), np.full((layers, width, width), 0.01, np.float32)
    programs = {}
    for gathers in ("once", "twice"):
        parallel, product = make_mesh(fsdp=8), Product(gathers_twice=gathers == "twice")

        def gradient(x, kernels, product=product):
            def loss(x):
                for kernel in kernels:
                    x = jnp.sin(product("...D,DF->...F", x, kernel, parameter=True))
                return x.sum()

            return jax.grad(loss)(x)

        split = parallel.sharding_of(KERNEL, (width, width))
        inputs = parallel.put(x), [jax.device_put(kernel, split) for kernel in kernels]
        program = jax.jit(on_rows(parallel, gradient, PartitionSpec("fsdp")))
        programs[gathers] = program.lower(*inputs).compile(), inputs
    found = {name: program(*inputs) for name, (program, inputs) in programs.items()}
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


@pytest.mark.parametrize("kind", ["pallas", "triton"])
def test_the_kernel_of_attention_runs_on_the_parts_of_each_device(kind, monkeypatch):
    """By Pallas' interpreter, with all gradients; the kernel of GPUs drops what it does for a whole batch."""
    on_tpu, on_gpu = attention_kernels.attend_rows, triton_attention.attend_rows
    monkeypatch.setattr(
        attention_kernels,
        "attend_rows",
        lambda heads, causal, _, *arrays: on_tpu(heads, causal, True, *arrays),
    )
    monkeypatch.setattr(
        triton_attention, "attend_rows", lambda rule, *arrays: on_gpu(rule._replace(interpret=True), *arrays)
    )
    parallel, generator = make_mesh(data=2, fsdp=2, tensor=2), np.random.default_rng(0)
    projected = generator.normal(size=(4, 16, 3, 4, 64)).astype(jnp.bfloat16)
    tokens = np.arange(16) < np.array([16, 5, 9, 1])[:, None]
    plain = functools.partial(attend, Product())

    def total(attention: Any, batch: tuple, part: Any) -> Any:
        projected, tokens = batch
        rule = MaskRule(None, tokens, causal=True, padded_at_end=True)
        drop = Drop(make_dropout_key(3, 1, part=part), 0.3) if kind == "triton" else None
        output = attention(*(projected[:, :, n] for n in range(3)), rule, drop=drop).astype(jnp.float32)
        output = jnp.where(tokens[..., None, None], output, 0)  # what padding attends to is read by nothing
        return (output * jnp.sin(jnp.arange(output[0].size).reshape(output[0].shape))).sum()

    def gradient(batch: tuple, attention: Any, split: bool) -> Any:
        part = jax.lax.axis_index(("data", "fsdp")) if split else None
        return jax.grad(lambda projected: total(attention, (projected, batch[1]), part))(batch[0])

    fused = functools.partial(attend_fused, (kind,), plain)
    by_kernel = on_rows(parallel, functools.partial(gradient, attention=fused, split=True))
    found = np.asarray(jax.jit(by_kernel)(parallel.put((projected, tokens))), np.float32)
    expected = jax.jit(functools.partial(gradient, attention=plain, split=False))((projected, tokens))
    expected = np.asarray(expected, np.float32)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())
