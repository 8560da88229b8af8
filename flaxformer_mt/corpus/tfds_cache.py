"""TFDS without its noise: where prepared sets lie, and building one so that nobody ever sees half of it.

Owns the folders, the lock and the names of splits. Knows nothing of particular data sets.
"""

import contextlib
import errno
import fcntl
import io
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from flaxformer_mt.config import DataConfig
from flaxformer_mt.errors import UserError


def cache_dir(config: DataConfig) -> Path:
    """The folder of what we prepare: data.cache_dir, $FLAXFORMER_MT_CACHE or ~/.cache/flaxformer_mt."""
    given = config.cache_dir or os.environ.get("FLAXFORMER_MT_CACHE", "")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "flaxformer_mt"


def tfds_dir(config: DataConfig) -> Path:
    """The folder of TFDS's own sets: data.tfds_data_dir, else $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    given = config.tfds_data_dir or os.environ.get("TFDS_DATA_DIR", "")
    return Path(given).expanduser() if given else Path.home() / "tensorflow_datasets"


def match_split(split: str, present: Collection[str]) -> str | None:
    """The split of `present` that `split` means, with its slice; None if there is none.

    match_split("valid", ["train", "validation"]) is "validation"; "train[:1%]" stays as it is.
    """
    base, bracket, rest = split.partition("[")
    for name in (base, {"valid": "validation", "validation": "valid"}.get(base, base)):
        if name in present:
            return f"{name}{bracket}{rest}"
    return None


def open_split(builder: Any, name: str, split: str) -> tuple[str, Any]:
    """The name of a split (or slice) as the builder knows it, and its rows.

    Raises:
      UserError: the set called `name` has no such split, or the slice lies outside of it.
    """
    real_split = match_split(split, builder.info.splits)
    if real_split is None:
        raise UserError(f"{name} has no split {split}; it has {', '.join(sorted(builder.info.splits))}")
    try:
        rows = builder.as_data_source(real_split)
        len(rows)  # negative for [5:3], which TFDS lets pass
    except ValueError as error:
        raise UserError(
            f"{name} has no part {split}; a slice reads as train[:10%] or train[1000:]"
        ) from error
    return real_split, rows


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps TFDS from printing: standard output belongs to results, and its warnings concern TensorFlow.

    Progress bars stay when standard error is a terminal.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        import tensorflow_datasets as tfds
        from absl import logging

        before = logging.get_verbosity()
        logging.set_verbosity(logging.ERROR)
        if not sys.stderr.isatty():
            tfds.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(before)


def build_once(make_builder: Callable[[], Any]) -> Any:
    """Returns the TFDS builder of a prepared set, preparing it first when that was never finished.

    TFDS writes into a folder of its own and renames it at the end, so a set that is there is whole. A lock
    makes a second process wait for the first; whoever holds it removes what a killed process left behind.
    """
    with quiet():
        builder = make_builder()
        if builder.is_prepared():
            return builder
        folder = Path(builder.data_dir)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot write to {folder.parent}: {error.strerror}; name another folder with "
                "--config.data.cache_dir (or tfds_data_dir for TFDS's own sets)"
            ) from None
        with _lock(folder.parent / f".{folder.name}.lock") as alone:
            builder = make_builder()  # another process may have finished it meanwhile
            if builder.is_prepared():
                return builder
            if alone:
                for leftover in folder.parent.glob(f"incomplete.*_{folder.name}"):
                    shutil.rmtree(leftover)
            try:
                builder.download_and_prepare()
            except OSError:
                if (
                    not make_builder().is_prepared()
                ):  # else another process, on a disk without locks, was faster
                    raise
            return make_builder()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Waits for an exclusive lock; yields False where the file system has none."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            yield False
        else:
            yield True  # closing the file ends the lock
