"""Real kills of real processes at named moments: as a checkpoint being written, or an old one removed.

A moment is the time that a process spends inside one function. Inside it, every change of the disk is
counted (files opened to be written, renamed, flushed, removed, folders made); the process kills itself with
SIGKILL just before one of them, or some milliseconds after it.
"""

import functools
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

# Moment -> the functions, as modules see them.
MOMENTS = {
    "the cache": ("flaxformer_mt.corpus.text_files.load_or_scan",),
    "cleaning": ("flaxformer_mt.corpus.reader.load_or_clean",),
    "the vocabulary": ("flaxformer_mt.data.prepare._find_vocabs",),
    "the token store": ("flaxformer_mt.data.token_store.artifact",),
    "the run's config": ("flaxformer_mt.data.prepare.open_run",),
    "a checkpoint written": ("flaxformer_mt.runs.array_files.write_item",),
    "a checkpoint sealed": ("flaxformer_mt.runs.checkpoints.atomic_folder.seal_folder",),
    "a checkpoint published": ("flaxformer_mt.runs.checkpoints.atomic_folder.publish_folder",),
    "an old checkpoint removed": ("flaxformer_mt.runs.checkpoints.atomic_folder.remove_folder",),
    "the average": ("flaxformer_mt.runs.checkpoints.Checkpoints.average",),
    "the report": ("flaxformer_mt.runs.run_directory.write_report",),
}
# Those before the network is made, in the order of a run.
OF_PREPARATION = ("the cache", "cleaning", "the vocabulary", "the run's config", "the token store")
OF_TRAINING = tuple(name for name in MOMENTS if name not in OF_PREPARATION)

_WRITING = os.O_WRONLY | os.O_RDWR


class Counter:
    """Counts the changes of the disk inside a moment, and kills the process at one of them."""

    def __init__(self, moment: str, at: int, delay: float) -> None:
        self.moment, self._at, self._delay = moment, at, delay
        self.inside, self.count = 0, 0

    def change(self) -> None:
        if not self.inside:
            return
        if self.count == self._at:
            if not self._delay:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Thread(target=self._kill_later, daemon=True).start()
        self.count += 1

    def _kill_later(self) -> None:
        time.sleep(self._delay)
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """Wraps the functions of the moment and listens to all changes of the disk."""
        for name in MOMENTS[self.moment]:
            owner, function = _find(name)
            setattr(owner, function, self._wrap(getattr(owner, function)))
        fsync = os.fsync

        def sync(file: Any) -> None:
            self.change()
            fsync(file)

        os.fsync = sync
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            if isinstance(arguments[2], int) and arguments[2] & _WRITING:
                self.change()
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link"):
            self.change()

    def _wrap(self, function: Any) -> Any:
        @functools.wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            if self.moment == "a checkpoint sealed" and "checkpoints" not in str(arguments[0]):
                return function(*arguments, **options)
            self.inside += 1
            try:
                return function(*arguments, **options)
            finally:
                self.inside -= 1

        return counted


def _find(name: str) -> tuple[Any, str]:
    """The owner of a function, a module or a class, and the function's name."""
    parts = name.split(".")
    owner: Any = importlib.import_module(".".join(parts[:3]))
    for part in parts[3:-1]:
        owner = getattr(owner, part)
    return owner, parts[-1]


def act(
    *, action: str, config: str, run: str, moment: str = "", at: int = -1, delay: float = 0.0
) -> dict[str, Any]:
    """Prepares or trains a run, and dies at a moment, before its change number `at`.

    Returns what the action leaves, digests of the data or of the run at its end; and, without a moment, the
    number of changes inside each of them.
    """
    from probes import final_state, prepared_data

    counters = [Counter(name, at, delay) for name in ([moment] if moment else MOMENTS)]
    for counter in counters:
        counter.watch()
    try:
        if action == "prepare":
            left: Any = prepared_data(Path(config), Path(run))
        else:
            from flaxformer_mt.config.files import read_config
            from flaxformer_mt.training.loop import fit

            fit(read_config(Path(config)), run)
            left = final_state(Path(run))
    except BaseException:
        return {"error": traceback.format_exc()}
    return {"changes": {counter.moment: counter.count for counter in counters}, "left": left}


def leftovers(cache: Path) -> list[str]:
    hidden = (".writing-", "incomplete.")
    return [str(path) for path in cache.rglob("*") if path.name.startswith(hidden)]
