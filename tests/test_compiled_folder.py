"""What a session of tests compiles is there in the next one, unless it is damaged, too much or too old."""

import os
import time
import zlib

import compiled_folder


def test_sessions_hand_on_what_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setenv("FLAXFORMER_MT_CACHE", str(tmp_path))
    monkeypatch.setattr("jax._src.compilation_cache.decompress_executable", zlib.decompress)
    first, second = (compiled_folder.open_folder() for _ in range(2))
    (first / "whole-cache").write_bytes(zlib.compress(b"program"))
    (first / "cut-cache").write_bytes(zlib.compress(b"program")[:-1])
    for name in ("program-1", ".writing-program-2"):
        (second / "kept" / name).mkdir(parents=True)
    for folder in (first, second):
        compiled_folder.close_folder(folder)
    third = compiled_folder.open_folder()
    assert {path.relative_to(third).as_posix() for path in third.rglob("*")} == {
        *("whole-cache", "kept", "kept/program-1")
    }
    compiled_folder.close_folder(third)
    (kept,) = (tmp_path / "tests").iterdir()
    os.utime(kept, (time.time() - compiled_folder._MOST_SECONDS - 1,) * 2)
    assert not list(compiled_folder.open_folder().iterdir())
