"""Index of a run's checkpoints: finds the best, the newest and damaged checkpoints, and those to delete."""

import copy
import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flaxformer_mt import atomic_folder
from flaxformer_mt.errors import UserError, describe_error, suggest
from flaxformer_mt.parameter_trees import make_like
from flaxformer_mt.runs.run_directory import IMPORTED_STEP, STEP_DIGITS, is_step

# The file of the training progress in checkpoints of version 0.1; now it is in the manifest.
_OLD_PROGRESS = "progress.json"
AVERAGE_NAME = "average"

# Metrics from 0 to 100; those from outside may be of any size.
_TO_100 = ("bleu", "chrf", "chrf++", "spbleu", "ter")
_KEYWORDS = ("best", "last", AVERAGE_NAME)


class CheckpointIndex:
    """A stateless view of a run's checkpoints; each method reads the disk, to which other jobs may write."""

    def __init__(self, run_dir: Path, *, best_metric: str) -> None:
        self.directory = Path(run_dir).absolute() / "checkpoints"
        self._best_metric = best_metric

    def folder(self, name: int | str) -> Path:
        return self.directory / str(name)

    def steps(self) -> list[int]:
        """Steps of all checkpoints, damaged ones too, in ascending order; ignores names such as 007."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if is_step(path.name))

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the best score by `rank_scores`; None if no checkpoint has a score.

        If the score of a damaged checkpoint cannot be read, the best step is the one that a later checkpoint
        recorded.
        """
        steps = self.steps()
        damages = {step: damage for step in steps if (damage := self._find_damage(self.folder(step), ()))}
        good = max((step for step in steps if step not in damages), default=None)
        if not damages:
            return self._best_of(steps)
        step, damage = max(damages.items())
        recorded = None if good is None or good < step else read_progress(self.folder(good)).get("best_step")
        if recorded in steps:
            return recorded
        raise UserError(
            f"checkpoint {step} of {self.directory} is damaged: {damage}; so the best checkpoint is unknown; "
            + _name_undamaged(good)
        )

    def removable(self, step: int, *, keep_last: int) -> list[int]:
        """Steps to delete once `step` is saved: all but the `keep_last` newest, the best and imported ones.

        An interim checkpoint, saved only because the run was asked to stop, is deleted as soon as a later one
        exists, and does not count among the newest. A run that was stopped and resumed therefore keeps (and
        averages) the same checkpoints as an uninterrupted run. Checkpoints after `step`, left if a run was
        resumed at an earlier step, are ignored here; training overwrites them.
        """
        steps = [other for other in self.steps() if IMPORTED_STEP < other <= step]
        interim = {other for other in steps if self._read_undamaged(other).get("interim") is True}
        lasting = [other for other in steps if other not in interim]
        return sorted({*lasting[:-keep_last], *(interim - {step})} - {self._best_of([IMPORTED_STEP, *steps])})

    def resolve(self, which: int | str) -> Path:
        word = str(which)
        name: int | str | None
        if word == "best":
            name = self.best()
        elif word == "last":
            name = self.latest()
        elif word == AVERAGE_NAME:
            name = word
        elif word.isascii() and word.isdigit() and len(word) <= STEP_DIGITS:
            name = int(word)
        else:
            raise UserError(
                f"checkpoint {word!r} is not best, last, average or a step{suggest(word, _KEYWORDS)}; "
                f"{self.describe()}"
            )
        if name is None or not os.path.lexists(self.folder(name)):
            raise UserError(f"{self._explain_absence(word)}; {self.describe()}")
        return self.folder(name)

    def describe(self) -> str:
        """Describe the checkpoints, as in `RUN/checkpoints has 500, 1000, average (best: 500)`."""
        names = list(map(str, self.steps()))
        if self.folder(AVERAGE_NAME).is_dir():
            names.append(AVERAGE_NAME)
        if not names:
            return f"{self.directory} has no checkpoints; train first"
        best = self._best_of(self.steps())
        return f"{self.directory} has {', '.join(names)}" + ("" if best is None else f" (best: {best})")

    def check_undamaged(self, folder: Path, parts: Iterable[str]) -> None:
        """Raise UserError, naming an undamaged step, if the progress or one of `parts` is damaged."""
        damage = self._find_damage(folder, parts)
        if not damage:
            return
        others = (step for step in reversed(self.steps()) if self.folder(step) != folder)
        good = next((step for step in others if not self._find_damage(self.folder(step))), None)
        raise UserError(
            f"checkpoint {folder.name} of {self.directory} is damaged: {damage}; {_name_undamaged(good)}"
        )

    def find_newest_undamaged(self) -> tuple[int | None, str]:
        """Return the newest undamaged step (or None) and a warning about newer damaged steps (or "")."""
        damages: list[str] = []
        for step in reversed(self.steps()):
            damage = self._find_damage(self.folder(step))
            if not damage:
                warning = f"{'; '.join(damages)}; the newest undamaged step is {step}" if damages else ""
                return step, warning
            damages.append(f"checkpoint {step} of {self.directory} is damaged: {damage}")
        if damages:
            raise UserError(
                f"{'; '.join(damages)}; no undamaged checkpoint is left: "
                f"delete {self.directory} to train from step 0"
            )
        return None, ""

    def _best_of(self, steps: list[int]) -> int | None:
        ranks = {
            step: rank_scores(self._read_undamaged(step).get("metrics", {}), self._best_metric)
            for step in steps
        }
        known = {step: rank for step, rank in ranks.items() if rank is not None}
        return max(known, key=lambda step: (known[step], -step), default=None)

    def _find_damage(self, folder: Path, parts: Iterable[str] | None = None) -> str:
        """Describe damage to the progress, the step or `parts` (None: all files); "" if there is none."""
        wanted = None if parts is None else {_OLD_PROGRESS, *parts}
        damage = atomic_folder.find_damage(
            folder, lambda file: wanted is None or file.split("/")[0] in wanted
        )
        damage = damage or _find_wrong_facts(folder)
        if damage or not is_step(folder.name):
            return damage
        step = read_progress(folder).get("step", int(folder.name))
        return "" if step == int(folder.name) else f"it holds the checkpoint of step {step}"

    def _read_undamaged(self, step: int) -> dict[str, Any]:
        return {} if self._find_damage(self.folder(step), ()) else read_progress(self.folder(step))

    def _explain_absence(self, word: str) -> str:
        steps = self.steps()
        if word == AVERAGE_NAME:
            return "there is no averaged checkpoint; the command `average` makes one"
        if word == "best" and steps:
            return f"there is no best checkpoint: no step has a {self._best_metric} yet; use last or a step"
        if word in _KEYWORDS or not steps:
            return f"there is no checkpoint {word}"
        return f"there is no checkpoint {word}; the nearest is {min(steps, key=lambda s: abs(s - int(word)))}"


def _find_wrong_facts(folder: Path) -> str:
    """Return what is malformed in a manifest whose digest is right; "" if nothing is."""
    try:
        for specs in atomic_folder.read_metadata(folder)["trees"].values():
            for spec in set(specs.values()):
                make_like(spec)
        dict.items(read_progress(folder).get("metrics", {}))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, FileNotFoundError) as error:
        return f"its manifest or progress is none of this package ({describe_error(error)})"
    return ""


def rank_scores(metrics: dict[str, Any], best_metric: str) -> tuple[float, float] | None:
    """Return a sort key, which is largest for the best checkpoint; None if `metrics` has no score.

    Scores from 0 to 100 are compared as they are displayed, with two decimals. If they are equal, the lower
    loss wins, because BLEU may stay at 0.00 while the model learns.
    """
    score, loss = (
        value if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None
        for value in (metrics.get(best_metric), metrics.get("loss"))
    )
    if score is None:
        return None
    shown = round(score, 2) if best_metric in _TO_100 else score
    return (-shown if best_metric in ("loss", "ter") else shown), (-math.inf if loss is None else -loss)


def _name_undamaged(step: int | None) -> str:
    if step is None:
        return "no undamaged checkpoint is left"
    return f"the newest undamaged step is {step}; use --checkpoint={step}"


def read_progress(folder: Path) -> dict[str, Any]:
    """Return a copy of the training progress that the checkpoint in `folder` stores."""
    metadata = atomic_folder.read_metadata(folder)
    if "progress" in metadata:
        return copy.deepcopy(metadata["progress"])
    return json.loads((folder / _OLD_PROGRESS).read_text(encoding="utf-8"))
