"""Objects are listed, written and created as stores do it; every failure is one line with a remedy."""

import errno
import importlib.util

import pytest
from failing_store import new_bucket
from pytest import raises

from flaxformer_mt.errors import UserError
from flaxformer_mt.object_store.filesystem import ObjectStore


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path) -> str:
    return f"{new_bucket()}/run" if request.param == "memory" else f"file://{tmp_path}/bucket/run"


def test_objects_are_written_created_and_removed(url, tmp_path):
    check_objects(ObjectStore(url), tmp_path)


def check_objects(store: ObjectStore, tmp_path, *, conditions: bool = True) -> None:
    assert store.list() == {} and store.list("a") == {}
    (tmp_path / "x").write_bytes(b"one")
    store.upload([(tmp_path / "x", "a/b"), (tmp_path / "x", "c")])
    versions = store.list()
    assert set(versions) == {"a/b", "c"} and set(store.list("a")) == {"a/b"}
    store.write("d", b"1", mode="create")
    with raises(FileExistsError):
        store.write("d", b"2", mode="create")
    assert store.read("d") == b"1"
    store.write("c", b"two")
    store.write("a/e", b"two")
    assert store.list()["c"] != versions["c"] and store.list()["a/b"] == versions["a/b"]
    store.download([("c", tmp_path / "here" / "c"), ("a/e", tmp_path / "here" / "e")])
    assert {p.name: p.read_bytes() for p in (tmp_path / "here").iterdir()} == {"c": b"two", "e": b"two"}
    store.remove(["c", "c", "absent", "a/b"])
    assert set(store.list()) == {"a/e", "d"}
    for missing in (lambda: store.read("c"), lambda: store.download([("c", tmp_path / "y")])):
        with raises(FileNotFoundError):
            missing()
    assert not (tmp_path / "y").exists()


def test_names_that_leave_their_folder_are_no_objects(tmp_path, monkeypatch):
    store = ObjectStore(f"{new_bucket()}/run")
    base = store._path("")
    names = [
        *(f"{base}/../x", f"{base}/a/../../x", f"{base}//etc", f"{base}/folder/", f"{base}/./y"),
        *(f"{base}/a",),
    ]
    monkeypatch.setattr(store._files, "find", lambda *_, **__: {name: {"size": 1} for name in names})
    assert list(store.list()) == ["a"]


def test_failures_name_the_url_and_a_remedy(monkeypatch):
    store, calls = ObjectStore(f"{new_bucket()}/run"), []

    def fail(error):
        def call(*_, **__):
            calls.append(error)
            raise error

        monkeypatch.setattr(store._files, "pipe_file", call)
        monkeypatch.setattr(store._files, "cat_file", call)

    class NoCredentialsError(Exception):
        pass

    store.list()
    for extra, error, remedy in (
        ("s3", PermissionError("Access Denied"), "set AWS_PROFILE"),
        ("gs", NoCredentialsError("none"), "gcloud auth application-default login"),
        ("gs", OSError("Anonymous caller does not have access, 401"), "gcloud auth"),
        ("s3", FileNotFoundError("The specified bucket does not exist"), "create the bucket"),
        ("s3", TimeoutError("timed out"), "check the URL and the network"),
        ("s3", ValueError("bad name\nand more"), "check the URL"),
    ):
        calls.clear()
        fail(error)
        store._extra = extra
        with raises(UserError, match=remedy) as caught:
            store.write("x", b"")
        text = str(caught.value)
        assert text.startswith(f"{store.url} cannot be written ({type(error).__name__}: ")
        assert "\n" not in text
        assert len(calls) == 1, "fsspec's packages try again"
    fail(OSError(errno.ENOSPC, "No space left on device"))
    with raises(OSError, match="No space"):  # a local disk: main() knows the remedy
        store.read("x")


def test_unknown_schemes_and_absent_packages_are_one_line():
    with raises(UserError, match=r"ftp://x/y: the scheme ftp is unknown; give a folder, gs://"):
        ObjectStore("ftp://x/y")
    for scheme, package in (("gs", "gcsfs"), ("s3", "s3fs")):
        if importlib.util.find_spec(package) is None:
            with raises(UserError, match=rf"{scheme}://b/r needs a package .*pip install '?{package}>="):
                ObjectStore(f"{scheme}://b/r")
