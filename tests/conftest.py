"""Tests run on eight simulated CPU devices, without a network."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Read when JAX makes its first array; tests that need one device ask for one.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    )
# Programs as small as these take longer to optimise than to run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
