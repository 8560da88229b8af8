"""Which checkpoints a run has: names, the best, the last, the damaged, and which of them to delete.

Owns the layout RUN/checkpoints/STEP/ and what is said when a checkpoint is absent or damaged. Knows nothing
of arrays: what is in a checkpoint, beside its progress and its manifest, is checkpoint.py's.
"""

import difflib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic_folder

PROGRESS_NAME = "progress.json"
AVERAGE_NAME = "average"

_WORDS = ("best", "last", AVERAGE_NAME)


class CheckpointIndex:
    """A view of a run's checkpoints folder; it remembers nothing, so it is right whoever writes there."""

    def __init__(self, run_dir: Path, *, best_metric: str) -> None:
        self.directory = Path(run_dir).absolute() / "checkpoints"
        self._best_metric = best_metric

    def folder(self, name: int | str) -> Path:
        """Where a checkpoint is, or would be."""
        return self.directory / str(name)

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order, damaged ones too."""
        if not self.directory.is_dir():
            return []
        names = (path.name for path in self.directory.iterdir())
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def best(self) -> int | None:
        """The step with the best score, the earliest of equals; None when none has been evaluated."""
        return self._best_of(self.steps())

    def removable(self, step: int, *, keep_last: int) -> list[int]:
        """The steps to delete once `step` is written: neither among the last of those up to it, nor the best.

        An interim one, which only a request to stop called for, goes as soon as there is a later one, and
        does not count: so a run that was stopped keeps, and averages, what it would have without the stop.
        Later steps than `step` belong to a run that was taken up again before them; they neither count nor
        go, and are replaced when training comes by again.
        """
        steps = [other for other in self.steps() if other <= step]
        interim = {other for other in steps if self._is_interim(other)}
        lasting = [other for other in steps if other not in interim]
        return sorted({*lasting[:-keep_last], *(interim - {step})} - {self._best_of(steps)})

    def resolve(self, which: int | str) -> Path:
        """The folder of checkpoint "best", "last", "average" or a step.

        Raises:
          UserError: it is absent; the message lists those there are.
        """
        word = str(which)
        name: int | str | None
        if word == "best":
            name = self.best()
        elif word == "last":
            name = max(self.steps(), default=None)
        elif word == AVERAGE_NAME:
            name = word
        elif word.isascii() and word.isdigit():
            name = int(word)
        else:
            near = difflib.get_close_matches(word, _WORDS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(
                f"checkpoint {word!r} is not best, last, average or a step{hint}; {self.describe()}"
            )
        if name is None or not self.folder(name).is_dir():
            raise UserError(f"{self._explain_absence(word)}; {self.describe()}")
        return self.folder(name)

    def describe(self) -> str:
        """What there is, for messages: `RUN/checkpoints has 500, 1000, average (best: 500)`."""
        names = list(map(str, self.steps()))
        if self.folder(AVERAGE_NAME).is_dir():
            names.append(AVERAGE_NAME)
        if not names:
            return f"{self.directory} has no checkpoints; train first"
        best = self.best()
        return f"{self.directory} has {', '.join(names)}" + ("" if best is None else f" (best: {best})")

    def check_sound(self, folder: Path, parts: Iterable[str]) -> None:
        """Raises UserError, naming the last good checkpoint, if the progress or one of `parts` is damaged."""
        wanted = {PROGRESS_NAME, *parts}
        damage = atomic_folder.find_damage(folder, lambda file: file.split("/")[0] in wanted)
        if not damage:
            return
        others = (step for step in reversed(self.steps()) if self.folder(step) != folder)
        good = next((step for step in others if not atomic_folder.find_damage(self.folder(step))), None)
        remedy = (
            "no other checkpoint is good" if good is None else f"last good: {good}; use --checkpoint={good}"
        )
        raise UserError(f"checkpoint {folder.name} of {self.directory} is damaged: {damage}; {remedy}")

    def find_good(self) -> tuple[int | None, str]:
        """The newest undamaged step, and a warning that names damaged newer ones, "" when there are none.

        Raises:
          UserError: there are checkpoints, but all of them are damaged.
        """
        damages: list[str] = []
        for step in reversed(self.steps()):
            damage = atomic_folder.find_damage(self.folder(step))
            if not damage:
                warning = f"{'; '.join(damages)}; the newest good one is {step}" if damages else ""
                return step, warning
            damages.append(f"checkpoint {step} of {self.directory} is damaged: {damage}")
        if damages:
            raise UserError(f"{'; '.join(damages)}; none is good: delete {self.directory} to begin again")
        return None, ""

    def _best_of(self, steps: list[int]) -> int | None:
        sign = -1 if self._best_metric == "loss" else 1
        scores = {step: self._read_score(step) for step in steps}
        known = {step: sign * score for step, score in scores.items() if score is not None}
        return max(known, key=lambda step: (known[step], -step), default=None)

    def _read_score(self, step: int) -> float | None:
        try:
            score = read_progress(self.folder(step))["metrics"][self._best_metric]
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # never evaluated, or damaged: not the best
            return None
        return score if isinstance(score, int | float) and math.isfinite(score) else None

    def _is_interim(self, step: int) -> bool:
        try:
            return read_progress(self.folder(step)).get("interim") is True
        except (OSError, ValueError, AttributeError):  # damaged
            return False

    def _explain_absence(self, word: str) -> str:
        steps = self.steps()
        if word == AVERAGE_NAME:
            return "there is no averaged checkpoint; the command `average` makes one"
        if word == "best" and steps:
            return f"there is no best checkpoint: none has a {self._best_metric} yet; use last or a step"
        if word in _WORDS or not steps:
            return f"there is no checkpoint {word}"
        return f"there is no checkpoint {word}; the nearest is {min(steps, key=lambda s: abs(s - int(word)))}"


def read_progress(folder: Path) -> dict[str, Any]:
    """The progress that was saved with the checkpoint in `folder`."""
    return json.loads((folder / PROGRESS_NAME).read_text(encoding="utf-8"))
