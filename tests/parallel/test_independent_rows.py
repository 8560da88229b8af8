"""Cores as devices: what the user has chosen stays, and training sees none of them."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from tiny_experiment import quick_environment

from flaxformer_mt.cpu import core_count
from flaxformer_mt.parallel import independent_rows

SPLIT = """
import jax
from flaxformer_mt.parallel import make_parallel, use_cpu_cores_as_devices
from flaxformer_mt.config import Config
use_cpu_cores_as_devices()
print(jax.local_device_count(), make_parallel(Config()).device_count)
"""


@pytest.mark.skipif(core_count() == 1, reason="one core")
@pytest.mark.parametrize(
    ("flags", "variables", "expected"),
    [
        ("", {}, (min(core_count(), 4), 1)),
        ("", {"JAX_NUM_CPU_DEVICES": "5"}, (5, 5)),
        ("--xla_force_host_platform_device_count=3", {}, (3, 3)),
    ],
    ids=["none", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"],
)
def test_the_users_number_of_devices_stays(flags, variables, expected):
    """All of them train, with or without a model that was loaded before; our own ones do not."""
    environment = quick_environment(**variables) | {"XLA_FLAGS": flags}
    command = [sys.executable, "-c", SPLIT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert tuple(map(int, done.stdout.split())) == expected


def test_training_takes_one_core_of_each_process(monkeypatch):
    cores = [SimpleNamespace(platform="cpu", process_index=n // 2, id=n) for n in range(6)]
    monkeypatch.setattr(jax, "devices", lambda: cores)
    assert independent_rows.training_devices() == cores
    monkeypatch.setattr(independent_rows, "_split_cores", True)
    assert [core.id for core in independent_rows.training_devices()] == [0, 2, 4]
    chips = [SimpleNamespace(platform="gpu", process_index=0, id=n) for n in range(2)]
    monkeypatch.setattr(jax, "devices", lambda: chips)
    assert independent_rows.training_devices() == chips
