"""Compiled programs: found again by equal facts, and never used when damaged."""

import os

import jax
import numpy as np
import pytest

from flaxformer_mt.config.files import is_private
from flaxformer_mt.errors import FlaxformerWarning
from flaxformer_mt.parallel import compilation
from flaxformer_mt.parallel.compilation import keep_json, lower_kept

ARGUMENTS = ({"weights": np.arange(3.0)}, np.arange(3, dtype=np.int32))
_SHORTEST = "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture
def folder(tmp_path):
    # Nothing goes into JAX's own cache: a program that comes from there cannot be kept on a CPU.
    changes = {"jax_compilation_cache_dir": str(tmp_path), _SHORTEST: float("inf")}
    before = {name: jax.config.values[name] for name in changes}
    for name, value in changes.items():
        jax.config.update(name, value)
    yield tmp_path / "kept"
    for name, value in before.items():
        jax.config.update(name, value)


def make(traced):
    def function(params, x):
        traced.append(1)
        return params["weights"] + x, x.sum()

    return jax.jit(function)


def run(facts, traced) -> list:
    devices = jax.local_devices()[:1]
    found = lower_kept(make(traced), ARGUMENTS, facts, devices)()(*ARGUMENTS)
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


def test_damaged_programs_are_replaced(folder):
    traced = []
    run("a", traced)
    (kept,) = folder.iterdir()
    path = kept / "program"
    whole = path.read_bytes()
    damages = [lambda: path.write_bytes(whole[:-1]), lambda: os.mkfifo(path)]
    damages += [lambda: path.symlink_to("/dev/zero")]
    for number, damage in enumerate(damages):
        path.unlink()
        damage()
        with pytest.warns(FlaxformerWarning, match=f"{kept} is damaged: file program .*; it is built again"):
            assert run("a", traced) == [[0.0, 2.0, 4.0], 3]
        assert len(traced) == number + 2
    folder.chmod(0o500)
    try:
        assert run("b", traced) == [[0.0, 2.0, 4.0], 3]  # a folder that cannot be written
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize("shared", ["compiled", "kept"])
def test_programs_that_others_can_have_written_are_not_loaded(folder, shared, request):
    """A kept program is a pickle, so whoever writes to its folder runs code as its reader."""
    request.addfinalizer(is_private.cache_clear)
    traced, place = [], folder if shared == "kept" else folder.parent
    run("a", traced)
    run("a", traced)
    assert len(traced) == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    place.chmod(0o775)  # as an umask of 002 has made it
    is_private.cache_clear()
    message = rf"{place} is not a folder of user \d+ that nobody else can write to: .*chmod -R go-w {place}`"
    with pytest.warns(FlaxformerWarning, match=message) as caught:
        run("a", traced)
        run("a", traced)
    assert len(traced) == 3 and len(caught) == 1, "neither loaded nor kept, with one warning"
    place.chmod(0o755)  # as earlier versions have made it
    is_private.cache_clear()
    run("a", traced)
    assert len(traced) == 3
    if os.getuid() == 0:
        os.chown(place, 65534, -1)
        is_private.cache_clear()
        with pytest.warns(FlaxformerWarning, match="is not a folder of user 0"):
            run("a", traced)
        assert len(traced) == 4


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
