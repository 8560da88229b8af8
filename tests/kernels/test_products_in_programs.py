"""Matrix products in bfloat16: float32 sums, scores and gradients, and casts outside of loops."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bfloat16_models import CONFIG, KINDS, V, make_bfloat16
from tiny_experiment import random_params

from flaxformer_mt.config import Config, SearchConfig, TrainConfig
from flaxformer_mt.decoding.search_engine import SearchEngine
from flaxformer_mt.decoding.search_inputs import Form
from flaxformer_mt.kernels import choose_kernels
from flaxformer_mt.kernels.attention_kernels import attention_weights
from flaxformer_mt.kernels.bfloat16 import cast_kernels
from flaxformer_mt.kernels.dropout import make_dropout_key
from flaxformer_mt.kernels.matmul import Product, multiply_on_cpu, multiply_rows
from flaxformer_mt.model.feedforward import FeedForward
from flaxformer_mt.search import Size, Symbols
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training.optimizers import make_hyperparameters
from flaxformer_mt.training.update import UpdateConfig, make_gradient_step

NUMBERS = make_hyperparameters(Config())
CONTRACT = Product(multiply_on_cpu)


def equations_in(jaxpr: Any) -> list[Any]:
    inner = [
        part
        for equation in jaxpr.eqns
        for value in equation.params.values()
        for part in (value if isinstance(value, tuple | list) else [value])
    ]
    bodies = [getattr(part, "jaxpr", part) for part in inner if hasattr(getattr(part, "jaxpr", part), "eqns")]
    return list(jaxpr.eqns) + [equation for body in bodies for equation in equations_in(body)]


def make_batch(rows: int = 3, source: int = 7, target: int = 5) -> Batch:
    generator = np.random.default_rng(1)
    draw = lambda length: generator.integers(3, V, (rows, length)).astype(np.int32)  # noqa: E731
    source_ids, target_ids = draw(source), draw(target)
    return Batch(
        source_ids, target_ids, draw(target), np.ones((rows, source), bool), np.ones((rows, target), bool)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_all_products_of_a_training_step_take_bfloat16_and_return_float32(kind):
    model, batch = make_bfloat16(KINDS[kind]), make_batch()
    params = random_params(model)
    for chunk in (0, 4):
        step = make_gradient_step(model, UpdateConfig.of(Config(train=TrainConfig(loss_chunk_tokens=chunk))))
        traced = jax.make_jaxpr(step)(params, NUMBERS, jnp.int32(0), batch)
        equations = equations_in(traced.jaxpr)
        products = [equation for equation in equations if equation.primitive.name == "dot_general"]
        assert len(products) > 20 and not any("conv_general" in e.primitive.name for e in equations)
        for product in products:
            assert product.params["preferred_element_type"] == jnp.float32, product
            assert {operand.aval.dtype for operand in product.invars} == {jnp.dtype("bfloat16")}, product


@pytest.mark.parametrize(("kind", "chunk"), list(zip(KINDS, (1000, 0, 4), strict=True)))
def test_gradients_of_kernels_are_never_rounded_to_bfloat16(kind, chunk):
    """Of float32 numbers, 1 in 65536 is one that bfloat16 can represent."""
    model, batch = make_bfloat16(KINDS[kind]), make_batch()
    config = Config(model=model.config, train=TrainConfig(loss_chunk_tokens=chunk))
    step = jax.jit(make_gradient_step(model, UpdateConfig.of(config)))
    gradients = step(random_params(model), NUMBERS, jnp.int32(0), batch).gradients
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        rounded = gradient.astype(jnp.bfloat16).astype(jnp.float32) == gradient
        share = float((rounded & (gradient != 0)).mean())
        assert gradient.dtype == jnp.float32
        if path[-1].key in ("kernel", "output_kernel"):
            assert share < 0.2, (jax.tree_util.keystr(path), share)


def test_scores_are_not_rounded_before_the_softmax():
    generator = np.random.default_rng(2)
    query, keys = (jnp.asarray(8 * generator.standard_normal((2, 5, 3, 16)), jnp.bfloat16) for _ in range(2))
    exact = attention_weights(CONTRACT, query.astype(jnp.float32), keys.astype(jnp.float32))
    np.testing.assert_allclose(attention_weights(CONTRACT, query, keys), exact, atol=1e-4)


def test_products_on_a_cpu_are_given_to_the_library_in_bfloat16():
    """A product that XLA would convert to float32 has operands of float32 in the compiled program."""
    shapes = {"x": (64, 48), "y": (48, 32), "z": (64, 32), "query": (3, 2, 4, 16), "single": (3, 2, 1, 16)}
    operands = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}

    def multiply(x: Any, y: Any, z: Any, query: Any, single: Any) -> Any:
        keys = jnp.tile(query, (1, 1, 3, 1))
        return (
            CONTRACT("KN,KM->NM", x, z),  # a kernel's gradient
            CONTRACT("NK,KM->NM", z.T.reshape(64, 32).T.T, y.T),  # operands that are views
            CONTRACT("BHQK,BHKM->BHQM", query, keys.swapaxes(2, 3)),
            CONTRACT("BHQK,BHKM->BHQM", single, keys.swapaxes(2, 3)),
        )

    text = jax.jit(multiply).lower(**operands).compile().as_text()
    dtypes = dict(re.findall(r"%?([\w.-]+) = (\w+)\[", text))
    products = re.findall(r" dot\(%?([\w.-]+), %?([\w.-]+)\)", text)
    assert len(products) == 4
    assert {dtypes[name] for product in products for name in product} == {"bf16"}, text


def test_the_smaller_side_of_a_product_is_transposed():
    """A kernel's gradient [F, D] needs [F, T] or [D, T] in memory; the wide one is not written again."""
    wide, narrow = (jax.ShapeDtypeStruct((160, width), jnp.bfloat16) for width in (96, 8))

    def product(spec: str) -> Any:
        return jax.jit(lambda x, y: multiply_on_cpu(spec, x, y))

    for spec, turned, whole in (("TF,TD->FD", "8,160", "96,160"), ("TF,TD->DF", "8,160", "96,160")):
        text = product(spec).lower(wide, narrow).compile().as_text()
        assert f"bf16[{turned}]" in text and f"bf16[{whole}]" not in text, spec
    generator = np.random.default_rng(5)
    x, y = (generator.integers(-4, 5, (160, width)).astype(np.float32) for width in (96, 8))
    for spec in ("TF,TD->FD", "TF,TD->DF"):
        narrowed = product(spec)(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16))
        np.testing.assert_array_equal(narrowed, np.einsum(spec, x, y))


def test_attention_copies_whole_rows():
    """Scores and averages need no other order of the last axis; a gradient turns scores, not vectors."""
    sizes = dict(zip("BQMHK", (2, 5, 7, 3, 11), strict=True))
    turned = {
        "BQHK,BMHK->BHQM": [],  # scores; gradients of weights
        "BHQM,BMHK->BQHK": [],  # averages; gradients of queries
        "BHQM,BQHK->BMHK": ["BHQM"],  # gradients of keys and of values
    }
    for spec, expected in turned.items():
        terms = spec.partition("->")[0].split(",")
        operands = [jax.ShapeDtypeStruct([sizes[a] for a in term], jnp.bfloat16) for term in terms]
        equations = equations_in(jax.make_jaxpr(lambda x, y, s=spec: multiply_rows(s, x, y))(*operands).jaxpr)
        moves = [equation for equation in equations if equation.primitive.name == "transpose"]
        columns = [move for move in moves if move.params["permutation"][-1] != move.invars[0].aval.ndim - 1]
        shapes = [tuple(sizes[axis] for axis in term) for term in expected]
        assert [move.invars[0].aval.shape for move in columns] == shapes, spec


def test_the_gradient_of_a_rectified_layer_draws_no_random_numbers_again():
    """The compiled program has the first constant of the hash where it drops entries, and nowhere else."""
    config = dataclasses.replace(CONFIG, dropout_rate=0.1)
    layer = FeedForward(config, choose_kernels(config, "cpu"))
    x = jnp.ones((8, 32, CONFIG.model_dim), jnp.bfloat16)
    params = layer.init(jax.random.key(0), x, deterministic=True)

    def total(params: Any, x: jax.Array) -> jax.Array:
        result = layer.apply(params, x, deterministic=False, rngs={"dropout": make_dropout_key(1, 0)})
        return (result.astype(jnp.float32) ** 2).sum()

    for program, number in ((total, 1), (jax.grad(total, (0, 1)), 1)):
        text = jax.jit(program).lower(params, x).compile().as_text()
        assert text.count(f"constant({0x7FEB352D})") == number


def computations_of_loops(text: str) -> dict[str, list[str]]:
    """The computations of a compiled program that run in loops, by name, each as its instructions."""
    computations: dict[str, list[str]] = {}
    for line in text.split("\n"):
        if found := re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line):
            inside = computations.setdefault(found[1], [])
        elif line.startswith("  "):
            inside.append(line)
    called = [name for lines in computations.values() for line in lines for name in re.findall(_LOOP, line)]
    seen: dict[str, list[str]] = {}
    while called:
        name = called.pop()
        if name not in seen:
            seen[name] = computations[name]
            called += [other for line in seen[name] for other in re.findall(_CALLED, line)]
    return seen


def converted_sizes(loops: dict[str, list[str]]) -> set[int]:
    """The sizes of all arrays that are converted in loops; bits are viewed as numbers by bitcast-convert."""
    lines = [line for lines in loops.values() for line in lines if " convert(" in line]
    shapes = [re.findall(r"= \w+\[([\d,]*)\]", line)[0] for line in lines]
    return {math.prod(map(int, dims.split(",") if dims else ())) for dims in shapes}


def copies_in_disguise(loops: dict[str, list[str]]) -> list[str]:
    """The computations that only view an array in another shape: as fusions they copy it."""
    operations = {
        name: {re.findall(r" ([\w-]+)\(", one)[0] for one in lines} for name, lines in loops.items()
    }
    return [name for name, found in operations.items() if found == {"parameter", "bitcast"}]


_LOOP = r"body=%?([\w.-]+)"
_CALLED = r"(?:calls|to_apply|body|condition)=%?([\w.-]+)"


@pytest.mark.parametrize(("kind", "beams"), [("encoder-decoder", 4), ("decoder-only, gated", 1)])
def test_a_loop_of_decoding_steps_converts_no_matrix_and_no_cache(kind, beams):
    """The kernels and the tied table are bfloat16 before the loop, and the caches in the whole loop."""
    model, batch = make_bfloat16(KINDS[kind]), make_batch(rows=9, source=9, target=11)
    params = random_params(model)

    def decode(params: Any) -> Any:
        variables = {"params": cast_kernels(params, model.config.dtype)}
        cache = model.apply(variables, batch.source, batch.source_mask, beams, 11, method="start_decoding")

        def step(carry: Any) -> Any:
            logits, cache = model.apply(variables, *carry, method="decode_step")
            return logits.argmax(-1).astype(jnp.int32), cache

        start = jnp.ones((9, beams), jnp.int32), cache
        return jax.lax.while_loop(lambda carry: carry[1].index < 11, step, start)

    caches = jax.eval_shape(decode, params)[1]
    kept = jax.tree.leaves((caches.per_beam, caches.shared))
    assert {leaf.dtype.name for leaf in kept} == {"uint16", "bool"}  # the bits of bfloat16 numbers
    text = jax.jit(decode).lower(params).compile().as_text()
    loops = computations_of_loops(text)
    assert any(" dot(" in line for lines in loops.values() for line in lines)
    large = {leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim > 1}
    large |= {leaf.size for leaf in kept if leaf.dtype != jnp.bool}
    assert not large & converted_sizes(loops), text
    assert not copies_in_disguise(loops), text


def test_no_call_of_a_decoding_program_converts_the_table_of_embeddings():
    """XLA gathers rows of a bfloat16 table from a float32 copy of all of it."""
    model, batch = make_bfloat16({}), make_batch()
    params = cast_kernels(random_params(model), model.config.dtype)

    def decode(params: Any, tokens: Any) -> Any:
        sources = batch.source, batch.source_mask
        cache = model.apply({"params": params}, *sources, 4, 5, method="start_decoding")
        logits, _ = model.apply({"params": params}, tokens, cache, method="decode_step")
        listed = model.apply({"params": params}, cache, tokens, method="add_shortlists").shared["output"]
        return logits, listed, model.apply({"params": params}, tokens[0], method="take_output")

    text = jax.jit(decode).lower(params, jnp.zeros((3, 4), jnp.int32)).compile().as_text()
    converted = converted_sizes({"program": text.split("\n")})
    assert converted and V * CONFIG.model_dim not in converted, text


def test_rows_are_refilled_without_a_conversion_of_what_they_keep():
    """XLA writes rows of bfloat16 arrays by converting all of them to float32 and back."""
    engine = SearchEngine(
        [CONFIG],
        SearchConfig(beam_size=3, max_length_ratio=1.0, max_length_offset=4),
        Symbols(0, 1, 2),
        sizes=(V, V),
        source_pad_id=0,
        longest_source=11,
    )
    params = (cast_kernels(random_params(make_bfloat16({})), CONFIG.dtype),)
    size = Size(rows=3, source_length=11, capacity=13)
    slots = engine.make_slots(params, size, Form(), n_best=1)
    programs = slots.programs
    state, waiting = programs.empty(), programs.prefill(params, slots._lay_out([[]]))
    text = programs._programs["generate"].result().as_text()
    loops = computations_of_loops(text)
    kept = [leaf for leaf in (*state, *waiting) if leaf.dtype == jnp.uint16 or leaf.ndim > 3]
    assert any(" dot(" in line for lines in loops.values() for line in lines)
    assert not {leaf.size for leaf in kept if leaf.dtype != jnp.bool} & converted_sizes(loops), text
    assert not copies_in_disguise(loops), text
