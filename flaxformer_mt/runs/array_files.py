"""Stores tables of arrays as orbax items: written by one process or by all, read into any sharding."""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxformer_mt.errors import UserError, describe_error
from flaxformer_mt.parameter_trees import (
    Leaves,
    Specs,
    compare_specs,
    flatten_tree,
    make_like,
    nest_leaves,
    place_leaf,
    shares_host_memory,
)

# From how many bytes on an item is written through buffers, and their total size in GB: at least this, and
# room for the largest array, which orbax does not divide.
_LARGE, _BUFFERS_GB = 1 << 30, 0.128


def write_item(folder: Path, leaves: Leaves) -> None:
    """Write host arrays as the orbax item `folder`, from this process alone.

    Orbax copies all numpy arrays twice before it writes them, but device arrays, even of the CPU device, only
    a few at a time. Large items are therefore written as arrays of the CPU device.
    """
    sizes = [np.asarray(leaf).nbytes for leaf in leaves.values()]
    options = {}
    if jax.process_count() == 1 and sum(sizes) >= _LARGE:
        options = {"save_concurrent_gb": max(_BUFFERS_GB, 1.01 * max(sizes) / 1e9)}
        leaves = {path: _place_on_cpu(leaf) for path, leaf in leaves.items()}
    with _raise_storage_errors(folder):
        _make_checkpointer(**options).save(folder, nest_leaves(leaves))


def _place_on_cpu(leaf: Any) -> Any:
    """Put an array on the CPU device, without a copy if its memory is aligned, unless JAX lacks its type."""
    keeps_type = isinstance(leaf, np.ndarray) and jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype
    return jax.device_put(leaf, jax.devices("cpu")[0]) if keeps_type else leaf


def start_shared_item(folder: Path, leaves: Leaves) -> Callable[[], None]:
    """Start to write this process's shards of an item; return a function that waits until they are on disk.

    Returns once the shards are on the host (on accelerators, in a single copy); their buffers may then be
    donated or overwritten. Each process writes a part of replicated arrays. `folder` must be empty and
    visible to all processes.
    """
    import orbax.checkpoint as ocp
    from etils import epath  # the paths of orbax, which brings it along

    _quieten()
    # orbax's other processes wait for process 0 to make this folder, for ever if that has failed
    (folder / "array_metadatas").mkdir(exist_ok=True)
    tree = nest_leaves({path: _own_copy(leaf) for path, leaf in leaves.items()})
    handler = _make_shared_handler()

    def start() -> list[Any]:
        args = ocp.args.PyTreeSave(tree)
        return asyncio.run(handler.async_save(epath.Path(folder), args=args)) or []

    with _raise_storage_errors(folder), concurrent.futures.ThreadPoolExecutor(1) as pool:
        # In a thread of its own: the caller may run an event loop, as notebooks do.
        writes = pool.submit(start).result()

    def wait() -> None:
        with _raise_storage_errors(folder):
            for write in writes:
                write.result()

    return wait


def finish_shared_item(folder: Path) -> None:
    """Complete an item; call this in process 0 only, after all processes have written their shards."""
    from etils import epath  # the paths of orbax, which brings it along

    with _raise_storage_errors(folder):
        _make_shared_handler().finalize(epath.Path(folder))


def is_written_by(name: str, process: int) -> bool:
    """Return whether the path `name` inside a shared item belongs to a file that `process` writes."""
    return f"ocdbt.process_{process}" in name.split("/")


def read_item(folder: Path, specs: Specs, likes: Mapping[str, Any] | None = None) -> Leaves:
    """Read the arrays that `specs` lists, bit for bit; create the empty ones, which orbax does not store.

    `likes` maps paths to targets. For a jax.Array or ShapeDtypeStruct, the array gets the target's sharding,
    or the default device; each device reads only its shards. For other targets, the array is a numpy array.
    """
    import orbax.checkpoint as ocp

    likes = likes or {}
    filled = {}
    for path in (path for path, spec in specs.items() if 0 not in make_like(spec).shape):
        like = likes.get(path)
        filled[path] = ocp.RestoreArgs(restore_type=np.ndarray)
        if isinstance(like, jax.Array | jax.ShapeDtypeStruct) and like.sharding is not None:
            filled[path] = ocp.ArrayRestoreArgs(
                restore_type=jax.Array, sharding=like.sharding, global_shape=like.shape, dtype=like.dtype
            )
    empty = {path: make_like(spec) for path, spec in specs.items() if path not in filled}
    leaves = {path: np.empty(like.shape, like.dtype) for path, like in empty.items()}
    if filled:
        checkpointer = _make_checkpointer()
        try:
            _check_stored(checkpointer, folder, {path: specs[path] for path in filled})
            arguments = ocp.args.PyTreeRestore(restore_args=nest_leaves(filled))
            leaves.update(flatten_tree(checkpointer.restore(folder, args=arguments)))
        except (KeyError, ValueError) as error:  # of orbax and TensorStore
            raise UserError(f"the arrays in {folder} cannot be read: {describe_error(error)}") from error
    return {
        path: leaf if isinstance(leaf, jax.Array) else place_leaf(leaf, likes.get(path))
        for path, leaf in leaves.items()
    }


def _check_stored(checkpointer: Any, folder: Path, specs: Specs) -> None:
    """Compare the types and shapes in the files with `specs` before any array of that size is allocated."""
    item = checkpointer.metadata(folder).item_metadata  # None: orbax cannot read it
    stored = {
        path: _describe(like.dtype, like.shape, like.storage and like.storage.chunk_shape)
        for path, like in flatten_tree(item and item.tree).items()
        if path in specs
    }
    if lines := compare_specs(stored, specs):
        raise UserError(f"the arrays in {folder} are not those of the checkpoint's manifest: {lines[0]}")


def _describe(dtype: Any, shape: Sequence[int], blocks: Any) -> str:
    """Return the spec of a stored array, with the size of its storage blocks if they exceed the array."""
    spec = f"{dtype}[{','.join(map(str, shape))}]"
    is_large = any(block > max(1, size) for block, size in zip(blocks or (), shape, strict=False))
    return f"{spec} in blocks of {blocks}" if is_large else spec


def _own_copy(leaf: Any) -> Any:
    """Return a leaf in memory that nobody else overwrites, in a form that all processes can write."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.array(leaf, copy=True)  # equal in all processes; the first one writes it
    if not shares_host_memory(leaf):
        return leaf  # orbax copies its shards from the devices
    copies = [
        jax.device_put(np.array(shard.data, copy=True), shard.device) for shard in leaf.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, copies)


@contextlib.contextmanager
def _raise_storage_errors(folder: Path) -> Iterator[None]:
    """Raise OSError for errors that orbax's storage library reports only in the text of its message."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(folder)) from error


def _ignore_late_writes() -> None:
    """Hide the traceback of a write that ends after another one failed and orbax closed its event loop."""
    previous = sys.unraisablehook
    if getattr(previous, "ignores_late_writes", False):
        return

    def show(unraisable: Any) -> None:
        trace = unraisable.exc_traceback
        where = "" if trace is None else trace.tb_frame.f_code.co_name
        if (str(unraisable.exc_value), where) != ("Event loop is closed", "call_soon_threadsafe"):
            previous(unraisable)

    show.ignores_late_writes = True  # type: ignore[attr-defined]
    sys.unraisablehook = show


def _quieten() -> None:
    _ignore_late_writes()
    # orbax logs its progress, and a traceback of each exception that it raises; the exception is enough
    logging.getLogger("absl").setLevel(logging.CRITICAL)


def _make_checkpointer(**options: Any) -> Any:
    import orbax.checkpoint as ocp

    _quieten()
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=alone, **options), multiprocessing_options=alone
    )


def _make_shared_handler() -> Any:
    import orbax.checkpoint as ocp

    # orbax waits for no other process here: `wait_for_all` does, without involving any device
    together = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes=set(range(jax.process_count()))
    )
    return ocp.PyTreeCheckpointHandler(multiprocessing_options=together)


def read_stored_arrays(folder: Path, specs: Specs) -> dict[str, np.ndarray] | None:
    """Read the arrays that `specs` lists from a verified orbax item; None if its layout is unexpected."""
    if any("." in path for path in specs):
        return None
    import tensorstore

    base = {"driver": "ocdbt", "base": f"file://{folder}/"}
    context = tensorstore.Context()
    opened = {
        path: tensorstore.open(
            {"driver": "zarr", "kvstore": {**base, "path": f"{path.replace('/', '.')}/"}},
            open=True,
            read=True,
            context=context,
        )
        for path in specs
    }
    try:
        stores = {path: store.result() for path, store in opened.items()}
        stored = {
            path: _describe(store.dtype.name, store.shape, store.chunk_layout.read_chunk.shape)
            for path, store in stores.items()
        }
        if stored != specs:  # before anything of these sizes is read
            return None
        reads = {path: store.read() for path, store in stores.items()}
        return {path: np.asarray(read.result()) for path, read in reads.items()}
    except ValueError:  # absent or damaged: `read_item` says which
        return None
