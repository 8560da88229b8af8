"""Records a run with MLflow. The only module that imports mlflow.

Where it goes is up to MLflow's own settings, such as MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow

from flaxformer_mt.tracking.progress_display import Sample
from flaxformer_mt.tracking.service import Identity, Service

# MLflow takes this many parameters at a time.
_AT_ONCE = 100


class Run(Service):
    """A run of MLflow."""

    def __init__(self, identity: Identity) -> None:
        """Begin the run, or go on with the one of this identity."""
        known = identity.read()
        self._is_new = known is None
        self._run: Any = mlflow.start_run(
            run_id=known, run_name=identity.run_dir.absolute().name if known is None else None
        )
        identity.write(self._run.info.run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers by name."""
        mlflow.log_metrics(dict(values), step=step)

    def log_config(self, fields: Mapping[str, Any]) -> None:
        """Record the config: as parameters, which MLflow fixes at the begin, and as a file."""
        mlflow.log_dict(dict(fields), "config.json")
        rows = list(fields.items())
        for first in range(0, len(rows) if self._is_new else 0, _AT_ONCE):
            mlflow.log_params(dict(rows[first : first + _AT_ONCE]))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Add translations to a table."""
        columns: dict[str, Any] = {"step": [step] * len(samples)}
        for name in Sample._fields:
            columns[name] = [getattr(sample, name) for sample in samples]
        mlflow.log_table(columns, "translations.json")

    def log_report(self, page: Path) -> None:
        """Record the page as an artefact."""
        mlflow.log_artifact(str(page))

    def close(self, *, failed: bool) -> None:
        """End the run."""
        mlflow.end_run("FAILED" if failed else "FINISHED")
