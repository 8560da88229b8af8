"""Services that record a run beside its own files (TensorBoard, Weights & Biases, MLflow)."""

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
    """One place where a run is recorded; it leaves out what it does not define."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers by name, such as train/loss."""

    def log_config(self, fields: Mapping[str, Any]) -> None: ...

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None: ...

    def log_report(self, page: Path) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class Identity:
    """The identity of a run in one service, which a resumed run reads from its directory."""

    def __init__(self, run_dir: Path, service: str) -> None:
        self.run_dir, self._service, self._path = run_dir, service, run_dir / _NAME

    def read(self) -> str | None:
        return self._read_all().get(self._service)

    def write(self, identity: str) -> None:
        write_atomically(self._path, json.dumps(self._read_all() | {self._service: identity}).encode())

    def _read_all(self) -> dict[str, str]:
        try:
            identities = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            identities = {}
        return identities if isinstance(identities, dict) else {}


def import_service(name: str) -> Callable[[Identity], Service]:
    try:
        make: Callable[[Identity], Service] = importlib.import_module(
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
    """Begin, or go on with, the record of a run in a service."""
    make = import_service(name)
    try:
        return make(Identity(run_dir, name))
    except Exception as error:
        raise _explain(name, error) from error


def _explain(name: str, error: Exception) -> UserError:
    return UserError(
        f"train.trackers={name} cannot begin: {describe_error(error)}; correct that, or leave {name} out"
    )
