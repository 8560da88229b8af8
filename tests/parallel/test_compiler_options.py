"""Flags of XLA from a config: which reach the programs, and what is said of those that XLA does not know."""

import jax
import jax.numpy as jnp
import pytest
from tiny_experiment import change

from flaxformer_mt.config import Config
from flaxformer_mt.config.checks import validate
from flaxformer_mt.errors import UserError
from flaxformer_mt.parallel import check_compiler_options, make_parallel
from flaxformer_mt.parallel.compilation import read_compiler_options

# Which a CPU's compiler obeys visibly: the program keeps the order of its operations, and the name says so.
SEEN = "xla_backend_optimization_level=0"


def with_flags(*flags: str, backend: str = "auto", devices: int = 1) -> Config:
    return change(Config(), parallel={"xla_flags": flags, "backend": backend, "devices": devices})


def test_flags_of_other_platforms_are_left_out():
    flags = ("xla_gpu_a=true", "xla_tpu_b=FALSE", "xla_c=12", "xla_gpu_d=0.5")
    assert read_compiler_options(flags, "gpu") == {"xla_gpu_a": True, "xla_c": "12", "xla_gpu_d": "0.5"}
    assert read_compiler_options(flags, "tpu") == {"xla_tpu_b": False, "xla_c": "12"}


@pytest.mark.parametrize(("backend", "devices"), [("mesh", 1), ("pmap", 2)])
def test_the_programs_of_a_backend_are_compiled_with_the_flags(monkeypatch, backend, devices):
    """With and without a batch, and also under pmap."""
    seen = []
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda *a, **k: seen.append(k.get("compiler_options")) or jit(*a, **k))
    parallel = make_parallel(with_flags(SEEN, "xla_gpu_other=1", backend=backend, devices=devices))
    batch = parallel.put(jnp.arange(4.0)[:, None])
    parallel.compile(lambda x: 2 * x)(parallel.place(jnp.ones(2)))
    step = parallel.compile(parallel.over_rows(lambda x, batch, part: x + batch.sum(), batch=1))
    assert float(step(parallel.place(jnp.ones(())), batch)) == (7 if backend == "mesh" else 8)
    assert seen == [{"xla_backend_optimization_level": "0"}] * 2


def test_a_flag_that_xla_does_not_know_is_named_before_training():
    check_compiler_options({"xla_backend_optimization_level": "1", "xla_cpu_enable_fast_math": False})
    for flag, value in (("xla_no_such_flag", True), ("xla_backend_optimization_level", "high")):
        with pytest.raises(UserError, match=rf"parallel.xla_flags has {flag}=(true|high), which XLA of JAX"):
            check_compiler_options({flag: value})
    validate(with_flags(SEEN))
    with pytest.raises(UserError, match="has '--xla_a=1'; give each flag as xla_NAME=VALUE, without dashes"):
        validate(with_flags("--xla_a=1"))
