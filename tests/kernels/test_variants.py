"""Every variant of a kernel against its reference: values and gradients, at sizes of different primes."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_experiment import mark_slow

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import MaskRule, attention_kernels, choose_kernels, triton_attention
from flaxformer_mt.kernels.attention_kernels import Drop, attend, attend_fused, attend_unpadded
from flaxformer_mt.kernels.cross_entropy import (
    CrossEntropy,
    Output,
    _entropies,
    project,
    score_in_bfloat16,
    score_in_two_passes,
    score_rounded,
    score_words,
)
from flaxformer_mt.kernels.dropout import dropout, make_dropout_key
from flaxformer_mt.kernels.matmul import Product, multiply, multiply_on_cpu
from flaxformer_mt.kernels.relative_bias import RelativeBias
from flaxformer_mt.kernels.relu import rectify, rectify_and_drop
from flaxformer_mt.kernels.unpad import find_places, remove_padding, restore_padding
from flaxformer_mt.model.layers import LayerNorm

B, T, M, H, K, D, F, V = 2, 5, 7, 3, 11, 13, 17, 19
PLAIN = functools.partial(attend, Product())
TOKENS = np.arange(M) < np.array([7, 2])[:, None]
# Of one side of a batch without padding: its rows are fewer than those of the batch with it.
QUERIES = np.arange(T) < np.array([2, 0, 3, 4])[:, None]
MEMORY = np.arange(M) < np.array([3, 7, 2, 1])[:, None]
LINKED = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 3]], np.int32)


def draw(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng((*shape, seed)).normal(size=shape), dtype)


def by_product(multiply: Any, spec: str) -> Callable[..., Any]:
    return functools.partial(Product(multiply), spec)


def attended(attention: Any, rule: MaskRule, sees: bool = False) -> Callable[..., Any]:
    """Attention whose weights are halved where somebody sees them."""
    see = (lambda weights: weights * 0.5) if sees else None
    return lambda query, keys, values: attention(query, keys, values, rule, see_weights=see)


def changed(attention: Any, rule: MaskRule, rate: float, biased: bool) -> Callable[..., Any]:
    """Attention with another scale, dropout, and biases of which the table is the last argument."""

    def attend_changed(query: Any, keys: Any, values: Any, *tables: Any) -> Any:
        bias = RelativeBias(tables[0].astype(jnp.float32), 20, bidirectional=True) if biased else None
        drop = Drop(make_dropout_key(3, 1, part=1), rate) if rate else None
        rules = dataclasses.replace(rule, bias=bias)
        return attention(query, keys, values, rules, scale=0.5, drop=drop)

    return attend_changed


def with_biases(attention: Any, rule: MaskRule, leaves: bool) -> Callable[..., Any]:
    """Attention to sums with biases, whose gradients a fused kernel is left; that of keys' is rounding."""

    def attend_sums(query: Any, keys: Any, values: Any, of_query: Any, of_values: Any) -> Any:
        biases = of_query, jnp.ones_like(of_query), of_values
        added = jax.lax.stop_gradient(biases) if leaves else biases
        heads = (x + bias for x, bias in zip((query, keys, values), added, strict=True))
        return attention(*heads, rule, **({"biases": biases} if leaves else {}))

    return attend_sums


def without_padding(queries: Any, memory: Any, causal: bool, sees: bool = False) -> Callable[..., Any]:
    """Attention by a batch without padding, put back into its rows."""

    def attention(query: Any, keys: Any, values: Any) -> Any:
        own, other = (find_places(jnp.asarray(side), 2 * side.shape[1]) for side in (queries, memory))
        rule = MaskRule(own, other, causal=causal)
        attend_slots = attended(functools.partial(attend_unpadded, PLAIN), rule, sees)
        taken = remove_padding(query, own), remove_padding(keys, other), remove_padding(values, other)
        assert taken[0].shape[0] < len(queries) and taken[1].shape[0] < len(memory)
        return restore_padding(attend_slots(*taken), own) * queries[..., None, None]

    return attention


def with_padding(queries: Any, memory: Any, causal: bool, sees: bool = False) -> Callable[..., Any]:
    padded = attended(PLAIN, MaskRule(None, memory, causal=causal), sees)
    return lambda *heads: padded(*heads) * queries[..., None, None]


def cross_entropy(hidden: Any, output: Output, target: Any, weights: Any, *, smoothing: float) -> Any:
    """The loss in one piece, of the logits of all tokens."""
    return (_entropies(project(multiply, hidden, output), target, smoothing) * weights).sum()


def loss(
    kernel: Any, bias: bool, smoothing: float = 0.1, chunk_tokens: int = 4, count: bool = False
) -> Callable[..., Any]:
    """The loss by hidden states, table and bias; without smoothing, exp of its logits would overflow."""
    target = np.random.default_rng(1).integers(0, V, (B, T))
    weights = np.random.default_rng(2).random((B, T)).astype(np.float32)

    def total(hidden: Any, table: Any, vector: Any) -> Any:
        output = Output(table, vector if bias else None)
        hidden = hidden * jnp.asarray(1 if smoothing else 16, hidden.dtype)
        if kernel is cross_entropy:
            return cross_entropy(hidden, output, target, weights, smoothing=smoothing)
        options = {"smoothing": smoothing, "chunk_tokens": chunk_tokens, "count": count}
        totals = kernel(hidden, output, jnp.asarray(target), weights, **options)
        assert (totals.correct_sum is not None) is count
        return totals.loss_sum

    return total


def normalized(kernels: Any) -> Callable[..., Any]:
    """Layer normalization of numbers whose mean is four times their deviation."""

    def apply(x: Any, scale: Any, bias: Any) -> Any:
        params = {"scale": scale.astype(jnp.float32), "bias": bias.astype(jnp.float32)}
        return LayerNorm(1e-6, jnp.bfloat16, True, kernels).apply({"params": params}, x + 4)

    return apply


def rectified(function: Any, dropped: bool, dtype: str) -> Callable[..., Any]:
    """A rectifier whose key is made when it is called, not while tests are collected."""

    def apply(product: Any, bias: Any) -> Any:
        return function(product, bias, make_dropout_key(3, 1) if dropped else None, 0.3, jnp.dtype(dtype))

    return apply


SPECS = ("abD,DF->abF", "aTK,aMK->aTM", "aTHK,aMHK->aHTM", "aHTM,aMHK->aTHK", "aD,FD->aF")
SIZES = dict(zip("abDFTMHK", (B, T, D, F, T, M, H, K), strict=True))
HEADS = [(B, M, H, K)] * 3
WIDE = [(B, 16, 2, 64)] * 3  # what the kernel of TPUs needs
MAPPED = [(B, T, D), (V, D), (V,)]
MASKS = {
    "padding": MaskRule(None, TOKENS, padded_at_end=True),
    "causal": MaskRule(causal=True),
    "packed": MaskRule(LINKED, LINKED, causal=True),
    "none": MaskRule(),
}
# Name -> variant, reference, shapes of the arguments, dtype, tolerance of values and gradients.
CASES: dict[str, tuple[Any, Any, list[tuple[int, ...]], str, float]] = {}
for spec in SPECS:
    shapes = [tuple(SIZES[axis] for axis in term) for term in spec.partition("->")[0].split(",")]
    for dtype in ("float32", "bfloat16"):
        pair = by_product(multiply_on_cpu, spec), by_product(multiply, spec)
        CASES[f"product on a CPU, {spec}, {dtype}"] = (*pair, shapes, dtype, 1e-5)
single = [(B, H, 1, K), (B, H, K, M)]
pair = by_product(multiply_on_cpu, "BHWK,BHKM->BHWM"), by_product(multiply, "BHWK,BHKM->BHWM")
CASES["product on a CPU, one row of a batch"] = (*pair, single, "bfloat16", 1e-5)
for name, rule in MASKS.items():
    fused = functools.partial(attend_fused, ("cudnn",), PLAIN)
    pair = attended(fused, rule), attended(PLAIN, rule)
    CASES[f"attention by cuDNN, {name}"] = (*pair, HEADS, "float32", 1e-4)
fused = functools.partial(attend_fused, ("cudnn",), PLAIN)
pair = attended(fused, MASKS["packed"], True), attended(PLAIN, MASKS["packed"], True)
CASES["attention by cuDNN, seen"] = (*pair, HEADS, "float32", 1e-6)
MANY = [(4, M, H, K)] * 3
CROSS = [(4, T, H, K), (4, M, H, K), (4, M, H, F)]
for name, sides, many in (
    ("itself", (MEMORY, MEMORY, True), MANY),
    ("sources", (QUERIES, MEMORY, False), CROSS),
):
    for sees in (False, True):
        for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.02)):
            pair = without_padding(*sides, sees), with_padding(*sides, sees)
            seen = ", seen" if sees else ""
            CASES[f"attention without padding, {name}{seen}, {dtype}"] = (*pair, many, dtype, tolerance)
for name, rule in MASKS.items():
    fused = functools.partial(attend_fused, ("cudnn",), PLAIN)
    CASES[f"attention by cuDNN, {name}, bfloat16"] = (
        *(attended(fused, rule), attended(PLAIN, rule)),
        *(HEADS, "bfloat16", 0.03),
    )
rows = MaskRule(None, np.arange(16) < np.array([16, 5])[:, None], causal=True, padded_at_end=True)
pallas = attended(functools.partial(attend_fused, ("pallas",), PLAIN), rows), attended(PLAIN, rows)
CASES["attention on a TPU"] = (*pallas, WIDE, "bfloat16", 0.03)
for name, sizes, length, causal in (("itself", (1, 128), 16, True), ("sources", (2, 64), 32, False)):
    queries, memory = (
        np.repeat([[1, 2], [1, 1]], size // 2, axis=1).astype(np.int32) for size in (16, length)
    )
    rows = MaskRule(queries, memory, causal=causal)
    pallas = attended(functools.partial(attend_fused, ("pallas",), PLAIN), rows), attended(PLAIN, rows)
    shapes = [(B, 16, *sizes), (B, length, *sizes), (B, length, *sizes)]
    CASES[f"attention on a TPU, packed, {name}"] = (*pallas, shapes, "bfloat16", 0.03)
for name, kind, rule in (("on a TPU", "pallas", rows), ("by cuDNN", "cudnn", MASKS["packed"])):
    pair = (
        with_biases(functools.partial(attend_fused, (kind,), PLAIN), rule, True),
        with_biases(PLAIN, rule, False),
    )
    sizes = shapes if kind == "pallas" else HEADS
    CASES[f"attention {name}, biases"] = (*pair, [*sizes, *[sizes[0][2:]] * 2], "bfloat16", 0.03)
for name, rule in MASKS.items():
    for rate, biased in ((0.0, False), (0.3, False), (0.3, True)):
        fused = functools.partial(attend_fused, ("triton",), PLAIN)
        pair = changed(fused, rule, rate, biased), changed(PLAIN, rule, rate, biased)
        tables = [(8, 3)] if biased else []
        CASES[f"attention on a GPU, {name}, {rate}, {biased}"] = (
            *(*pair, [(B, M, H, 16)] * 3 + tables),
            *("bfloat16", 0.02),
        )
for biased in (False, True):  # blocks of 32 and 64 queries, tiles of 128 keys
    rule = MaskRule(None, np.arange(131) < np.array([131, 5])[:, None])
    pair = changed(fused, rule, 0.3, biased), changed(PLAIN, rule, 0.3, biased)
    tables = [(8, 3)] if biased else []
    CASES[f"attention on a GPU, several tiles, {biased}"] = (
        *(*pair, [(B, 67, H, 16), (B, 131, H, 16), (B, 131, H, 16), *tables]),
        *("bfloat16", 0.02),
    )
for options in (  # bias, smoothing, chunk_tokens, count
    (True, 0.1, 4, False),
    (False, 0.1, 1, True),
    (False, 0.0, 1000, True),
    (True, 0.0, 4, False),
):
    reference = loss(cross_entropy, *options)
    for score in (score_words, score_in_bfloat16, score_rounded, score_in_two_passes):
        pair = loss(CrossEntropy(score=score), *options), reference
        name = f"cross-entropy, {score.__name__}, {options}"
        CASES[name] = (*pair, MAPPED, "float32", 1e-5)
        CASES[f"{name}, bfloat16"] = (*pair, MAPPED, "bfloat16", 0.05)
for dropped in (True, False):
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 1e-2)):
        pair = rectified(rectify, dropped, dtype), rectified(rectify_and_drop, dropped, dtype)
        name = f"rectifier, {'dropped' if dropped else 'whole'}, {dtype}"
        CASES[name] = (*pair, [(B, T, F), (F,)], "float32", tolerance)
pair = (normalized(choose_kernels(ModelConfig(attention="plain"), name)) for name in ("tpu", "cpu"))
CASES["layer normalization, tpu"] = (*pair, [(B, T, D), (D,), (D,)], "bfloat16", 0.02)


@functools.cache
def run(function: Any, shapes: tuple[tuple[int, ...], ...], dtype: str) -> Any:
    """The gradients, and the result; variants of one reference share what it computes."""
    inputs = [draw(*shape, dtype=dtype, seed=number) for number, shape in enumerate(shapes)]

    def total(*inputs: Any) -> Any:
        result = function(*inputs).astype(jnp.float32)
        factors = jnp.cos(jnp.arange(result.size, dtype=jnp.float32)).reshape(result.shape)
        return (result * factors).sum(), result

    gradients = jax.jit(jax.grad(total, tuple(range(len(inputs))), has_aux=True))
    return jax.tree.map(lambda x: np.asarray(x, np.float32), gradients(*inputs))


# Rules that others repeat with more, and scores in bfloat16 of kernels that differ in float32.
SIMILAR = [name for name in CASES if "on a GPU" in name and "padding" not in name and name.endswith("False")]
SIMILAR = [name for name in SIMILAR if "tiles" not in name] + [
    f"cross-entropy, {score}, {options}, bfloat16"
    for score in ("score_words", "score_in_two_passes")
    for options in ((False, 0.1, 1, True), (False, 0.0, 1000, True), (True, 0.0, 4, False))
]


@pytest.mark.parametrize("name", mark_slow(CASES, *SIMILAR))
def test_a_variant_computes_what_its_reference_does(name, monkeypatch):
    """The gradients are those of a sum in which each entry of the result has its own factor."""
    variant, reference, shapes, dtype, tolerance = CASES[name]
    ran = []
    kernels = {"attend_rows": attention_kernels.attend_rows, "fits": attention_kernels.fits}
    by_jax = jax.nn.dot_product_attention

    def interpreted(heads: int, causal: bool, _: bool, *rest: Any) -> Any:
        ran.append("TPU")
        return kernels["attend_rows"](heads, causal, True, *rest)

    def on_gpu(rule: triton_attention.Rule, *rest: Any) -> Any:
        ran.append("GPU")
        return kernels["gpu_rows"](rule._replace(interpret=True), *rest)

    def without_cudnn(*heads: Any, implementation: str, **options: Any) -> Any:
        ran.append("cuDNN")
        assert implementation == "cudnn"
        return by_jax(*heads, **options)

    kernels["gpu_rows"] = triton_attention.attend_rows
    monkeypatch.setattr(attention_kernels, "attend_rows", interpreted)
    monkeypatch.setattr(triton_attention, "attend_rows", on_gpu)
    monkeypatch.setattr(jax.nn, "dot_product_attention", without_cudnn)
    monkeypatch.setattr(
        attention_kernels, "fits", lambda kind, *heads: kind == "cudnn" or kernels["fits"](kind, *heads)
    )
    found = run(variant, tuple(shapes), dtype)
    seen = name.endswith(", seen")  # a fused kernel keeps no weights
    assert set(ran) == {kind for kind in ("TPU", "GPU", "cuDNN") if kind in name and not seen}, (
        "another kernel ran"
    )
    expected = run(reference, tuple(shapes), dtype)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            one, other, rtol=tolerance, atol=tolerance * max(1e-3, np.abs(other).max())
        )
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(expected)[:2]), "nothing is compared"


def test_the_table_has_the_variants_of_a_platform():
    config = ModelConfig(attention="auto")
    cpu, gpu, tpu, cuda = (choose_kernels(config, name) for name in ("cpu", "gpu", "tpu", "cuda"))
    assert cpu.product.multiply is multiply_on_cpu and gpu.product.multiply is multiply
    assert cpu.attention.func is attend_unpadded and cpu.attention.args[0].func is attend
    assert (gpu.attention.args[0], tpu.attention.args[0]) == (("cudnn", "triton"), ("pallas",))
    assert cpu.cross_entropy.score is score_rounded and tpu.cross_entropy.score is score_in_two_passes
    assert gpu.materialize is jax.lax.optimization_barrier and cpu.materialize is tpu.materialize
    assert (cpu.one_pass, gpu.one_pass, tpu.one_pass) == (False, False, True)
    assert repr(gpu) == repr(cuda) and gpu.cross_entropy.score is score_in_bfloat16
    assert choose_kernels(config, "cpu", gathers_twice=True).product.gathers_twice


def test_parts_of_a_batch_draw_the_rows_of_the_whole_batch():
    """By the index of the part in the key, also through what Flax folds in and splits off."""
    ones = jnp.ones((6, 5, 7))

    def site(part: int | None) -> Any:
        return jax.random.split(jax.random.fold_in(make_dropout_key(7, 2, 1, part), 9), 2)[1]

    def dropped(*numbers: int) -> Any:
        return np.asarray(dropout(ones, make_dropout_key(*numbers), 0.4)) == 0

    whole = dropout(ones, site(None), 0.4)
    parts = [dropout(ones[:2], site(part), 0.4) for part in range(3)]
    np.testing.assert_array_equal(jnp.concatenate(parts), whole)
    for other in ((7, 3, 1), (7, 2, 0), (8, 2, 1)):
        assert (dropped(*other) != dropped(7, 2, 1)).mean() > 0.3, other


def test_dropout_keeps_its_share_and_the_mean_at_every_site():
    """Within five standard deviations; of two sites, entries are dropped independently of each other."""
    ones, rate, key = jnp.ones((101, 103)), 0.3, make_dropout_key(7, 2, 1)
    sites = [key, *(jax.random.fold_in(key, number) for number in (1, 2)), *jax.random.split(key, 2)]
    dropped = [np.asarray(dropout(ones, site, rate)) for site in sites]
    deviation = (rate * (1 - rate) / ones.size) ** 0.5
    for one in dropped:
        assert abs((one == 0).mean() - rate) < 5 * deviation
        np.testing.assert_allclose(one[one != 0], 1 / (1 - rate), rtol=1e-6)
        assert abs(one.mean() - 1) < 5 * deviation / (1 - rate)
    both = rate**2
    for one, other in itertools.combinations(dropped, 2):
        share = ((one == 0) & (other == 0)).mean()
        assert abs(share - both) < 5 * (both * (1 - both) / ones.size) ** 0.5


@pytest.mark.parametrize("score", [score_words, score_in_bfloat16, score_rounded, score_in_two_passes])
@pytest.mark.parametrize("chunk_tokens", [4, 1000])
def test_correct_words_are_those_of_the_largest_logit(score, chunk_tokens):
    """In the pass with gradients, too, and scaled as the loss is; of equal logits the first one counts."""
    hidden, table, bias = (jnp.round(draw(*shape, seed=n)) for n, shape in enumerate(MAPPED))
    table = table.at[1].set(table[0])
    bias = bias.at[:2].set(99.0)  # words 0 and 1 are equally probable, and the most probable ones
    target, weights = np.zeros((B, T), np.int32), np.random.default_rng(2).random((B, T)).astype(np.float32)
    target[:, 1::2] = 1

    def total(hidden: Any, output: Any, kernel: Any = None) -> Any:
        if kernel is None:
            return 0.7 * cross_entropy(hidden, output, target, weights, smoothing=0.1), None
        totals = kernel(hidden, output, target, weights, smoothing=0.1, chunk_tokens=chunk_tokens, count=True)
        return 0.7 * totals.loss_sum, totals.correct_sum

    kernel = functools.partial(total, kernel=CrossEntropy(score=score))
    output = Output(table, bias)
    (loss_sum, correct), gradients = jax.jit(jax.value_and_grad(kernel, (0, 1), has_aux=True))(hidden, output)
    (expected, _), expected_gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, output)
    np.testing.assert_allclose(correct, weights[:, ::2].sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(kernel)(hidden, output)[1], correct, rtol=1e-6)
    np.testing.assert_allclose(loss_sum, expected, rtol=1e-4)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), gradients, expected_gradients
    )


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_sum_of_zero_passes_no_gradient(dropped, biased):
    """In whole numbers a third of the sums are 0; and a sum that is no number stays none."""
    product, bias = jnp.round(draw(B, T, F)), jnp.round(draw(F, seed=1)) if biased else None
    total = np.asarray(product if bias is None else product + bias)
    assert 0.1 < (total == 0).mean() < 0.6
    key, gradients = make_dropout_key(3, 1) if dropped else None, []
    for function in (rectify, rectify_and_drop):
        run = functools.partial(function, bias=bias, key=key, rate=0.3, dtype=jnp.dtype("float32"))
        gradients.append(jax.grad(lambda product, run=run: run(product).sum())(product))
        assert not np.asarray(gradients[-1])[total <= 0].any(), function.__name__
        assert np.isnan(run(product * jnp.nan)).any()
    np.testing.assert_allclose(*gradients, rtol=1e-6)
