"""Worker processes of benchmarks: each runs one of the compared systems on command.

Contains the start of a worker, with the same number of threads and the same use of memory for all systems.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# What the command `train` sets itself (flaxformer_mt/commands/launch.py), here for all systems.
_MALLOC = {"arena_max": 1, "mmap_max": 0, "trim_threshold": 2**31 - 1}
_KEEP_MEMORY = {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in _MALLOC.items())}


class Worker:
    """A system in its own process, which executes one command at a time."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process
        self.facts = self._read()

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command to the `serve` function of the system, and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self._process.wait()}; see its message above")
        return json.loads(line)


@contextmanager
def open_worker(
    script: Path,
    name: str,
    task: Path,
    *,
    threads: int,
    platform: str = "cpu",
    keep_memory: bool = False,
) -> Iterator[Worker]:
    """Start a worker and yield it once its programs are compiled; end it with the context.

    Args:
      script: the benchmark script, which is started again with --worker and --task.
      name: the name of the system.
      task: the file with the task of all systems.
      platform: JAX's name of the platform, cpu or cuda.
      keep_memory: whether the worker keeps the memory that it frees, as the command `train` does.
    """
    root = Path(__file__).resolve().parent.parent
    environment = {
        **(_KEEP_MEMORY if keep_memory else {}),
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": platform,
    }
    command = [sys.executable, str(script.resolve()), f"--worker={name}", f"--task={task}"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield Worker(process)
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()
