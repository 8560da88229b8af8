"""The lock of a run in an object store: an object .lock that names the process that trains the run.

The owner rewrites the lock every 15 seconds. If the owner does not rewrite it for a minute, another process
may take it over. An old owner that is still running checks the lock before it publishes anything, finds the
new owner, and raises UserError.
"""

import json
import os
import secrets
import socket
import threading
import time
from typing import Any

from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.object_store.filesystem import ObjectStore

NAME = ".lock"
# Seconds between two signs of life, and after how many without one an owner counts as dead.
BEAT, SILENCE = 15.0, 60.0


class OwnerLock:
    def __init__(self, store: ObjectStore) -> None:
        """Take the lock; if it has an owner, wait up to a minute, and raise UserError if the owner lives."""
        self._store, self._end = store, threading.Event()
        self._me = {"host": socket.gethostname(), "process": os.getpid(), "token": secrets.token_hex(8)}
        self._await_silence()
        try:
            self._store.write(NAME, self._content(), mode="create" if self._read() is None else "overwrite")
        except FileExistsError:
            pass
        time.sleep(BEAT / 15)  # of several that take it over at once, the last one has it
        self.check()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        if (owner := self._read() or {}).get("token") != self._me["token"]:
            raise UserError(
                f"{self._store.url} is being trained by {_describe(owner)}; this process publishes nothing "
                "further; wait until the other one ends, or give another --run=DIR"
            )

    def release(self) -> None:
        """Release the lock; if the store cannot be reached, only warn, since the lock expires anyway."""
        self._end.set()
        self._thread.join()
        try:
            self.check()
            self._store.remove([NAME])
        except UserError as error:
            warn_user(f"the lock of the run was not given back: {error}")

    def _beat(self) -> None:
        while not self._end.wait(BEAT):
            try:
                self.check()  # a process that was suspended must not take the lock back
                self._store.write(NAME, self._content())
            except UserError:
                continue  # whoever publishes next says what is wrong

    def _await_silence(self) -> None:
        if (first := self._read()) is None:
            return
        who = f"{self._store.url} was last trained by {_describe(first)}"
        warn_user(f"{who}; waiting up to {SILENCE:.0f} s for it to show that it lives")
        end = time.monotonic() + SILENCE
        while (owner := self._read()) is not None:
            if owner != first:
                raise UserError(
                    f"{self._store.url} is being trained by {_describe(owner)}; wait until it ends, or give "
                    "another --run=DIR"
                )
            if time.monotonic() >= end:  # what was read just now is nobody's sign of life
                break
            time.sleep(BEAT / 10)

    def _content(self) -> bytes:
        return json.dumps({**self._me, "time": time.time()}).encode()

    def _read(self) -> dict[str, Any] | None:
        try:
            owner = json.loads(self._store.read(NAME))
        except FileNotFoundError:
            return None
        except ValueError:
            owner = {}
        return owner if isinstance(owner, dict) else {}


def _describe(owner: dict[str, Any]) -> str:
    return f"process {owner['process']} on host {owner['host']}" if "process" in owner else "another process"
