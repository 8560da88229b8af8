"""Trees as tables: paths are unambiguous, specs say what differs, and arrays go where they are wanted."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from flaxformer_mt import parameter_trees
from flaxformer_mt.parameter_trees import (
    compare_specs,
    copy_to_host,
    flatten_tree,
    make_specs,
)


class Moments(NamedTuple):
    mu: dict
    nu: list
    none: None = None


TREE = {"a": {"b": 1, "c": (2, None, [3])}, "m": Moments(mu={"x": 4}, nu=[5])}


def test_paths_of_every_kind_of_node():
    expected = {"a/b": 1, "a/c/0": 2, "a/c/2/0": 3, "m/mu/x": 4, "m/nu/0": 5}
    assert flatten_tree(TREE) == expected
    assert flatten_tree(7) == {"value": 7}
    assert flatten_tree({"a": None, "b": ()}) == {}


@pytest.mark.parametrize("tree", [{"a/b": 1}, {"a": {"b": 1}, "a/b": 2}, {"x/": 1}, [{"/": 1}]])
def test_ambiguous_names_are_refused(tree):
    with pytest.raises(ValueError, match="ambiguous"):
        flatten_tree(tree)


def test_differences_are_all_listed():
    stored = {"same": "int8[1]", "shape": "int8[1]", "type": "int8[]", "old": "int8[2]"}
    wanted = {"new": "int8[]", "type": "int32[]", "same": "int8[1]", "shape": "int8[1,1]"}
    assert compare_specs(stored, wanted) == [
        "new: stored nothing, wanted int8[]",
        "type: stored int8[], wanted int32[]",
        "shape: stored int8[1], wanted int8[1,1]",
        "old: stored int8[2], wanted nothing",
    ]
    assert compare_specs(stored, stored) == []


def test_host_copies_share_no_memory():
    ours = {"numpy": np.arange(3), "jax": jnp.arange(5), "number": 2.5}
    copies = copy_to_host(ours)
    assert make_specs(copies) == make_specs(ours)
    for path, copy in copies.items():
        assert isinstance(copy, np.ndarray)
        np.testing.assert_array_equal(copy, ours[path])
        assert not np.shares_memory(copy, np.asarray(ours[path]))


def test_leaves_of_accelerators_are_gathered_shard_by_shard(monkeypatch):
    monkeypatch.setattr(parameter_trees, "shares_host_memory", lambda leaf: False)
    mesh = jax.make_mesh((2, 4), ("a", "b"), devices=jax.devices()[:8])
    whole = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    ours = {"one": jnp.asarray(whole)}
    for spec in [(), ("a", "b"), (None, "a"), (("a", "b"),)]:
        ours[str(spec)] = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(*spec)))
    for path, copy in copy_to_host(ours).items():
        np.testing.assert_array_equal(copy, whole, err_msg=path)
