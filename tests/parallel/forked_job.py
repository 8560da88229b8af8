"""Jobs of two processes with four simulated devices each, forked from a process that has imported everything.

    python forked_job.py        requests on standard input, answers on standard output, a line of JSON each

A request names a task of this file and its arguments; the answer is the status of each process, and its
standard error. A new Python would take seconds to start.
"""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import orbax.checkpoint  # noqa: F401  its import takes longest
from test_parallel import LAYOUTS, on
from tiny_experiment import quick_environment

from flaxformer_mt import atomic_folder
from flaxformer_mt.commands.main import main
from flaxformer_mt.config import OptimConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.object_store import remote_runs
from flaxformer_mt.object_store.remote_runs import open_copy
from flaxformer_mt.parallel import Parallel, make_parallel
from flaxformer_mt.parallel.processes import connect, work_together
from flaxformer_mt.runs import array_files, checkpoint_index, checkpoints
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.training.checkpoint_trees import load_state, to_trees
from flaxformer_mt.training.resume_position import TrainProgress
from flaxformer_mt.training.state import TrainState, init_state
from flaxformer_mt.training.train_log import TrainingLog

LONGEST = 120  # seconds
SHARED = tuple(name for name in LAYOUTS if name != "one")


# ---- states, which are functions of a seed ----
def make_state() -> TrainState:
    params = {
        "shared_embedding": {"embedding": jnp.zeros((24, 16))},
        "self_attention": {"query": {"kernel": jnp.zeros((16, 8, 2), jnp.bfloat16)}},
        "feedforward": {"output": {"kernel": jnp.zeros((24, 16))}},
        "norm": {"scale": jnp.zeros(16)},
    }
    return init_state(params, OptimConfig())


def random_state(seed: int) -> Any:
    """A training state of numpy arrays of any bits; of bfloat16, finite numbers.

    XLA's slices on CPUs set a bit of those NaNs of bfloat16 that lack it.
    """

    def draw(path: Any, leaf: Any) -> np.ndarray:
        number = zlib.crc32(jax.tree_util.keystr(path).encode(), seed)
        size = max(1, int(np.prod(leaf.shape))) * leaf.dtype.itemsize
        bits = np.frombuffer(np.random.default_rng(number).bytes(size), f"u{leaf.dtype.itemsize}")
        bits = bits & 0xBFFF if leaf.dtype == jnp.bfloat16 else bits
        return bits.view(leaf.dtype)[: leaf.size].reshape(leaf.shape)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(make_state))


def save_state(checkpoints: Checkpoints, layout: str, step: int) -> None:
    trees = to_trees(make_parallel(on(layout)).place(random_state(step)))
    checkpoints.save(step, trees, TrainProgress(step=step, epoch=2, index=3).to_dict())


def check_state(run: Path, layout: str) -> int:
    """Restores the newest state onto a layout and compares all bits; returns its step, which is its seed."""
    parallel = make_parallel(on(layout))
    state, progress = load_state(Checkpoints(run), parallel, lambda: parallel.init(make_state))
    assert_same_bits(state, random_state(progress.step), parallel, (run, layout))
    assert (progress.epoch, progress.index) == (2, 3)
    return progress.step


def save_params(runs: Path, job: str, layouts: Iterable[str]) -> None:
    for layout in layouts:
        checkpoints = Checkpoints(runs / f"{job} {layout}")
        params = random_state(zlib.crc32(f"{job} {layout}".encode())).params
        checkpoints.save(7, {"params": make_parallel(on(layout)).place(params)}, {})
        checkpoints.wait()


def check_params(run: Path, layout: str) -> None:
    parallel = make_parallel(on(layout))
    expected = random_state(zlib.crc32(run.name.encode())).params
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        expected,
        parallel.shardings(expected),
    )
    found = Checkpoints(run).restore(7, {"params": like})[0]["params"]
    assert_same_bits(found, expected, parallel, (run, layout))


def assert_same_bits(found: Any, expected: Any, parallel: Parallel, what: Any) -> None:
    for (path, leaf), right, sharding in zip(
        jax.tree_util.tree_leaves_with_path(expected),
        jax.tree.leaves(found),
        jax.tree.leaves(parallel.shardings(found)),
        strict=True,
    ):
        where = (what, jax.tree_util.keystr(path))
        assert right.sharding.is_equivalent_to(sharding, right.ndim), where
        assert len(right.addressable_shards) == len(parallel.mesh.local_devices), where
        for shard in right.addressable_shards:
            assert np.asarray(shard.data).tobytes() == leaf[shard.index].tobytes(), where


# ---- tasks of one process of a job ----
def move(process: int, folder: str) -> None:
    """Writes parameters of all layouts; restores them, and those of one process, onto all layouts."""
    save_params(Path(folder), "two", SHARED)
    for run in sorted(Path(folder).iterdir()):
        for layout in SHARED:
            check_params(run, layout)


def see_damage(process: int, run: str, by: int) -> None:
    """Restores a run of which the process `by` cannot read the newest checkpoint."""
    find = atomic_folder.find_damage

    def find_damage(folder: Path, *arguments: Any) -> str:
        steps = [int(path.name) for path in folder.parent.iterdir() if path.name.isdigit()]
        newest = folder.name == str(max(steps, default=None))
        return "file x is missing" if newest else find(folder, *arguments)

    if process == by:
        checkpoint_index.atomic_folder.find_damage = find_damage
    os.write(2, f"step {check_state(Path(run), 'fsdp 8')}\n".encode())


def command(process: int, flags: list[str], *, memory: int = 0, devices: int = 4) -> int:
    """A command, as the shell sees it.

    Args:
      memory: bytes of each device; 0: unknown.
      devices: number of devices of each process.
    """
    os.environ["XLA_FLAGS"] = quick_environment(devices)["XLA_FLAGS"]
    if memory:
        os.environ["FLAXFORMER_MT_DEVICE_MEMORY"] = str(memory)
    return main(flags)


def train_until_killed(process: int, flags: list[str], run: str) -> int:
    """Training whose second process kills itself after update 20, with the checkpoint of step 16 on disk."""
    manifest, add = Path(run) / "checkpoints" / "16" / "manifest.json", TrainingLog.add

    def kill(self: TrainingLog, step: int, *arguments: Any) -> None:
        if step == 20:
            while not manifest.exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, step, *arguments)

    if process == 1:
        TrainingLog.add = kill
    os.environ["FLAXFORMER_MT_PROCESS_TIMEOUT"] = "10"
    return command(process, flags, devices=2)


def fill(process: int, run: str, steps: int, victim: int, moment: str) -> None:
    """Resumes a run and saves a checkpoint at each step; the process `victim` kills itself at a moment.

    "train" is no real training: the state of a step is random, but known.
    """
    checkpoints = Checkpoints(Path(run), keep_last=2)
    first = check_state(Path(run), "fsdp 8") + 1 if Path(run).exists() else 1
    for step in range(first, steps + 1):
        if step == first + 1:
            checkpoints.wait()
            if process == victim:
                kill_at(moment)
        save_state(checkpoints, "fsdp 8", step)
    checkpoints.wait()


def fill_store(process: int, url: str, caches: str, **arguments: Any) -> None:
    os.environ["FLAXFORMER_MT_CACHE"] = f"{caches}/{process}"
    fill(process, str(open_copy(url)), **arguments)


MOMENTS = {
    # Before the second item is written, while the first is.
    "shards": (array_files, "start_shared_item", 2),
    # Its shards are on disk, but not reported.
    "digests": (checkpoints.atomic_folder, "digest_files", 1),
    # Its shards are reported; process 0 has not published the checkpoint.
    "reported": (checkpoints, "let_first_conclude", 1),
    "merge": (array_files, "finish_shared_item", 2),
    "seal": (atomic_folder, "seal_folder", 1),
    "publish": (atomic_folder, "publish_folder", 1),
    # In an object store: before the shards of process 1 are sent, and once the manifest is there.
    "send": (remote_runs, "send_parts", 1),
    "in the store": (remote_runs._Copy, "sweep", 1),
    # Of what is no longer kept.
    "removal": (atomic_folder.shutil, "rmtree", 1),
}


def kill_at(moment: str) -> None:
    """Kill this process at a call of a function, or, once it has reported, soon afterwards."""
    owner, name, count = MOMENTS[moment]
    original, calls = getattr(owner, name), []

    def killing(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == count:
            if moment != "reported":
                os.kill(os.getpid(), signal.SIGKILL)
            signal.setitimer(signal.ITIMER_REAL, 0.02)  # SIGALRM ends the process as SIGKILL does
        return original(*arguments, **options)

    setattr(owner, name, killing)


def run_out_of_space(process: int, run: str) -> None:
    """Saves four checkpoints, of which one process cannot write its part of the second and of the third."""
    checkpoints = Checkpoints(Path(run))
    start = array_files.start_shared_item

    def full(folder: Path, leaves: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.name))

    for step, victim in [(1, None), (2, 0), (3, 1), (4, None)]:
        array_files.start_shared_item = full if process == victim else start
        try:
            save_state(checkpoints, "data 8", step)
            checkpoints.wait()
        except UserError as error:
            os.write(2, f"step {step}: {error}\n".encode())


TASKS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (move, see_damage, command, train_until_killed, fill, fill_store, run_out_of_space)
}


# ---- the server, as its client sees it ----
ANY = None  # a status


class Jobs:
    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            env=quick_environment(devices=4, FLAXFORMER_MT_PROCESS_TIMEOUT="60"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, task: str, *statuses: int | None, **arguments: Any) -> list[str]:
        """What the processes of a job print, which must end with these statuses, by default with 0."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps({"task": task, **arguments}) + "\n")
        self._server.stdin.flush()
        ended = json.loads(self._server.stdout.readline())
        printed = "\n".join(each["stderr"] for each in ended)
        for each, status in zip(ended, statuses or (0, 0), strict=True):
            assert status in (ANY, each["status"]), printed
        return [each["stderr"] for each in ended]

    def close(self) -> None:
        self._server.communicate()


# ---- the server ----
def run_job(task: str, seconds: float = 0.5, **arguments: Any) -> list[dict[str, Any]]:
    """Forks the two processes of a job; so long after one of them has been killed, the other one is."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    logs = [tempfile.TemporaryFile("w+") for _ in range(2)]
    children = [_fork(process, task, f"127.0.0.1:{port}", logs[process], arguments) for process in range(2)]
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + LONGEST
    while len(statuses) < 2:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            statuses[child] = os.waitstatus_to_exitcode(status)
            if statuses[child] < 0:
                deadline = min(deadline, time.monotonic() + seconds)
        elif time.monotonic() > deadline:
            for child in set(children) - set(statuses):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    answer = []
    for child, log in zip(children, logs, strict=True):
        log.seek(0)
        printed, count = log.read(), 1
        while count:
            printed, count = _GLOO.subn("", printed)
        answer.append({"status": statuses[child], "stderr": printed})
    return answer


# What the library that connects processes says; parts may be written inside of other lines, also its own.
_GLOO = re.compile(r"\[Gloo\] Rank ?|\d+ is connected to \d+ peer ranks\..*? is : \d+\n?")


def _fork(process: int, task: str, address: str, log: Any, arguments: dict[str, Any]) -> int:
    if child := os.fork():
        return child
    status = 1
    try:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        job = [f"--coordinator={address}", "--processes=2", f"--process={process}"]
        if "flags" in arguments:
            status = TASKS[task](process, [*arguments.pop("flags"), *job], **arguments)
        else:
            connect(coordinator=address, processes=2, process=process)
            with work_together():
                TASKS[task](process, **arguments)
            status = 0
    except UserError as error:
        os.write(2, f"error: {error}\n".encode())
        status = 2
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(run_job(**json.loads(line))) + "\n")
        answers.flush()
