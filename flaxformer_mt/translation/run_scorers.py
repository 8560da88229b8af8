"""Trained runs as scorers: log-probabilities per token of texts whose languages are known."""

import functools
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from flaxformer_mt.config.checks import candidate_search
from flaxformer_mt.config.directions import Direction, find_directions
from flaxformer_mt.config.files import read_config, split_checkpoint
from flaxformer_mt.config.load_options import LoadOptions
from flaxformer_mt.corpus.tfds_cache import compiled_dir
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.object_store.remote_runs import open_copy
from flaxformer_mt.parallel.devices import enable_compilation_cache
from flaxformer_mt.runs.load_run import choose_checkpoint, load_trained
from flaxformer_mt.scoring.outside_scorers import OutsideScorer
from flaxformer_mt.translation.scorer import Scorer
from flaxformer_mt.translation.translator import Translator, on_host

# Threads take turns, so that a model is loaded once.
_LOCK = threading.Lock()


def make_run_scorer(text: str, name: str | None) -> OutsideScorer:
    """Return the scorer that run:RUN or run:RUN,run:RUN defines; its models are loaded at the first call."""
    runs = [RunScorer(one) for one in text.removeprefix("run:").split(",run:")]
    name = name or "+".join(re.sub(r"[^\w+-]", "_", one.folder.name) for one in runs)
    shown = ",".join(f"run:{one.name}" for one in runs)
    if len(runs) == 1:
        return OutsideScorer(name, shown, runs[0], by_direction=True)
    if len(runs) > 2 or not any(one.reverse in runs[1].directions for one in runs[0].directions):
        raise UserError(
            f"the runs are of {', '.join(one.languages for one in runs)}; dual cross-entropy needs two runs "
            "whose directions are the reverse of each other"
        )
    return OutsideScorer(name, shown, functools.partial(_score_dual, runs), by_direction=True)


class RunScorer:
    """Scores pairs of texts with the model of a run."""

    def __init__(self, text: str) -> None:
        """Find the run and the checkpoint that RUN or RUN@CHECKPOINT names."""
        run, checkpoint = split_checkpoint(text)
        if not run:
            raise UserError("it names no run; give run:RUN")
        self.folder = open_copy(run)
        config = read_config(self.folder / "config.json")
        self.directions = find_directions(config.data)
        self.languages = " and ".join(one.name for one in self.directions)
        _, self._checkpoint = choose_checkpoint(self.folder, config, checkpoint, warn_user)
        self.name = f"{run}@{self._checkpoint}"

    def __call__(self, sources: Sequence[str], hypotheses: Sequence[str], task: Direction) -> np.ndarray:
        """Score sources given hypotheses, or the reverse; with a language model, score one side alone."""
        texts = Direction("", task.target), Direction("", task.source)
        for direction in (task.reverse, task, *texts):
            if direction in self.directions:
                return self.score(sources, hypotheses, task, direction)
        _refuse([self], task)

    def score(
        self, sources: Sequence[str], hypotheses: Sequence[str], task: Direction, direction: Direction
    ) -> np.ndarray:
        """Return the mean token log-probability, with eos, of each text on `direction`'s target side."""
        forward = direction.target == task.target
        source, target = (sources, hypotheses) if forward else (hypotheses, sources)
        languages = {"source_language": direction.source or None, "target_language": direction.target}
        with _LOCK:
            scorer = _load(self.folder, self._checkpoint)
            scored = scorer.score(source if direction.source else None, target, **languages)
        return np.array([one.log_prob / len(one.tokens) for one in scored])


@functools.cache
def _load(folder: Path, checkpoint: str) -> Scorer:
    enable_compilation_cache(compiled_dir())
    try:
        # `alone`, since only the processes that have something to score load the model.
        trained = load_trained(folder, checkpoint=checkpoint, alone=True)
    except UserError as error:
        raise UserError(f"cannot be loaded: {error}") from error
    # Once, and without line numbers, which are relative to a batch.
    warn = functools.cache(lambda fact: warn_user(f"texts that {folder} scores: {fact}"))
    # Without search.mbr and search.rerank, which do not affect scores.
    options = LoadOptions(search=candidate_search(trained.config.search), use_all_devices=False)
    model = Translator(on_host(trained), options, warn=lambda message: warn(message.rpartition(": ")[2]))
    return Scorer(model, cuts_lines=True)


def _score_dual(
    runs: Sequence[RunScorer], sources: Sequence[str], hypotheses: Sequence[str], task: Direction
) -> np.ndarray:
    """Return exp(-(|H_A - H_B| + (H_A + H_B) / 2)) of each pair, where H is the cross-entropy per token.

    This is the score adq of dual conditional cross-entropy filtering (Junczys-Dowmunt 2018), from 0 to 1.
    """
    for forward, backward in (runs, runs[::-1]):
        if task in forward.directions and task.reverse in backward.directions:
            a = -forward.score(sources, hypotheses, task, task)
            b = -backward.score(sources, hypotheses, task, task.reverse)
            return np.exp(-(np.abs(a - b) + (a + b) / 2))
    _refuse(runs, task)


def _refuse(runs: Sequence[RunScorer], task: Direction) -> NoReturn:
    languages = " and of ".join(one.languages for one in runs)
    known = " and ".join(language or "unknown" for language in task)
    raise UserError(
        f"is of {languages}, so that it cannot score texts whose languages are {known}; give runs of these"
    )
