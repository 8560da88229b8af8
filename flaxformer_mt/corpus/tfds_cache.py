"""Cache of prepared TFDS data sets, built so that other processes see only complete sets."""

import contextlib
import hashlib
import io
import os
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from flaxformer_mt import file_lock
from flaxformer_mt.config import DataConfig
from flaxformer_mt.config.files import user_cache_dir
from flaxformer_mt.corpus.caches import read_cached, write_cached
from flaxformer_mt.errors import DISK_FULL, UserError, describe_error, folder_of_arrays, local_path, warn_user

# The files that describe a set have some kilobytes.
_DESCRIPTION_BYTES = 1 << 26


def cache_dir(config: DataConfig) -> Path:
    if not config.cache_dir:
        return user_cache_dir()
    folder = folder_of_arrays(config.cache_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"data.cache_dir {folder} is a file; set it to a folder")
    return folder


def compiled_dir() -> Path:
    """Folder of compiled programs; no config chooses it, since these programs are executed."""
    return user_cache_dir() / "compiled"


def tfds_dir(config: DataConfig) -> Path:
    configured = config.tfds_data_dir or os.environ.get("TFDS_DATA_DIR", "")
    if configured:
        return local_path(configured)
    try:
        return Path.home() / "tensorflow_datasets"
    except RuntimeError:  # no home folder
        return user_cache_dir() / "tensorflow_datasets"


def match_split(split: str, present: Collection[str]) -> str | None:
    """The split in `present` that `split` refers to, with its slice; None if there is none.

    match_split("valid", ["train", "validation"]) is "validation"; "train[:1%]" stays as it is.
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
        len(rows)  # ValueError for a negative length, as of [5:3], which TFDS accepts
    except ValueError as error:
        raise UserError(
            f"{name} has no slice {split}; write a slice as train[:10%] or train[1000:]"
        ) from error
    return real_split, rows


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress TFDS's output and warnings; keep its progress bars if standard error is a terminal."""
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


def build_once(make_builder: Callable[[], Any], *, root: Path | None = None) -> Any:
    """Return the TFDS builder of a data set, preparing the set first if it is missing or incomplete.

    TFDS writes to a temporary folder and renames it at the end, so an existing set is complete. A lock makes
    a second process wait for the first; the holder of the lock removes the folders of killed processes.
    `root` is the folder of all sets of this builder, if only this package writes there.
    """
    with quiet():
        if root is not None:
            _remove_endless(root)
        builder = _open_undamaged(make_builder)
        if builder.is_prepared():
            # Another process may have prepared the set since the builder looked for it, and found no splits.
            return builder if builder.info.splits else make_builder()
        folder = Path(builder.data_dir)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot write to {folder.parent}: {error.strerror}; set another folder with "
                "--config.data.cache_dir (or tfds_data_dir for TFDS's own sets)"
            ) from None
        with _lock(folder.parent / f".{folder.name}.lock") as alone:
            builder = make_builder()  # another process may have prepared the set meanwhile
            if builder.is_prepared():
                return builder
            if alone:
                for leftover in folder.parent.glob(f"incomplete.*_{folder.name}"):
                    shutil.rmtree(leftover)
            try:
                builder.download_and_prepare()
            except OSError:
                # On a disk without locks another process may have prepared the set first.
                if not make_builder().is_prepared():
                    raise
            except RuntimeError as error:  # ArrayRecord reports a full disk only in the text of its message
                code = next((code for code in DISK_FULL if os.strerror(code) in str(error)), None)
                if code is None:
                    raise
                raise OSError(code, os.strerror(code), str(folder)) from error
            write_cached(_record(folder), {"files": _describe_files(folder)})
            return make_builder()


def _open_undamaged(make_builder: Callable[[], Any]) -> Any:
    """Return the builder; a prepared set whose files have changed is removed, with a warning.

    Shards have digests of their own; the files that describe them, such as the number of rows, do not.
    """
    try:
        builder = make_builder()
    except UserError:
        raise
    except Exception as error:  # TFDS raises many types for files that describe no set
        raise UserError(
            f"a prepared data set is damaged ({describe_error(error)}); remove it "
            "from data.cache_dir (or tfds_data_dir): the next run prepares it again"
        ) from error
    folder = Path(builder.data_dir)
    record = read_cached(_record(folder))  # None: prepared by another program, or by an earlier version
    if record is None or not folder.is_dir() or record["files"] == _describe_files(folder):
        return builder
    warn_user(f"the prepared data set {folder} is damaged: its files have changed; it is prepared again")
    _record(folder).unlink()
    shutil.rmtree(folder)
    return make_builder()


def _remove_endless(root: Path) -> None:
    """Remove what TFDS would wait for, or read until memory ends; the set then counts as damaged."""
    for path in list(root.rglob("*")):
        try:
            status = path.stat()
        except OSError:
            continue  # a link to nowhere, or removed meanwhile
        is_huge = path.suffix == ".json" and status.st_size > _DESCRIPTION_BYTES
        if is_huge or not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            warn_user(f"{path} is no file of a prepared data set, but a pipe, a device or too large; removed")
            path.unlink()


def _record(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.files.json"


def _describe_files(folder: Path) -> dict[str, str]:
    """Sizes of all files, and digests of those that are not shards."""
    return {
        path.name: f"{path.stat().st_size}"
        + (hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.suffix == ".json" else "")
        for path in sorted(folder.iterdir())
        if path.is_file()
    }


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Wait for an exclusive lock and yield True; yield False where the file system has no locks."""
    with path.open("a") as file:
        try:
            file_lock.lock(file.fileno(), wait=True)
        except file_lock.FileHasNoLock:
            yield False
        else:
            yield True  # closing the file releases the lock
