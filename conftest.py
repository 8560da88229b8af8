"""All tests run on simulated CPU devices, without a network, and share compiled programs and one tiny run."""

import fcntl
import functools
import gc
import json
import os
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import compiled_folder
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Read when JAX makes its first array; tests that need one device ask for one.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    )
# Programs as small as these take longer to optimise than to run.
os.environ["XLA_FLAGS"] += (
    " --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE"
)
if version("jaxlib").startswith(
    "0.10."
):  # later versions have no such flag, and abort at flags unknown to them
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Where in the sources each operation comes from is in no program's way, but takes time to note.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Tracing allocates many objects, and a collection walks through all modules that are loaded.
gc.set_threshold(100_000, 20, 20)
# PyTorch and CTranslate2: threads that wait for each other take processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

# What another test has compiled, or an earlier session, or a command that a test runs, is not compiled again:
# workers and commands inherit the folder, and the process that made it removes it.
_compiled = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = compiled_folder.open_folder()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_compiled)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    # Of XLA's own caches, which are for GPUs, the key of each program would name the folder.
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"


def pytest_unconfigure():
    if _compiled is not None:
        compiled_folder.close_folder(_compiled)


@pytest.fixture(scope="session", autouse=True)
def one_device():
    """Translations run on one of the simulated devices, and commands that a test starts have one.

    Programs for all of them take longer to trace.
    """
    import jax
    from tiny_experiment import quick_environment

    every = jax.local_device_count, jax.local_devices
    jax.devices()  # JAX has made its devices, so the flags are those of other processes from here on
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", quick_environment()["XLA_FLAGS"])
        patch.setattr(jax, "local_device_count", lambda *options, **more: 1)
        patch.setattr(jax, "local_devices", lambda *options, **more: every[1](*options, **more)[:1])
        yield every


@pytest.fixture
def all_devices(one_device, monkeypatch):
    """Translations run on all simulated devices."""
    import jax

    monkeypatch.setattr(jax, "local_device_count", one_device[0])
    monkeypatch.setattr(jax, "local_devices", one_device[1])


_shared_programs: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps():
    """Forget compiled programs before the process has as many memory maps as Linux allows (65,530).

    Each program takes several; without a free one, JAX or the garbage collection ends in SIGSEGV.
    """
    import jax

    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 25_000:
        _shared_programs.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session", autouse=True)
def shared_programs(one_device):
    """Translators of equal models, options and vocabulary sizes share their programs, each traced once."""
    import jax

    from flaxformer_mt.decoding import search_engine

    made, make = _shared_programs, search_engine.SearchPrograms

    @functools.wraps(make)
    def share(configs, options, symbols, *, spread, shortlists=None, **more):
        if not isinstance(spread, bool) or shortlists is not None:
            return make(configs, options, symbols, spread=spread, shortlists=shortlists, **more)
        parts = jax.local_device_count() if spread else 1
        key = repr((configs, options, symbols, parts, sorted(more.items())))
        if key not in made:
            made[key] = make(configs, options, symbols, spread=spread, **more)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_engine, "SearchPrograms", share)
        yield make


@pytest.fixture
def own_programs(shared_programs, monkeypatch):
    """Each translator has programs of its own, for tests that change or count what is traced."""
    monkeypatch.setattr("flaxformer_mt.decoding.search_engine.SearchPrograms", shared_programs)


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory) -> Path:
    """One folder for all worker processes of this test session."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def make_once(folder: Path, make: Callable[[Path], Any]) -> Path:
    """The folder, filled by `make` in the first worker process that asks for it; the others wait."""
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_text(session_folder) -> Path:
    """Parallel text files, xx to yy: 64 pairs to train on, 6 to validate, 6 to test."""
    from made_up_text import write_text

    def write(folder: Path) -> None:
        for seed, (split, pairs) in enumerate({"train": 64, "valid": 6, "test": 6}.items(), start=1):
            write_text(folder, split, pairs, seed=seed)

    return make_once(session_folder / "tiny_text", write)


@pytest.fixture(scope="session")
def tiny_config(session_folder, tiny_text):
    """The config of `tiny_run`; vocabularies, token stores and programs are made once for all that use it."""
    from tiny_experiment import make_tiny_config

    return make_tiny_config(tiny_text, session_folder / "tiny_cache")


@pytest.fixture(scope="session")
def tiny_run(session_folder, tiny_config) -> Path:
    """A run directory, trained for 48 updates and never disturbed. Tests that write to it copy it."""

    def train(folder: Path) -> None:
        from flaxformer_mt.evaluation.run_report.page import report_training
        from flaxformer_mt.training.loop import fit

        fit(tiny_config, folder, draw_report=report_training)

    return make_once(session_folder / "tiny_run", train)


@pytest.fixture(scope="session")
def two_way_config(tiny_config):
    """The config of `two_way_run`: one model for both directions of the tiny text, with tags."""
    from tiny_experiment import change

    names = "parallel_text:xx-yy,parallel_text:yy-xx"
    return change(
        tiny_config,  # tags make the longest lines longer
        data={"dataset": names, "weights": (1.0, 2.0), "max_source_length": 20, "batch_tokens": 160},
        train={"steps": 2, "evaluate_every": 2, "log_accuracy": False},
        search={"method": "greedy"},
    )


@pytest.fixture(scope="session")
def two_way_run(session_folder, two_way_config) -> Path:
    """A run directory of a model of two directions, trained for 2 updates and never disturbed."""

    def train(folder: Path) -> None:
        from flaxformer_mt.training.loop import fit

        with (folder / "log").open("w") as log:
            fit(two_way_config, folder / "run", progress=log)

    return make_once(session_folder / "two_way", train) / "run"


@pytest.fixture(scope="session")
def tiny_report(tiny_run) -> dict[str, Any]:
    """What `fit` returned for `tiny_run`."""
    return json.loads((tiny_run / "report.json").read_text(encoding="utf-8"))


@pytest.fixture
def strict_dtypes():
    """JAX refuses to promote dtypes implicitly, which code of Optax and of Flax's RMSNorm needs."""
    import jax

    with jax.numpy_dtype_promotion("strict"):
        yield
