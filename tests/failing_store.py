"""Stores for tests, and their failures: fsspec's store in memory, whose operations can end a "process"."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest

from flaxformer_mt.object_store import owner_lock, remote_runs
from flaxformer_mt.object_store.filesystem import ObjectStore

_numbers = itertools.count()
_CHANGES = ("pipe_file", "put_file", "cp_file", "rm_file")


class Killed(BaseException):
    """What SIGKILL would have done."""


def new_bucket() -> str:
    return f"memory://bucket{next(_numbers)}"


@contextmanager
def s3_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket of moto's server, which speaks S3; skips the test without its packages."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install s3fs 'moto[server]'")
    server_kind = pytest.importorskip("moto.server", reason="moto is not installed").ThreadedMotoServer
    server = server_kind(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    values = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in (values | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # of an earlier server
    bucket = f"bucket{next(_numbers)}"  # all servers of a process have the same buckets
    fsspec.filesystem("s3").mkdir(bucket)
    yield f"s3://{bucket}"
    server.stop()


def objects(url: str) -> dict[str, bytes]:
    store = ObjectStore(url)
    return {name: store.read(name) for name in sorted(store.list()) if name != ".lock"}


@contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[list[str]]:
    """From the change of this number on, no change reaches a store; yields the changes that did."""
    done: list[str] = []
    kind = fsspec.get_filesystem_class("memory")
    with monkeypatch.context() as patch:
        for name in _CHANGES:
            original = getattr(kind, name)

            def change(self, path, *arguments, original=original, name=name, **options):
                if not str(path).endswith("/.lock"):
                    if len(done) == number:
                        raise Killed(f"{name} {path}")
                    done.append(f"{name} {path}")
                return original(self, path, *arguments, **options)

            patch.setattr(kind, name, change)
        yield done


def move_to_machine(monkeypatch: pytest.MonkeyPatch, cache) -> None:
    """This process becomes one of a machine with another cache folder."""
    close_copies()
    monkeypatch.setenv("FLAXFORMER_MT_CACHE", str(cache))


def close_copies() -> None:
    while remote_runs._copies:
        remote_runs._copies.popitem()[1].folder_lock.close()


def hurry(monkeypatch: pytest.MonkeyPatch, silence: float = 0.2) -> None:
    monkeypatch.setattr(owner_lock, "BEAT", silence / 10)
    monkeypatch.setattr(owner_lock, "SILENCE", silence)
