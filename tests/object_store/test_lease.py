"""One job at a time holds the lease of a run, whoever is killed, paused or slow."""

import json
import threading

import pytest
from failing_store import hurry, new_bucket

from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.object_store import lease
from flaxformer_mt.object_store.filesystem import ObjectStore
from flaxformer_mt.object_store.lease import Lease


@pytest.fixture
def store(monkeypatch) -> ObjectStore:
    hurry(monkeypatch, 0.3)
    return ObjectStore(f"{new_bucket()}/run")


def make_lease(store: ObjectStore, *, process: int = 1 << 30, machine: str = "elsewhere") -> Lease:
    made = Lease(store)
    made._owner |= {"host": "pod-7", "process": process, "machine": machine}
    return made


def kill(owner: Lease) -> None:
    """Ends the heartbeats and leaves the lease in the store."""
    owner._end.set()
    owner._thread.join()


def test_a_second_owner_is_refused_until_the_first_gives_the_lease_back(store):
    first, second = make_lease(store), make_lease(store)
    first.acquire()
    with (
        pytest.warns(FlaxformerWarning, match="process 1073741824 on host pod-7; waiting up to"),
        pytest.raises(
            UserError, match=r"run is being trained by process 1073741824 on host pod-7; wait until"
        ),
    ):
        second.acquire()
    first.check()
    first.release()
    assert store.list() == {}
    second.acquire()
    second.check()
    second.release()


def test_a_silent_owner_is_replaced_and_finds_out(store):
    first, second = make_lease(store), make_lease(store)
    first.acquire()
    kill(first)
    with pytest.warns(FlaxformerWarning, match="waiting up to"):
        second.acquire()
    second.check()
    with pytest.raises(
        UserError, match="is being trained by process .* since this process gave no sign of life"
    ):
        first.check()
    first._end.clear()  # it was only suspended: its heartbeat must not bring its lease back
    beating = threading.Thread(target=first._beat)
    beating.start()
    beating.join(timeout=5)
    assert not beating.is_alive() and list(store.list()) == [".lease/000002.json"]
    second.release()


def test_an_owner_that_died_on_this_machine_is_replaced_at_once(store, monkeypatch):
    monkeypatch.setattr(lease, "SILENCE", 1e9)
    machine = lease._name_machine()
    assert machine
    first, second = make_lease(store, machine=machine), make_lease(store, machine=machine)
    first.acquire()
    kill(first)
    second.acquire()
    second.release()


def test_of_many_at_once_at_most_one_gets_the_lease(store):
    """A dead owner, and eight that want its lease at the same time."""
    dead = make_lease(store)
    dead.acquire()
    kill(dead)
    leases, got = [make_lease(store) for _ in range(8)], []

    def take(one: Lease) -> None:
        try:
            one.acquire()
            got.append(one)
        except UserError:
            pass

    threads = [threading.Thread(target=take, args=(one,)) for one in leases]
    with pytest.warns(FlaxformerWarning):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(got) == 1
    got[0].check()
    got[0].release()


def test_a_store_that_ignores_the_condition_leaves_one_owner(store, monkeypatch):
    """Both have seen no lease, and both create the first one: the later one owns it."""
    monkeypatch.setattr(store, "create", lambda name, content: store.write(name, content) or True)
    first, second = make_lease(store), make_lease(store)
    first.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(second, "_numbers", lambda: [])
        second.acquire()
    second.check()
    with pytest.raises(UserError, match="is being trained by"):
        first.check()
    first._thread.join(timeout=5)
    assert not first._thread.is_alive(), "its heartbeats have ended"
    second.release()


def test_a_lost_answer_and_a_damaged_lease_are_no_other_owner(store, monkeypatch):
    create = store.create
    monkeypatch.setattr(store, "create", lambda name, content: create(name, content) and False)
    mine = make_lease(store)
    mine.acquire()
    mine.release()
    store.write(".lease/000004.json", json.dumps([1]).encode())
    with pytest.warns(FlaxformerWarning, match="another process"):
        other = make_lease(store)
        other.acquire()
    assert list(store.list()) == [".lease/000005.json"]
    other.release()
