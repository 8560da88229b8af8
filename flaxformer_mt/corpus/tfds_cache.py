"""The cache of prepared TFDS data sets, in which other processes see only complete data sets."""

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from flaxformer_mt import file_lock
from flaxformer_mt.config import DataConfig
from flaxformer_mt.config.files import user_cache_dir
from flaxformer_mt.errors import UserError, folder_of_arrays, local_path, name_full_disk


def cache_dir(config: DataConfig) -> Path:
    if not config.cache_dir:
        return user_cache_dir()
    folder = folder_of_arrays(config.cache_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"data.cache_dir {folder} is a file; set it to a folder")
    return folder


def compiled_dir() -> Path:
    """Return the cache folder of compiled programs; configs cannot set it, as its programs are executed."""
    return user_cache_dir() / "compiled"


def tfds_dir() -> Path:
    if configured := os.environ.get("TFDS_DATA_DIR", ""):
        return local_path(configured)
    try:
        return Path.home() / "tensorflow_datasets"
    except RuntimeError:  # no home folder
        return user_cache_dir() / "tensorflow_datasets"


def match_split(split: str, present: Collection[str]) -> str | None:
    """Find a split, which may have a slice, in `present`; return its name there, or None if it is missing.

    match_split("valid", ["train", "validation"]) returns "validation"; "train[:1%]" is returned unchanged.
    """
    base, bracket, rest = split.partition("[")
    for name in (base, {"valid": "validation", "validation": "valid"}.get(base, base)):
        if name in present:
            return f"{name}{bracket}{rest}"
    return None


def open_split(builder: Any, name: str, split: str) -> tuple[str, Any]:
    real_split = match_split(split, builder.info.splits)
    if real_split is None:
        raise UserError(f"{name} has no split {split}; it has {', '.join(sorted(builder.info.splits))}")
    try:
        rows = builder.as_data_source(real_split)
        len(rows)  # raises ValueError for a negative length, such as [5:3], which TFDS accepts
    except ValueError as error:
        raise UserError(
            f"{name} has no slice {split}; write a slice as train[:10%] or train[1000:]"
        ) from error
    return real_split, rows


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the output and warnings of TFDS, except progress bars if standard error is a terminal."""
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


def build_set(builder: Any) -> None:
    """Prepare a data set; if the disk is full, raise an OSError with the errno and the path."""
    with name_full_disk(builder.data_dir):
        builder.download_and_prepare()


def build_once(make_builder: Callable[[], Any]) -> Any:
    """Return the TFDS builder of a data set; if the set is missing, one process prepares it, others wait.

    TFDS writes to a temporary folder and renames it at the end, so an existing data set is complete. The
    process that holds the lock removes the temporary folders of killed processes.
    """
    folder = Path(make_builder().data_dir)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder.parent}: {error.strerror}; set another folder with TFDS_DATA_DIR"
        ) from None
    with (folder.parent / f".{folder.name}.lock").open("a") as file:
        with contextlib.suppress(file_lock.FileHasNoLock):
            file_lock.lock(file.fileno(), wait=True)
            for leftover in folder.parent.glob(f"incomplete.*_{folder.name}"):
                shutil.rmtree(leftover)
        builder = make_builder()  # another process may have prepared the set meanwhile
        if not builder.is_prepared():
            build_set(builder)
    return make_builder()
