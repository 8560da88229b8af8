"""Services that record a run in addition to metrics.jsonl: TensorBoard, Weights & Biases and MLflow."""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.errors import UserError, describe_error, install_command
from flaxformer_mt.tracking.progress_display import Sample

# The file of a run with its identity in each service.
_NAME = "trackers.json"


class Service:
    """Base class of tracking services; a resumed run continues the record whose id is `identity`."""

    identity: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers by name, such as train/loss."""

    def log_config(self, fields: Mapping[str, Any]) -> None: ...

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None: ...

    def log_report(self, page: Path) -> None: ...

    def close(self, *, failed: bool) -> None: ...


def import_service(name: str) -> Callable[[Path, str | None], Service]:
    """Return the class of a service; its arguments are a run directory and a record's id (None: new)."""
    try:
        make: Callable[[Path, str | None], Service] = importlib.import_module(
            f"flaxformer_mt.tracking.{name}_run"
        ).Run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        raise UserError(
            f"train.trackers={name} needs the package {name}, which is not installed; install it with: "
            f"{install_command(extra=name)}"
        ) from error
    except Exception as error:  # the package's own, of any type
        raise _explain(name, error) from error
    return make


def open_service(name: str, run_dir: Path) -> Service:
    """Start or continue the record of a run in a tracking service."""
    make, path = import_service(name), run_dir / _NAME
    try:
        identities = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        identities = {}
    identities = identities if isinstance(identities, dict) else {}
    try:
        service = make(run_dir, identities.get(name))
        write_atomically(path, json.dumps(identities | {name: service.identity}).encode())
    except Exception as error:
        raise _explain(name, error) from error
    return service


def _explain(name: str, error: Exception) -> UserError:
    return UserError(
        f"train.trackers={name} cannot begin: {describe_error(error)}; correct that, or leave {name} out"
    )
