"""Kept programs: found again by equal facts, never used when damaged."""

import os

import jax
import numpy as np
import pytest

from flaxformer_mt.parallel import compilation
from flaxformer_mt.parallel.compilation import compile_kept, keep_json

ARGUMENTS = ({"weights": np.arange(3.0)}, np.arange(3, dtype=np.int32))


@pytest.fixture
def folder(tmp_path):
    name, before = "jax_compilation_cache_dir", jax.config.values["jax_compilation_cache_dir"]
    jax.config.update(name, str(tmp_path))
    yield tmp_path / "kept"
    jax.config.update(name, before)


def make(traced):
    def function(params, x):
        traced.append(1)
        return params["weights"] + x, x.sum()

    return jax.jit(function)


def run(facts, traced) -> list:
    devices = jax.local_devices()[:1]
    found = compile_kept(make(traced), ARGUMENTS, facts, devices)(*ARGUMENTS)
    return [np.asarray(value).tolist() for value in found]


def test_a_program_is_traced_once_for_equal_facts_and_code(folder, monkeypatch):
    """A copy from JAX's own cache could not be kept on a CPU, so the program is compiled outside of it."""
    traced, expected = [], [[0.0, 2.0, 4.0], 3]
    for facts, times in (("a", 1), ("a", 1), ("b", 2), ("a", 2)):
        assert run(facts, traced) == expected
        assert len(traced) == times
    monkeypatch.setattr(compilation, "_digest_code", lambda: "another version")
    assert run("a", traced) == expected
    monkeypatch.setattr(compilation, "describe_processor", lambda: ["another machine"])
    assert run("a", traced) == expected
    assert len(traced) == 4
    assert len(list(folder.iterdir())) == 4
    assert all(name.name.startswith("program-") for name in folder.iterdir())


def test_damaged_and_odd_files_are_replaced(folder):
    traced = []
    run("a", traced)
    (path,) = folder.iterdir()
    whole = path.read_bytes()

    def truncate():
        path.write_bytes(whole[:-1])

    def flip():
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])

    def make_pipe():
        path.unlink()
        os.mkfifo(path)

    def link_to_nothing():
        path.unlink()
        path.symlink_to("/dev/zero")

    for number, damage in enumerate([truncate, flip, make_pipe, link_to_nothing], start=2):
        damage()
        assert run("a", traced) == [[0.0, 2.0, 4.0], 3]
        assert len(traced) == number
        assert (
            path.read_bytes()[:32]
            == compilation.hashlib.blake2b(path.read_bytes()[32:], digest_size=32).digest()
        )
    path.unlink()
    path.mkdir()  # cannot be replaced: the program is compiled each time
    assert run("a", traced)[1] == 3


def test_the_oldest_files_go_and_without_a_folder_nothing_is_kept(folder, monkeypatch):
    monkeypatch.setattr(compilation, "_MAX_FILES", 2)
    made = []
    for fact in (1, 2, 1, 3, 1, 2):
        assert keep_json("fact", fact, lambda fact=fact: made.append(fact) or [fact]) == [fact]
        for age, path in enumerate(sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)):
            os.utime(path, (age, age))
    assert made == [1, 2, 3, 2]
    jax.config.update("jax_compilation_cache_dir", None)
    assert keep_json("fact", 1, lambda: made.append(1) or (1,)) == [1]
    assert made == [1, 2, 3, 2, 1]
