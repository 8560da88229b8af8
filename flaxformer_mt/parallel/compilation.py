"""Compile time, compiler options, and a cache of compiled programs on disk.

JAX's own cache stores the output of the compiler, but each new process must trace and lower every function
again. The programs that this module caches are loaded without tracing and lowering. With a base-size network,
`translate` of one line then takes 2.6 s of processor time instead of 6.8 s with JAX's cache alone, and each
batch shape of the training step takes 2 s less (Xeon with AMX).
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from flaxformer_mt.atomic_folder import artifact, discard, read_artifact
from flaxformer_mt.config.files import is_private
from flaxformer_mt.processor import describe_processor

# The monitoring events of JAX whose time is compile time.
_COMPILING = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")


class CompileClock:
    """A context manager that measures compile time; threads that compile at the same time count once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._start = clock, clock()
        self._beside = False
        # Start and end of each time in which programs were compiled; they do not overlap.
        self._compiled: list[tuple[float, float]] = []
        self._lock = threading.Lock()

    def compiling(self) -> float:
        with self._lock:
            return sum(end - start for start, end in self._compiled)

    def working(self) -> float:
        """Return the time of a clock that stops while programs are compiled."""
        return self._clock() - self.compiling()

    @contextlib.contextmanager
    def compiling_beside(self) -> Iterator[None]:
        """Do not count the compile time of the body, which compiles in the background."""
        self._beside = True
        try:
            yield
        finally:
            self._beside = False

    def listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Add the duration of an event that ends now; overlapping times of several threads count once."""
        if self._beside or event not in _COMPILING:
            return
        with self._lock:
            end = self._clock()
            start = max(self._start, end - duration_secs)
            while self._compiled and self._compiled[-1][1] >= start:
                start = min(start, self._compiled.pop()[0])
            self._compiled.append((start, end))

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self.listen)
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self.listen)


def default_compiler_options(platform: str) -> dict[str, str | bool]:
    """Return the compiler options that the package sets for a platform.

    On GPUs, XLA must really round the numbers that the model rounds to bfloat16. By default it may keep them
    in float32 between kernels, which moves twice as many bytes.
    """
    return {"xla_allow_excess_precision": False} if platform in ("gpu", "cuda") else {}


# Maximum number of files; those that were used longest ago are removed.
_MAX_FILES = 400

# The threads that compile outside of JAX's cache, and the setting that the last of them restores.
_outside_lock = threading.Lock()
_num_outside, _cached_from = 0, 0.0

# Settings of JAX, by the beginnings of their names, that no program depends on.
_UNRELATED = ("jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache", "jax_log")


def kept_folder() -> Path | None:
    """Return the folder of cached programs; None if programs are not cached.

    They are not cached if JAX's own cache is off, if other users can write to the folder, or in a job of
    several processes.
    """
    settings = jax.config.values
    folder = settings["jax_compilation_cache_dir"]
    if not folder or "://" in folder or not settings["jax_enable_compilation_cache"]:
        return None
    kept = Path(folder) / "kept"
    alone = jax.process_count() == 1
    return kept if alone and is_private(kept.parent) and is_private(kept) else None


def keep_json(kind: str, dependencies: Any, make: Callable[[], Any]) -> Any:
    """Return `make()`, a JSON value; cache it on disk for later processes with equal dependencies."""
    made = functools.cache(lambda: json.loads(json.dumps(make())))
    return _keep(_find_path(kind, dependencies), lambda folder: made(), lambda folder, value: value, made)


def lower_kept(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    dependencies: Any,
    devices: Sequence[jax.Device],
    *,
    results: Any = None,
    check: bool = True,
) -> Callable[[], Callable[..., Any]]:
    """Load a program from the disk cache, or trace it; return a function that returns the compiled program.

    The function may be called in any thread; it compiles and caches a program that was not in the cache.

    Args:
      function: a result of `jax.jit`, without static arguments.
      arguments: arrays or ShapeDtypeStructs with the shapes, dtypes and shardings of all later calls. The
        check runs the program on these arguments, with zeros in place of ShapeDtypeStructs; arguments that
        are donated must be ShapeDtypeStructs.
      dependencies: what the program depends on, apart from its arguments, this package, JAX and the machine.
      results: a tree with the structure of the results; None: the results are a tuple of arrays.
      check: whether to cache a program only after its serialized copy has given the same results.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(arguments)
    shapes = [[jax.tree_util.keystr(path), str(x.dtype), list(x.shape)] for path, x in leaves]
    path = _find_path("program", [dependencies, str(structure), shapes, [device.id for device in devices]])

    def load(folder: Path, _: Any = None) -> Callable[..., Any]:
        return _load((folder / "program").read_bytes(), arguments, devices, results)

    with contextlib.suppress(Exception):  # written for another JAX in spite of its name: compiled anew
        if path is not None and read_artifact(path):
            loaded = load(path)
            _touch(path)
            return lambda: loaded
    lowered = function.lower(*arguments)  # type: ignore[attr-defined]
    if path is None:
        return lowered.compile

    @functools.cache
    def compile_it() -> Callable[..., Any]:
        with _outside_of_jax_cache():
            return lowered.compile()

    def build(folder: Path) -> None:
        _write(folder, compile_it(), arguments, devices, results, check=check)

    def load_or_take(folder: Path, _: Any) -> Callable[..., Any]:
        return compile_it() if compile_it.cache_info().currsize else load(folder)

    return lambda: _keep(path, build, load_or_take, compile_it)


def _keep(
    path: Path | None, build: Callable[[Path], Any], load: Callable[..., Any], make: Callable[[], Any]
) -> Any:
    """Load the cached folder at `path`, or build it first; if the folder is not usable, return `make()`."""
    # No space, no permission, a program that cannot be serialized, or one of another JAX despite its name.
    with contextlib.suppress(OSError, ValueError, TypeError, RuntimeError):
        if path is not None:
            found = artifact(path, build, load)
            _touch(path)
            return found
    return make()


def _touch(path: Path) -> None:
    """Mark a cache entry as just used, and remove the entries that were used longest ago."""
    with contextlib.suppress(OSError):  # a folder that may only be read
        os.utime(path)
        files = [(path.stat().st_mtime, path) for path in path.parent.glob("[!.]*")]
        for _, oldest in sorted(files)[:-_MAX_FILES]:
            discard(oldest)


def _write(
    folder: Path,
    compiled: Any,
    arguments: tuple[Any, ...],
    devices: Sequence[jax.Device],
    results: Any,
    *,
    check: bool,
) -> None:
    """Write a program to a cache folder; with `check`, only if its serialized copy gives the same results."""
    from jax.experimental.serialize_executable import serialize

    program, _, structure = serialize(compiled)
    assert results is None or jax.tree.structure(results) == structure
    data = json.dumps(structure.num_leaves).encode() + b"\n" + program
    if check:
        copy = _load(data, arguments, devices, results)
        # One after the other: both may donate what they get.
        copied, own = (jax.device_get(run(*jax.tree.map(_make_zeros, arguments))) for run in (copy, compiled))
        pairs = zip(jax.tree.leaves(copied), jax.tree.leaves(own), strict=True)
        if not all(np.array_equal(*pair, equal_nan=True) for pair in pairs):
            raise ValueError("the copy of a program gives other results")
    (folder / "program").write_bytes(data)


def _make_zeros(argument: Any) -> Any:
    if not isinstance(argument, jax.ShapeDtypeStruct):
        return argument
    return jax.device_put(np.zeros(argument.shape, argument.dtype), argument.sharding)


def _load(
    data: bytes, arguments: tuple[Any, ...], devices: Sequence[jax.Device], results: Any
) -> Callable[..., Any]:
    from jax.experimental.serialize_executable import deserialize_and_load

    count, _, program = data.partition(b"\n")
    return deserialize_and_load(
        program,
        jax.tree.structure((arguments, {})),
        jax.tree.structure((0,) * json.loads(count) if results is None else results),
        backend=devices[0].client,
        execution_devices=tuple(devices),
    )


@contextlib.contextmanager
def _outside_of_jax_cache() -> Iterator[None]:
    """Disable JAX's own cache during the body, since on CPUs a program from that cache cannot be serialized.

    Several threads may be inside at the same time: the first changes the setting, and the last restores it.
    """
    global _num_outside, _cached_from
    name = "jax_persistent_cache_min_compile_time_secs"
    with _outside_lock:
        if _num_outside == 0:
            _cached_from = jax.config.values[name]
            jax.config.update(name, float("inf"))
        _num_outside += 1
    try:
        yield
    finally:
        with _outside_lock:
            _num_outside -= 1
            if _num_outside == 0:
                jax.config.update(name, _cached_from)


def _find_path(kind: str, dependencies: Any) -> Path | None:
    folder = kept_folder()
    if folder is None:
        return None
    text = json.dumps([kind, dependencies, _describe_surroundings()], sort_keys=True, default=_describe)
    return folder / f"{kind}-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _describe(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)  # type: ignore[arg-type]


def _describe_surroundings() -> dict[str, Any]:
    devices = jax.local_devices()
    settings = {
        name: str(value) for name, value in jax.config.values.items() if not name.startswith(_UNRELATED)
    }
    return {
        "code": _digest_code(),
        "versions": [
            sys.version,
            *(importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")),
            devices[0].client.platform_version,
        ],
        "settings": settings,
        "flags": [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        "processor": describe_processor(),
        "devices": [device.device_kind for device in devices],
    }


# The modules of the package that programs are traced from.
_TRACED = ("model", "kernels", "search", "decoding", "training", "parallel") + tuple(
    f"{name}.py" for name in ("losses", "shapes", "parameter_trees", "config/schema", "data/batch_array")
)


@functools.cache
def _digest_code() -> str:
    """Return a digest of the modules that programs are traced from, which may change within a version."""
    package = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=16)
    for wing in _TRACED:
        files = [package / wing] if wing.endswith(".py") else sorted((package / wing).rglob("*.py"))
        for file in files:
            digest.update(file.read_bytes())
    return digest.hexdigest()
