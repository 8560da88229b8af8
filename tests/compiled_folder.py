"""Compiled programs that a test session leaves to the next one, for the same JAX, flags and processor.

JAX writes its files in place, and tests kill processes that write. So each session works in a folder of links
to the kept files, and at its end adds those that can be read to them: whole files appear in one step, however
many sessions there are, and nothing that one of them damages or removes is missing in another.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from flaxformer_mt.config.files import is_private, user_cache_dir
from flaxformer_mt.processor import describe_processor

# Folders that have more bytes, or were used longer ago, are removed: sources change, and so do programs.
_MOST_BYTES, _MOST_SECONDS = 3 << 29, 14 * 24 * 3600


def open_folder() -> Path:
    """Make a folder for this session, with what is kept; FLAXFORMER_MT_TEST_PROGRAMS=none keeps nothing."""
    root = user_cache_dir() / "tests"
    if os.environ.get("FLAXFORMER_MT_TEST_PROGRAMS") == "none" or not is_private(root):
        return Path(tempfile.mkdtemp(prefix="flaxformer_mt_compiled_"))
    _remove_old(root)
    kept = root / _name()
    kept.mkdir(mode=0o700, exist_ok=True)
    os.utime(kept)
    folder = Path(tempfile.mkdtemp(prefix="session-", dir=root))
    with contextlib.suppress(OSError):  # removed meanwhile by another session
        shutil.copytree(kept, folder, copy_function=os.link, dirs_exist_ok=True)
    return folder


def close_folder(folder: Path) -> None:
    """Keep the programs that this session has added, and remove its folder."""
    kept = folder.parent / _name()
    if folder.name.startswith("session-"):
        # The package's own, each a folder, and JAX's. Another session may add the same, or remove all.
        for path in [*folder.glob("kept/[!.]*"), *folder.glob("*-cache")]:
            target = kept / path.relative_to(folder)
            with contextlib.suppress(OSError):
                target.parent.mkdir(exist_ok=True)
                if path.is_dir():
                    path.rename(target)
                elif not target.exists() and _is_whole(path):
                    os.link(path, target)
    shutil.rmtree(folder, ignore_errors=True)


def _name() -> str:
    facts = [version("jax"), version("jaxlib"), os.environ["XLA_FLAGS"], *describe_processor()]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()


def _is_whole(path: Path) -> bool:
    from jax._src.compilation_cache import decompress_executable

    try:
        decompress_executable(path.read_bytes())
    except Exception:  # of whichever library JAX compresses with
        return False
    return True


def _remove_old(root: Path) -> None:
    for folder in root.iterdir():
        with contextlib.suppress(OSError):  # removed meanwhile by another session
            size = sum(path.stat().st_size for path in folder.rglob("*"))
            unused = time.time() - folder.stat().st_mtime > _MOST_SECONDS
            if unused or (size > _MOST_BYTES and not folder.name.startswith("session-")):
                shutil.rmtree(folder, ignore_errors=True)
