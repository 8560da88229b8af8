"""A checkpoint that all processes of a job write together, each its own shards.

Process 0 makes the hidden folder, and makes it visible once all processes have reported that their shards are
on disk, with the digests of their files. A process that fails reports that instead: the checkpoint then stays
hidden, and all processes raise an error. No device takes part once the shards are copied, so that training
goes on meanwhile. Processes that share no folder, but an object store, send their shards there.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flaxformer_mt.errors import UserError
from flaxformer_mt.object_store import working_copies
from flaxformer_mt.parallel.processes import decide_once, is_first, let_first_conclude, process_index
from flaxformer_mt.runs import array_files, atomic_folder
from flaxformer_mt.trees import Leaves


class SharedSave:
    """The part of one process in a checkpoint."""

    def __init__(
        self,
        trees: dict[str, Leaves],
        *,
        begin: Callable[[], Path],
        publish: Callable[[Path, dict[str, atomic_folder.FileDigest]], None],
    ) -> None:
        """Copy this process's shards to the host and start to write them; all processes call it together.

        Args:
          trees: the items, by name; without empty arrays.
          begin: makes the hidden folder, with an empty folder for each item, on a file system that all
            processes share; called in process 0.
          publish: makes the folder visible, given the digests of files that their writers have flushed;
            called in process 0, once all shards are on disk.

        Raises:
          UserError: `begin` raised it; then all processes raise it.
        """
        folder = decide_once(lambda: working_copies.to_url(begin()))
        self._folder, self._names = working_copies.to_local(folder), list(trees)
        self._publish = publish
        self._error: Exception | None = None
        self._waits: list[Callable[[], None]] = []
        try:
            for name, leaves in trees.items():
                if folder != str(self._folder):  # the run is in a store, and its copy is our own
                    (self._folder / name).mkdir(parents=True, exist_ok=True)
                self._waits.append(array_files.start_shared_item(self._folder / name, leaves))
        except Exception as error:  # reported by `complete`, since the other processes have begun to write
            self._error = error

    def complete(self) -> None:
        """Wait until the checkpoint is published; a thread of each process calls it.

        Raises:
          OSError: some process could not write.
        """
        problem = let_first_conclude("save", json.dumps(self._finish_own_shards()), self._conclude)
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error
        if problem:
            raise OSError(problem)

    def _finish_own_shards(self) -> dict[str, Any]:
        """Wait until the shards of this process are on disk; return its report."""
        try:
            for wait in self._waits:
                wait()
            if self._error is None:
                files = atomic_folder.digest_files(self._folder, wanted=_is_own_file)
                if not is_first():
                    working_copies.send_parts(self._folder)
                return {"files": files}
        except Exception as error:
            self._error = self._error or error
        return {"problem": _describe(self._error)}

    def _conclude(self, texts: list[str]) -> str:
        """Publish the checkpoint, given the reports of all processes; return the problem, "" if none."""
        reports = [json.loads(text) for text in texts]
        for process, report in enumerate(reports):
            if "problem" in report:
                return f"process {process} of {len(reports)}: {report['problem']}"
        try:
            working_copies.collect_parts(self._folder)
            for name in self._names:
                array_files.finish_shared_item(self._folder / name)
            files = {name: file for report in reports for name, file in report["files"].items()}
            self._publish(self._folder, files)
        except Exception as error:
            self._error = error
            return f"process 0 of {len(reports)}: {_describe(error)}"
        return ""


def _describe(error: Exception | None) -> str:
    return str(error) if isinstance(error, OSError | UserError) else f"{type(error).__name__}: {error}"


def _is_own_file(name: str) -> bool:
    return array_files.is_written_by(name, process_index())
