"""What the processor is, on systems that tell them and on those that do not."""

import os
import subprocess
import sys

import pytest

from flaxformer_mt.processor import core_count


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 8}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert core_count() == 3


@pytest.mark.parametrize(("told", "count"), [(10, 10), (None, 1)])
def test_a_system_without_affinities_such_as_macos_has_all_its_cores(monkeypatch, told, count):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: told)
    assert core_count() == count


def test_doctor_reports_where_jax_is_missing(tmp_path):
    """It is the command that says how to install what is missing."""
    program = (
        "import sys; sys.modules['jax'] = None; from flaxformer_mt.commands.doctor import doctor; "
        "report = doctor(); assert report['packages']['jax'] is None; print(report['host']['cores'])"
    )
    environment = {**os.environ, "FLAXFORMER_MT_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == core_count()


def test_a_platform_that_jax_does_not_find_is_named(tmp_path):
    """JAX answers it by an assertion without text, where no package for the platform is installed."""
    program = (
        "from flaxformer_mt.commands.doctor import doctor\n"
        "from flaxformer_mt.errors import UserError\n"
        "from flaxformer_mt.parallel.rows_per_device import training_devices\n"
        "from flaxformer_mt.parallel.processes import process_count\n"
        "for problem in doctor()['problems']: print('doctor:', problem)\n"
        "for find in (training_devices, process_count):\n"
        "    try: print(find())\n"
        "    except UserError as error: print(find.__name__, error)\n"
    )
    environment = {**os.environ, "FLAXFORMER_MT_CACHE": str(tmp_path), "JAX_PLATFORMS": "rocm"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.split("\n") if "JAX finds no devices (" in line]
    assert [line.split()[0] for line in found] == ["doctor:", "training_devices", "process_count"]
    assert all("unset JAX_PLATFORMS" in line for line in found)
