"""Folders appear whole or not at all, whenever the process dies; each changed byte is noticed."""

import errno
import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from flaxformer_mt import atomic_folder as manifest
from flaxformer_mt.errors import FlaxformerWarning, UserError


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs, as nothing here catches it."""


def write_folder(final: Path, text: str) -> None:
    folder = manifest.begin_folder(final)
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "sub" / "deep" / "a.txt").write_text(text)
    (folder / "b.bin").write_bytes(bytes(range(256)))
    manifest.seal_folder(folder, {"text": text, "list": [1, None]})
    manifest.publish_folder(folder, final)


def kill_at(patch, count: int) -> None:
    """Ends the process, so to speak, at the count-th change that the code makes to the disk."""
    calls = itertools.count()

    def mortal(function):
        def call(*args, **kwargs):
            if next(calls) == count:
                raise Killed
            return function(*args, **kwargs)

        return call

    for module, name in [(os, "rename"), (os, "fsync"), (os, "rmdir"), (os, "unlink"), (os, "mkdir")]:
        patch.setattr(module, name, mortal(getattr(module, name)))


def survive(monkeypatch, action, check) -> int:
    """Runs `action` with death at its first, second, ... change, and checks each time; returns the deaths."""
    for count in itertools.count():
        died = False
        with monkeypatch.context() as patch:
            kill_at(patch, count)
            try:
                action()
            except Killed:
                died = True
        check(died)
        if not died:
            return count
    raise AssertionError("unreachable")


def test_killed_while_writing_leaves_the_old_or_the_new(tmp_path, monkeypatch):
    final = tmp_path / "7"

    def check(died: bool) -> None:
        if final.exists():  # before any sweep: what is visible is whole
            assert manifest.find_damage(final) == ""
        manifest.sweep_folders(tmp_path)
        assert manifest.find_damage(final) == ""
        text = (final / "sub" / "deep" / "a.txt").read_text()
        assert manifest.read_metadata(final) == {"text": text, "list": [1, None]}
        assert text == "new" or (died and text == "old")
        assert [path.name for path in tmp_path.iterdir()] == ["7"]
        if died:
            write_folder(final, "old")

    write_folder(final, "old")
    assert survive(monkeypatch, lambda: write_folder(final, "new"), check) > 10


@pytest.mark.parametrize("resume", [False, True])
def test_what_a_killed_builder_leaves_is_no_artifact(tmp_path, monkeypatch, resume):
    """The next one begins anew, or goes on with what there is; a reader sees the whole or nothing."""
    folder, seen = tmp_path / "x", []

    def build(partial: Path) -> dict[str, int]:
        seen.append(sorted(path.name for path in partial.iterdir()))
        (partial / "sub").mkdir(exist_ok=True)
        manifest.write_atomically(partial / "sub" / "a", b"text")
        return {"number": 1}

    def load() -> str:
        return manifest.artifact(folder, build, lambda f, facts: (f / "sub" / "a").read_text(), resume=resume)

    def check(died: bool) -> None:
        if folder.exists():
            assert manifest.find_damage(folder) == ""
        assert load() == "text" and [path.name for path in tmp_path.iterdir()] == ["x"]
        if died:
            manifest.discard(folder)

    assert survive(monkeypatch, load, check) > 5
    assert any(seen) == resume


def test_an_artifact_is_built_once_and_again_when_it_is_damaged(tmp_path, monkeypatch):
    arrays = {"a": np.arange(5), "b": np.zeros((0, 2), np.int32)}
    built = []

    def load() -> dict[str, np.ndarray]:
        def build(folder: Path) -> None:
            built.append(folder)
            manifest.save_arrays(folder, arrays)

        before = os.umask(0o027)  # others may read what their group may
        try:
            return manifest.artifact(tmp_path / "root" / "x", build, manifest.map_arrays)
        finally:
            os.umask(before)

    for _ in range(2):
        found = load()
        assert len(built) == 1 and found.keys() == arrays.keys()
        assert all((found[name] == arrays[name]).all() for name in found)
        assert all(found[name].dtype == arrays[name].dtype for name in found)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "root" / "x").iterdir()}
    assert modes == {0o640}
    (tmp_path / "root" / "x" / "a.npy").write_bytes(b"")
    with pytest.warns(FlaxformerWarning, match=r"x is damaged: file a.npy has 0 bytes .*; it is built again"):
        assert (load()["a"] == arrays["a"]).all()
    assert len(built) == 2

    monkeypatch.setattr(manifest, "find_damage", lambda folder: "file x has changed")
    with (
        pytest.warns(FlaxformerWarning),
        pytest.raises(UserError, match="damaged again whenever it is written"),
    ):
        load()
    monkeypatch.undo()

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise UserError("wrong text")

    with pytest.raises(UserError, match="^wrong text$"):
        manifest.artifact(tmp_path / "root" / "y", fail)
    assert [path.name for path in (tmp_path / "root").iterdir()] in (["x"], [])


def test_killed_while_removing_leaves_all_or_none(tmp_path, monkeypatch):
    final = tmp_path / "7"

    def check(died: bool) -> None:
        if final.exists():
            assert died and manifest.find_damage(final) == ""
        manifest.sweep_folders(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] in ([], ["7"])
        if died and not final.exists():
            write_folder(final, "text")

    write_folder(final, "text")
    assert survive(monkeypatch, lambda: manifest.remove_folder(final), check) > 5


def test_killed_while_sweeping_sweeps_the_next_time(tmp_path, monkeypatch):
    write_folder(tmp_path / "kept", "kept")

    def leave_behind() -> None:
        for prefix in (".writing-", ".removed-", ".replaced-"):
            write_folder(tmp_path / "1", "half")
            os.rename(tmp_path / "1", tmp_path / f"{prefix}5")

    def check(died: bool) -> None:
        manifest.sweep_folders(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "kept"]
        assert manifest.find_damage(tmp_path / "5") == ""
        if died:
            manifest.remove_folder(tmp_path / "5")
            leave_behind()

    leave_behind()
    assert survive(monkeypatch, lambda: manifest.sweep_folders(tmp_path), check) > 5
    manifest.sweep_folders(tmp_path / "absent")


def test_every_changed_byte_is_noticed(tmp_path):
    folder = tmp_path / "x"
    write_folder(folder, "text")
    for path in [folder / "b.bin", folder / "sub" / "deep" / "a.txt", folder / "manifest.json"]:
        content = path.read_bytes()
        for index in range(len(content)):
            path.write_bytes(content[:index] + bytes([content[index] ^ 0x15]) + content[index + 1 :])
            assert path.name in manifest.find_damage(folder)
        path.write_bytes(content[:-1])
        assert path.name in manifest.find_damage(folder)
        path.write_bytes(content)
        assert manifest.find_damage(folder) == ""


def test_damage_says_what_is_wrong(tmp_path, monkeypatch):
    folder = tmp_path / "x"
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "MANIFEST_FORMAT", 2)
        write_folder(folder, "ä\n")
    assert manifest.find_damage(folder) == (
        "file manifest.json has format 2, but this version of flaxformer_mt reads format 1"
    )
    write_folder(folder, "text")
    assert manifest.find_damage(folder) == ""
    assert manifest.read_metadata(folder) == {"text": "text", "list": [1, None]}
    (folder / "sub" / "deep" / "a.txt").write_text("tex")
    assert manifest.find_damage(folder) == "file sub/deep/a.txt has 3 bytes instead of 4"
    assert manifest.find_damage(folder, lambda name: not name.startswith("sub/")) == ""
    (folder / "b.bin").unlink()
    assert manifest.find_damage(folder, lambda name: name == "b.bin") == "file b.bin is missing"
    (folder / "manifest.json").write_text("[]")
    assert manifest.find_damage(folder) == "file manifest.json is not readable"
    (folder / "manifest.json").unlink()
    assert manifest.find_damage(folder) == "file manifest.json is missing"
    with pytest.raises(ValueError, match="missing"):
        manifest.read_metadata(folder)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "MANIFEST_FORMAT", 2)
        write_folder(folder, "text")
    assert manifest.find_damage(folder) == (
        "file manifest.json has format 2, but this version of flaxformer_mt reads format 1"
    )


def test_entries_of_another_kind_are_damage_and_can_be_replaced_and_removed(tmp_path):
    write_folder(tmp_path / "real", "text")
    names = ["file", "dangling", "nested", "folder as manifest", "pipe as manifest"]
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "manifest.json").write_text("[" * 100_000)
    (tmp_path / "folder as manifest" / "manifest.json").mkdir(parents=True)
    (tmp_path / "pipe as manifest").mkdir()
    os.mkfifo(tmp_path / "pipe as manifest" / "manifest.json")
    for name, damage in zip(names, ["it is not a folder"] * 2 + ["not readable"] * 3, strict=True):
        assert damage in manifest.find_damage(tmp_path / name), name
        write_folder(tmp_path / name, "text")
        assert manifest.find_damage(tmp_path / name) == ""
    (tmp_path / "link").symlink_to(tmp_path / "real")
    manifest.remove_folder(tmp_path / "link")
    (tmp_path / ".writing-file").write_text("")
    (tmp_path / ".removed-link").symlink_to(tmp_path / "real")
    manifest.sweep_folders(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "real"])
    assert manifest.find_damage(tmp_path / "real") == ""


def test_a_file_that_disappears_during_a_build_is_the_error_that_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such text"):
        manifest.artifact(tmp_path / "x", lambda folder: (tmp_path / "no such text").read_bytes())
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_goes_on_is_not_removed_though_its_files_look_a_day_old(tmp_path):
    """As when the clock is set ahead while another process builds."""
    killed = tmp_path / ".writing-killed"
    killed.mkdir()

    def build(folder: Path) -> None:
        (folder / "a").write_text("text")
        for path in (folder / "a", folder, killed):
            os.utime(path, (0, 0))
        manifest.artifact(tmp_path / "y", lambda folder: None)
        assert (folder / "a").is_file() and not killed.exists()

    manifest.artifact(tmp_path / "x", build)
    assert {path.name for path in tmp_path.iterdir()} == {"x", "y"}


def test_a_full_disk_leaves_no_new_folder_and_is_named(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught, manifest.new_folder(tmp_path / "new"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.filename == str(tmp_path / "new") and list(tmp_path.iterdir()) == []
