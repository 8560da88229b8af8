"""Profiling: a trace holds the updates that were asked for, and ends when the run does."""

import gzip
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from flaxformer_mt.training.profiling import WARM_UP, Profile


@jax.jit
def update(x):
    return x @ x / 8


def train(profile: Profile, first: int, last: int) -> None:
    x = jnp.ones((8, 8))
    for step in range(first, last + 1):
        with jax.profiler.StepTraceAnnotation("update", step_num=step):
            x = update(x)
        profile(step, x)


def read_updates(trace: Path) -> list[int]:
    (planes,) = trace.glob("*.xplane.pb")
    (events,) = trace.glob("*.trace.json.gz")
    assert events.stat().st_size > 0
    assert any(list(plane.lines) for plane in jax.profiler.ProfileData.from_file(str(planes)).planes)
    with gzip.open(trace / "perfetto_trace.json.gz") as file:
        found = json.load(file)["traceEvents"]
    steps = [event["args"]["step_num"] for event in found if event.get("name") == "update"]
    return sorted(int(step) for step in steps)


def told_trace(said: list[str], first: int, last: int) -> Path:
    (line,) = said
    match = re.match(rf"profile of steps {first} to {last}: (\S+); TensorBoard ", line)
    assert match, line
    return Path(match[1])


def test_a_trace_holds_the_updates_after_the_first_ones(tmp_path):
    """Of 40 updates from number 101 on, the first WARM_UP are left out, for programs are compiled in them."""
    said: list[str] = []
    with Profile(tmp_path / "profile", 3, (100, 140), say=said.append) as profile:
        train(profile, 101, 104 + WARM_UP)
        trace = told_trace(said, 101 + WARM_UP, 103 + WARM_UP)
    assert trace.is_relative_to(tmp_path / "profile")
    assert read_updates(trace) == [step + WARM_UP for step in (101, 102, 103)]
    assert len(said) == 1


@pytest.mark.parametrize(("remaining", "wanted", "first"), [(2, 5, 1), (4, 3, 2), (1, 1, 1)])
def test_in_a_short_run_it_is_the_last_updates(tmp_path, remaining, wanted, first):
    said: list[str] = []
    with Profile(tmp_path, wanted, (0, remaining), say=said.append) as profile:
        train(profile, 1, remaining)
    assert read_updates(told_trace(said, first, remaining)) == list(range(first, remaining + 1))


def test_what_ends_training_ends_the_trace(tmp_path):
    said: list[str] = []
    with pytest.raises(ZeroDivisionError), Profile(tmp_path, 3, (0, 3), say=said.append) as profile:
        train(profile, 1, 2)
        _ = 1 / 0
    assert read_updates(told_trace(said, 1, 2)) == [1, 2]
    with Profile(tmp_path / "next", 1, (0, 1), say=said.append) as profile:  # JAX records one at a time
        train(profile, 1, 1)
    assert len(said) == 2


def test_without_a_trace_it_says_so_only_if_one_was_wanted(tmp_path):
    said: list[str] = []
    with Profile(tmp_path, 0, (0, 9), say=said.append) as profile:
        train(profile, 1, 9)
    assert said == []
    with Profile(tmp_path, 2, (0, 100), say=said.append) as profile:
        train(profile, 1, 3)
    assert said == ["no profile: training ended before the first of the 2 steps to record"]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), Profile(tmp_path, 3, (0, 3), say=said.append):
        _ = 1 / 0  # in the first update that is recorded
    assert said[1:] == ["no profile: training ended before the first of the 3 steps to record"]
