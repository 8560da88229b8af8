"""The run directory: what belongs to one experiment, and whether a command may go on with it.

Owns the names of its files and the comparison of configs. Knows nothing of what the files hold.

RUN/ config.json · vocab/ · checkpoints/STEP/ · metrics.jsonl · tensorboard/ · translations/ · report.json
     profile/ where one was asked for
"""

import json
import os
from pathlib import Path
from typing import Any

from flaxformer_mt.config import Config
from flaxformer_mt.config.files import compare_configs, read_config, save_config
from flaxformer_mt.errors import UserError

# Fields that may change between two sittings of one run: they do not change what is computed from here on.
_FREE_FIELDS = (
    "data.cache_dir",
    "data.tfds_data_dir",
    "data.loader_threads",
    "data.prefetch",
    "parallel.backend",
    "parallel.devices",
    "parallel.data",
    "parallel.fsdp",
    "parallel.tensor",
    "train.log_every",
    "train.tensorboard",
    "train.peak_flops",
    "train.keep_checkpoints",
)

# Of a run that `import` made, before any training: all but the model and its vocabulary are still open.
IMPORTED_STEP = 0
_FIXED_BY_IMPORT = ("model.", "vocab.")
# Of the model, how its layers are run.
_OPEN_AFTER_IMPORT = ("model.remat:", "model.scan_layers:")

# Schedules that do not look at train.steps, so that a run may be made longer.
_OPEN_ENDED = ("noam", "inverse_sqrt", "constant")


def check_run(run_dir: Path, config: Config) -> None:
    """Raises UserError if the run was made with another config, and names each field that differs.

    Touches nothing; a run that is not there yet is fine.
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
            if line.startswith(_FIXED_BY_IMPORT) and not line.startswith(_OPEN_AFTER_IMPORT)
        ]
    if differences:
        raise UserError(
            f"{run_dir} was made with another config. Differing fields (there -> now):\n  "
            + "\n  ".join(differences)
            + "\nGive another --run=DIR, or the old values, or delete the directory."
        )


def open_run(run_dir: Path, config: Config) -> None:
    """Checks the run as `check_run` does, makes its directory, and writes the config into it.

    Called once the data has been read: a run that cannot begin leaves no directory behind.

    Raises:
      UserError: another config, or a directory that cannot be written.
    """
    check_run(run_dir, config)
    path = run_dir / "config.json"
    if path.exists() and read_config(path) == config:
        return  # another process of the same job may be reading it
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        save_config(config, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)
    except OSError as error:
        raise UserError(f"cannot write to the run directory {run_dir}: {error.strerror}") from error


def _is_untrained_import(run_dir: Path) -> bool:
    """Whether the run's one checkpoint is the imported model: training writes those of later steps."""
    checkpoints = run_dir / "checkpoints"
    steps = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return [name for name in steps if name.isdigit()] == [str(IMPORTED_STEP)]


def _may_differ(line: str, old: Config, new: Config) -> bool:
    name = line.split(":", 1)[0]
    if name == "train.steps":
        return new.train.steps > old.train.steps and new.optim.schedule in _OPEN_ENDED
    return name in _FREE_FIELDS


def read_report(run_dir: Path) -> dict[str, Any] | None:
    """The report of a finished run, or None. Raises UserError if it is damaged."""
    path = run_dir / "report.json"
    try:
        report = json.loads(path.read_bytes())
        reason = "" if {"step", "stopped_early"} <= set(report) else "it says not how the run ended"
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:  # not JSON, not UTF-8, or not an object
        reason = str(error)
    if reason:
        raise UserError(f"{path} is damaged ({reason}); delete it to have it made again")
    return report


def write_report(run_dir: Path, report: dict[str, Any]) -> None:
    """Writes report.json whole or not at all."""
    path = run_dir / "report.json"
    path.with_suffix(".tmp").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    os.replace(path.with_suffix(".tmp"), path)
