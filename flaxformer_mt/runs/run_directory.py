"""The run directory with the files of one experiment, and checks whether a config may resume it.

RUN/ config.json · vocab/ · checkpoints/STEP/ · metrics.jsonl · tensorboard/ · translations/ · report.json
     target_lengths.json · history.jsonl if the config has changed · profile/ if a profile was requested
"""

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from flaxformer_mt import atomic_folder
from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.config import Config
from flaxformer_mt.config.field_values import LARGEST_INT, MayChange, find_marks
from flaxformer_mt.config.files import compare_configs, flatten, read_config, read_json_object, save_config
from flaxformer_mt.config.removed import take_out
from flaxformer_mt.errors import UserError, command_line, local_path, warn_user
from flaxformer_mt.file_lock import FileHasNoLock, open_locked
from flaxformer_mt.object_store import remote_runs
from flaxformer_mt.vocab import Vocabs, load_vocabs
from flaxformer_mt.vocab.pretrained_vocab import FILES_NAME, METADATA_NAME
from flaxformer_mt.vocab.run_vocabs import holds_vocabs

# Fields that may change when a run is resumed, and what changes with them.
CHANGEABLE_FIELDS = find_marks(Config, MayChange)

# The step of the checkpoint that `import` writes.
IMPORTED_STEP = 0
# The largest number of digits of a step.
STEP_DIGITS = 18
# Groups of fields that `import` fixes; all other fields may change until the first update.
_FIXED_BY_IMPORT = ("model.", "vocab.")
# Fields of these groups that may change as well: they choose how the layers are run.
_CHANGEABLE_AFTER_IMPORT = ("model.remat:", "model.attention:", "model.scan_layers:", "model.alignment.")

# Learning-rate schedules that are independent of train.steps, so that train.steps may change.
_EXTENDABLE_SCHEDULES = ("noam", "inverse_sqrt", "constant")


def check_run(run_dir: Path, config: Config) -> None:
    """Raise UserError, with the differences, if a trained run's config is missing or differs from `config`.

    An untrained run accepts any config. Nothing is written, and the run directory may be absent.
    """
    path = local_path(run_dir) / "config.json"
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir} is a file, not a directory; give another --run=DIR")
    if not path.exists():
        if _newest_step(run_dir) is not None:
            raise UserError(
                f"{run_dir} has checkpoints, but no {path.name} that says what they are; restore the file, "
                "or give another --run=DIR"
            )
        return
    old, newest = read_config(path), _newest_step(run_dir)
    if newest is None:
        return
    _, removed = take_out(read_json_object(path) | {"search": {}})
    if removed:
        again = command_line("train", f"--init={run_dir}", "--run=NEW")
        raise UserError(
            f"{run_dir} was trained with {' and '.join(removed)}, which version 0.3 no longer has; resume it "
            f"with version 0.2, or train its parameters further in a new run: {again}"
        )
    differences = [line for line in compare_configs(old, config) if not _may_differ(line, config, newest)]
    if newest == IMPORTED_STEP:  # training writes later steps
        differences = [
            line
            for line in differences
            if line.startswith(_FIXED_BY_IMPORT) and not line.startswith(_CHANGEABLE_AFTER_IMPORT)
        ]
    if differences:
        raise UserError(
            f"{run_dir} was made with another config. Differing fields (in the run -> now):\n  "
            + "\n  ".join(_give_reason(line, old, config) for line in differences)
            + f"\n{_describe_remedies(run_dir, differences, config)}"
        )


def _give_reason(line: str, old: Config, new: Config) -> str:
    if not line.startswith("train.steps:"):
        return line
    if new.train.steps < old.train.steps:
        return f"{line} (steps cannot be undone; a run may only become longer)"
    schedule = new.optim.schedule
    return (
        f"{line} (the learning rates of optim.schedule={schedule} depend on train.steps, so those of the "
        f"steps so far would have been others; only {', '.join(_EXTENDABLE_SCHEDULES)} can be extended)"
    )


def _describe_remedies(run_dir: Path, differences: list[str], new: Config) -> str:
    remedies = (
        "The steps so far were made with the old values. To resume, restore the old values, or leave out "
        "--config, because the run has its own; to train anew, give another --run=DIR or delete the directory"
    )
    other_network = any(line.startswith(_FIXED_BY_IMPORT) for line in differences)
    if other_network:
        return f"{remedies}."
    values = flatten(new)
    changes = [_write_flag(name, values[name]) for name in (line.split(":", 1)[0] for line in differences)]
    again = command_line("train", f"--init={run_dir}", "--run=NEW", *changes)
    return f"{remedies}; to train its parameters further in a new run: {again}"


def _write_flag(name: str, value: Any) -> str:
    """Format a field as a flag, such as `--config.data.weights=1.0,2.5`."""
    items = value if isinstance(value, tuple) else (value,)
    if name == "data.stages" and items:
        return f"--config.{name}=FILE.yaml"
    return f"--config.{name}=" + ",".join("none" if item is None else str(item) for item in items)


def open_run(run_dir: Path, config: Config) -> None:
    """Check the run as `check_run` does, create its directory, and write the config into it.

    A changed config is recorded in history.jsonl; if the run has been trained, a warning lists the changes.
    Read the data before this call, so that invalid data leave no run directory behind.
    """
    check_run(run_dir, config)
    path = run_dir / "config.json"
    old = read_config(path) if path.exists() else None
    if old == config:
        return  # another process of the same job may be reading the file
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if old is not None:
            _record_change(run_dir, old, config)
        save_config(config, path)
    except OSError as error:
        raise UserError(f"cannot write to the run directory {run_dir}: {error.strerror}") from error


def forget_preparation(run_dir: Path, config: Config) -> None:
    """Delete the vocabulary of an untrained run if its data or vocabulary settings have changed."""
    path = run_dir / "config.json"
    if _newest_step(run_dir) is None and path.exists():
        old = read_config(path)
        if (old.data, old.vocab) != (config.data, config.vocab):
            shutil.rmtree(run_dir / "vocab", ignore_errors=True)


def _record_change(run_dir: Path, old: Config, new: Config) -> None:
    """Append a change of the config to history.jsonl, and warn of changes that affect results."""
    step, before, after = _newest_step(run_dir) or 0, flatten(old), flatten(new)
    changed = {name: [before[name], after[name]] for name in after if before[name] != after[name]}
    record = {"time": time.time(), "step": step, "changed": changed}
    with (run_dir / "history.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    effects: dict[str, list[str]] = {}
    for line in compare_configs(old, new) if step > IMPORTED_STEP else []:
        mark = CHANGEABLE_FIELDS.get(line.split(":", 1)[0])
        if mark and mark.effect:
            effects.setdefault(mark.effect, []).append(line)
    if effects:
        changes = "; ".join(f"{', '.join(lines)} ({effect})" for effect, lines in effects.items())
        warn_user(f"{run_dir} is resumed at step {step} with another config: {changes}")


def _newest_step(run_dir: Path) -> int | None:
    """Return the newest step of all checkpoints, including damaged ones."""
    checkpoints = run_dir / "checkpoints"
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return max((int(name) for name in names if is_step(name)), default=None)


def is_step(name: str) -> bool:
    """Return whether a name is a step number: digits without leading zeros."""
    return name.isascii() and name.isdigit() and len(name) <= STEP_DIGITS and name == str(int(name))


def sweep_run(run_dir: Path) -> None:
    """Delete temporary files that killed processes left in a run; only its training process may call this."""
    for path in [*run_dir.glob(".*.*"), *run_dir.glob("vocab/.*.*")]:
        path.unlink(missing_ok=True)


def _may_differ(line: str, new: Config, newest_step: int | None) -> bool:
    name = line.split(":", 1)[0]
    if name == "train.steps":
        return new.train.steps >= (newest_step or 0) and new.optim.schedule in _EXTENDABLE_SCHEDULES
    return name in CHANGEABLE_FIELDS


def read_final_report(run_dir: Path, config: Config) -> dict[str, Any] | None:
    """Read the final report of a run; return None if `config` requires more training.

    A run that stopped early continues if the config has more patience than before, or no early stopping.
    """
    report = read_report(run_dir)
    if report is None or report["step"] >= config.train.steps or report.get("stages_ended"):
        return report
    # Reports of earlier versions do not have the patience; in those versions it could not change.
    patience = report.get("patience", read_config(run_dir / "config.json").train.patience)
    return report if report["stopped_early"] and 0 < config.train.patience <= patience else None


# Forms of JSON values: a type, [form] of all entries of a list, names of an object (...: any), and (form,) of
# what may be absent.
_PART = {"name": str, "read": int, "pairs": int, "problems": {...: {"count": int, "action": str}}}
_SCORES = dict.fromkeys(("sentences", "step", "bleu", "chrf", "ter"), (float,))
_REPORT = {
    **dict.fromkeys(("train_seconds", "parameters", "target_tokens"), (float,)),
    "best": ({"step": (int,)},),
    "test": (_SCORES | {"directions": ({...: _SCORES},)},),
    "data": ({...: ({"parts": ([_PART],)},)},),
}


def _fits(value: Any, form: Any) -> bool:
    if isinstance(form, tuple):
        return value is None or _fits(value, form[0])
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(entry, form[0]) for entry in value)
    if isinstance(form, dict) and isinstance(value, dict):
        return all(_fits(value.get(n), form.get(n, form.get(...))) for n in (value if ... in form else form))
    if form is float:
        return isinstance(value, int | float) and abs(value) < LARGEST_INT
    return isinstance(form, type) and isinstance(value, form)


def read_report(run_dir: Path) -> dict[str, Any] | None:
    path = run_dir / "report.json"
    try:
        report = read_json_object(path)
        if type(report.get("step")) is not int or type(report.get("stopped_early")) is not bool:
            raise ValueError("step or stopped_early is missing")
        if wrong := [name for name, form in _REPORT.items() if not _fits(report.get(name), form)]:
            raise ValueError(f"{wrong[0]} has another form than those that `train` writes")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete it, and `train` writes it again") from error
    return report


def write_report(run_dir: Path, report: Mapping[str, Any]) -> None:
    write_atomically(run_dir / "report.json", f"{json.dumps(report, indent=2)}\n".encode(), sync=True)


_NAME = ".lock"


@contextlib.contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """Hold a run's lock during the body; create an absent run directory, and delete it afterward if empty."""
    absent = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = _take(run_dir / _NAME)
    except OSError as error:
        _remove_empty(absent)
        raise UserError(f"cannot write to the run directory {run_dir}: {error.strerror}") from error
    with file:
        try:
            with remote_runs.own_run(run_dir):
                yield
        finally:
            # While it is still locked: afterwards the file may be that of another owner.
            with contextlib.suppress(OSError):
                (run_dir / _NAME).unlink()
            _remove_empty(absent)


def _take(path: Path) -> BinaryIO:
    try:
        file = open_locked(path)
    except BlockingIOError:
        raise UserError(
            f"{path.parent} is being trained by {_read_owner(path)}; wait until it ends, or give another "
            "--run=DIR"
        ) from None
    except FileHasNoLock as error:
        warn_user(f"the file system of {path.parent} has no locks; train only once in it at a time")
        assert error.stream is not None
        file = error.stream
    file.truncate(0)
    file.write(json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode())
    file.flush()
    return file


def _read_owner(path: Path) -> str:
    try:
        with path.open("rb") as file:
            owner = json.loads(file.read(1000))
        return f"process {owner['process']} on host {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # not written yet, or removed since
        return "another process"


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def seal_vocabs(folder: Path) -> None:
    """Write the manifest of the vocabularies in `folder`, unless it has one."""
    if not (folder / atomic_folder.MANIFEST_NAME).exists():
        atomic_folder.seal_folder(folder, {}, wanted=_is_vocabulary)


def _is_vocabulary(name: str) -> bool:
    """Return whether a file belongs to a vocabulary; hidden files are temporary files of other processes."""
    path = PurePath(name)
    pretrained = name == METADATA_NAME or path.parent.name == FILES_NAME
    return (pretrained or name.endswith(".model")) and not path.name.startswith(".")


def has_vocabs(run_dir: Path) -> bool:
    """Return whether a run has vocabularies; before the first step, an incomplete set counts as none."""
    folder = run_dir / "vocab"
    if _newest_step(run_dir) is None and not (folder / atomic_folder.MANIFEST_NAME).exists():
        return holds_vocabs(folder)
    return folder.is_dir()


def load_sealed_vocabs(folder: Path) -> Vocabs:
    sealed = (folder / atomic_folder.MANIFEST_NAME).exists()
    if damage := atomic_folder.find_damage(folder) if sealed else "":
        raise UserError(
            f"the vocabulary {folder} is damaged: {damage}; restore its files from a copy of the run, or "
            "from the folder vocabularies of data.cache_dir"
        )
    return load_vocabs(folder)
