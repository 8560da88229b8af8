"""The run directory: the files of one experiment, and whether a command may resume it with a given config.

Contains the comparison of a run's config with a new one, and the reading and writing of report.json.

RUN/ config.json · vocab/ · checkpoints/STEP/ · metrics.jsonl · tensorboard/ · translations/ · report.json
     profile/ if a profile was requested
"""

import json
import os
from pathlib import Path
from typing import Any

from flaxformer_mt.config import Config
from flaxformer_mt.config.files import compare_configs, read_config, save_config
from flaxformer_mt.errors import UserError, name_full_disk

# Fields that may change when a run is resumed: the results of further updates are independent of them.
_CHANGEABLE_FIELDS = (
    "data.cache_dir",
    "data.tfds_data_dir",
    "data.loader_threads",
    "data.prefetch",
    "parallel.backend",
    "parallel.devices",
    "parallel.data",
    "parallel.fsdp",
    "parallel.tensor",
    "train.bleu_tokenize",
    "train.log_every",
    "train.tensorboard",
    "train.peak_flops",
    "train.keep_checkpoints",
)

# The step of the checkpoint that `import` writes.
IMPORTED_STEP = 0
# Groups of fields that `import` fixes; all other fields may change until the first update.
_FIXED_BY_IMPORT = ("model.", "vocab.")
# Fields of these groups that may change as well: they choose how the layers are run.
_CHANGEABLE_AFTER_IMPORT = ("model.remat:", "model.scan_layers:")

# Learning-rate schedules that are independent of train.steps, so that a run may be extended.
_EXTENDABLE_SCHEDULES = ("noam", "inverse_sqrt", "constant")


def check_run(run_dir: Path, config: Config) -> None:
    """Raises UserError if the run was made with another config; the message names each differing field.

    Writes nothing; accepts a run directory that is absent.
    """
    path = run_dir / "config.json"
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir} is a file, not a directory; give another --run=DIR")
    if not path.exists():
        return
    old = read_config(path)
    differences = [line for line in compare_configs(old, config) if not _may_differ(line, old, config)]
    if _is_untrained_import(run_dir):
        differences = [
            line
            for line in differences
            if line.startswith(_FIXED_BY_IMPORT) and not line.startswith(_CHANGEABLE_AFTER_IMPORT)
        ]
    if differences:
        raise UserError(
            f"{run_dir} was made with another config. Differing fields (in the run -> now):\n  "
            + "\n  ".join(differences)
            + "\nGive another --run=DIR, restore the old values, or delete the directory."
        )


def open_run(run_dir: Path, config: Config) -> None:
    """Checks the run as `check_run` does, creates its directory, and writes the config into it.

    Call this function after the data has been read, so that a run whose data are invalid leaves no directory
    behind.

    Raises:
      UserError: the run was made with another config, or the directory is not writable.
    """
    check_run(run_dir, config)
    path = run_dir / "config.json"
    if path.exists() and read_config(path) == config:
        return  # another process of the same job may be reading the file
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        save_config(config, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)
    except OSError as error:
        raise UserError(f"cannot write to the run directory {run_dir}: {error.strerror}") from error


def _is_untrained_import(run_dir: Path) -> bool:
    """Returns whether the imported model is the run's only checkpoint; training writes later steps."""
    checkpoints = run_dir / "checkpoints"
    steps = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return [name for name in steps if name.isdigit()] == [str(IMPORTED_STEP)]


def _may_differ(line: str, old: Config, new: Config) -> bool:
    name = line.split(":", 1)[0]
    if name == "train.steps":
        return new.train.steps > old.train.steps and new.optim.schedule in _EXTENDABLE_SCHEDULES
    return name in _CHANGEABLE_FIELDS


def read_report(run_dir: Path) -> dict[str, Any] | None:
    """Reads the report of a finished run; None if absent. Raises UserError if the file is damaged."""
    path = run_dir / "report.json"
    try:
        report = json.loads(path.read_bytes())
        reason = "" if {"step", "stopped_early"} <= set(report) else "step or stopped_early is missing"
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:  # not JSON, not UTF-8, or not an object
        reason = str(error)
    if reason:
        raise UserError(f"{path} is damaged ({reason}); delete it, and `train` writes it again")
    return report


def write_report(run_dir: Path, report: dict[str, Any]) -> None:
    """Writes report.json atomically."""
    path = run_dir / "report.json"
    with name_full_disk(path):
        path.with_suffix(".tmp").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    os.replace(path.with_suffix(".tmp"), path)
