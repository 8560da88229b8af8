"""The end of a run: the test score, ten translations, and what to try next.

Owns report.json's content and its summary for humans. Knows nothing of training.
"""

import platform
from pathlib import Path
from typing import Any

from flaxformer_mt.config import Config
from flaxformer_mt.evaluate import evaluate_run
from flaxformer_mt.prepare import Prepared
from flaxformer_mt.progress import Progress


def make_report(
    config: Config, run_dir: Path, prepared: Prepared, progress: Progress, *, parameters: int, hardware: str
) -> dict[str, Any]:
    """Scores the final checkpoint on the test set, if there is one, and gathers the facts of the run."""
    report: dict[str, Any] = {
        "step": progress.step,
        "stopped_early": progress.step < config.train.steps,
        "train_seconds": round(progress.train_seconds, 1),
        "target_tokens": progress.target_tokens,
        "parameters": parameters,
        "hardware": hardware,
        "python": platform.python_version(),
        "best": {"step": progress.best_step, config.train.best_metric: progress.best_value},
    }
    if prepared.test_pairs is not None:
        report["test"] = evaluate_run(run_dir, split="test")
    return report
