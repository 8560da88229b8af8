"""One job at a time has the lock of a run, whoever is killed, paused or slow."""

import contextlib
import threading

import pytest
from failing_store import hurry, new_bucket
from pytest import raises, warns

from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.object_store.filesystem import ObjectStore
from flaxformer_mt.object_store.owner_lock import OwnerLock


@pytest.fixture
def store(monkeypatch) -> ObjectStore:
    hurry(monkeypatch, 0.6)
    return ObjectStore(f"{new_bucket()}/run")


def kill(owner: OwnerLock) -> None:
    owner._end.set()
    owner._thread.join()


def test_a_second_owner_is_refused_until_the_first_gives_the_lock_back(store):
    first = OwnerLock(store)
    with (
        warns(FlaxformerWarning, match=r"was last trained by process \d+ on host .*; waiting up to"),
        raises(UserError, match=r"run is being trained by process \d+ on host .*; wait until it ends"),
    ):
        OwnerLock(store)
    first.check()
    first.release()
    assert store.list() == {}
    second = OwnerLock(store)
    second.check()
    second.release()


def test_a_silent_owner_is_replaced_and_finds_out(store):
    first = OwnerLock(store)
    kill(first)
    with warns(FlaxformerWarning, match="waiting up to"):
        second = OwnerLock(store)
    second.check()
    with raises(UserError, match="is being trained by .*; this process publishes nothing further"):
        first.check()
    first._end.clear()  # it was only suspended: its sign of life must not bring its lock back
    beating = threading.Thread(target=first._beat, daemon=True)
    beating.start()
    beating.join(timeout=0.3)
    second.check()
    first._end.set()
    with warns(FlaxformerWarning, match="the lock of the run was not given back: .* is being trained by"):
        first.release()
    second.check()
    second.release()


def test_of_many_at_once_at_most_one_gets_the_lock(store):
    """A dead owner, and eight that want its lock at the same time."""
    kill(OwnerLock(store))
    got = []

    def take() -> None:
        with contextlib.suppress(UserError):
            got.append(OwnerLock(store))

    threads = [threading.Thread(target=take) for _ in range(8)]
    with warns(FlaxformerWarning):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(got) == 1
    got[0].check()
    got[0].release()


@pytest.mark.parametrize("content", [b"[1]", b"{", b""])
def test_a_damaged_lock_ends_after_the_silence(store, content):
    store.write(".lock", content)
    with warns(FlaxformerWarning, match="was last trained by another process"):
        OwnerLock(store).release()
