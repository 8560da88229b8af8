"""Checkpoints: named trees of arrays, and the training progress, in RUN/checkpoints/STEP/.

RUN/checkpoints/1500/ params/ opt_state/ ...   one orbax item per tree, as nested dicts of arrays
                      manifest.json            size and digest of each file, dtype and shape of each leaf,
                                               and the training progress, needed to resume
RUN/checkpoints/average/                       the mean of several checkpoints, in the same layout
"""

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxformer_mt import atomic_folder
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.lora import merge_leaves
from flaxformer_mt.object_store import remote_runs
from flaxformer_mt.parallel.processes import (
    decide_once,
    is_first,
    let_first_conclude,
    process_count,
    process_index,
    wait_for_all,
)
from flaxformer_mt.parameter_trees import (
    Leaves,
    PyTree,
    Specs,
    average_leaves,
    compare_specs,
    copy_to_host,
    flatten_tree,
    is_finite,
    make_like,
    make_specs,
    nest_leaves,
    unflatten_like,
)
from flaxformer_mt.runs import array_files
from flaxformer_mt.runs.checkpoint_index import AVERAGE_NAME, CheckpointIndex, read_progress
from flaxformer_mt.runs.run_directory import IMPORTED_STEP


def write_checkpoint(final: Path, trees: dict[str, Leaves], progress: dict[str, Any]) -> None:
    """Write host arrays to the checkpoint folder `final`, which appears only when it is complete."""
    folder = atomic_folder.begin_folder(final)
    try:
        for name, leaves in trees.items():
            if filled := without_empty(leaves):
                array_files.write_item(folder / name, filled)
        specs = {name: make_specs(leaves) for name, leaves in trees.items()}
        atomic_folder.seal_folder(folder, {"trees": specs, "progress": progress})
        atomic_folder.publish_folder(folder, final)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # a full disk would stay full
        raise


@contextlib.contextmanager
def explain_failed_write(describe: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Convert an OSError of the body, such as a full or read-only disk, into a UserError with a remedy."""
    try:
        yield
    except OSError as error:
        remedy = "free disk space or make the folder writable, and run the command again"
        reasons = [f"a checkpoint could not be written: {error}", remedy, describe()]
        raise UserError("; ".join(filter(None, reasons))) from error


def without_empty(leaves: Leaves) -> Leaves:
    """Remove empty arrays, which orbax does not store; the manifest describes them completely."""
    return {path: leaf for path, leaf in leaves.items() if np.size(leaf)}


class SharedSave:
    def __init__(
        self, owner: "Checkpoints", step: int, trees: dict[str, Leaves], progress: dict[str, Any]
    ) -> None:
        """Copy this process's shards to the host and start to write them; all processes must call this."""
        filled = {name: stored for name, leaves in trees.items() if (stored := without_empty(leaves))}
        specs = {name: make_specs(leaves) for name, leaves in trees.items()}
        self._metadata = {"trees": specs, "progress": progress}

        def begin() -> str:
            with explain_failed_write(owner.describe):
                owner.sweep()
                # A process of an earlier job that has not ended yet must not write into this folder.
                folder = atomic_folder.begin_folder(owner.folder(step))
                for name in filled:
                    (folder / name).mkdir()
                return remote_runs.to_url(folder)

        folder = decide_once(begin)
        self._owner, self._step = owner, step
        self._folder, self._names = remote_runs.to_local(folder), list(filled)
        self._error: Exception | None = None
        self._waits: list[Callable[[], None]] = []
        try:
            for name, leaves in filled.items():
                if folder != str(self._folder):  # the run is in a store, and its copy is our own
                    (self._folder / name).mkdir(parents=True, exist_ok=True)
                self._waits.append(array_files.start_shared_item(self._folder / name, leaves))
        except Exception as error:  # reported by `complete`, since the other processes have begun to write
            self._error = error

    def complete(self) -> None:
        """Wait until the checkpoint is visible; each process must call this method, in a thread."""
        problem = let_first_conclude("save", json.dumps(self._finish_own_shards()), self._conclude)
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error
        if problem:
            raise OSError(problem)

    def _finish_own_shards(self) -> dict[str, Any]:
        try:
            for wait in self._waits:
                wait()
            if self._error is None:
                me = process_index()
                files = atomic_folder.digest_files(
                    self._folder, wanted=lambda name: array_files.is_written_by(name, me)
                )
                if not is_first():
                    remote_runs.send_parts(self._folder)
                return {"files": files}
        except Exception as error:
            self._error = self._error or error
        return {"problem": _describe(self._error)}

    def _conclude(self, texts: list[str]) -> str:
        reports = [json.loads(text) for text in texts]
        for process, report in enumerate(reports):
            if "problem" in report:
                return f"process {process} of {len(reports)}: {report['problem']}"
        try:
            remote_runs.collect_parts(self._folder)
            for name in self._names:
                array_files.finish_shared_item(self._folder / name)
            files = {name: file for report in reports for name, file in report["files"].items()}
            atomic_folder.seal_folder(self._folder, self._metadata, written=files)
            atomic_folder.publish_folder(self._folder, self._owner.folder(self._step))
            self._owner.prune(self._step)
        except Exception as error:
            self._error = error
            return f"process 0 of {len(reports)}: {_describe(error)}"
        return ""


def _describe(error: Exception | None) -> str:
    return str(error) if isinstance(error, OSError | UserError) else f"{type(error).__name__}: {error}"


# Trees for evaluation and translation, which use the first of these that a checkpoint has.
_INFERENCE_TREES = ("ema_params", "params")

_USE_ITS_CONFIG = "use the config that it was trained with, or another run directory"


class Checkpoints(CheckpointIndex):
    """Reads and writes the checkpoints of one run.

    `save` returns once the arrays are on the host, and a thread writes them. The next `save`, `wait` or read
    waits for that thread and re-raises its exception. Only one job may write to a run at a time, while others
    read. If a job has several processes, all of them call `save`, `average` and `wait`. Each process writes
    its shards to a shared folder; the first one makes the checkpoint visible once all have written. If a
    process fails to write, all raise an exception.
    """

    def __init__(self, run_dir: Path, *, keep_last: int = 5, best_metric: str = "bleu") -> None:
        """Keep the `keep_last` newest checkpoints, and also the best one and an imported model.

        `best_metric`: entry of `progress["metrics"]`; higher is better, except for loss and ter.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; it must be at least 1")
        super().__init__(run_dir, best_metric=best_metric)
        # The damaged checkpoints that the last `newest_undamaged` skipped, and their damage; "" if none.
        self.warning = ""
        self._keep_last = keep_last
        self._swept = False
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, step: int, trees: dict[str, PyTree], progress: dict[str, Any]) -> None:
        """Save or replace checkpoint `step`, then delete the checkpoints that need not be kept.

        The leaves of `trees` are arrays of any sharding, or numbers; their buffers may be donated or
        overwritten after this call. `progress` has JSON values.
        """
        self.finish_writing()
        progress = json.loads(json.dumps(progress))  # as it is now, and as it is read
        leaves = {name: flatten_tree(tree) for name, tree in trees.items()}
        start = self._start_shared_save if process_count() > 1 else self._start_save
        write = start(step, leaves, progress)
        self._writer = threading.Thread(target=self._run_writer, args=(write,), name=f"save-{step}")
        self._writer.start()

    def record_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Add scores to a checkpoint that was saved without them; its arrays do not change."""
        self.finish_writing()
        if is_first():
            folder = self.folder(step)
            progress = {**read_progress(folder), "metrics": metrics}
            with explain_failed_write(self.describe):
                metadata = atomic_folder.read_metadata(folder)
                atomic_folder.replace_metadata(folder, {**metadata, "progress": progress})

    def wait(self) -> None:
        """Wait until all processes have written the checkpoint of the last `save` to disk."""
        self.finish_writing()
        wait_for_all("checkpoint")
        remote_runs.refresh(self.directory)  # what another process has written

    def restore(
        self, which: int | str, targets: dict[str, PyTree]
    ) -> tuple[dict[str, PyTree], dict[str, Any]]:
        """Return the trees bit for bit, with the shardings of `targets`, and the training progress.

        `targets` are trees of jax.ShapeDtypeStruct or arrays; other stored trees are skipped. Leaves without
        a sharding are placed on the default device; numpy leaves stay on the host.
        """
        folder = self.resolve(which)
        wanted = {name: make_specs(flatten_tree(target)) for name, target in targets.items()}
        self._check_fit(folder, wanted)
        trees = {}
        for name, target in targets.items():
            leaves = array_files.read_item(folder / name, wanted[name], flatten_tree(target))
            trees[name] = unflatten_like(target, leaves)
        return trees, read_progress(folder)

    def read_specs(self, which: int | str) -> dict[str, Specs]:
        folder = self.resolve(which)
        self.check_undamaged(folder, ())
        return atomic_folder.read_metadata(folder)["trees"]

    def describe_params(self, which: int | str) -> dict[str, jax.ShapeDtypeStruct]:
        """Return dtype and shape of each stored inference parameter; LoRA factors have separate entries."""
        trees = self.read_specs(which)
        stored = next((trees[name] for name in _INFERENCE_TREES if trees.get(name)), {})
        return {path: make_like(spec) for path, spec in stored.items()}

    def restore_params(
        self,
        which: int | str,
        *,
        allow_nonfinite: bool = False,
        sharding_of: Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the inference parameters and the training progress.

        Returns nested dicts of arrays: the moving average if the checkpoint has one, with LoRA factors
        merged. `sharding_of` returns the sharding for a path and a shape; it may differ from the sharding of
        the saved array.
        """
        folder = self.resolve(which)
        name, specs = self._inference_tree(folder)
        if (
            sharding_of is None
            and (stored := array_files.read_stored_arrays(folder / name, specs)) is not None
        ):
            leaves = jax.device_put(merge_leaves(stored))
        else:
            likes = {path: make_like(spec) for path, spec in specs.items()}
            if sharding_of is not None:
                likes = {path: x.update(sharding=sharding_of(path, x.shape)) for path, x in likes.items()}
            leaves = array_files.read_item(folder / name, specs, likes)
        if not allow_nonfinite:
            _check_finite(folder, leaves)
        return nest_leaves(merge_leaves(leaves)), read_progress(folder)

    def average(self, last: int, *, allow_nonfinite: bool = False) -> Path:
        """Average the inference parameters of the newest `last` checkpoints into a checkpoint `average`.

        Step 0, the initial model of an imported run or a run with --init, is not included. The mean is
        computed in float64 and cast back to the dtype; leaves that are not floating-point are those of the
        newest checkpoint.
        """
        self.finish_writing()
        steps = [step for step in self.steps() if step > IMPORTED_STEP]
        if not 1 <= last <= len(steps):
            possible = f"choose 1 to {len(steps)}" if steps else "there are none"
            if len(self.steps()) > len(steps):
                possible += f" after step {IMPORTED_STEP}, the model that training starts from"
            raise UserError(f"cannot average {last} checkpoints: {possible}; {self.describe()}")
        steps = steps[-last:]
        name, specs = self._inference_tree(self.folder(steps[-1]))
        for step in steps:
            self._check_fit(self.folder(step), {name: specs})
        final = self.folder(AVERAGE_NAME)
        if is_first():
            read = array_files.read_item if allow_nonfinite else _read_finite_leaves
            tables = (merge_leaves(read(self.folder(step) / name, specs)) for step in steps)
            progress = {"step": steps[-1], "averaged_steps": steps, "averaged_tree": name}
            trees = {"params": average_leaves(tables)}
            with explain_failed_write(self.describe):
                write_checkpoint(final, trees, progress)
        return final

    def newest_undamaged(self) -> int | None:
        """The newest undamaged step, from which training resumes; None if there is no checkpoint.

        First removes what a killed process left behind, including checkpoints that it would have deleted;
        only the training process may therefore call this method. Sets `warning`, which names newer damaged
        checkpoints.
        """
        self.finish_writing()
        self.sweep()
        step, self.warning = self.find_newest_undamaged()
        if step is not None:
            self.prune(step)
        return step

    def resolve(self, which: int | str) -> Path:
        self.finish_writing()
        return super().resolve(which)

    def finish_writing(self) -> None:
        """Wait until this process has written its part of the last `save`, regardless of other processes."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None:
            with explain_failed_write(self.describe):
                raise error

    def _run_writer(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # re-raised by `finish_writing` in the training thread
            self._error = error

    def _start_save(
        self, step: int, trees: dict[str, Leaves], progress: dict[str, Any]
    ) -> Callable[[], None]:
        copies = {name: copy_to_host(leaves) for name, leaves in trees.items()}

        def write() -> None:
            self.sweep()
            write_checkpoint(self.folder(step), copies, progress)
            self.prune(step)

        return write

    def _start_shared_save(
        self, step: int, trees: dict[str, Leaves], progress: dict[str, Any]
    ) -> Callable[[], None]:
        """Start to write this process's shards; return a function that waits for the checkpoint."""
        shared = SharedSave(self, step, trees, progress)

        def write() -> None:
            try:
                shared.complete()
            except BaseException:
                self._swept = False  # the next save removes what is left
                raise

        return write

    def prune(self, step: int) -> None:
        """Delete the checkpoints that need not be kept, now that checkpoint `step` is visible."""
        for other in self.removable(step, keep_last=self._keep_last):
            atomic_folder.remove_folder(self.folder(other))

    def sweep(self) -> None:
        """Delete, before the first save, what a killed process left behind; only a writer may call this."""
        if not self._swept and is_first():
            atomic_folder.sweep_folders(self.directory)
        self._swept = True

    def _check_fit(self, folder: Path, wanted: dict[str, Specs]) -> None:
        self.check_undamaged(folder, wanted)
        stored = atomic_folder.read_metadata(folder)["trees"]
        what = f"checkpoint {folder.name} of {self.directory}"
        absent = [name for name in wanted if name not in stored]
        if absent:
            raise UserError(
                f"{what} has no {' and no '.join(absent)}, only {', '.join(stored)}; {_USE_ITS_CONFIG}"
            )
        lines = [f"  {name}/{line}" for name in wanted for line in compare_specs(stored[name], wanted[name])]
        if lines:
            raise UserError(
                "\n".join([f"{what} does not match: {len(lines)} arrays differ; {_USE_ITS_CONFIG}", *lines])
            )

    def _inference_tree(self, folder: Path) -> tuple[str, Specs]:
        self.check_undamaged(folder, ())
        stored = atomic_folder.read_metadata(folder)["trees"]
        name = next((name for name in _INFERENCE_TREES if stored.get(name)), None)
        if name is None:
            raise UserError(
                f"checkpoint {folder.name} of {self.directory} has no parameters: params and ema_params are "
                "absent; use another checkpoint"
            )
        self.check_undamaged(folder, [name])
        return name, stored[name]


def _read_finite_leaves(item: Path, specs: Specs) -> Leaves:
    leaves = array_files.read_item(item, specs)
    _check_finite(item.parent, leaves)
    return leaves


def _check_finite(folder: Path, leaves: Leaves) -> None:
    bad = [path for path, leaf in leaves.items() if not is_finite(leaf)]
    if bad:
        raise UserError(
            f"checkpoint {folder.name} of {folder.parent} has NaN or infinite values in {len(bad)} of "
            f"{len(leaves)} arrays of parameters, first in {bad[0]}; use another --checkpoint, or give "
            "--allow_nonfinite to translate, score, evaluate or average with it"
        )
