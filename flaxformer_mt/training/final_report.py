"""The report of a finished run: test scores, ten translations, and commands to try next.

Defines the contents of report.json and its summary as text.
"""

import contextlib
import datetime
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO, TypedDict

import flaxformer_mt
from flaxformer_mt.config.files import read_config
from flaxformer_mt.errors import command_line, program_line, warn_user
from flaxformer_mt.evaluation.evaluate import EvaluationResult, evaluate_run
from flaxformer_mt.evaluation.evaluation_set import format_side_by_side, load_translations
from flaxformer_mt.evaluation.score_breakdowns import describe_directions
from flaxformer_mt.evaluation.tables import write_text
from flaxformer_mt.parallel.processes import is_first
from flaxformer_mt.runs.load_run import describe_start, name_checkpoint
from flaxformer_mt.scoring.metrics import METRICS
from flaxformer_mt.tracking import Tracker
from flaxformer_mt.training.resume_position import has_ended
from flaxformer_mt.training.setup import TrainingSetup

_SCORING = "scoring the test set"
_NO_TEST_SET = "there is no test set to score; hold one out with data.test_pairs=N"


class TrainingReport(TypedDict, total=False):
    """The report that `fit` returns and writes to report.json in the run directory."""

    # The number of steps trained; `stopped_early`: whether training ended before train.steps.
    step: int
    stopped_early: bool
    # The step of the best checkpoint by train.best_metric, and its value.
    best: dict[str, Any]
    # The results on the test set, if there is one.
    test: EvaluationResult
    # The duration of training, without evaluations and checkpoints; `target_tokens`: the number of target
    # tokens, without padding.
    train_seconds: float
    target_tokens: int
    # The number of parameters of the model.
    parameters: int
    # The devices that trained.
    hardware: str
    # The numbers of pairs that were read, used and left out, per split.
    data: dict[str, Any]
    # The value of train.patience; with data.stages, `stages_ended`: whether the last stage has ended.
    patience: int
    stages_ended: bool
    # The date and time of the end; `version`: this package's version; `command`: the command line.
    finished: str
    version: str
    python: str
    command: str


def make_report(setup: TrainingSetup, tracker: Tracker, stream: TextIO | None = None) -> TrainingReport:
    """Score the final checkpoint on the test set, if there is one, and return the report of the run."""
    config, run_dir = setup.config, setup.run_dir
    prepared, progress = setup.prepared, setup.progress
    report: TrainingReport = {
        "step": progress.step,
        "stopped_early": progress.step < config.train.steps,
        "patience": config.train.patience,
        **({"stages_ended": has_ended(config.data, progress)} if config.data.stages else {}),
        "train_seconds": round(progress.train_seconds, 1),
        "target_tokens": progress.target_tokens,
        "parameters": setup.parameters,
        "hardware": setup.parallel.describe(),
        "finished": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "version": flaxformer_mt.__version__,
        "command": program_line(sys.argv),
        "python": platform.python_version(),
        "best": {"step": progress.best_step, config.train.metrics[0]: progress.best_value},
        "data": {split: _count_pairs(prepared.report[split]) for split in ("train", "valid", "test")},
    }
    tracker.message(_SCORING if prepared.test_pairs is not None else _NO_TEST_SET)
    if prepared.test_pairs is not None:
        further = [name for name in config.train.metrics if name not in (*METRICS, "loss")]
        # On a terminal, the line of the tracker alone is updated in place.
        shown = None if stream is None or stream.isatty() or not is_first() else stream
        with tracker.busy(_SCORING) if shown is None else contextlib.nullcontext():
            report["test"] = evaluate_run(run_dir, split="test", scorers=further, progress=shown)
    elif config.train.final_checkpoint == "best" and is_first():
        if warning := describe_start(progress.best_step, progress.step, run_dir):
            warn_user(warning)  # as the evaluation does
    return report


def _count_pairs(split: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return how many pairs of a split were read, used and left out; None if the split does not exist."""
    if split is None:
        return None
    parts = [
        {
            **{field: part[field] for field in ("name", "read", "pairs")},
            "problems": {
                problem: {"count": found["count"], "action": found["action"]}
                for problem, found in part["problems"].items()
            },
        }
        for part in split["parts"]
    ]
    return {"parts": parts}


def describe_report(report: Mapping[str, Any], run_dir: Path) -> str:
    """Return the report as text: a summary of training, the scores, ten translations, commands to try next.

    For a language model, the score is the perplexity, and there are no translations.
    """
    minutes = report["train_seconds"] / 60
    lines = [
        f"trained {report['step']:,} steps ({report['target_tokens']:,} target tokens) in {minutes:.1f} "
        f"minutes on {report['hardware']}; {report['parameters']:,} parameters"
    ]
    test = report.get("test")
    checkpoint = name_checkpoint(test["checkpoint"], test.get("step")) if test is not None else ""
    if not read_config(run_dir / "config.json").data.source_language:
        if test is not None:
            lines.append(
                f"test perplexity {test['perplexity']:.2f}, {test['loss']:.4f} nats per token over "
                f"{test['tokens']:,} tokens; checkpoint {checkpoint}"
            )
        evaluate = "  " + command_line("evaluate", _shorten(run_dir), "--reference=FILE")
        return "\n".join([*lines, "Try next:", evaluate])
    if test is not None and "directions" in test:
        lines += [f"test set, {test['method']} search, beam {test['beam_size']}, checkpoint {checkpoint}"]
        lines += [write_text([describe_directions(test)], indent=""), ""]
    elif test is not None:
        lines += [
            f"test BLEU {test['bleu']:.2f}   {test['signature']}",
            f"test chrF {test['chrf']:.2f}   {test['chrf_signature']}",
            *([f"test TER {test['ter']:.2f}   {test['ter_signature']}"] if "ter" in test else []),
            *(f"test {name} {test[name]:.4g}" for name in test.get("scorers", ())),
            f"  cased BLEU {test['cased']['bleu']:.2f}, lower-cased {test['lowercased']['bleu']:.2f}; "
            f"{test['method']} search, beam {test['beam_size']}, checkpoint {checkpoint}",
        ]
        if (run_dir / "translations" / f"{test['name']}.hypothesis").exists():
            lines += ["", format_side_by_side(load_translations(run_dir, test["name"])), ""]
    where = _shorten(run_dir)
    lines += [
        "Try next:",
        "  " + command_line("translate", where, "FILE"),
        "  " + command_line("serve", where),
        "  " + command_line("export", where, "--format=ctranslate2", "--output=exported"),
        f"Curves, scores and translations are in {_shorten(run_dir / 'report.html')}",
    ]
    return "\n".join(lines)


def _shorten(path: Path) -> Path:
    here = Path.cwd()
    return path.absolute().relative_to(here) if path.absolute().is_relative_to(here) else path
