"""The network: every variant decodes with a cache as without, and no sentence sees another or padding."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_experiment import mark_slow, random_params, small_model

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.convert.name_table import expand_groups
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.plots import attention_maps
from flaxformer_mt.model import Model, init_params, make_model
from flaxformer_mt.parameter_trees import flatten_tree
from flaxformer_mt.shapes import Batch

pytestmark = pytest.mark.usefixtures("strict_dtypes")

V = 23  # words, on both sides
LENGTHS = ((5, 4), (3, 6), (2, 3))  # source and target tokens of three sentence pairs

TINY = small_model(1, 12, 2, 14, max_positions=16)

# Between them, every choice that the config offers, each combined with different others.
VARIANTS = {
    "paper": {"norm_position": "post"},
    "learned": {"positions": "learned", "activation": "gelu", "norm": "rms", "tying": "target_output"}
    | {"output_bias": True},
    "modern": {"num_decoder_layers": 2, "positions": "rotary", "activation": "swiglu", "norm": "rms"}
    | {"tying": "none", "attention_bias": False, "ffn_bias": False, "key_dim": 4}
    | {"value_dim": 7},
    "without_source_end": {"positions": "sinusoidal_halves", "source_end": False, "target_start": "zeros"},
    "mixed": {"positions": "rotary", "norm_position": "post", "activation": "gelu_tanh"}
    | {"tying": "none", "output_bias": True, "embedding_scale": False, "value_dim": 5},
    "documents": {"norm_position": "post", "final_norm": True, "embedding_norm": True}
    | {"embedding_bias": True, "logit_scale": True, "first_position": 1, "padding_mask": "both"}
    | {"tying": "embeddings", "ffn_layer": "convolution", "activation": "silu"},
    "recurrent": {"decoder_self_attention": "ssru", "num_decoder_layers": 2, "positions": "rotary"}
    | {"key_dim": 4, "padding_mask": "both", "tying": "none"},
    "fairseq": {"positions": "sinusoidal_halves", "first_position": 2, "model_dim": 14, "max_positions": 11},
    "t5": {"num_encoder_layers": 2, "num_decoder_layers": 2, "positions": "relative"}
    | {"relative_buckets": 8, "relative_distance": 6, "attention_scale": False}
    | {"attention_bias": False, "ffn_bias": False, "activation": "geglu_tanh", "norm": "rms"}
    | {"embedding_scale": False, "logit_scale": True, "key_dim": 5, "value_dim": 5}
    | {"tying": "embeddings", "max_positions": None},
    "decoder_only": {"architecture": "decoder_only", "norm_position": "post", "positions": "learned"}
    | {"embedding_bias": True, "norm_affine": False, "output_bias": True, "tying": "none"}
    | {"key_dim": 4, "value_dim": 7},
    "decoder_only_rotary": {"architecture": "decoder_only", "positions": "rotary", "norm": "rms"},
}
# Parts of "mixed" are in "modern" and "documents".
DEFAULT = mark_slow(VARIANTS, "mixed", "without_source_end", "fairseq", "decoder_only_rotary")


@functools.cache
def build(variant: str) -> tuple[Model, Any]:
    """A variant of the model, and parameters away from their initial ones and zeros."""
    model = make_model(dataclasses.replace(TINY, **VARIANTS[variant]), source_size=V, target_size=V)
    return model, random_params(model, scale=0.25)


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


PREFIXES = np.random.default_rng(9).integers(4, V, size=(3, 2, 6)).astype(np.int32)


def pack_rows(order: list[int]) -> Batch:
    """The pairs of `LENGTHS` in this order in one row, with a gap of padding at its end."""
    separate = make_rows(order)

    def pack(parts: list[np.ndarray]) -> np.ndarray:
        return np.pad(np.concatenate(parts), (0, 2))[None].astype(np.int32)

    def pack_side(rows: np.ndarray, lengths: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = pack([row[:length] for row, length in zip(rows, lengths, strict=True)])
        segments = pack([np.full(length, number) for number, length in enumerate(lengths, start=1)])
        return tokens, segments, pack([np.arange(length) for length in lengths])

    source, source_segments, source_positions = pack_side(separate.source, [LENGTHS[n][0] for n in order])
    target, target_segments, target_positions = pack_side(separate.target_in, [LENGTHS[n][1] for n in order])
    return Batch(
        source,
        target,
        target,
        source_segments > 0,
        target_segments > 0,
        source_segments,
        target_segments,
        source_positions,
        target_positions,
    )


@functools.cache
def compute(variant: str) -> dict[str, Any]:
    """What one program of a variant computes for all tests.

    logits, hidden [3, 6, ...]: of the three pairs as one batch, the reference for everything else.
    whole [3, 2, 6, V]: of two target prefixes per source, in the same batch.
    shuffled [3, 6, V]: of pairs 2, 0 and 1, padded with another token, in the same batch.
    repadded [6, V]: of pair 2 with another token as padding at target position 3, in the same batch.
    stepwise [6, 3, 2, V], index [6]: the prefixes token by token, with a cache longer than need be.
    alone [1, 3, V]: of pair 2, without padding.
    packed [1, 15, V]: of pairs 1, 0 and 2 in one row.
    table, bias: the output layer.
    """
    model, params = build(variant)
    pairs = make_rows([0, 1, 2])
    source, source_mask = (np.repeat(array, 2, axis=0) for array in (pairs.source, pairs.source_mask))
    rows = PREFIXES.reshape(6, 6)
    beams = Batch(source, rows, rows, source_mask, np.ones(rows.shape, bool))
    repadded = make_rows([2])
    repadded.target_in[0, 3] = V - 1
    parts = pairs, beams, make_rows([2, 0, 1], filling=V - 1), repadded
    batch = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)

    @jax.jit
    def run(params: Any, batch: Batch, alone: Batch, packed: Batch, prefixes: np.ndarray) -> dict[str, Any]:
        apply = functools.partial(model.apply, {"params": params})

        def step(cache: Any, tokens: jax.Array) -> tuple[Any, Any]:
            logits, after = apply(tokens, cache, method="decode_step")
            return after, (logits, cache.index)

        def hidden_and_logits(model: Model) -> tuple[jax.Array, jax.Array]:
            hidden = model.hidden(batch, deterministic=True)
            return hidden, model.logits(hidden)

        hidden, logits = apply(method=hidden_and_logits)
        cache = apply(batch.source[:3], batch.source_mask[:3], 2, 9, method="start_decoding")
        _, (stepwise, index) = jax.lax.scan(step, cache, prefixes.transpose(2, 0, 1))
        table, bias = apply(method="output_layer")
        return (
            {"hidden": hidden[:3], "logits": logits[:3], "whole": logits[3:9].reshape(3, 2, 6, V)}
            | {"shuffled": logits[9:12], "repadded": logits[12], "stepwise": stepwise}
            | {"index": index, "alone": apply(alone, deterministic=True)}
            | {"packed": apply(packed, deterministic=True), "table": table, "bias": bias}
        )

    found = jax.device_get(run(params, batch, make_rows([2], 2, 3), pack_rows([1, 0, 2]), PREFIXES))
    assert found["logits"].shape == (3, 6, V)
    for name in ("logits", "stepwise", "alone", "packed"):
        assert found[name].dtype == np.float32, name
    return found


def expected_logits(variant: str) -> np.ndarray:
    return compute(variant)["logits"]


@pytest.mark.parametrize("variant", DEFAULT)
def test_decoding_with_a_cache_equals_the_whole_forward_pass_at_every_step(variant):
    """Two beams of each source, with different prefixes and a cache longer than need be."""
    found = compute(variant)
    assert found["index"].tolist() == list(range(6))
    for index in range(6):
        np.testing.assert_allclose(
            found["stepwise"][index], found["whole"][:, :, index], atol=3e-5, err_msg=f"step {index}"
        )


def test_padding_masks_by_name():
    """none: padding reaches real tokens; both: padded targets attend to no padded target."""
    for kind, variant in {"source": "paper", "both": "documents"}.items():
        assert build(variant)[0].config.padding_mask == kind
        # The padding at target position 3 is another token: do the padded positions after it see that?
        one, other = expected_logits(variant)[2], compute(variant)["repadded"]
        np.testing.assert_allclose(one[:3], other[:3], atol=1e-5, err_msg=kind)
        assert np.allclose(one[4:], other[4:], atol=1e-5) == (kind == "both"), kind
        of_other_padding = compute(variant)["shuffled"][0]
        np.testing.assert_allclose(one[:3], of_other_padding[:3], atol=1e-5, err_msg=kind)
    model = make_model(dataclasses.replace(TINY, padding_mask="none"), source_size=V, target_size=V)
    params = random_params(model, scale=0.25)
    batch, other = make_rows([2, 2]), make_rows([2], filling=V - 1)
    batch.source[1] = other.source[0]
    one, other = jax.jit(lambda params, batch: model.apply({"params": params}, batch, deterministic=True))(
        params, batch
    )
    assert not np.allclose(one[:3], other[:3], atol=1e-5)


def test_an_input_beyond_the_last_position_is_refused():
    model, params = build("paper")
    with pytest.raises(UserError, match="17 tokens is longer than the 16 positions of .*sinusoidal; raise"):
        jax.eval_shape(lambda: model.apply({"params": params}, make_rows([0], 17, 4), deterministic=True))


def test_the_end_of_sources_is_read_or_not():
    """Without it, a network computes what it does for sources that lack their last token."""
    config = dataclasses.replace(TINY, source_end=False)
    model, reader = (make_model(one, source_size=V, target_size=V) for one in (config, TINY))
    params = random_params(model, scale=0.25)
    batch = make_rows([0, 1, 2])
    lengths = batch.source_mask.sum(axis=1)
    shorter = np.arange(batch.source.shape[1])[None] < lengths[:, None] - 1

    @jax.jit
    def run(params: Any, batch: Batch, shorter: Any) -> list[jax.Array]:
        cut = batch._replace(source_mask=shorter)
        one_token = batch._replace(
            source_mask=jnp.broadcast_to(jnp.arange(shorter.shape[1]) == 0, shorter.shape)
        )
        return [
            network.apply({"params": params}, rows, deterministic=True)
            for network, rows in ((model, batch), (reader, cut), (model, one_token), (reader, one_token))
        ]

    found, expected, alone, read = jax.device_get(run(params, batch, shorter))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(alone, read, atol=1e-6)  # the only token of a source is read


@pytest.mark.parametrize("variant", DEFAULT)
def test_a_pair_in_a_batch_is_the_pair_alone(variant):
    """Neither the other rows nor the amount of padding, on either side, reach the logits of real tokens."""
    np.testing.assert_allclose(expected_logits(variant)[2, :3], compute(variant)["alone"][0], atol=3e-5)


@pytest.mark.parametrize("variant", DEFAULT)
def test_padding_may_hold_anything_and_order_does_not_matter(variant):
    expected, shuffled = expected_logits(variant), compute(variant)["shuffled"]
    for place, row in enumerate([2, 0, 1]):
        targets = LENGTHS[row][1]
        np.testing.assert_allclose(shuffled[place, :targets], expected[row, :targets], atol=3e-5)


@pytest.mark.parametrize("variant", DEFAULT)
def test_packed_pairs_are_pairs_in_rows_of_their_own(variant):
    """Pairs 1, 0 and 2 in one row, with a gap of padding at its end."""
    packed, start = compute(variant)["packed"][0], 0
    assert np.isfinite(packed).all()
    for row in (1, 0, 2):
        length = LENGTHS[row][1]
        np.testing.assert_allclose(
            packed[start : start + length], expected_logits(variant)[row, :length], atol=3e-5
        )
        start += length


def test_attention_weights_are_kept_on_request():
    model, params = build("modern")
    batch = make_rows([0, 1, 2])

    @jax.jit
    def run(params: Any, batch: Batch) -> Any:
        return model.apply({"params": params}, batch, deterministic=True, mutable=["intermediates"])

    logits, kept = jax.device_get(run(params, batch))
    np.testing.assert_allclose(logits, expected_logits("modern"), atol=1e-5)
    found = flatten_tree(kept["intermediates"])
    assert {name.removesuffix("/attention_weights/0"): leaf.shape for name, leaf in found.items()} == {
        "encoder/layers_0/self_attention": (3, 2, 5, 5),
        "decoder/layers_0/self_attention": (3, 2, 6, 6),
        "decoder/layers_0/cross_attention": (3, 2, 6, 5),
        "decoder/layers_1/self_attention": (3, 2, 6, 6),
        "decoder/layers_1/cross_attention": (3, 2, 6, 5),
    }
    for name, weights in found.items():
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
        if "self_attention" in name and "decoder" in name:
            assert np.all(np.triu(weights, 1) == 0)  # no token looks ahead
        else:
            assert np.all(weights[1, :, :, 3:] == 0)  # pair 1 has three source tokens


def test_a_single_stack_has_attention_maps_of_its_own_alone():
    """By their shapes; tests/model/test_scan_layers.py compares values, of a network of two stacks."""
    maps = jax.eval_shape(functools.partial(attention_maps, *build("decoder_only")), make_rows([0, 1, 2]))
    assert (maps.encoder, maps.cross) == ([], []) and [m.shape for m in maps.decoder] == [(3, 2, 11, 11)]


def parameter_shapes(config: ModelConfig, source_size: int = V, target_size: int = V) -> dict[str, tuple]:
    model = make_model(config, source_size=source_size, target_size=target_size)
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    return {path: leaf.shape for path, leaf in flatten_tree(params).items()}


def test_parameter_paths_are_an_interface():
    """Checkpoints and converters read these names: a change here breaks what users have on disk."""
    layers = "(encoder|decoder)/layers_0"
    paths = {
        *expand_groups(f"{layers}/self_attention/(query|key|value|output)/(kernel|bias)"),
        *expand_groups("decoder/layers_0/cross_attention/(query|key|value|output)/(kernel|bias)"),
        *expand_groups(f"{layers}/feedforward/(input|output)/(kernel|bias)"),
        *expand_groups(f"{layers}/(self_attention|feedforward)_residual/norm/(scale|bias)"),
        *expand_groups("decoder/layers_0/cross_attention_residual/norm/(scale|bias)"),
    }
    final = {*expand_groups("(encoder|decoder)/final_norm/(scale|bias)")}
    shapes = parameter_shapes(TINY)
    assert set(shapes) == paths | final | {"shared_embedding/embedding"}
    assert shapes["shared_embedding/embedding"] == (V, 12)
    assert shapes["decoder/layers_0/cross_attention/query/kernel"] == (12, 2, 6)
    assert shapes["decoder/layers_0/cross_attention/output/kernel"] == (2, 6, 12)
    assert shapes["encoder/layers_0/feedforward/input/kernel"] == (12, 14)

    post = parameter_shapes(dataclasses.replace(TINY, norm_position="post"))
    assert set(post) == paths | {"shared_embedding/embedding"}

    untied = parameter_shapes(
        dataclasses.replace(TINY, tying="none", output_bias=True, positions="learned", remat="full"), 19, 29
    )
    assert set(untied) == paths | final | {
        *("source_embedding/embedding", "target_embedding/embedding", "output_kernel"),
        *("output_bias", "encoder/positions/embedding", "decoder/positions/embedding"),
    }
    assert untied["source_embedding/embedding"] == (19, 12)
    assert untied["target_embedding/embedding"] == (29, 12)
    assert untied["output_kernel"] == (12, 29)
    assert untied["output_bias"] == (29,)
    assert untied["encoder/positions/embedding"] == (16, 12)

    gated = parameter_shapes(
        dataclasses.replace(TINY, tying="target_output", activation="swiglu", norm="rms")
    )
    gates = {*expand_groups(f"{layers}/feedforward/gate/(kernel|bias)")}
    rms = {path for path in paths | final if not path.endswith("norm/bias")}
    assert set(gated) == rms | gates | {"source_embedding/embedding", "target_embedding/embedding"}


def test_a_recurrence_takes_the_place_of_self_attention_in_the_decoder():
    plain = parameter_shapes(TINY)
    recurrent = parameter_shapes(dataclasses.replace(TINY, decoder_self_attention="ssru"))
    kept = {path: shape for path, shape in plain.items() if "decoder/layers_0/self_attention" not in path}
    layer = "decoder/layers_0/recurrence"
    assert recurrent == kept | {f"{layer}/input/kernel": (12, 12), f"{layer}/forget/kernel": (12, 12)} | {
        f"{layer}/forget/bias": (12,),
        f"{layer}_residual/norm/scale": (12,),
    } | {f"{layer}_residual/norm/bias": (12,)}


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
    params = jax.device_get(init_params(model, jax.random.key(4)))
    attention = params["decoder"]["layers_0"]["cross_attention"]
    for name, fans in {"query": 24 + 15, "key": 24 + 15, "value": 24 + 21, "output": 24 + 21}.items():
        largest, bound = float(np.abs(attention[name]["kernel"]).max()), (6 / fans) ** 0.5
        assert 0.95 * bound < largest <= bound, name
        assert not attention[name]["bias"].any()
    for side in ("source_embedding", "target_embedding"):
        assert abs(float(params[side]["embedding"].std()) * 24**0.5 - 1) < 0.05
    largest, bound = float(np.abs(params["output_kernel"]).max()), (6 / (24 + 500)) ** 0.5
    assert 0.95 * bound < largest <= bound


def test_a_seed_gives_the_same_numbers_everywhere_and_from_version_to_version():
    """Integers are hashed, and multiplied by bounds: platforms differ in the last bit at most."""
    config = ModelConfig(num_encoder_layers=2, num_decoder_layers=2, model_dim=8, num_heads=2, ffn_dim=12)
    params = init_params(make_model(config, source_size=11, target_size=11), jax.random.key(7))
    leaves = flatten_tree(jax.device_get(params))
    first = {
        "shared_embedding/embedding": leaves["shared_embedding/embedding"][3],
        "query": leaves["decoder/layers_1/cross_attention/query/kernel"].ravel(),
        "input": leaves["encoder/layers_0/feedforward/input/kernel"].ravel(),
    }
    expected = {
        "shared_embedding/embedding": [0.25479525, 0.23569989, -0.17814435],
        "query": [-0.28563118, 0.35180175, -0.57552516],
        "input": [0.49571282, 0.00353944, -0.21904612],
    }
    for name, numbers in expected.items():
        np.testing.assert_allclose(first[name][:3], numbers, rtol=1e-5, err_msg=name)
    matrices = {path: leaf.ravel() for path, leaf in leaves.items() if leaf.any() and leaf.std()}
    assert len(matrices) == 1 + 2 * (4 + 2) + 2 * (8 + 2)
    assert len({leaf[:3].tobytes() for leaf in matrices.values()}) == len(matrices)


def test_arrays_of_one_shape_are_drawn_by_one_program():
    """So deeper models compile no longer."""
    programs = []
    for layers in (2, 6):
        config = ModelConfig(num_encoder_layers=layers, num_decoder_layers=layers, model_dim=16, ffn_dim=24)
        model = make_model(config, source_size=40, target_size=40)
        made = jax.make_jaxpr(functools.partial(init_params, model))(jax.random.key(0)).jaxpr.eqns
        drawn = [str(eqn.params["jaxpr"]) for eqn in made if eqn.params.get("name") == "_draw"]
        assert len(drawn) == 5 + layers * (16 + 26)
        programs.append(len(set(drawn)))
    # Kernels of heads in and out, of the feed-forward layer in and out, the embedding; zeros and ones.
    assert programs[0] == programs[1] <= 10


def squared_logits(model: Model, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    rngs = {"dropout": jax.random.key(5)}
    logits = model.apply({"params": params}, batch, deterministic=False, rngs=rngs)
    return (logits**2).mean(), logits


def test_bfloat16_computes_narrow_and_answers_wide():
    model, params = build("paper")
    narrow = make_model(dataclasses.replace(model.config, dtype="bfloat16"), source_size=V, target_size=V)
    batch = make_rows([0, 1, 2])
    run = jax.jit(jax.value_and_grad(functools.partial(squared_logits, narrow), has_aux=True))
    (loss, logits), grads = jax.device_get(run(params, batch))
    hidden = jax.eval_shape(
        lambda: narrow.apply({"params": params}, batch, deterministic=True, method="hidden")
    )
    assert (logits.dtype, hidden.dtype) == (jnp.float32, jnp.bfloat16)
    difference = np.abs(logits - expected_logits("paper")).max()
    assert 1e-4 < difference < 0.1 * np.abs(expected_logits("paper")).max()
    assert np.isfinite(loss)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("variant", DEFAULT)
def test_the_output_layer_is_what_makes_the_logits(variant):
    found, bias = compute(variant), compute(variant)["bias"]
    assert (bias is not None) == build(variant)[0].config.output_bias
    expected = found["hidden"] @ found["table"].T + (0 if bias is None else bias)
    np.testing.assert_allclose(expected, found["logits"], atol=3e-5)
