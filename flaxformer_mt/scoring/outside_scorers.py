"""External scorers: programs that are kept running, and Python functions.

A program reads one JSON object per line and writes one number per line, the higher the better. The object has
the fields `source`, `hypothesis`, `reference` (if there is one) and `left`, the number of lines that follow
before the program must answer.
"""

import atexit
import contextlib
import importlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flaxformer_mt.config.directions import Direction
from flaxformer_mt.errors import UserError, describe_error, name_signal

# Scores texts: sources, hypotheses, and references or None.
ScoreTexts = Callable[[Sequence[str], Sequence[str], Sequence[str] | None], Sequence[float]]
# The direction of texts whose languages are unknown.
UNKNOWN = Direction("", "")

# Number of texts that a program is sent at a time.
_AT_ONCE = 256
# Seconds to wait for the end of a program that has closed its output, and for surplus answers.
_ENDING, _SURPLUS = 2.0, 0.02


@dataclass(frozen=True)
class OutsideScorer:
    """An external scorer with its name and definition; the scores that it returns are checked."""

    name: str
    definition: str
    function: ScoreTexts | Callable[[Sequence[str], Sequence[str], Direction], Iterable[float]]
    # Whether `function` takes the languages of sources and hypotheses, and no references.
    by_direction: bool = False

    def __call__(
        self,
        sources: Sequence[str],
        hypotheses: Sequence[str],
        references: Sequence[str] | None,
        direction: Direction = UNKNOWN,
    ) -> list[float]:
        if not hypotheses:
            return []
        what = f"scorer {self.name} ({self.definition})"
        third: Any = direction if self.by_direction else references
        try:
            scores = [float(score) for score in self.function(sources, hypotheses, third)]
        except UserError as error:
            raise UserError(f"{what} {error}") from error
        except Exception as error:  # of the user's code: one line, no traceback
            raise UserError(f"{what} fails: {describe_error(error)}") from error
        if len(scores) != len(hypotheses):
            raise UserError(
                f"{what} returned {len(scores)} scores for {len(hypotheses)} texts; return one each"
            )
        for score, hypothesis in zip(scores, hypotheses, strict=True):
            if not math.isfinite(score):
                raise UserError(f"{what} scored {hypothesis[:80]!r} as {score}; return a finite number")
        return scores


class ScorerProgram:
    """A program that is started at the first call and kept running; calls from several threads take turns."""

    def __init__(self, command: Sequence[str], limit: float) -> None:
        """Start nothing yet; a program that does not answer within `limit` seconds is terminated."""
        self._command, self._limit, self._lock = command, limit, threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.close)

    def __call__(
        self, sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str] | None
    ) -> list[float]:
        texts = {"source": sources, "hypothesis": hypotheses, "reference": references}
        columns = {name: column for name, column in texts.items() if column is not None}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        scores: list[float] = []
        with self._lock:
            try:
                for start in range(0, len(rows), _AT_ONCE):
                    scores += self._ask(rows[start : start + _AT_ONCE])
                with contextlib.suppress(queue.Empty):
                    self._refuse_surplus(_SURPLUS)
            except BaseException:  # its remaining answers belong to these texts
                self.close()
                raise
        return scores

    def _ask(self, rows: Sequence[dict[str, str]]) -> list[float]:
        process = self._process
        if process is None:
            process = self._start()
        elif not self._answers.empty():
            self._refuse_surplus(0)
        lines = [json.dumps(row | {"left": len(rows) - n}) for n, row in enumerate(rows, start=1)]
        # In a thread: a program that does not read would block this one for ever.
        threading.Thread(target=_write, args=(process.stdin, lines), daemon=True).start()
        scores: list[float] = []
        while len(scores) < len(rows):
            done = f"after {len(scores)} of {len(rows)} scores"
            try:
                answer = self._answers.get(timeout=self._limit)
            except queue.Empty:
                raise UserError(
                    f"is silent for {self._limit:g} seconds {done}{self._last_words()}; it must answer each "
                    "line and flush its output; if it is only slow, raise --scorer_timeout"
                ) from None
            if answer is None:
                raise UserError(f"{self._describe_end()} {done}{self._last_words()}")
            try:
                scores.append(float(answer))
            except ValueError:
                raise UserError(f"answered {answer[:80]!r}; it must write one number per line") from None
        return scores

    def _refuse_surplus(self, seconds: float) -> None:
        answer = self._answers.get(timeout=seconds) if seconds else self._answers.get_nowait()
        if answer is None:
            raise UserError(f"{self._describe_end()} before its input did{self._last_words()}")
        raise UserError(f"answered {answer[:80]!r} without being asked; it must write one number per text")

    def _start(self) -> subprocess.Popen[str]:
        self._errors, self._answers = tempfile.TemporaryFile(), queue.SimpleQueue[str | None]()
        try:
            # In a session of its own: Ctrl-C ends training, which may still need a score for its last steps.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"cannot be started: {error.strerror}") from error
        arguments = self._process.stdout, self._answers.put
        self._reader = threading.Thread(target=_read, args=arguments, daemon=True)
        self._reader.start()
        return self._process

    def _describe_end(self) -> str:
        try:
            status = self._process.wait(_ENDING) if self._process is not None else 0
        except subprocess.TimeoutExpired:
            return "closed its output"
        return f"was ended by {name_signal(-status)}" if status < 0 else f"ended with status {status}"

    def _last_words(self) -> str:
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2000))
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f", saying {last[:200]!r}" if last else ", without a word"

    def close(self) -> None:
        """Terminate the program; the next call starts it again."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._reader.join(_ENDING)
        self._errors.close()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # input that the program has not read
                stream.close()  # type: ignore[union-attr]


def _write(stream: Any, lines: Sequence[str]) -> None:
    with contextlib.suppress(OSError, ValueError):  # the program has ended, as the end of its output shows
        stream.write("".join(f"{line}\n" for line in lines))
        stream.flush()


def _read(stream: Any, take: Callable[[str | None], object]) -> None:
    for line in stream:
        if line.strip():
            take(line.strip())
    take(None)


def import_function(module: str, name: str) -> ScoreTexts:
    """Import a function from a module, which may be in the working directory."""
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # any exception of the user's module
        raise UserError(f"scorer {module}:{name} cannot be imported: {describe_error(error)}") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(function):
        raise UserError(f"scorer {module}:{name} is no function; name one of sources, hypotheses, references")
    return function
