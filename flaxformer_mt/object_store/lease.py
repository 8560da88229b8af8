"""The lease of a run in an object store: at most one job trains it at a time, as far as a store allows.

A store has no locks that end with their owner. The owner of a run therefore writes an object .lease/N.json
again and again, its heartbeat; the largest N counts. Another job waits until it has seen no heartbeat for a
minute, and then creates N+1, which the store grants to one of several jobs only. The old owner, should it
still live, finds the larger number before it publishes anything further, and ends.
"""

import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.object_store.filesystem import ObjectStore

FOLDER = ".lease"
# Seconds between two heartbeats of an owner, and after how many without one its lease has ended.
BEAT, SILENCE = 15.0, 60.0
# Seconds between two looks at the lease of another owner.
_LOOK = 2.0


class Lease:
    """The lease of one owner; `acquire`, then `check` before each publication, then `release`."""

    def __init__(self, store: ObjectStore) -> None:
        """Reads and writes nothing."""
        self._store = store
        self._owner = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "machine": _name_machine(),
            "token": secrets.token_hex(8),
        }
        self._number, self._beats = 0, 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    def acquire(self) -> None:
        """Takes the lease, at once or after the silence of an owner that no longer lives.

        Raises:
          UserError: another process has the lease, or the store cannot be written to.
        """
        old = max(self._numbers(), default=0)
        if old:
            self._wait_for_silence(old)
        self._number = old + 1
        # What is there decides: an answer may be lost, and a store may ignore the condition.
        self._store.create(_name(self._number), self._content())
        if (owner := self._read(self._number)).get("token") != self._owner["token"]:
            raise self._refuse(owner)
        if others := [number for number in self._numbers() if number not in (old, self._number)]:
            self._store.remove([_name(self._number)])
            raise self._refuse(self._read(max(others)))
        if old:
            self._store.remove([_name(old)])
        self._thread.start()

    def check(self) -> None:
        """Raises UserError if another process has taken the lease over."""
        if not self._is_mine():
            other = self._read(max(self._numbers(), default=0))
            raise UserError(
                f"{self._store.url} is being trained by {_describe(other)}, since this process gave no sign "
                f"of life for {SILENCE:.0f} s; it ends without publishing anything further"
            )

    def release(self) -> None:
        """Gives the lease back; leaves it to its silence if the store cannot be reached."""
        self._end.set()
        self._thread.join()
        try:
            self._store.remove([_name(self._number)])
        except UserError as error:
            warn_user(f"the lease could not be given back, and ends after {SILENCE:.0f} s: {error}")

    def _beat(self) -> None:
        while not self._end.wait(BEAT):
            try:
                # A process that was suspended must not restore a lease that another one has removed.
                if not self._is_mine():
                    return
                self._beats += 1
                self._store.write(_name(self._number), self._content())
            except UserError:
                continue  # whoever publishes next says what is wrong with the store

    def _wait_for_silence(self, number: int) -> None:
        seen, since, said = self._read_bytes(number), time.monotonic(), False
        while time.monotonic() - since < SILENCE:
            owner = _parse(seen)
            if seen == b"" or _has_ended(owner):
                return
            if not said:
                warn_user(
                    f"{self._store.url} was last trained by {_describe(owner)}; waiting up to {SILENCE:.0f} "
                    "s for a sign of life of it"
                )
                said = True
            time.sleep(_LOOK)
            if (now := self._read_bytes(number)) not in (seen, b""):
                raise self._refuse(_parse(now))
            seen = now

    def _is_mine(self) -> bool:
        newest = self._numbers()[-1:] == [self._number]
        return newest and self._read(self._number).get("token") == self._owner["token"]

    def _numbers(self) -> list[int]:
        names = [name.rpartition("/")[2].removesuffix(".json") for name in self._store.list(FOLDER)]
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def _read_bytes(self, number: int) -> bytes:
        try:
            return self._store.read(_name(number))
        except FileNotFoundError:  # given back
            return b""

    def _read(self, number: int) -> dict[str, Any]:
        return _parse(self._read_bytes(number))

    def _content(self) -> bytes:
        return json.dumps({**self._owner, "beat": self._beats, "time": round(time.time())}).encode()

    def _refuse(self, owner: dict[str, Any]) -> UserError:
        return UserError(
            f"{self._store.url} is being trained by {_describe(owner)}; wait until it ends, or give another "
            "--run=DIR"
        )


def _name(number: int) -> str:
    return f"{FOLDER}/{number:06d}.json"


def _parse(content: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(content)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _describe(owner: dict[str, Any]) -> str:
    if not {"process", "host"} <= owner.keys():
        return "another process"
    return f"process {owner['process']} on host {owner['host']}"


def _name_machine() -> str:
    """Names this boot of this machine, and the processes that can be seen here; "" if it cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _has_ended(owner: dict[str, Any]) -> bool:
    """Whether the owner was a process of this very machine that lives no more."""
    if not owner.get("machine") or owner.get("machine") != _name_machine():
        return False
    process: Any = owner.get("process")
    return isinstance(process, int) and not Path(f"/proc/{process}").exists()
