"""Tests run on eight simulated CPU devices, without a network."""

import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Read when JAX makes its first array; tests that need one device ask for one.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    )
# Programs as small as these take longer to optimise, and to take apart for several threads, than to run.
os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

# What another test has compiled, or a command that a test runs, is not compiled again: workers and commands
# inherit the folder, and the process that made it removes it.
_compiled = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="flaxformer_mt_compiled_")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def pytest_unconfigure():
    if _compiled is not None:
        shutil.rmtree(_compiled, ignore_errors=True)
