"""Stores for tests, and their failures: fsspec's store in memory, whose operations can end a "process"."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest

from flaxformer_mt.object_store import filesystem, lease, working_copies
from flaxformer_mt.object_store.filesystem import ObjectStore

_numbers = itertools.count()
_CHANGES = ("pipe_file", "put_file", "cp_file", "rm_file")


class Killed(BaseException):
    """What SIGKILL would have done."""


def new_bucket() -> str:
    """The URL of an empty bucket in memory."""
    return f"memory://bucket{next(_numbers)}"


def objects(url: str) -> dict[str, bytes]:
    """All objects below a URL, but for leases."""
    store = ObjectStore(url)
    return {name: store.read(name) for name in sorted(store.list()) if not name.startswith(".lease/")}


@contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[list[str]]:
    """From the change of this number on, no change reaches a store; yields the changes that did."""
    done: list[str] = []
    kind = fsspec.get_filesystem_class("memory")

    with monkeypatch.context() as patch:
        for name in _CHANGES:
            original = getattr(kind, name)

            def change(self, path, *arguments, original=original, name=name, **options):
                if "/.lease/" not in str(path):
                    if len(done) == number:
                        raise Killed(f"{name} {path}")
                    done.append(f"{name} {path}")
                return original(self, path, *arguments, **options)

            patch.setattr(kind, name, change)
        # Several objects at a time would be changed in any order.
        patch.setattr(
            filesystem, "_in_parallel", lambda work, tasks: [work(*task) for task in tasks] and None
        )
        yield done


def move_to_machine(monkeypatch: pytest.MonkeyPatch, cache) -> None:
    """This process becomes one of a machine with another cache folder."""
    working_copies.close_copies()
    monkeypatch.setenv("FLAXFORMER_MT_CACHE", str(cache))


def hurry(monkeypatch: pytest.MonkeyPatch, silence: float = 0.2) -> None:
    """Leases end after this silence, in seconds; failures are not waited for."""
    monkeypatch.setattr(lease, "BEAT", silence / 10)
    monkeypatch.setattr(lease, "SILENCE", silence)
    monkeypatch.setattr(lease, "_LOOK", silence / 20)
    monkeypatch.setattr(filesystem, "_DELAYS", (0.0, 0.0))
