"""Parameter trees as flat dicts from paths to leaves: conversion, comparison, copies to the host and back.

Defines the format of paths (`encoder/layers_0/kernel`) and of specs (`float32[4,8]`).
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
# {"encoder/layers_0/kernel": leaf}
Leaves = dict[str, Any]
# {"encoder/layers_0/kernel": "float32[4,8]"}
Specs = dict[str, str]

# Path of the leaf in a tree that is a single leaf.
_BARE_LEAF = "value"


def flatten_tree(tree: PyTree) -> Leaves:
    """Return the leaves of a tree by path; nodes without leaves (None, optax.EmptyState) have no entry.

    {"a": {"b": x}, "c": (y, None)} -> {"a/b": x, "c/0": y}
    """
    leaves: Leaves = {}
    for entries, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = jax.tree_util.keystr(entries, simple=True, separator="/") or _BARE_LEAF
        if path in leaves or path.count("/") != max(len(entries) - 1, 0):
            raise ValueError(
                f"the leaf path {path} is ambiguous; rename entries that contain a slash or occur twice"
            )
        leaves[path] = leaf
    return leaves


def unflatten_like(tree: PyTree, leaves: Leaves) -> PyTree:
    """Build a tree with the structure of `tree` from `leaves`, which are looked up by path."""
    structure = jax.tree_util.tree_structure(tree)
    return jax.tree_util.tree_unflatten(structure, [leaves[path] for path in flatten_tree(tree)])


def nest_leaves(leaves: Leaves) -> dict[str, Any]:
    """Turn leaves by path into nested dicts: {"a/b": x, "c/0": y} -> {"a": {"b": x}, "c": {"0": y}}."""
    nested: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return nested


def make_specs(leaves: Leaves) -> Specs:
    """Describe the dtype and shape of each leaf, as in {"a/b": "float32[4,8]", "step": "int32[]"}."""
    return {path: make_spec(leaf) for path, leaf in leaves.items()}


def make_spec(leaf: Any) -> str:
    """Describe the dtype and shape of an array, a ShapeDtypeStruct or a number, as in `float32[4,8]`."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return f"{dtype}[{','.join(map(str, np.shape(leaf)))}]"


def make_like(spec: str) -> jax.ShapeDtypeStruct:
    """Make a ShapeDtypeStruct from a spec such as `float32[4,8]`."""
    dtype, _, shape = spec.rstrip("]").partition("[")
    return jax.ShapeDtypeStruct([int(size) for size in shape.split(",") if size], jnp.dtype(dtype))


def compare_specs(stored: Specs, wanted: Specs) -> list[str]:
    """Return a line per path whose dtype or shape differs: those of `wanted`, then those only in `stored`."""
    lines = []
    for path in [*wanted, *(path for path in stored if path not in wanted)]:
        if stored.get(path) != wanted.get(path):
            lines.append(
                f"{path}: stored {stored.get(path, 'nothing')}, wanted {wanted.get(path, 'nothing')}"
            )
    return lines


def average_leaves(tables: Iterable[Leaves]) -> Leaves:
    """Average several sets of leaves with equal paths, shapes and dtypes, in float64; keep the dtypes.

    Leaves that are not floating-point numbers are taken from the last set.
    """
    sums: Leaves = {}
    newest: Leaves = {}
    count = 0
    for newest in tables:
        count += 1
        for path, leaf in newest.items():
            sums[path] = sums.get(path, 0.0) + leaf.astype(np.float64)
    return {
        path: np.asarray(sums[path] / count, leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        for path, leaf in newest.items()
    }


def copy_to_host(leaves: Leaves) -> dict[str, np.ndarray]:
    """Copy all leaves to host memory, each assembled from its shards on the devices of this process.

    Leaves are copied even on a CPU, where numpy could share the device's buffer, because a later step that
    donates the buffer would overwrite it. On accelerators, the host holds each leaf only once.
    """
    for leaf in leaves.values():
        if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
            leaf.copy_to_host_async()
    return {path: _copy_leaf(leaf) for path, leaf in leaves.items()}


def shares_host_memory(leaf: jax.Array) -> bool:
    """Return whether an array is on a CPU, where numpy may share its memory."""
    device: Any = next(iter(leaf.sharding.device_set))
    return device.platform == "cpu"


def _copy_leaf(leaf: Any) -> np.ndarray:
    if not isinstance(leaf, jax.Array) or shares_host_memory(leaf):
        return np.array(leaf, copy=True)
    if leaf.is_fully_replicated:
        return np.asarray(leaf)
    whole = np.empty(leaf.shape, leaf.dtype)
    # JAX keeps the host copy of a shard as long as the shard: here that of a copy, which ends at once.
    shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    for shard, copy in [(shard, jnp.copy(shard.data)) for shard in shards]:
        whole[shard.index] = np.asarray(copy)
    return whole


def digest_leaves(tree: PyTree) -> str:
    """Return a digest of all leaves of a tree; for sharded leaves, of this process's shards only."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves(tree):
        whole = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
        for part in [leaf] if whole else [shard.data for shard in leaf.addressable_shards]:
            digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


def is_finite(leaf: Any) -> bool:
    """Return whether all numbers of an array are finite; for a sharded array, those in this process."""
    parts = [shard.data for shard in leaf.addressable_shards] if isinstance(leaf, jax.Array) else [leaf]
    return all(np.isfinite(part).all() for part in parts)


def gather_leaf(leaf: Any) -> Any:
    """Return the whole leaf, gathered if other processes hold parts of it; all processes must call this."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    if leaf.is_fully_replicated:
        return leaf.addressable_data(0)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(leaf, tiled=True)


def place_leaf(leaf: np.ndarray, like: Any) -> Any:
    """Put a host array on the devices of `like`, with its sharding.

    If `like` has no sharding, the array goes to the default device; if `like` is not a JAX array, the host
    array is returned.
    """
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    if like.sharding is None:
        return jnp.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, like.sharding, lambda index: leaf[index])
