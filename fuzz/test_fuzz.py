"""Damaged files and senseless values: one message of the user's, or the same result; never a traceback.

Seeds are fixed. In the usual test session a few inputs of each kind run in the test's own process. With
FLAXFORMER_MT_FUZZ=100 there are thousands, each in a process with limits of time and memory, and a hundred
real kills; tests/README.md says how to run that, and FLAXFORMER_MT_FUZZ_LOG=FILE collects all outcomes.
"""

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import isolation
import pytest
from damage import DAMAGES, SIZE, damage_file, draw_for, mutate
from foreign_models import MODELS, TENSORS, make_foreign_model
from isolation import LONGEST, MOST_MEMORY, Server, open_server
from kills import MOMENTS, OF_PREPARATION, OF_TRAINING, leftovers
from probes import attempt
from tiny_experiment import change, mark_slow, quick_environment

from flaxformer_mt.config import Config
from flaxformer_mt.config.files import save_config, to_dict
from flaxformer_mt.vocab import load_vocabs

LARGE = SIZE > 1
# Read by the same code as others.
SIMILAR = ("torch-nn", "handbuilt", "kokoyi", "decoder-only", "hf-pre-norm")
large_only = pytest.mark.skipif(not LARGE, reason="FLAXFORMER_MT_FUZZ=100 runs it")


def numbers(small: int, large: int) -> range:
    """The inputs of this session: so many in the usual one, so many with FLAXFORMER_MT_FUZZ=100."""
    return range(large * SIZE // 100 if LARGE else small)


def log(kind: str, outcomes: Sequence[dict[str, Any]], **facts: Any) -> None:
    if path := os.environ.get("FLAXFORMER_MT_FUZZ_LOG"):
        with Path(path).open("a", encoding="utf-8") as file:
            for outcome in outcomes:
                file.write(json.dumps({"of": kind, **outcome}) + "\n")
            counts = Counter(outcome["kind"] for outcome in outcomes)
            file.write(json.dumps({"summary": kind, "inputs": len(outcomes), **counts, **facts}) + "\n")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """In the large size, the server that forks a process for every few inputs; None in the small one."""
    if not LARGE:
        yield None
        return
    cache = str(tmp_path_factory.mktemp("compiled"))
    with open_server(isolation.HEAVY, **quick_environment(FLAXFORMER_MT_CACHE=cache)) as running:
        yield running


def try_all(
    server: Server | None, probe: str, which: range, settings: dict[str, Any], *, name: str = ""
) -> list[dict[str, Any]]:
    """The outcomes of these inputs; each is a result, equal to that of the undamaged input, or refused."""
    name = name or probe
    if server is None:
        outcomes = [attempt(probe, number, settings) for number in which]
    else:
        (whole,) = server.attempt_all(probe, [-1], settings, normal=0) if "scratch" in settings else [None]
        normal = whole or server.attempt_all(probe, [0], settings, normal=0)[0]
        assert normal["kind"] != "killed", normal
        outcomes = server.attempt_all(probe, which, settings, normal=normal["virtual"])
        peak = max(outcome["memory"] for outcome in outcomes)
        slowest = max(outcome["seconds"] for outcome in outcomes)
        log(name, outcomes, slowest=slowest, peak=peak, normal=normal["memory"])
        assert peak < normal["memory"] + MOST_MEMORY and slowest < LONGEST, (peak, slowest)
    bad = [outcome for outcome in outcomes if outcome["kind"] not in ("result", "refused")]
    assert not bad, describe(bad)
    return outcomes


def describe(outcomes: list[dict[str, Any]]) -> str:
    return f"{len(outcomes)}:\n" + "\n".join(
        f"{o['number']}: {o['what'][:300]}: {o['kind']} {str(o['value'])[-1000:]}" for o in outcomes[:6]
    )


def check_same(outcomes: list[dict[str, Any]], expected: Any) -> None:
    """All results are those of the undamaged input.

    Whether any input is refused is asked of inputs that must be: of few inputs chance may choose only files
    that nothing reads, since the names of arrays' files are random.
    """
    other = [o for o in outcomes if o["kind"] == "result" and o["value"] != expected["value"]]
    assert expected["kind"] == "result", expected
    assert not other, describe(other)


def undamaged(server: Server | None, probe: str, settings: dict[str, Any]) -> dict[str, Any]:
    if server is None:
        return attempt(probe, -1, settings)
    return server.attempt_all(probe, [-1], settings, normal=0)[0]


def test_damage_to_any_file_of_a_run(server, tiny_run, tmp_path):
    settings = {"run": str(tiny_run), "scratch": str(tmp_path), "seed": "runs"}
    expected = undamaged(server, "load_run", settings)
    check_same(try_all(server, "load_run", numbers(20, 700), settings), expected)
    config = try_all(server, "load_run", range(2), settings | {"only": "config.json"})
    assert [outcome["kind"] for outcome in config] == ["refused"] * 2, describe(config)


def test_runs_that_another_program_has_sealed(server, tiny_run, tmp_path):
    settings = {"run": str(tiny_run), "scratch": str(tmp_path)}
    outcomes = try_all(server, "load_sealed", numbers(16, 400), settings)
    assert sum(outcome["kind"] == "refused" for outcome in outcomes) > len(outcomes) // 4


COMMANDS = {
    "train": (40, ["train", "--run={run}"]),
    "translate": (40, ["translate", "--run={run}", "--input={text}/test.xx"]),
    "score": (20, ["score", "--run={run}", "--source={text}/test.xx", "--target={text}/test.yy"]),
    "evaluate": (20, ["evaluate", "--run={run}"]), "average": (20, ["average", "--run={run}", "--last=2"]),
    "export": (20, ["export", "--run={run}", "--format=torch", "--output={output}"]),
    "show": (20, ["show", "--run={run}"]), "plot": (20, ["plot", "--run={run}", "--output={output}"]),
}  # fmt: skip


@large_only
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_on_damaged_runs(server, tiny_run, tiny_text, tmp_path, name):
    count, flags = COMMANDS[name]
    flags = [flag.replace("{text}", str(tiny_text)) for flag in flags]
    settings = {"run": str(tiny_run), "scratch": str(tmp_path), "seed": f"command {name}", "flags": flags}
    expected = undamaged(server, "command", settings)
    check_same(try_all(server, "command", numbers(0, count), settings, name=name), expected)
    (config,) = try_all(server, "command", range(1), settings | {"only": "config.json"}, name=name)
    assert config["kind"] == "refused", describe([config])


@pytest.mark.usefixtures("tiny_run")  # whose training fills the cache
def test_damage_to_any_file_of_the_cache(server, tiny_config, tmp_path):
    whole, cache, config = tmp_path / "whole", tmp_path / "cache", tmp_path / "config.json"
    shutil.copytree(tiny_config.data.cache_dir, whole)
    shutil.rmtree(whole / "compiled", ignore_errors=True)  # JAX's own, outside of what a run chooses
    save_config(change(tiny_config, data={"cache_dir": str(cache)}), config)
    settings = {"whole": whole, "cache": cache, "config": config, "scratch": tmp_path}
    settings = {name: str(path) for name, path in settings.items()} | {"seed": "cache"}
    expected = undamaged(server, "use_damaged_cache", settings)
    outcomes = try_all(server, "use_damaged_cache", numbers(10, 300), settings)
    check_same(outcomes, expected)


def test_mutated_configs(server, tmp_path):
    outcomes = try_all(server, "read_mutated_config", numbers(200, 600), {"folder": str(tmp_path)})
    assert sum(outcome["kind"] == "result" for outcome in outcomes) > 2


def test_mutated_flags(server):
    try_all(server, "parse_mutated_flags", numbers(20, 600), {})


@pytest.mark.parametrize("name", mark_slow(MODELS, *SIMILAR))
def test_damaged_foreign_models(server, tiny_config, tiny_run, tmp_path, name):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = make_foreign_model(name, tiny_config, load_vocabs(tiny_run / "vocab"), tmp_path)
    settings = {"format": name, "folder": str(folder), "scratch": str(tmp_path)}
    if server is not None:
        assert undamaged(server, "import_damaged", settings)["kind"] == "result"
    try_all(server, "import_damaged", numbers(4, 100), settings, name=f"import {name}")


def test_damage_is_damage(tmp_path):
    kinds = set()
    for seed in range(400):
        path = tmp_path / str(seed) / "file"
        path.parent.mkdir()
        path.write_bytes(b"0123456789" * 20)
        kinds.add(damage_file(path, draw_for("x", seed), harm=tmp_path / "HARM"))
    assert kinds == set(DAMAGES) and len(TENSORS) > 20
    assert mutate(to_dict(Config()), draw_for("x", 1)) == mutate(to_dict(Config()), draw_for("x", 1))
    with pytest.raises(OSError, match="Is a directory"):
        path.write_bytes(b"") if path.is_dir() else (tmp_path).write_bytes(b"")


@large_only
def test_the_isolation_notices_what_it_is_for(monkeypatch):
    """Tracebacks, crashes, hangs and memory, each named with its input; the inputs after them run."""
    with open_server() as server:
        outcomes = server.attempt_all("crash", range(6), {}, normal=1 << 30)
    kinds = [(outcome["kind"], outcome["number"]) for outcome in outcomes]
    bad = {1: "bug", 2: "killed", 3: "killed", 4: "bug"}
    assert kinds == [(bad.get(number, "result"), number) for number in range(6)]
    assert outcomes[3]["value"] == "SIGPROF"


class Killer:
    """Acts on one run and one cache in processes of the server, which are killed where the caller says."""

    def __init__(self, server: Server, config: Config, folder: Path) -> None:
        self.cache, self.run = folder / "cache", folder / "run"
        self._server, self._config = server, folder / "config.json"
        folder.mkdir(parents=True)
        save_config(change(config, data={"cache_dir": str(self.cache)}), self._config)
        self.kills: Counter[str] = Counter()

    def act(self, action: str, moment: str = "", at: int = -1, delay: float = 0.0) -> Any:
        """What the action leaves, and the changes of the disk in the moment; None if it was killed."""
        answer = self._server.run(
            {"kill": {"action": action, "config": str(self._config), "run": str(self.run)}
             | {"moment": moment, "at": at, "delay": delay}}
        )[0]  # fmt: skip
        if answer["ended"]:
            assert answer["ended"] == signal.SIGKILL.name, (moment, at, answer)
            self.kills[moment] += 1
            return None
        assert "error" not in answer["answer"], (moment, at, answer["answer"]["error"])
        return answer["answer"]

    def kill(self, action: str, moment: str, at: int, delay: float = 0.0) -> None:
        """Kills the action at a change inside the moment, or at an earlier one if there are not as many.

        An action that came to its end, because less was left to do, is undone and begun anew.
        """
        while self.act(action, moment, at, delay) is not None:
            if moment in OF_PREPARATION and moment != "the run's config":
                shutil.rmtree(self.cache)
            shutil.rmtree(self.run, ignore_errors=True)
            if not at:
                return
            at //= 2


def test_preparations_killed_at_any_moment_are_repeated_alike(tiny_config, tmp_path):
    imports = ("flaxformer_mt.data.prepare", "flaxformer_mt.corpus.reader")
    with open_server(imports, **quick_environment()) as server:
        expected = Killer(server, tiny_config, tmp_path / "undisturbed").act("prepare")["left"]
        kills: Counter[str] = Counter()
        for number in numbers(1, 20):
            killer, draw = Killer(server, tiny_config, tmp_path / str(number)), draw_for("kills", number)
            for moment in OF_PREPARATION:
                killer.kill("prepare", moment, draw.randrange(12))
            assert killer.act("prepare")["left"] == expected, number
            assert not leftovers(killer.cache), number
            assert killer.kills.total() >= 4, killer.kills
            kills += killer.kills
            shutil.rmtree(tmp_path / str(number))
        log("kills of preparations", [], kills=kills)


@large_only
def test_training_killed_at_any_moment_ends_alike(server, tiny_config, tmp_path):
    config = change(
        tiny_config,
        train={"steps": 20, "checkpoint_every": 2, "evaluate_every": 10, "average_last": 2,
               "keep_checkpoints": 2, "log_every": 5}, search={"method": "greedy", "beam_size": 1},
    )  # fmt: skip
    undisturbed = Killer(server, config, tmp_path / "undisturbed").act("train")
    expected, changes = undisturbed["left"], undisturbed["changes"]
    assert all(changes.values()), changes
    kills: Counter[str] = Counter()
    for number in numbers(0, 5):
        killer, draw = Killer(server, config, tmp_path / f"{number}"), draw_for("training", number)
        for moment in (*OF_PREPARATION, *OF_TRAINING):
            repeated = moment in OF_TRAINING and changes[moment] > 60
            at = draw.randrange(max(1, changes[moment] // (6 if repeated else 1)))
            killer.kill("train", moment, at, draw.choice([0.0, 0.0, 0.001, 0.004]))
        assert killer.act("train")["left"] == expected, (number, killer.kills)
        assert not leftovers(killer.cache), number
        kills += killer.kills
        shutil.rmtree(tmp_path / str(number))
    log("kills", [], changes=changes, kills=kills)
    assert kills.total() >= 40 * SIZE // 100 and set(kills) == set(MOMENTS), kills
