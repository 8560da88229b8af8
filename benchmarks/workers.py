"""Systems that are measured side by side, each in a process of its own that works when it is told to.

Owns how such a process is started, and that all have the same threads and large memory pages. Knows nothing
of what they do.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Worker:
    """A system in its own process, which works when it is told to."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process
        self.facts = self._read()

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """The answer to one command that the system's `serve` knows."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self._process.wait()}; its message is above")
        return json.loads(line)


@contextmanager
def open_worker(
    script: Path, name: str, task: Path, *, threads: int, platform: str = "cpu"
) -> Iterator[Worker]:
    """A worker that is ready, its programs compiled; ends with the context.

    Args:
      script: the benchmark, which is started again with --worker and --task.
      name: of the system.
      task: the file that says what all systems do.
      platform: as JAX calls it, cpu or cuda.
    """
    root = Path(__file__).resolve().parent.parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        # What the commands of the package set for themselves (memory.py), here for all systems.
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
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
