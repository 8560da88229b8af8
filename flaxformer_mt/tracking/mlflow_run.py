"""Records a run with MLflow, configured by MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow

from flaxformer_mt.tracking.progress_display import Sample
from flaxformer_mt.tracking.tracking_services import Service

# MLflow takes this many parameters at a time.
_AT_ONCE = 100


class Run(Service):
    def __init__(self, run_dir: Path, identity: str | None) -> None:
        self._is_new = identity is None
        name = run_dir.absolute().name if self._is_new else None
        self.identity = mlflow.start_run(run_id=identity, run_name=name).info.run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # Names such as chrf++ are not allowed.
        mlflow.log_metrics({name.replace("+", "p"): value for name, value in values.items()}, step=step)

    def log_config(self, fields: Mapping[str, Any]) -> None:
        """Log the config as a file and, in a new run, as parameters (MLflow cannot change them later)."""
        mlflow.log_dict(dict(fields), "config.json")
        rows = list(fields.items())
        for first in range(0, len(rows) if self._is_new else 0, _AT_ONCE):
            mlflow.log_params(dict(rows[first : first + _AT_ONCE]))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        columns: dict[str, Any] = {"step": [step] * len(samples)}
        for name in Sample._fields:
            columns[name] = [getattr(sample, name) for sample in samples]
        mlflow.log_table(columns, "translations.json")

    def log_report(self, page: Path) -> None:
        mlflow.log_artifact(str(page))

    def close(self, *, failed: bool) -> None:
        mlflow.end_run("FAILED" if failed else "FINISHED")
