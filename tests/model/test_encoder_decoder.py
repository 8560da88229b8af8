"""The network: every variant decodes with a cache as without, and no sentence sees another or padding."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import Model, init_params, make_model
from flaxformer_mt.model.attention_maps import attention_maps
from flaxformer_mt.shapes import Batch

V = 23  # words, on both sides
LENGTHS = ((5, 4), (3, 6), (2, 3))  # source and target tokens of three sentence pairs

TINY = ModelConfig(
    num_encoder_layers=1,
    num_decoder_layers=2,
    model_dim=12,
    num_heads=2,
    ffn_dim=14,
    dropout_rate=0.0,
    max_positions=16,
)

# Between them, every choice that the config offers, and each beside different others.
VARIANTS = {
    "paper": {"norm_position": "post"},
    "learned": {
        "positions": "learned",
        "activation": "gelu",
        "norm": "rms",
        "tying": "target_output",
        "output_bias": True,
    },
    "modern": {
        "positions": "rotary",
        "activation": "swiglu",
        "norm": "rms",
        "tying": "none",
        "attention_bias": False,
        "ffn_bias": False,
        "key_dim": 4,
        "value_dim": 7,
    },
    "mixed": {
        "positions": "rotary",
        "norm_position": "post",
        "activation": "gelu_tanh",
        "tying": "none",
        "output_bias": True,
        "embedding_scale": False,
        "value_dim": 5,
    },
    "documents": {
        "norm_position": "post",
        "final_norm": True,
        "embedding_norm": True,
        "embedding_bias": True,
        "logit_scale": True,
        "first_position": 1,
        "padding_mask": "both",
        "tying": "embeddings",
        "ffn_layer": "convolution",
        "activation": "silu",
    },
    "decoder_only": {
        "architecture": "decoder_only",
        "norm_position": "post",
        "positions": "learned",
        "embedding_bias": True,
        "norm_affine": False,
        "output_bias": True,
        "tying": "none",
        "key_dim": 4,
        "value_dim": 7,
    },
    "decoder_only_rotary": {"architecture": "decoder_only", "positions": "rotary", "norm": "rms"},
}


class Built(NamedTuple):
    model: Model
    params: Any
    forward: Any  # params, batch -> logits, compiled


@functools.cache
def build(variant: str) -> Built:
    """A variant with all parameters moved off their initial ones and zeros, and its forward pass."""
    model = make_model(dataclasses.replace(TINY, **VARIANTS[variant]), source_size=V, target_size=V)
    leaves, structure = jax.tree.flatten(init_params(model, jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    forward = jax.jit(lambda params, batch: model.apply({"params": params}, batch, deterministic=True))
    return Built(model, jax.tree.unflatten(structure, moved), forward)


def make_rows(rows: list[int], source_length: int = 5, target_length: int = 6, filling: int = 0) -> Batch:
    """The pairs of `LENGTHS` numbered in `rows`, padded with `filling` to the given lengths."""
    shape = (len(rows), source_length), (len(rows), target_length)
    source, target = np.full(shape[0], filling, np.int32), np.full(shape[1], filling, np.int32)
    source_mask, target_mask = np.zeros(shape[0], bool), np.zeros(shape[1], bool)
    for place, row in enumerate(rows):
        words = np.random.default_rng(row).integers(4, V, size=11).astype(np.int32)
        sources, targets = LENGTHS[row]
        source[place, :sources], source_mask[place, :sources] = words[:sources], True
        target[place, :targets], target_mask[place, :targets] = words[5 : 5 + targets], True
    return Batch(source, target, target, source_mask, target_mask)


@functools.cache
def expected_logits(variant: str) -> np.ndarray:
    """The logits of the three pairs as one batch, the measure for everything else."""
    built = build(variant)
    logits = built.forward(built.params, make_rows([0, 1, 2]))
    assert logits.shape == (3, 6, V)
    assert logits.dtype == jnp.float32
    return np.asarray(logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_with_a_cache_equals_the_whole_forward_pass_at_every_step(variant):
    """Two beams of each source, with different prefixes and a cache longer than need be."""
    model, params, _ = build(variant)
    batch = make_rows([0, 1, 2])
    prefixes = np.random.default_rng(9).integers(4, V, size=(3, 2, 6)).astype(np.int32)

    @jax.jit
    def whole(params: Any, rows: np.ndarray) -> tuple[jax.Array, Any]:
        variables = {"params": params}
        args = batch.source, batch.source_mask, 2, 9
        cache = model.apply(variables, *args, method="start_decoding")
        source, source_mask = (jnp.repeat(array, 2, axis=0) for array in args[:2])
        twice = Batch(source, rows, rows, source_mask, np.ones(rows.shape, bool))
        return model.apply(variables, twice, deterministic=True), cache

    @jax.jit
    def step(params: Any, tokens: np.ndarray, cache: Any) -> Any:
        return model.apply({"params": params}, tokens, cache, method="decode_step")

    logits, cache = whole(params, prefixes.reshape(6, 6))
    expected = logits.reshape(3, 2, 6, V)
    for index in range(6):
        assert cache.index == index
        logits, cache = step(params, prefixes[:, :, index], cache)
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(logits, expected[:, :, index], atol=3e-5, err_msg=f"step {index}")


def test_encoding_and_decoding_apart_are_the_forward_pass():
    model, params, _ = build("documents")
    batch = make_rows([0, 1, 2])

    @jax.jit
    def apart(params: Any) -> jax.Array:
        memory = model.apply({"params": params}, batch.source, batch.source_mask, method="encode")
        args = batch.target_in, memory, batch.source_mask
        return model.apply({"params": params}, *args, method="decode")

    logits = apart(params)
    for row, (_, targets) in enumerate(LENGTHS):
        expected = expected_logits("documents")[row, :targets]
        np.testing.assert_allclose(logits[row, :targets], expected, atol=3e-5)


def test_padding_masks_by_name():
    """none: padding reaches real tokens; both: no padded target is attended to, not even by its like."""
    batch = make_rows([2])
    other = make_rows([2], filling=V - 1)
    changed = {}
    for kind in ("source", "both", "none"):
        config = dataclasses.replace(TINY, num_decoder_layers=1, padding_mask=kind)
        model = make_model(config, source_size=V, target_size=V)
        params = init_params(model, jax.random.key(0))
        forward = jax.jit(
            lambda b, model=model, params=params: model.apply({"params": params}, b, deterministic=True)
        )
        one, two = forward(batch), forward(other._replace(target_in=batch.target_in))
        changed[kind] = not np.allclose(one[0, :3], two[0, :3], atol=1e-5)
        if kind == "none":
            continue
        # the padding at place 3 is other text: does the padding after it see that?
        target = batch.target_in.copy()
        target[0, 3] = V - 1
        three = forward(batch._replace(target_in=target))
        np.testing.assert_allclose(one[0, :3], three[0, :3], atol=1e-5)
        assert np.allclose(one[0, 4:], three[0, 4:], atol=1e-5) == (kind == "both")
    assert changed == {"source": False, "both": False, "none": True}


def test_an_input_beyond_the_last_position_is_refused():
    model, params, _ = build("paper")
    with pytest.raises(UserError, match="17 tokens is longer than the 16 positions of .*sinusoidal; raise"):
        jax.eval_shape(lambda: model.apply({"params": params}, make_rows([0], 17, 4), deterministic=True))


def test_a_language_model_reads_no_source():
    """What the text before a target's end gives does not depend on an absent source's shape or on padding."""
    model, params, forward = build("decoder_only")
    batch = make_rows([0, 1, 2])
    nothing = np.zeros((3, 0), np.int32), np.zeros((3, 0), bool)
    alone = batch._replace(source=nothing[0], source_mask=nothing[1])
    logits = forward(params, alone)
    assert logits.shape == (3, 6, V)
    assert not np.allclose(logits, expected_logits("decoder_only"), atol=1e-3)
    short = alone._replace(target_in=batch.target_in[:, :4], target_mask=batch.target_mask[:, :4])
    np.testing.assert_allclose(forward(params, short), logits[:, :4], atol=3e-5)


def test_one_vector_tells_no_positions_apart():
    """Document 002 read literally: a token sees the same first layer wherever it stands."""
    config = dataclasses.replace(
        TINY, architecture="decoder_only", positions="one_vector", num_decoder_layers=1, max_positions=5
    )
    model = make_model(config, source_size=V, target_size=V)
    params = init_params(model, jax.random.key(0))
    assert params["decoder"]["positions"]["embedding"].shape == (5, 12)
    rows = np.array([[7, 8, 9], [8, 7, 9]], np.int32)
    nothing = np.zeros((2, 0), np.int32)
    batch = Batch(nothing, rows, rows, nothing > 0, rows > 0)
    logits = jax.jit(lambda: model.apply({"params": params}, batch, deterministic=True))()
    np.testing.assert_allclose(logits[0, 2], logits[1, 2], atol=1e-5)
    assert not np.allclose(logits[0, 1], logits[1, 1], atol=1e-3)


def test_cache_leaves_are_where_search_expects_them():
    model, params, _ = build("modern")
    batch = make_rows([0, 1, 2])

    def start() -> Any:
        memory = model.apply({"params": params}, batch.source, batch.source_mask, method="encode")
        return model.apply({"params": params}, memory, batch.source_mask, 2, 9, method="start_cache")

    cache = jax.eval_shape(start)
    assert {leaf.shape for leaf in jax.tree.leaves(cache.per_beam)} == {(3, 2, 4, 18), (3, 2, 18, 7)}
    assert {leaf.shape[0] for leaf in jax.tree.leaves(cache.shared)} == {3}
    assert len(jax.tree.leaves(cache.per_beam)) == 4  # keys and values of two layers


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pair_in_a_batch_is_the_pair_alone(variant):
    """Neither the other rows nor the amount of padding, on either side, reach the logits of real tokens."""
    _, params, forward = build(variant)
    alone = forward(params, make_rows([2], 2, 3))
    np.testing.assert_allclose(expected_logits(variant)[2, :3], alone[0], atol=3e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_may_hold_anything_and_order_does_not_matter(variant):
    _, params, forward = build(variant)
    expected = expected_logits(variant)
    shuffled = forward(params, make_rows([2, 0, 1], filling=V - 1))
    for place, row in enumerate([2, 0, 1]):
        targets = LENGTHS[row][1]
        np.testing.assert_allclose(shuffled[place, :targets], expected[row, :targets], atol=3e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_pairs_are_pairs_in_rows_of_their_own(variant):
    """Pairs 1, 0 and 2 in one row, with a gap of padding at its end."""
    _, params, forward = build(variant)
    separate = make_rows([1, 0, 2])
    order = [LENGTHS[row] for row in (1, 0, 2)]

    def pack(rows: np.ndarray, lengths: list[int], values: list[np.ndarray] | None = None) -> np.ndarray:
        parts = (
            [row[:length] for row, length in zip(rows, lengths, strict=True)] if values is None else values
        )
        return np.pad(np.concatenate(parts), (0, 2))[None].astype(np.int32)

    def number(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
        segments = [np.full(length, number) for number, length in enumerate(lengths, start=1)]
        positions = [np.arange(length) for length in lengths]
        return pack(segments, lengths), pack(positions, lengths)

    sources, targets = [s for s, _ in order], [t for _, t in order]
    source_segments, source_positions = number(sources)
    target_segments, target_positions = number(targets)
    target = pack(separate.target_in, targets)
    packed = Batch(
        pack(separate.source, sources),
        target,
        target,
        source_segments > 0,
        target_segments > 0,
        source_segments,
        target_segments,
        source_positions,
        target_positions,
    )
    logits = forward(params, packed)
    assert np.isfinite(logits).all()
    start = 0
    for row, length in zip((1, 0, 2), targets, strict=True):
        np.testing.assert_allclose(
            logits[0, start : start + length], expected_logits(variant)[row, :length], atol=3e-5
        )
        start += length


def test_attention_weights_are_kept_on_request():
    model, params, _ = build("paper")
    batch = make_rows([0, 1, 2])
    logits, kept = jax.jit(
        lambda: model.apply({"params": params}, batch, deterministic=True, mutable=["intermediates"])
    )()
    np.testing.assert_allclose(logits, expected_logits("paper"), atol=1e-5)
    found = {
        "/".join(path): leaf[0]
        for path, leaf in _flatten(kept["intermediates"], stop=lambda node: isinstance(node, tuple))
    }
    assert {name: leaf.shape for name, leaf in found.items()} == {
        "encoder/layers_0/self_attention/attention_weights": (3, 2, 5, 5),
        "decoder/layers_0/self_attention/attention_weights": (3, 2, 6, 6),
        "decoder/layers_0/cross_attention/attention_weights": (3, 2, 6, 5),
        "decoder/layers_1/self_attention/attention_weights": (3, 2, 6, 6),
        "decoder/layers_1/cross_attention/attention_weights": (3, 2, 6, 5),
    }
    for name, weights in found.items():
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
        if "self_attention" in name and "decoder" in name:
            assert np.all(np.triu(weights, 1) == 0)  # no token looks ahead
        else:
            assert np.all(np.asarray(weights)[1, :, :, 3:] == 0)  # pair 1 has three source tokens


def test_attention_maps_are_in_the_order_of_layers():
    model, params, _ = build("paper")
    maps = attention_maps(model, params, make_rows([0, 1, 2]))
    assert [m.shape for m in maps.encoder] == [(3, 2, 5, 5)]
    assert [m.shape for m in maps.decoder] == [(3, 2, 6, 6)] * 2
    assert [m.shape for m in maps.cross] == [(3, 2, 6, 5)] * 2
    model, params, _ = build("decoder_only")
    maps = attention_maps(model, params, make_rows([0, 1, 2]))
    assert (maps.encoder, maps.cross) == ([], [])
    assert [m.shape for m in maps.decoder] == [(3, 2, 11, 11)] * 2


def _flatten(node: Any, *, stop: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if stop(node):
        return [(path, node)]
    return [item for name in node for item in _flatten(node[name], stop=stop, path=(*path, name))]


def parameter_shapes(config: ModelConfig, source_size: int = V, target_size: int = V) -> dict[str, tuple]:
    model = make_model(config, source_size=source_size, target_size=target_size)
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    flat = _flatten(params, stop=lambda node: hasattr(node, "shape"))
    return {"/".join(path): leaf.shape for path, leaf in flat}


def attention_paths(prefix: str, *names: str) -> set[str]:
    return {f"{prefix}/{part}/{leaf}" for part in ("query", "key", "value", "output") for leaf in names}


def test_parameter_paths_are_an_interface():
    """Checkpoints and converters read these names: a change here breaks what users have on disk."""
    plain = dataclasses.replace(TINY, num_decoder_layers=1)
    encoder, decoder = "encoder/layers_0", "decoder/layers_0"
    paths = attention_paths(f"{encoder}/self_attention", "kernel", "bias")
    paths |= attention_paths(f"{decoder}/self_attention", "kernel", "bias")
    paths |= attention_paths(f"{decoder}/cross_attention", "kernel", "bias")
    for layer in (encoder, decoder):
        paths |= {
            f"{layer}/feedforward/{p}/{leaf}" for p in ("input", "output") for leaf in ("kernel", "bias")
        }
    residuals = [f"{encoder}/self_attention", f"{encoder}/feedforward", f"{decoder}/self_attention"]
    residuals += [f"{decoder}/cross_attention", f"{decoder}/feedforward"]
    paths |= {f"{place}_residual/norm/{leaf}" for place in residuals for leaf in ("scale", "bias")}
    final = {f"{stack}/final_norm/{leaf}" for stack in ("encoder", "decoder") for leaf in ("scale", "bias")}

    shapes = parameter_shapes(plain)
    assert set(shapes) == paths | final | {"shared_embedding/embedding"}
    assert shapes["shared_embedding/embedding"] == (V, 12)
    assert shapes["decoder/layers_0/cross_attention/query/kernel"] == (12, 2, 6)
    assert shapes["decoder/layers_0/cross_attention/output/kernel"] == (2, 6, 12)
    assert shapes["encoder/layers_0/feedforward/input/kernel"] == (12, 14)

    post = parameter_shapes(dataclasses.replace(plain, norm_position="post"))
    assert set(post) == paths | {"shared_embedding/embedding"}

    untied = parameter_shapes(
        dataclasses.replace(plain, tying="none", output_bias=True, positions="learned", remat="full"), 19, 29
    )
    assert set(untied) == paths | final | {
        "source_embedding/embedding",
        "target_embedding/embedding",
        "output_kernel",
        "output_bias",
        "encoder/positions/embedding",
        "decoder/positions/embedding",
    }
    assert untied["source_embedding/embedding"] == (19, 12)
    assert untied["target_embedding/embedding"] == (29, 12)
    assert untied["output_kernel"] == (12, 29)
    assert untied["output_bias"] == (29,)
    assert untied["encoder/positions/embedding"] == (16, 12)

    gated = parameter_shapes(
        dataclasses.replace(plain, tying="target_output", activation="swiglu", norm="rms")
    )
    gates = {
        f"{layer}/feedforward/gate/{leaf}" for layer in (encoder, decoder) for leaf in ("kernel", "bias")
    }
    rms = {path for path in paths | final if not path.endswith("norm/bias")}
    assert set(gated) == rms | gates | {"source_embedding/embedding", "target_embedding/embedding"}


def test_the_papers_base_model_has_its_63_million_parameters():
    """Table 3 says 65 million, of which the 37,000 words of the shared vocabulary are a rounded number."""
    shapes = parameter_shapes(ModelConfig(norm_position="post"), 37_000, 37_000)
    attention = 4 * (512 * 512 + 512)
    feedforward = 512 * 2048 + 2048 + 2048 * 512 + 512
    norm = 2 * 512
    encoder = attention + feedforward + 2 * norm
    decoder = 2 * attention + feedforward + 3 * norm
    assert 37_000 * 512 + 6 * encoder + 6 * decoder == 63_082_496
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 63_082_496


def test_initial_parameters():
    """Xavier's bound counts a three-axis kernel as the matrix that it is; embeddings have variance 1 / D."""
    config = dataclasses.replace(TINY, model_dim=24, num_heads=3, key_dim=5, value_dim=7, tying="none")
    model = make_model(config, source_size=400, target_size=500)
    params = init_params(model, jax.random.key(4))
    attention = params["decoder"]["layers_1"]["cross_attention"]
    for name, fans in {"query": 24 + 15, "key": 24 + 15, "value": 24 + 21, "output": 24 + 21}.items():
        largest, bound = float(jnp.abs(attention[name]["kernel"]).max()), (6 / fans) ** 0.5
        assert 0.95 * bound < largest <= bound, name
        assert not attention[name]["bias"].any()
    for side in ("source_embedding", "target_embedding"):
        assert abs(float(params[side]["embedding"].std()) * 24**0.5 - 1) < 0.05
    largest, bound = float(jnp.abs(params["output_kernel"]).max()), (6 / (24 + 500)) ** 0.5
    assert 0.95 * bound < largest <= bound


def gradients(config: ModelConfig, params: Any) -> tuple[jax.Array, Any]:
    """Mean of the squared logits, and its gradients, with dropout."""
    model = make_model(config, source_size=V, target_size=V)
    batch = make_rows([0, 1, 2])

    def loss(params: Any) -> jax.Array:
        rngs = {"dropout": jax.random.key(5)}
        return (model.apply({"params": params}, batch, deterministic=False, rngs=rngs) ** 2).mean()

    return jax.jit(jax.value_and_grad(loss))(params)


def test_recomputing_layers_changes_no_gradient():
    config = dataclasses.replace(TINY, num_decoder_layers=1, dropout_rate=0.3)
    params = init_params(make_model(config, source_size=V, target_size=V), jax.random.key(0))
    loss, expected = gradients(config, params)
    for remat in ("full", "dots"):
        again, recomputed = gradients(dataclasses.replace(config, remat=remat), params)
        np.testing.assert_allclose(again, loss, rtol=1e-6)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), recomputed, expected)


def test_bfloat16_computes_narrow_and_answers_wide():
    _, params, _ = build("paper")
    narrow = make_model(
        dataclasses.replace(TINY, **VARIANTS["paper"], dtype="bfloat16"), source_size=V, target_size=V
    )
    batch = make_rows([0, 1, 2])
    logits, hidden = jax.jit(
        lambda: [
            narrow.apply({"params": params}, batch, deterministic=True, method=method)
            for method in (None, "hidden")
        ]
    )()
    assert (logits.dtype, hidden.dtype) == (jnp.float32, jnp.bfloat16)
    difference = np.abs(np.asarray(logits) - expected_logits("paper")).max()
    assert 1e-4 < difference < 0.1 * np.abs(expected_logits("paper")).max()
    loss, grads = gradients(narrow.config, params)
    assert np.isfinite(loss)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_the_output_layer_is_what_makes_the_logits():
    for variant in VARIANTS:
        model, params, _ = build(variant)
        batch = make_rows([0, 1, 2])
        (table, bias), hidden = jax.jit(
            lambda params, model=model, batch=batch: (
                model.apply({"params": params}, method="output_layer"),
                model.apply({"params": params}, batch, deterministic=True, method="hidden"),
            )
        )(params)
        assert (bias is not None) == model.config.output_bias
        expected = np.asarray(hidden) @ np.asarray(table).T + (0 if bias is None else np.asarray(bias))
        np.testing.assert_allclose(expected, expected_logits(variant), atol=3e-5)
