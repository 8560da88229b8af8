"""Runs probes in processes of their own, each with a limit of time and of memory.

A server process imports what probes need, but starts nothing of JAX, which does not survive a fork. It forks
a child for each chunk of inputs; if an input ends the child, the next child goes on with the input after it.
So an input costs milliseconds instead of the ten seconds that a new Python would take to start.

    python isolation.py MODULE ...      requests on standard input, answers on standard output, a line each
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
# Seconds of processor time after which an input counts as one that hangs, however busy the machine is; one
# that waits forever ends after WAITING seconds.
LONGEST, WAITING = 60, 600
# Bytes of memory that a damaged input may take beyond those of the undamaged one.
MOST_MEMORY = 2 << 30
_CHUNK = 25
# What imports of the package bring along anyhow, for probes of networks.
HEAVY = [
    *("jax", "flax.linen", "optax", "orbax.checkpoint", "sentencepiece", "sacrebleu", "numpy"),
    *("torch", "safetensors.torch", "transformers", "tensorflow_datasets"),
    *("flaxformer_mt.commands.main", "flaxformer_mt.training.loop", "flaxformer_mt.evaluation.evaluate"),
    *("flaxformer_mt.convert.import_run", "flaxformer_mt.convert.export_run", "flaxformer_mt.commands.plot"),
]


class Server:
    def __init__(self, modules: Sequence[str], *, environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def run(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the server ended with status {self._process.wait()}"
        return json.loads(line)

    def attempt_all(
        self, probe: str, numbers: Sequence[int], settings: dict[str, Any], *, normal: int
    ) -> list[dict[str, Any]]:
        """The outcomes of a probe for these inputs; see `probes.attempt`.

        Further kinds: "killed" by a signal, with `value` its name: SIGPROF after LONGEST seconds. `memory` is
        the peak of resident memory so far, in bytes.

        Args:
          normal: the largest virtual memory of an undamaged input; 0: no limit.
        """
        limit = normal + MOST_MEMORY if normal else 0
        return self.run({"probe": probe, "numbers": list(numbers), "settings": settings, "limit": limit})

    def close(self) -> None:
        self._process.communicate()


@contextlib.contextmanager
def open_server(modules: Sequence[str] = (), **variables: str) -> Iterator[Server]:
    """A server that ends with the body; `variables` are added to its environment."""
    server = Server(modules, environment=variables)
    try:
        yield server
    finally:
        server.close()


def serve(modules: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        if "kill" in request:
            answer = [run_killed(request)]
        else:
            answer = list(_run_chunks(request))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _run_chunks(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    numbers = request["numbers"]
    while numbers:
        chunk, done = numbers[:_CHUNK], 0
        for outcome in _fork(chunk, request):
            yield outcome
            done += 1
        numbers = numbers[done:]


def _fork(numbers: list[int], request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _work(numbers, request, writer)
    os.close(writer)
    done, started = 0, time.monotonic()
    with os.fdopen(reader) as lines:
        for line in lines:
            done += 1
            yield json.loads(line)
    _, status, usage = os.wait4(child, 0)
    if done < len(numbers):
        name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {status}"
        yield {
            **{"kind": "killed", "value": name, "number": numbers[done], "what": "see the number"},
            **{"memory": usage.ru_maxrss << 10, "seconds": time.monotonic() - started, "virtual": 0},
        }


def _work(numbers: list[int], request: dict[str, Any], writer: int) -> None:
    from probes import attempt

    if request["limit"]:
        resource.setrlimit(resource.RLIMIT_AS, (request["limit"], request["limit"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(writer, "w") as answers:
        for number in numbers:
            signal.alarm(WAITING)
            signal.setitimer(signal.ITIMER_PROF, LONGEST)
            started = time.process_time()
            outcome = attempt(request["probe"], number, request["settings"])
            outcome["seconds"] = time.process_time() - started
            outcome["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            outcome["virtual"] = _largest_virtual_memory()
            answers.write(json.dumps(outcome) + "\n")
            answers.flush()
    os._exit(0)


def _largest_virtual_memory() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.split("\n") if line.startswith("VmPeak"))


def run_killed(request: dict[str, Any]) -> dict[str, Any]:
    """Runs an action in a child that a real SIGKILL may end; see `kills.act`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        from kills import act

        signal.alarm(10 * LONGEST)
        with os.fdopen(writer, "w") as answer:
            answer.write(json.dumps(act(**request["kill"])))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ""
    return {"ended": ended, "answer": json.loads(text) if text and not ended else None}


if __name__ == "__main__":
    sys.path[:0] = [str(_HERE.parent), str(_HERE.parent / "tests")]
    serve(sys.argv[1:])
