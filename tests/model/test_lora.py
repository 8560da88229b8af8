"""Factors of low-rank changes: their sizes, their first values, and the matrices with the changes merged."""

import jax
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
from tiny_experiment import change

from flaxformer_mt.model.lora import add_factors, is_matrix, merge_factors, without_factors
from flaxformer_mt.model.scanned_layers import stack_layers, unstack_layers
from flaxformer_mt.parameter_trees import flatten_tree


def test_changes_are_merged_into_matrices_of_any_form_and_layout():
    """At first nothing changes; then each matrix gets scale * down @ up, in the layout of scan_layers too."""
    draw = np.random.default_rng(1).standard_normal
    layer = {
        "query": {"kernel": draw((7, 2, 5)), "bias": draw((2, 5))},
        "output": {"kernel": draw((2, 5, 7))},
    }
    plain = {"encoder": {f"layers_{number}": jax.tree.map(np.copy, layer) for number in range(2)}}
    plain = jax.tree.map(np.float32, plain)
    paths = [path for path in flatten_tree(plain) if path.endswith("kernel")]
    key = jax.random.key(3)
    adapted = jax.device_get(add_factors(plain, paths, rank=3, alpha=12, key=key))
    assert without_factors(adapted).keys() == plain.keys()
    factors = adapted["lora"]["encoder"]["layers_1"]["output"]["kernel"]
    assert factors["down"].shape == (10, 3) and factors["up"].shape == (3, 7)
    assert 0.2 < np.abs(factors["down"]).max() <= 10**-0.5 and not factors["up"].any()
    for path, leaf in flatten_tree(merge_factors(adapted)).items():
        assert_array_equal(leaf, flatten_tree(plain)[path])
    assert not np.array_equal(
        adapted["lora"]["encoder"]["layers_0"]["output"]["kernel"]["down"], factors["down"]
    )
    stacked_paths = [path.replace("layers_0", "layers") for path in paths if "layers_0" in path]
    stacked = jax.device_get(add_factors(stack_layers(plain), stacked_paths, rank=3, alpha=12, key=key))
    other = flatten_tree(unstack_layers(stacked))
    for path, leaf in flatten_tree(adapted).items():
        assert_array_equal(leaf, other[path])
    adapted, stacked = jax.tree.map(np.array, (adapted, stacked))
    for tree in (adapted, stacked):
        for path, leaf in flatten_tree(tree).items():
            if path.endswith("/up"):
                leaf += np.float32(0.5)
    merged = flatten_tree(merge_factors(adapted))
    wanted = layer["output"]["kernel"].reshape(10, 7) + 4 * factors["down"] @ np.full((3, 7), 0.5)
    assert_allclose(merged["encoder/layers_1/output/kernel"].reshape(10, 7), wanted, rtol=1e-5, atol=1e-6)
    on_device = flatten_tree(unstack_layers(jax.jit(merge_factors)(stacked)))
    assert on_device.keys() == merged.keys() == flatten_tree(plain).keys()
    for path, leaf in merged.items():
        assert_allclose(on_device[path], leaf, rtol=1e-5, atol=1e-6)
    assert_array_equal(merged["encoder/layers_0/query/bias"], np.float32(layer["query"]["bias"]))


def test_every_matrix_of_a_network_has_one_rule_for_its_factors(tiny_config):
    """Split over devices as the matrix is: along its inputs, or along its outputs."""
    from flaxformer_mt.model import init_params, make_model
    from flaxformer_mt.parallel.sharding import choose_placements

    config = change(
        tiny_config, model={"tying": "none", "activation": "swiglu", "positions": "learned"}
    ).model
    model = make_model(config, source_size=12, target_size=20)

    def adapt():
        params = init_params(model, jax.random.key(0))
        paths = list(flatten_tree(params))
        return add_factors(
            params, filter(is_matrix, paths), rank=2, alpha=1, key=jax.random.key(0), embedding_rank=3
        )

    shapes = {path: leaf.shape for path, leaf in flatten_tree(jax.eval_shape(adapt)).items()}
    assert shapes["lora/output_kernel/down"][-1] == 3
    assert shapes["lora/encoder/layers_0/feedforward/output/kernel/down"][-1] == 2
    placed = choose_placements(shapes, {"data": 1, "fsdp": 2, "tensor": 2})
    table = {path: tuple(placement.spec) for path, placement in placed.items()}
    names = {path.split("/", 1)[1] for path in table if path.startswith("lora/") and path != "lora/scale"}
    assert len(names) == 2 * sum(map(is_matrix, table))
    query, output = "lora/decoder/layers_0/cross_attention/query", "lora/encoder/layers_0/feedforward/output"
    assert table[f"{query}/kernel/down"] == ("fsdp",) and table[f"{query}/kernel/up"] == (None, "tensor")
    assert table[f"{output}/kernel/down"] == ("tensor",) and table[f"{output}/kernel/up"] == (None, "fsdp")
    assert table["lora/scale"] == () and table["lora/output_kernel/up"] == (None, "tensor")
