"""Checkpoints: bits come back, a crash or damage is never silent, the right ones are kept and loaded."""

import asyncio
import errno
import json
import math
import os
import resource
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pytest import raises

from flaxformer_mt import atomic_folder
from flaxformer_mt.errors import UserError
from flaxformer_mt.parallel import processes
from flaxformer_mt.parameter_trees import flatten_tree
from flaxformer_mt.runs import array_files
from flaxformer_mt.runs import checkpoints as checkpoint_module
from flaxformer_mt.runs.checkpoints import Checkpoints, write_checkpoint
from flaxformer_mt.runs.load_run import load_trained, name_checkpoint
from flaxformer_mt.training.resume_position import TrainProgress


def make_params(seed: float = 0.0) -> dict:
    """A small tree with a float32, a bfloat16, a scalar and an empty leaf."""
    return {
        "dense": {
            "kernel": jnp.arange(24, dtype=jnp.float32).reshape(3, 8) / 7 + seed,
            "bias": (jnp.arange(8) / 3 + seed).astype(jnp.bfloat16),
        },
        "scale": jnp.float32(seed),
        "unused": jnp.zeros((0, 5)),
    }


def save_steps(run_dir: Path, scores: dict[int, float | None], **options) -> Checkpoints:
    """Saves a tiny checkpoint at each step, with its score as progress["metrics"]["bleu"]."""
    checkpoints = Checkpoints(run_dir, **options)
    for step, score in scores.items():
        metrics = {} if score is None else {options.get("best_metric", "bleu"): score}
        checkpoints.save(step, {"params": {"w": jnp.full((2,), float(step))}}, {"metrics": metrics})
    checkpoints.wait()
    return checkpoints


def assert_same_bits(left, right) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (a.dtype, np.shape(a)) == (b.dtype, np.shape(b))
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_trees_and_progress_return_bit_for_bit(tmp_path):
    params = make_params(0.25)
    # a NaN with a payload, an infinity, a negative zero and a subnormal: values that a detour would change
    strange = np.array([0x7FC00123, 0x7F800000, 0x80000000, 0x00000001], np.uint32).view(np.float32)
    params["dense"]["kernel"] = params["dense"]["kernel"].at[0, :4].set(strange)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.constant_schedule(1e-3)))
    opt_state = optimizer.update(params, optimizer.init(params), params)[1]
    trees = {"params": params, "opt_state": opt_state, "none": {"a": None, "b": (), "c": optax.EmptyState()}}
    progress = {"epoch": 3, "best": -math.inf, "metrics": {"bleu": 12.5}, "text": "ä\u2028\u0085b"}

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, trees, progress)
    checkpoints.wait()
    restored, restored_progress = Checkpoints(tmp_path).restore("last", jax.eval_shape(lambda: trees))
    assert_same_bits(restored, trees)
    assert restored_progress == progress
    assert any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(restored))
    assert any(leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(restored["opt_state"]))


def test_numpy_targets_stay_on_the_host(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    tree = {"big": np.array([2**40, -1]), "flag": np.array([True, False]), "number": 3}
    checkpoints.save(1, {"data": tree}, {})
    restored, _ = checkpoints.restore(1, {"data": tree})
    assert isinstance(restored["data"]["big"], np.ndarray)
    assert restored["data"]["big"].tolist() == [2**40, -1]
    assert restored["data"]["flag"].tolist() == [True, False]
    assert restored["data"]["number"] == 3


def test_save_takes_a_snapshot(tmp_path, monkeypatch):
    """The writing starts after the caller has overwritten and donated what it saved."""
    go = threading.Event()
    write = checkpoint_module.write_checkpoint

    def write_later(*args):
        assert go.wait(timeout=20)
        write(*args)

    monkeypatch.setattr(checkpoint_module, "write_checkpoint", write_later)
    checkpoints = Checkpoints(tmp_path)
    host, device = np.arange(4.0), jnp.arange(4096.0)
    progress = {"epoch": 1}
    checkpoints.save(1, {"params": {"host": host, "device": device}}, progress)
    host[:] = -1
    progress["epoch"] = 2
    device = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(device)
    device.block_until_ready()
    go.set()
    params, restored_progress = checkpoints.restore_params(1)
    np.testing.assert_array_equal(params["host"], np.arange(4.0))
    np.testing.assert_array_equal(params["device"], np.arange(4096.0))
    assert restored_progress == {"epoch": 1}


def test_restore_params_prefers_the_moving_average_and_needs_no_optimizer(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"opt_state": {"m": jnp.ones(3)}, "params": make_params(1)}, {"n": 1})
    checkpoints.save(2, {"opt_state": {}, "params": make_params(1), "ema_params": make_params(2)}, {"n": 2})
    for step in (1, 2):
        params, progress = checkpoints.restore_params(step)
        assert_same_bits(params, make_params(step))
        assert progress == {"n": step}
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))


def test_keeps_the_last_and_the_best(tmp_path):
    scores = {10: 1.0, 20: 9.0, 30: None, 40: 2.0, 50: math.nan, 60: 3.0}
    checkpoints = save_steps(tmp_path, scores, keep_last=2)
    assert checkpoints.steps() == [20, 50, 60]
    assert (checkpoints.best(), checkpoints.latest()) == (20, 60)
    assert checkpoints.resolve("best").name == "20"
    assert checkpoints.resolve("last").name == "60"
    assert checkpoints.resolve("50") == checkpoints.resolve(50) == tmp_path / "checkpoints" / "50"


def test_what_a_killed_process_would_have_deleted_goes_when_training_resumes(tmp_path):
    """Killed between its last checkpoint and the removal of an older one: nothing is saved afterwards."""
    save_steps(tmp_path, {10: 1.0, 20: 9.0, 30: 2.0, 40: 3.0}, keep_last=4)
    resumed = Checkpoints(tmp_path, keep_last=1)
    assert resumed.newest_undamaged() == 40
    assert resumed.steps() == [20, 40]


def test_lower_loss_is_better_and_the_earliest_of_equals_is_best(tmp_path):
    losses = {1: 3.0, 2: 1.5, 3: 1.5, 4: 2.0}
    assert save_steps(tmp_path / "loss", losses, best_metric="loss").best() == 2
    assert save_steps(tmp_path / "chrf", losses, best_metric="chrf").best() == 1
    assert save_steps(tmp_path / "none", {1: None}).best() is None
    numbers = {1: float("inf"), 2: 1.0, 3: float("nan")}  # what is no finite number is no score
    assert save_steps(tmp_path / "finite", numbers).best() == 2


def test_the_lower_loss_breaks_ties_of_shown_scores(tmp_path):
    """A model that was trained further is not taken for the one it started from because both have no BLEU."""
    scores = {0: (0.0, 4.43), 25: (0.0, 4.30), 50: (0.004, 4.26), 75: (0.0, 4.5)}
    checkpoints, progress = Checkpoints(tmp_path), TrainProgress()
    for step, (bleu, loss) in scores.items():
        progress.step = step
        progress.record_evaluation({"bleu": bleu, "loss": loss}, best_metric="bleu")
        checkpoints.save(step, {"params": {"w": jnp.ones(2)}}, progress.to_dict())
    checkpoints.wait()
    assert checkpoints.best() == progress.best_step == 50
    assert (progress.best_value, progress.evaluations_since_best) == (0.004, 1)
    progress.step = 100
    assert progress.record_evaluation({"bleu": 0.01, "loss": 9.0}, best_metric="bleu")


def test_average_is_the_mean_in_the_type_of_the_parameters_and_is_never_deleted(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        params = {
            "w": jnp.array([1e8 if step == 2 else 3, 0.1 * step], jnp.float32),
            "half": jnp.array([step / 4], jnp.bfloat16),
            "count": jnp.int32(step),
        }
        checkpoints.save(step, {"params": params, "opt_state": {"m": jnp.ones(2)}}, {})
    assert checkpoints.average(3) == tmp_path / "checkpoints" / "average"
    mean, progress = checkpoints.restore_params("average")
    # in float32, 3 + 1e8 + 3 is 1e8, whose third is another float32 than that of the true sum
    assert np.float32(1e8) / 3 != np.float32((1e8 + 6) / 3)
    w = np.array([[3, 1e8, 3], np.float32(0.1) * np.arange(1, 4, dtype=np.float32)])
    np.testing.assert_array_equal(mean["w"], w.mean(axis=1).astype(np.float32))
    assert mean["half"].dtype == jnp.bfloat16 and mean["half"].tolist() == [0.5]
    assert mean["count"].dtype == jnp.int32 and mean["count"] == 3
    assert progress == {"step": 3, "averaged_steps": [1, 2, 3], "averaged_tree": "params"}

    checkpoints.average(1)  # replaces the first
    assert_same_bits(checkpoints.restore_params("average")[0], checkpoints.restore_params(3)[0])
    for step in (4, 5, 6, 7):
        checkpoints.save(step, {"params": {"w": jnp.ones(2)}}, {})
    checkpoints.wait()
    assert checkpoints.steps() == [5, 6, 7]
    assert checkpoints.resolve("average").is_dir()


def test_the_model_that_training_starts_from_is_not_averaged(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step, value in [(0, 100.0), (4, 1.0), (8, 2.0)]:
        checkpoints.save(step, {"params": {"w": jnp.full(2, value)}}, {})
        if step == 0:
            with raises(UserError, match="average 1 checkpoints: there are none after step 0, the"):
                checkpoints.average(1)
    with raises(UserError, match="cannot average 3 checkpoints: choose 1 to 2 after step 0, the"):
        checkpoints.average(3)
    checkpoints.average(2)
    assert checkpoints.restore_params("average")[0]["w"].tolist() == [1.5, 1.5]


def test_parameters_that_are_not_finite_are_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step, bad in [(1, 1.0), (2, np.nan), (3, -np.inf)]:
        half = jnp.array([1.0, bad], jnp.bfloat16)
        checkpoints.save(step, {"params": {"w": jnp.ones(2), "half": half, "count": jnp.int32(1)}}, {})
    checkpoints.restore_params(1)
    for step in (2, 3):
        with raises(UserError, match=f"checkpoint {step} .*NaN or infinite values in 1 of 3 .* in half"):
            checkpoints.restore_params(step)
        params, _ = checkpoints.restore_params(step, allow_nonfinite=True)
        assert not np.isfinite(params["half"].astype(np.float32)).all()
    with raises(UserError, match="checkpoint 2 .*--allow_nonfinite"):
        checkpoints.average(3)
    assert checkpoints.average(3, allow_nonfinite=True).is_dir()


def test_average_of_what_is_not_there(tmp_path):
    with raises(UserError, match="checkpoints: there are none.*train first"):
        Checkpoints(tmp_path).average(2)
    checkpoints = save_steps(tmp_path, {5: 1.0, 6: 1.0})
    for last in (3, 0):
        with raises(UserError, match=f"cannot average {last} checkpoints: choose 1 to 2; .* has 5, 6"):
            checkpoints.average(last)
    checkpoints.save(7, {"params": {"w": jnp.ones(3)}}, {})
    with raises(UserError, match=r"params/w: stored float32\[2\], wanted float32\[3\]"):
        checkpoints.average(2)
    assert not (tmp_path / "checkpoints" / "average").exists()


def test_absent_checkpoints_are_answered_with_those_there_are(tmp_path):
    with raises(UserError, match="no checkpoint last; .*checkpoints has no checkpoints; train first"):
        Checkpoints(tmp_path).resolve("last")
    with raises(UserError, match="no checkpoint 12; .* has no checkpoints"):
        Checkpoints(tmp_path).restore_params(12)
    checkpoints = save_steps(tmp_path, {100: None, 1400: None})
    with raises(UserError, match="no checkpoint 1000; the nearest is 1400; .* has 100, 1400$"):
        checkpoints.restore_params(1000)
    with raises(UserError, match="no best checkpoint: no step has a bleu yet; use last"):
        checkpoints.resolve("best")
    with raises(UserError, match="no averaged checkpoint; the command `average` makes one"):
        checkpoints.resolve("average")
    with raises(UserError, match="'lats' is not best, last, average or a step; did you mean last?"):
        checkpoints.resolve("lats")
    with raises(UserError, match="'-5' is not"):
        checkpoints.resolve(-5)


def damage_file(path: Path, kind: str) -> None:
    content, middle = path.read_bytes(), path.stat().st_size // 2
    if kind == "delete":
        path.unlink()
    elif kind == "truncate":
        path.write_bytes(content[:middle])
    else:
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


@pytest.mark.parametrize("kind", ["truncate", "change", "delete"])
def test_damage_to_any_file_is_named_with_the_last_good_one(tmp_path, kind):
    checkpoints = save_steps(tmp_path, {1: 1.0, 2: 2.0})
    target = {"params": {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}}
    folder = checkpoints.resolve(2)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(files) >= 4
    for path in files:
        content = path.read_bytes()
        damage_file(path, kind)
        name = path.relative_to(folder)
        message = (
            f"checkpoint 2 of .* is damaged: file {name} .*; the newest undamaged step is 1; "
            "use --checkpoint=1"
        )
        with raises(UserError, match=message):
            checkpoints.restore(2, target)
        with raises(UserError, match=message):
            checkpoints.restore_params("last")
        assert checkpoints.newest_undamaged() == 1
        assert f"{path.name} " in checkpoints.warning
        assert checkpoints.warning.endswith("the newest undamaged step is 1")
        path.write_bytes(content)
    assert checkpoints.newest_undamaged() == 2
    assert checkpoints.warning == ""
    checkpoints.restore(2, target)


def test_damage_elsewhere_does_not_keep_parameters_from_being_read(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    trees = {"params": {"w": jnp.ones(2)}, "opt_state": {"m": jnp.ones(2)}}
    checkpoints.save(1, trees, {})
    damage_file(checkpoints.resolve(1) / "opt_state" / "_METADATA", "delete")
    np.testing.assert_array_equal(checkpoints.restore_params(1)[0]["w"], [1, 1])
    with raises(UserError, match="opt_state/_METADATA is missing; no undamaged checkpoint is left"):
        checkpoints.restore(1, trees)


def test_the_best_is_the_one_that_training_chose_whatever_is_damaged(tmp_path):
    """A manifest that is older, damaged or of another step must not choose another best."""
    checkpoints = Checkpoints(tmp_path, keep_last=9)
    for step, score, best in [(1, 9.0, 1), (2, 3.0, 1), (3, 4.0, 1)]:
        progress = {"step": step, "metrics": {"bleu": score}, "best_step": best}
        checkpoints.save(step, {"params": {"w": jnp.full((2,), float(step))}}, progress)
    checkpoints.wait()
    progress = checkpoints.directory / "1" / "manifest.json"
    content = progress.read_bytes()
    for damaged in (content.replace(b"9.0", b"2.0"), content[:9], b"[]", b"[" * 100_000):
        progress.write_bytes(damaged)
        assert Checkpoints(tmp_path).best() == 1
        with raises(UserError, match="checkpoint 1 .* is damaged.*use --checkpoint=3"):
            checkpoints.restore_params("best")
    progress.write_bytes(content)
    progress = checkpoints.directory / "3" / "manifest.json"
    progress.write_bytes(progress.read_bytes().replace(b"4.0", b"9.5"))
    with raises(UserError, match="checkpoint 3 .*the best checkpoint is unknown.*use --checkpoint=2"):
        checkpoints.restore_params("best")
    shutil.rmtree(checkpoints.directory / "3")
    shutil.copytree(checkpoints.directory / "1", checkpoints.directory / "3")  # whole, but of another step
    with raises(UserError, match="checkpoint 3 .* holds the checkpoint of step 1"):
        checkpoints.restore_params(3)
    assert checkpoints.newest_undamaged() == 2


def test_odd_names_among_the_checkpoints(tmp_path):
    """007 is not a step; a file or a link to nowhere that is named as a step is a damaged checkpoint."""
    checkpoints = save_steps(tmp_path, {5: 1.0, 6: 2.0})
    folder = checkpoints.directory
    (folder / "007").mkdir()
    (folder / ("9" * 200)).mkdir()
    (folder / "130").write_text("")
    (folder / "140").symlink_to(folder / "absent")
    (folder / "150" / "manifest.json").mkdir(parents=True)
    assert checkpoints.steps() == [5, 6, 130, 140, 150]
    assert checkpoints.newest_undamaged() == 6
    for step in (130, 140, 150, "last", "best"):
        with raises(UserError, match=r"checkpoint 1[345]0 .* is damaged: .*use --checkpoint=6"):
            checkpoints.restore_params(step)
    with raises(UserError, match="is not best, last, average or a step"):
        checkpoints.restore_params("9" * 5000)
    save_steps(tmp_path, {130: 3.0, 140: 3.0, 150: 3.0}, keep_last=2)
    assert checkpoints.steps() == [130, 140, 150]
    assert checkpoints.newest_undamaged() == 150


def test_newest_good_without_any_good_one(tmp_path):
    assert Checkpoints(tmp_path).newest_undamaged() is None
    checkpoints = save_steps(tmp_path, {1: 1.0, 2: 1.0})
    for step in (1, 2):
        damage_file(checkpoints.resolve(step) / "manifest.json", "truncate")
    with raises(UserError, match="checkpoint 2 .* checkpoint 1 .*no undamaged .* is left: delete"):
        checkpoints.newest_undamaged()


def test_after_falling_back_the_damaged_one_costs_no_good_one(tmp_path):
    checkpoints = save_steps(tmp_path, {100: None, 200: None}, keep_last=1)
    damage_file(checkpoints.resolve(200) / "manifest.json", "delete")
    save_steps(tmp_path, {150: None}, keep_last=1)
    assert checkpoints.steps() == [150, 200]
    assert checkpoints.newest_undamaged() == 150
    save_steps(tmp_path, {200: 7.0}, keep_last=1)
    assert checkpoints.steps() == [200]
    assert checkpoints.newest_undamaged() == 200


def test_a_target_of_another_shape_is_refused_path_by_path(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"params": make_params(), "opt_state": {}}, {})
    target = jax.eval_shape(make_params)
    target["dense"]["kernel"] = jax.ShapeDtypeStruct((3, 16), jnp.float32)
    target["dense"]["bias"] = jax.ShapeDtypeStruct((8,), jnp.float32)
    target["extra"] = jax.ShapeDtypeStruct((2,), jnp.int32)
    del target["scale"]
    with raises(UserError) as caught:
        checkpoints.restore(3, {"params": target})
    head, *lines = str(caught.value).split("\n")
    assert "checkpoint 3 of" in head and "4 arrays differ" in head
    assert sorted(lines) == [
        "  params/dense/bias: stored bfloat16[8], wanted float32[8]",
        "  params/dense/kernel: stored float32[3,8], wanted float32[3,16]",
        "  params/extra: stored nothing, wanted int32[2]",
        "  params/scale: stored float32[], wanted nothing",
    ]
    with raises(UserError, match="has no ema_params, only .*opt_state.*; use the config"):
        checkpoints.restore(3, {"ema_params": jax.eval_shape(make_params)})


def refuse_writes(patch, place: str) -> None:
    """From now on the disk is full, or out of inodes, at one of the places where a checkpoint is written."""

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner, _, name = place.rpartition(".")
    if owner == "storage":
        kind, make = ({"value": ValueError, "runtime": RuntimeError}[name], array_files._make_checkpointer)

        def save(folder, tree):
            raise kind(f"generic::unknown: writing {folder} failed [os_error_code='{errno.ENOSPC}']")

        storage = SimpleNamespace(
            save=save,
            metadata=lambda folder: make().metadata(folder),
            restore=lambda *given, **options: make().restore(*given, **options),
        )
        patch.setattr(array_files, "_make_checkpointer", lambda: storage)
    else:
        patch.setattr({"Path": Path, "os": os, "shutil": shutil}[owner], name, full)


def test_a_full_disk_at_any_write_costs_one_message(tmp_path, monkeypatch, capfd):
    """Inodes have the errno of blocks. Earlier checkpoints stay, and the next save works."""
    checkpoints = save_steps(tmp_path, {1: 1.0, 2: 2.0})
    places = ["Path.mkdir", "os.fsync", "os.replace", "os.rename"]
    storage = ["storage.value", "storage.runtime"]
    writes = {
        lambda: (checkpoints.save(3, {"params": {"w": jnp.ones(2)}}, {}), checkpoints.wait()): [
            *places,
            *storage,
        ],
        lambda: checkpoints.average(2): [*places, *storage],
        lambda: checkpoints.record_metrics(1, {"bleu": 3.0}): ["os.fsync", "os.replace"],
    }
    for write, failing in writes.items():
        for place in failing:
            with monkeypatch.context() as patch:
                refuse_writes(patch, place)
                message = "a checkpoint could not be written: .*No space left.*; free disk space .* has 1, 2"
                with raises(UserError, match=message) as caught:
                    write()
            assert "\n" not in str(caught.value), place
            assert not list((tmp_path / "checkpoints").glob(".writing-*")), place
            # A folder that was renamed to be replaced comes back before the next save, or at the next start.
            checkpoints = Checkpoints(tmp_path)
            assert checkpoints.newest_undamaged() == 2 and checkpoints.steps() == [1, 2], place
            assert not (tmp_path / "checkpoints" / "average").exists()
        write()
        shutil.rmtree(tmp_path / "checkpoints" / "3", ignore_errors=True)
        shutil.rmtree(tmp_path / "checkpoints" / "average", ignore_errors=True)
    assert checkpoints.best() == 1
    assert capfd.readouterr() == ("", "")


def test_writes_that_end_after_a_failed_one_print_nothing(tmp_path, capfd, monkeypatch):
    """A thread of the storage library calls orbax's closed event loop, and Python prints the traceback."""
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    save_steps(tmp_path, {1: 1.0})
    loop = asyncio.new_event_loop()
    loop.close()
    with raises(RuntimeError) as caught:
        loop.call_soon_threadsafe(print)
    late = SimpleNamespace(exc_value=caught.value, exc_traceback=caught.value.__traceback__.tb_next)
    other = SimpleNamespace(exc_value=ValueError("a bug"), exc_traceback=None)
    for unraisable in (late, other):
        sys.unraisablehook(unraisable)
    assert shown == [other]


def test_a_defect_in_the_thread_surfaces_at_the_next_call(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise ZeroDivisionError("a defect")

    checkpoints = save_steps(tmp_path, {1: 1.0})
    monkeypatch.setattr(checkpoint_module.atomic_folder, "seal_folder", fail)
    for call in (checkpoints.wait, checkpoints.newest_undamaged, lambda: checkpoints.resolve(1)):
        checkpoints.save(2, {"params": {"w": jnp.ones(2)}}, {})
        with raises(ZeroDivisionError, match="a defect"):
            call()
        call()


def test_files_are_as_documented(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, {"params": {"w": jnp.ones(2)}, "opt_state": optax.EmptyState()}, {"epoch": 1})
    folder = checkpoints.resolve(5)
    assert folder == checkpoints.directory / "5" == tmp_path / "checkpoints" / "5"
    assert {path.name for path in folder.iterdir()} == {"params", "manifest.json"}
    manifest = json.loads((folder / "manifest.json").read_text())
    trees = {"params": {"w": "float32[2]"}, "opt_state": {}}
    assert manifest["facts"] == {"trees": trees, "progress": {"epoch": 1}}
    assert manifest["files"]["params/_METADATA"]["bytes"] == (folder / "params/_METADATA").stat().st_size


def test_progress_of_earlier_versions_is_in_a_file_of_its_own(tmp_path):
    """It counts among the files that must be whole, and can be given metrics."""
    checkpoints = save_steps(tmp_path, {1: 1.0})
    folder = checkpoints.resolve(1)
    facts = atomic_folder.read_metadata(folder)
    (folder / "progress.json").write_text(json.dumps(facts.pop("progress")))
    (folder / "manifest.json").unlink()
    atomic_folder.seal_folder(folder, facts)
    assert checkpoints.restore_params(1)[1]["metrics"] == {"bleu": 1.0} and checkpoints.best() == 1
    damage_file(folder / "progress.json", "truncate")
    with raises(UserError, match="checkpoint 1 .* is damaged: file progress.json has .* bytes"):
        checkpoints.restore_params(1)


def test_large_items_come_back_bit_for_bit(tmp_path, monkeypatch):
    """Arrays that are written with bounded memory, in place or copied, and of types that JAX lacks.

    Also one that is larger than the buffers, as the embeddings of NLLB are.
    """
    from flaxformer_mt.parameter_trees import make_specs
    from flaxformer_mt.runs import array_files

    monkeypatch.setattr(array_files, "_LARGE", 1)
    monkeypatch.setattr(array_files, "_BUFFERS_GB", 1e-6)
    random = np.random.default_rng(0)
    leaves = (
        {"a/b": random.normal(size=(300, 70)).astype(np.float32)}
        | {"a/c": random.normal(size=7).astype(jnp.bfloat16), "d": random.normal(size=(3, 4))}
        | {"e": np.arange(5, dtype=np.int32), "f": np.asarray(2**40)}
    )
    array_files.write_item(tmp_path / "item", leaves)
    found = array_files.read_item(tmp_path / "item", make_specs(leaves))
    assert found.keys() == leaves.keys()
    for path, leaf in leaves.items():
        assert found[path].dtype == leaf.dtype
        np.testing.assert_array_equal(found[path], leaf)


# ---- load run ----
def test_all_processes_load_the_checkpoint_that_the_first_one_chose(tiny_run, tmp_path, monkeypatch):
    """The newest one when process 0 looked, although training has written another one since; or its error."""
    run, later = tmp_path / "run", tmp_path / "48"
    shutil.copytree(tiny_run, run)
    (run / "checkpoints" / "48").rename(later)
    sent = []
    monkeypatch.setattr(processes, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "exchange", lambda message: [message, sent.append(message) or b"{}"])
    first = load_trained(run, checkpoint="last")
    assert (first.checkpoint, first.progress["step"]) == ("last", 32)
    with pytest.raises(UserError, match="there is no checkpoint 48; the nearest is 32"):
        load_trained(run, checkpoint="48")
    later.rename(run / "checkpoints" / "48")
    assert load_trained(run, checkpoint="last").progress["step"] == 48
    monkeypatch.setattr(processes, "is_first", lambda: False)
    answers = iter(sent)
    monkeypatch.setattr(processes, "exchange", lambda message: [next(answers), message])
    other = load_trained(run, checkpoint="last")
    assert (other.checkpoint, other.progress["step"]) == ("last", 32)
    with pytest.raises(UserError, match="there is no checkpoint 48; the nearest is 32"):
        load_trained(run, checkpoint="48")


def test_the_model_that_training_started_from_is_not_taken_in_silence(tiny_run, tmp_path):
    """Step 0, whose BLEU no later checkpoint has reached, and the trained run: one line, and what to do."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    trained = load_trained(tiny_run, checkpoint="last")
    write_checkpoint(
        run / "checkpoints" / "0",
        {"params": flatten_tree(trained.params)},
        {"step": 0, "metrics": {"bleu": 100.0, "loss": 0.1}},
    )
    told = []
    found = load_trained(run, warn=told.append)
    assert (found.checkpoint, found.progress["step"]) == ("best", 0)
    (line,) = told
    assert line == (
        f"the best checkpoint of {run} is step 0, the model that training started from; --checkpoint=last "
        "takes step 48"
    )
    for named in ("last", "0", "48"):
        load_trained(run, checkpoint=named, warn=told.append)
    load_trained(tiny_run, warn=told.append)
    assert len(told) == 1
    for folder in (run / "checkpoints").iterdir():
        shutil.rmtree(folder) if folder.name != "0" else None
    load_trained(run, warn=told.append)  # an import that was not trained
    assert len(told) == 1


def test_a_checkpoint_is_named_with_its_step():
    assert name_checkpoint("best", 1250) == "best (step 1,250)"
    assert name_checkpoint("1250", 1250) == "1250" and name_checkpoint("best", None) == "best"


def test_a_full_disk_is_told_once_and_costs_nothing_else(tmp_path, capfd):
    checkpoints = save_steps(tmp_path, {1: 1.0})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        checkpoints.save(2, {"params": {"w": np.random.default_rng(0).random(50_000)}}, {})
        with raises(UserError, match="could not be written: .*File too large.*free disk .* has 1 "):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert checkpoints.steps() == [1]
    save_steps(tmp_path, {2: 1.0})
    assert checkpoints.newest_undamaged() == 2
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1", "2"}
    assert capfd.readouterr() == ("", "")
