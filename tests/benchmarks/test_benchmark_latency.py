"""The benchmark of latency: what is measured cold and warm, and which sentences the API translates."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

import flaxformer_mt

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "latency.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_latency", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeTranslator:
    """Records what it translates; its clock makes the sentence of call n take n ms."""

    def __init__(self, clock):
        self._clock, self.lines = clock, []

    def warm_up(self):
        self._clock.now += 2.0
        return 9

    def __call__(self, lines):
        self.lines += lines
        self._clock.now += len(self.lines) / 1000


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_api_translates_the_first_sentence_and_others_of_each_length(benchmark, monkeypatch):
    clock = Clock()
    fake = FakeTranslator(clock)

    class Loader:
        @staticmethod
        def load(run):
            assert run == "RUN"
            clock.now += 0.5
            return fake

    monkeypatch.setattr(flaxformer_mt, "Translator", Loader, raising=False)
    monkeypatch.setattr(benchmark.time, "perf_counter", clock)
    found = benchmark.serve_api("RUN", "a b c")
    assert {name: found[name] for name in ("import", "load", "warm_up", "programs")} == {
        "import": 0.0,
        "load": 0.5,
        "warm_up": 2.0,
        "programs": 9,
    }
    assert found["first_ms"] == pytest.approx(1) and fake.lines[0] == "a b c"
    assert fake.lines[1:7] == ["a", "b", "c", "a b", "b c", "c a"]
    cut = 1 + 3 * len(benchmark.LENGTHS)
    assert [len(line.split()) for line in fake.lines[1:cut]] == [n for n in benchmark.LENGTHS for _ in "abc"]
    made_up = fake.lines[cut:]
    assert len(made_up) == benchmark.MADE_UP and len(set(made_up)) > benchmark.MADE_UP * 0.9
    assert {len(line.split()) for line in made_up} == set(range(1, benchmark.MADE_UP_WORDS + 1))
    assert not {"a", "b", "c"} & {word for line in made_up for word in line.split()}
    assert list(found["later"]) == [
        *(f"{number} words" for number in benchmark.LENGTHS),
        f"up to {benchmark.MADE_UP_WORDS} made-up words",
    ]
    # The second to the fourth call take 2, 3 and 4 ms.
    assert found["later"]["1 words"] == {"median_ms": pytest.approx(3), "max_ms": pytest.approx(4)}


def test_cold_has_an_empty_cache_of_its_own_and_warm_is_the_median_of_rounds(benchmark, monkeypatch):
    seen = []

    def system(name):
        def run(options, cache):
            seen.append((name, cache.name))
            return {"seconds": float(len(seen)), "later": {"max_ms": 10.0 * len(seen)}}

        return run

    monkeypatch.setattr(benchmark, "SYSTEMS", {name: system(name) for name in ("command", "api")})
    options = benchmark.parse_options(["--run=RUN", "--rounds=3"])
    found = benchmark.measure(options)
    assert seen == [("command", "command"), ("api", "api")] * 4
    assert found["api"]["cold"] == {"seconds": 2.0, "later": {"max_ms": 20.0}}
    assert found["command"]["warm"] == {"seconds": 5.0, "later": {"max_ms": 50.0}}


def test_processes_have_the_cache_and_this_package(benchmark, monkeypatch):
    ran = {}

    def run(command, **options):
        ran.update(options, command=command)
        return subprocess.CompletedProcess(command, 0, stdout='{"first_ms": 3}\n')

    monkeypatch.setattr(benchmark.subprocess, "run", run)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    options = benchmark.parse_options(["--run=RUN", "--sentence=a b"])
    assert benchmark.measure_api(options, Path("/cache")) == {"first_ms": 3}
    assert ran["command"][1:] == [str(FILE), "--run=RUN", "--sentence=a b", "--worker"]
    environment = ran["env"]
    assert environment["FLAXFORMER_MT_CACHE"] == "/cache" and "JAX_COMPILATION_CACHE_DIR" not in environment
    assert environment["PYTHONPATH"].split(":")[0] == str(FILE.parents[1])
    assert benchmark.measure_command(options, Path("/cache"))["seconds"] >= 0
    assert (ran["command"][2:4], ran["input"]) == (["flaxformer_mt", "translate"], "a b")
