"""Atomic writes: a reader sees the old or the new content of a file, even if the writer is killed."""

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, *parts: bytes | memoryview, sync: bool = False) -> None:
    """Write `parts` to a hidden temporary file, then rename it to `path`; the folder of `path` must exist.

    With `sync`, the file and its folder are also flushed to disk.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("wb") as file:
            for part in parts:
                file.write(part)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
        if sync:
            sync_directory(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # not that of the hidden one
    finally:
        partial.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
