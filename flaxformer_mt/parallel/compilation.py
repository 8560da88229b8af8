"""The time in which JAX compiles programs, in any thread, so that rates of work can leave it out."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from flaxformer_mt.cpu import describe_processor
from flaxformer_mt.errors import UserError, first_line

# The monitoring events of JAX whose time is compile time.
_COMPILING = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")


class CompileClock:
    """A context manager that measures compile time; what several threads compile at a time counts once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start at the present time of `clock`, in seconds."""
        self._clock, self._start = clock, clock()
        self._beside = False
        # Start and end of each time in which programs were compiled; they do not overlap.
        self._compiled: list[tuple[float, float]] = []
        self._lock = threading.Lock()

    def compiling(self) -> float:
        """Return the seconds of compilation so far."""
        with self._lock:
            return sum(end - start for start, end in self._compiled)

    def working(self) -> float:
        """Return the time of a clock that stands still while programs are compiled."""
        return self._clock() - self.compiling()

    @contextlib.contextmanager
    def compiling_beside(self) -> Iterator[None]:
        """Count no compile time meanwhile: nothing waits for it."""
        self._beside = True
        try:
            yield
        finally:
            self._beside = False

    def listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Add the time of an event that ends now, less what others, in other threads, have of it."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self.listen)


_PLATFORMS = ("cpu", "gpu", "tpu")


def read_compiler_options(flags: Sequence[str], platform: str) -> dict[str, str | bool]:
    """Return the options for programs of a platform: {"xla_gpu_enable_nccl_user_buffers": True}.

    Flags that are named for another platform, as xla_tpu_... is on a GPU, are left out.

    Args:
      flags: `parallel.xla_flags`, each NAME=VALUE.
    """
    options: dict[str, str | bool] = {}
    for flag in flags:
        name, _, value = flag.partition("=")
        if not any(name.startswith(f"xla_{other}_") for other in _PLATFORMS if other != platform):
            options[name] = {"true": True, "false": False}.get(value.lower(), value)
    return options


def default_compiler_options(platform: str) -> dict[str, str | bool]:
    """Return the options for programs of a platform that the package sets itself.

    On GPUs, numbers that the model rounds to bfloat16 are rounded: XLA would keep them in float32 from kernel
    to kernel, and move twice the bytes.
    """
    return {"xla_allow_excess_precision": False} if platform in ("gpu", "cuda") else {}


def check_compiler_options(options: Mapping[str, str | bool]) -> None:
    """Compile a small program with each of the options for the default devices.

    Raises:
      UserError: the compiler does not know an option, or refuses its value.
    """
    for name, value in options.items():
        try:
            jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(0.0).compile()
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise UserError(
                f"parallel.xla_flags has {name}={shown}, which XLA of JAX {jax.__version__} refuses on "
                f"{jax.default_backend()} ({first_line(error)}); remove it from parallel.xla_flags"
            ) from error


# Maximum number of files; those that were used longest ago are removed.
_MAX_FILES = 400

# Maximum size of a file in bytes. The program of a big model has a few megabytes.
_MAX_BYTES = 1 << 30

# A file begins with the digest of the rest.
_DIGEST_BYTES = 32

# The threads that compile outside of JAX's cache, and the setting that the last of them restores.
_outside_lock = threading.Lock()
_num_outside, _cached_from = 0, 0.0

# Settings of JAX, by the beginnings of their names, that no program depends on.
_UNRELATED = ("jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache", "jax_log")


def kept_folder() -> Path | None:
    """Return the folder of kept files; None if JAX keeps nothing, or if there are several processes."""
    settings = jax.config.values
    folder = settings["jax_compilation_cache_dir"]
    if not folder or "://" in folder or not settings["jax_enable_compilation_cache"]:
        return None
    return Path(folder) / "kept" if jax.process_count() == 1 else None


def keep_json(kind: str, dependencies: Any, make: Callable[[], Any]) -> Any:
    """Return the JSON value that `make` returned in this process or an earlier one for equal dependencies."""
    path = _find_path(kind, dependencies)
    if (data := _read(path)) is None:
        data = json.dumps(make()).encode()
        _write(path, data)
    return json.loads(data)


def compile_kept(
    function: Callable[..., Any], arguments: tuple[Any, ...], dependencies: Any, devices: Sequence[jax.Device]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Return the program of a function that returns a tuple of arrays; see `lower_kept`."""
    return lower_kept(function, arguments, dependencies, devices)()


def lower_kept(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    dependencies: Any,
    devices: Sequence[jax.Device],
    *,
    results: Any = None,
    check: bool = True,
) -> Callable[[], Callable[..., Any]]:
    """Load a kept program, or trace it; return what compiles and keeps it if need be, in any thread.

    Args:
      function: a result of `jax.jit`, without static arguments.
      arguments: arrays, or their shapes, with the dtypes and shardings of all later calls; the program may be
        run on them, with zeros in place of shapes. Those that are donated are shapes.
      dependencies: what the program depends on, apart from its arguments, this package, JAX and the machine.
      devices: the devices that the program runs on.
      results: a tree with the structure of the results. None: they are a tuple of arrays.
      check: whether a copy must give the same results before it is kept.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(arguments)
    shapes = [[jax.tree_util.keystr(path), str(x.dtype), list(x.shape)] for path, x in leaves]
    path = _find_path("program", [dependencies, str(structure), shapes, [device.id for device in devices]])
    if (data := _read(path)) is not None:
        with contextlib.suppress(Exception):  # written for another JAX in spite of its name: compiled anew
            loaded = _load(data, arguments, devices, results)
            return lambda: loaded
    lowered = function.lower(*arguments)  # type: ignore[attr-defined]
    if path is None:
        return lowered.compile

    def compile_and_keep() -> Callable[..., Any]:
        with _outside_of_jax_cache():
            compiled = lowered.compile()
        _keep(path, compiled, arguments, devices, results, check=check)
        return compiled

    return compile_and_keep


def _keep(
    path: Path,
    compiled: Any,
    arguments: tuple[Any, ...],
    devices: Sequence[jax.Device],
    results: Any,
    *,
    check: bool,
) -> None:
    """Write a program once its copy has given the same results; some devices' programs cannot be copied."""
    from jax.experimental.serialize_executable import serialize

    with contextlib.suppress(ValueError, TypeError, RuntimeError):
        program, _, structure = serialize(compiled)
        assert results is None or jax.tree.structure(results) == structure
        data = json.dumps(structure.num_leaves).encode() + b"\n" + program
        if check:
            copy = _load(data, arguments, devices, results)
            # One after the other: both may donate what they get.
            copied, own = (
                jax.device_get(run(*jax.tree.map(_make_zeros, arguments))) for run in (copy, compiled)
            )
            pairs = zip(jax.tree.leaves(copied), jax.tree.leaves(own), strict=True)
            if not all(np.array_equal(*pair, equal_nan=True) for pair in pairs):
                return
        _write(path, data)


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
    """Keep programs out of JAX's cache: a program that came from there cannot be copied on CPUs.

    Several threads may be inside; the first and the last of them change the setting.
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
    """Return what any program depends on."""
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


# Of the package: what programs are traced from.
_TRACED = ("model", "kernels", "search", "decoding", "training", "parallel") + tuple(
    f"{name}.py" for name in ("losses", "shapes", "trees", "config/schema", "data/batch_array")
)


@functools.cache
def _digest_code() -> str:
    """Digest the modules that programs are traced from: a checkout may change without its version."""
    package = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=16)
    for wing in _TRACED:
        files = [package / wing] if wing.endswith(".py") else sorted((package / wing).rglob("*.py"))
        for file in files:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(path: Path | None) -> bytes | None:
    """Read a file; None if it is absent or damaged."""
    if path is None:
        return None
    with contextlib.suppress(OSError):
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_BYTES:
            content = path.read_bytes()
            digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if digest == hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest():
                with contextlib.suppress(OSError):  # a folder that may only be read
                    os.utime(path)
                return data
    return None


def _write(path: Path | None, data: bytes) -> None:
    """Write a file at once; without space or permission, nothing is kept."""
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            try:
                file.write(hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest() + data)
                file.close()
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise
        _remove_oldest(path.parent)


def _remove_oldest(folder: Path) -> None:
    files = [(path.stat().st_mtime, path) for path in folder.iterdir()]
    for _, path in sorted(files)[:-_MAX_FILES]:
        path.unlink(missing_ok=True)
