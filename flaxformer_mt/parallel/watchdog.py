"""Detection of processes that have died: each process writes heartbeats, and process 0 checks all of them.

Heartbeats are stored by process 0, the coordinator of the job. Once per interval, every process writes its
own heartbeat, process 0 reads all with one request, and every other process reads that of process 0, which
names the process that has died: the requests of N processes are 2 N per interval.
"""

import atexit
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

# Seconds between two heartbeats of a process.
HEARTBEAT_INTERVAL = 1.0
# Seconds without a heartbeat after which a process counts as dead; the variable overrides the default.
HEARTBEAT_TIMEOUT = float(os.environ.get("FLAXFORMER_MT_PROCESS_TIMEOUT", "30"))

_FOLDER = "flaxformer_mt/alive"


class Heartbeats:
    """The heartbeats of a job as one process sees them; contains no thread and no clock."""

    def __init__(self, client: Any, index: int, count: int) -> None:
        """Store the arguments.

        Args:
          client: the client of the key-value store of `jax.distributed`.
          index: index of this process.
          count: number of processes.
        """
        self._client, self._index, self._count = client, index, count
        # Process -> its last heartbeat, and when this process first saw it.
        self._seen: dict[int, tuple[int, float]] = {}
        self._beat = 0
        self._lost = ""
        self._last_contact: float | None = None

    def exchange(self, now: float) -> str:
        """Write and read heartbeats at time `now`, in seconds; return which process has died, "" if none.

        Process 0 returns the message again at each call, and sends it with its heartbeats.
        """
        self._beat += 1
        if self._last_contact is None:
            self._last_contact = now
        try:
            self._write()
            beats = self._read_all() if self._index == 0 else self._read_first()
            self._last_contact = now
        except jax.errors.JaxRuntimeError:
            silence = now - self._last_contact
            # Process 0 stores the heartbeats.
            return _describe(0, self._count, silence) if silence > HEARTBEAT_TIMEOUT / 3 else ""
        if self._lost:
            return self._lost
        for process in range(self._count) if self._index == 0 else [0]:
            if process == self._index:
                continue
            beat = beats.get(process, 0)
            if process not in self._seen or self._seen[process][0] != beat:
                self._seen[process] = (beat, now)
            elif now - self._seen[process][1] > HEARTBEAT_TIMEOUT:
                self._lost = _describe(process, self._count, now - self._seen[process][1])
                break
        if self._lost and self._index == 0:
            self._write()
        return self._lost

    def _write(self) -> None:
        value = json.dumps([self._beat, self._lost])
        self._client.key_value_set(f"{_FOLDER}/{self._index}", value, allow_overwrite=True)

    def _read_all(self) -> dict[int, int]:
        """Return the last heartbeat of each process that has sent one."""
        found = self._client.key_value_dir_get(_FOLDER)
        return {int(key.rpartition("/")[2]): json.loads(value)[0] for key, value in found}

    def _read_first(self) -> dict[int, int]:
        """Return the last heartbeat of process 0; keeps what it says about the others."""
        try:
            beat, self._lost = json.loads(self._client.key_value_try_get(f"{_FOLDER}/0"))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):  # no heartbeat has been written yet
                return {}
            raise
        return {0: beat}


def _describe(process: int, count: int, silence: float) -> str:
    return f"process {process} of {count} has sent no heartbeat for {silence:.0f} s"


class Watchdog:
    """Thread that exchanges heartbeats, and ends this process when another one has died."""

    def __init__(self, client: Any, end: Callable[[str], object]) -> None:
        """Store the client of the key-value store, and what ends this process, given who has died."""
        self._index, self._count = jax.process_index(), jax.process_count()
        self._client = client
        self._heartbeats = Heartbeats(client, self._index, self._count)
        self._end = end
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch-processes", daemon=True)

    def start(self) -> None:
        """Start the thread; heartbeats stop when the interpreter exits, so others notice exceptions here."""
        atexit.register(self._stop)
        self._thread.start()

    def finish(self) -> None:
        """Leave the job in order; process 0 is the last, since the other processes depend on it."""
        self._stop()
        if self._index == 0:
            self._client.get_live_nodes(list(range(self._count)))  # returns when only this process is left
        jax.distributed.shutdown()

    def _stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(HEARTBEAT_INTERVAL):
            if lost := self._heartbeats.exchange(time.monotonic()):
                if self._index == 0:  # the others read the message before their coordinator ends
                    time.sleep(3 * HEARTBEAT_INTERVAL)
                self._end(lost)
