"""Defines scorers, from the values of `--scorer` and the arguments of `define_scorer`."""

import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from flaxformer_mt.errors import UserError, suggest
from flaxformer_mt.scoring.metrics import add_scorer, add_spbleu, all_metrics
from flaxformer_mt.scoring.outside_scorers import OutsideScorer, ScorerProgram, ScoreTexts, import_function


def define_scorer(definition: str | ScoreTexts, *, name: str | None = None, timeout: float = 600.0) -> str:
    """Define a scorer for use in `train.best_metric`, `search.rerank` and other options; return its name.

    Args:
      definition: a function of sources, hypotheses and references (or None) that returns one number for each
        hypothesis, the higher the better; or a string, in the form of the flag `--scorer`.
      name: the scorer's name. None: the name of the function, the script, the program or the run.
      timeout: seconds to wait for an answer of a program before UserError is raised.

    Raises:
      UserError: the program, function, run or file does not exist, or the name is taken.
    """
    if callable(definition):
        shown = f"{getattr(definition, '__module__', '')}:{getattr(definition, '__qualname__', 'function')}"
        own = str(getattr(definition, "__name__", "scorer"))
        return add_scorer(OutsideScorer(name or own, shown, definition))
    given, text = re.fullmatch(r"(?:([A-Za-z][\w+-]*)=)?(.*)", definition.strip(), re.S).groups()  # type: ignore[union-attr]
    name = name or given
    (metric, _, file), known = text.partition(":"), all_metrics().get(text)
    if metric == "spbleu" or (known is not None and known.scorer is None):
        if name not in (None, metric):
            raise UserError(f"--scorer={definition}: {metric} keeps its name; leave out {name}=")
        if metric == "spbleu":
            add_spbleu(file)
        return metric
    if text.startswith("run:"):
        from flaxformer_mt.translation.run_scorers import make_run_scorer

        try:
            scorer = make_run_scorer(text, name)
        except UserError as error:
            raise UserError(f"--scorer={definition}: {error}") from error
        return add_scorer(scorer)
    if function := re.fullmatch(r"([A-Za-z_][\w.]*):(\w+)", text):
        return add_scorer(OutsideScorer(name or function[2], text, import_function(*function.groups())))
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--scorer={definition}: {error}; correct its quotes") from error
    if not words or shutil.which(words[0]) is None:
        usage = "give [NAME=]COMMAND, MODULE:FUNCTION, run:RUN, spbleu:FILE or the name of a metric"
        hint = suggest(text, [*all_metrics(), "spbleu"], otherwise=usage)
        raise UserError(f"--scorer={definition}: there is no program {words[0] if words else ''!r}{hint}")
    script = next((word for word in words if word.endswith(".py")), words[0])
    name = name or re.sub(r"[^\w+-]", "_", Path(script).stem)
    return add_scorer(OutsideScorer(name, text, ScorerProgram(words, timeout)))


def define_scorers(definitions: Sequence[str], *, timeout: float) -> list[str]:
    """Define the scorers of a command and return their names; raise UserError if a name occurs twice."""
    names = [define_scorer(definition, timeout=timeout) for definition in definitions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"--scorer defines {twice} twice; give one of them as NAME=COMMAND")
    return names
