"""Records a run in RUN/wandb, configured by WANDB_PROJECT, WANDB_MODE=offline and others."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from flaxformer_mt.tracking.progress_display import Sample
from flaxformer_mt.tracking.tracking_services import Service


class Run(Service):
    def __init__(self, run_dir: Path, identity: str | None) -> None:
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "flaxformer_mt"),
            name=run_dir.absolute().name,
            dir=str(run_dir),
            id=identity,
            resume="allow",
            settings=wandb.Settings(silent=True),
        )
        self.identity = self._run.id
        # Steps are a value of their own: a resumed run repeats the steps after its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def log_config(self, fields: Mapping[str, Any]) -> None:
        self._run.config.update(dict(fields), allow_val_change=True)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        table = wandb.Table(columns=list(Sample._fields), data=[list(sample) for sample in samples])
        self._run.log({"valid/translations": table, "step": step})

    def log_report(self, page: Path) -> None:
        artifact = wandb.Artifact(f"report-{self._run.id}", type="report")
        artifact.add_file(str(page))
        self._run.log_artifact(artifact)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
