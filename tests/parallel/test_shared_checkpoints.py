"""Checkpoints that two processes write together: on any layout, whoever is killed, whatever is damaged."""

import itertools
import signal
from pathlib import Path

import pytest
from failing_store import close_copies, move_to_machine
from forked_job import (
    ANY,
    MOMENTS,
    SHARED,
    check_params,
    check_state,
    save_params,
    save_state,
)
from test_parallel import LAYOUTS

from flaxformer_mt import atomic_folder
from flaxformer_mt.object_store.remote_runs import open_copy, publish
from flaxformer_mt.runs.checkpoints import Checkpoints

# Moments of jobs whose processes share an object store only.
IN_STORE = {"send": 1, "in the store": 0}


def save_alone(run: Path, layout: str, step: int) -> None:
    checkpoints = Checkpoints(run)
    save_state(checkpoints, layout, step)
    checkpoints.wait()


def test_checkpoints_move_between_layouts_of_one_and_two_processes(jobs, tmp_path):
    """Six layouts of one process and five of two, each onto each, bit for bit."""
    save_params(tmp_path, "one", LAYOUTS)
    jobs.run("move", folder=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == len(LAYOUTS) + len(SHARED) == 11
    for source in SHARED:
        folder = tmp_path / f"two {source}" / "checkpoints" / "7"
        assert not list(folder.parent.glob(".*")) and not atomic_folder.find_damage(folder)
        for layout in LAYOUTS:
            check_params(tmp_path / f"two {source}", layout)
        written = [sum(f.stat().st_size for f in folder.glob(f"*/ocdbt.process_{i}/d/*")) for i in range(2)]
        # Not halves: which of them stores the small arrays depends on the moment.
        assert min(written) > 0.1 * sum(written), f"each process writes its share: {source} {written}"


def test_processes_resume_from_the_step_that_process_0_has_chosen(jobs, tmp_path):
    """Whichever of them sees the newest checkpoint damaged."""
    for step in (1, 2):
        save_alone(tmp_path, "fsdp 8", step)
    for printed in jobs.run("see_damage", run=str(tmp_path), by=0):
        assert printed == "step 1\n"
    for printed in jobs.run("see_damage", 2, 2, run=str(tmp_path), by=1):
        assert printed.count("\n") == 1 and printed.startswith(
            "error: process 1 of 2 cannot read checkpoint 2, from which process 0 resumes training: "
            f"checkpoint 2 of {tmp_path / 'checkpoints'} is damaged: file x is missing; "
        )


def test_a_full_disk_of_one_process_is_one_message_of_all(jobs, tmp_path):
    for printed in jobs.run("run_out_of_space", run=str(tmp_path)):
        for line, victim in zip(printed.splitlines(), (0, 1), strict=True):
            assert line.startswith(
                f"step {2 + victim}: a checkpoint could not be written: process {victim} of 2: "
            )
            assert "; free disk space" in line and line.endswith(" has 1")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "4"]
    assert check_state(tmp_path, "fsdp 8") == 4


@pytest.mark.parametrize(
    "killed",
    [
        [(0, "shards"), (0, "seal"), (1, "reported")],
        pytest.param(
            [(0, moment) for moment in MOMENTS if moment not in (*IN_STORE, "shards", "seal")]
            + [(1, "shards")],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["some", "others"],
)
def test_killed_processes_lose_nothing(jobs, tmp_path, killed):
    """One run, in which each process is killed at the moments in which it can be."""
    run = tmp_path / "run"
    save_alone(run, "one", 1)
    newest = 1
    for victim, moment in killed:
        # JAX ends a process whose coordinator has died; the other way round it takes half a minute.
        statuses = [ANY, ANY]
        statuses[victim] = -signal.SIGALRM if moment == "reported" else -signal.SIGKILL
        jobs.run("fill", *statuses, run=str(run), steps=newest + 9, victim=victim, moment=moment)
        before, newest = newest, Checkpoints(run).newest_undamaged()
        published = moment in ("removal", "reported")
        assert newest == before + 1 + (moment == "removal") or (published and newest == before + 2), moment
        assert check_state(run, "one") == newest
    jobs.run("fill", run=str(run), steps=newest + 1, victim=-1, moment="")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [str(newest), str(newest + 1)]
    assert check_state(run, "pmap 8") == newest + 1


def test_processes_that_share_only_an_object_store_lose_nothing(jobs, tmp_path, monkeypatch):
    """Two machines, new ones after each kill; a third one reads what is in the store."""
    url, machines = f"file://{tmp_path}/bucket/x", map(str, itertools.count())

    def read() -> Path:
        move_to_machine(monkeypatch, tmp_path / next(machines))
        return open_copy(url)

    run = read()
    run.joinpath("config.json").write_text("{}", encoding="utf-8")
    publish(run)
    save_alone(run, "one", 1)
    newest = 1
    for moment, victim in IN_STORE.items():
        statuses = [ANY, ANY]
        statuses[victim] = -signal.SIGKILL
        caches = str(tmp_path / next(machines))
        jobs.run(
            *("fill_store", *statuses), url=url, caches=caches, steps=newest + 9, victim=victim, moment=moment
        )
        before, newest = newest, Checkpoints(read()).newest_undamaged()
        assert newest == before + 1 + (moment == "in the store"), moment
        assert check_state(read(), "one") == newest
    jobs.run("fill_store", url=url, caches=str(tmp_path / "end"), steps=newest + 1, victim=-1, moment="")
    assert check_state(run := read(), "pmap 8") == newest + 1
    folder = run / "checkpoints" / str(newest + 1)
    written = [sum(f.stat().st_size for f in folder.glob(f"*/ocdbt.process_{i}/d/*")) for i in range(2)]
    assert min(written) > 0.2 * sum(written), "each process writes its share"
    received = list((tmp_path / "end" / "1").rglob(f"checkpoints/{newest + 1}/*/manifest.ocdbt"))
    assert not received, "process 1 fetches nothing of what it has helped to write"
    stored = {path.name for path in (tmp_path / "bucket" / "x" / "checkpoints").glob("*/manifest.json")}
    assert stored and not [p for p in (tmp_path / "bucket").rglob(".writing-*/*") if p.is_file()]
    close_copies()
