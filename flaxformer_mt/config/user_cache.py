"""The user's own cache folder, which is always on a local or shared file system."""

import contextlib
import functools
import os
import stat
import tempfile
from pathlib import Path

from flaxformer_mt.errors import UserError, folder_of_arrays, warn_user


def user_cache_dir() -> Path:
    """Return the user's own cache folder: $FLAXFORMER_MT_CACHE, else ~/.cache/flaxformer_mt.

    A user without a home folder, as in a container that runs with a number for a user, has a temporary one.

    Raises:
      UserError: $FLAXFORMER_MT_CACHE is in an object store, or the temporary folder is not the user's own.
    """
    given = os.environ.get("FLAXFORMER_MT_CACHE", "")
    if given:
        return folder_of_arrays(given)
    home = _find_home()
    return _temporary_cache() if home is None else home / ".cache" / "flaxformer_mt"


def _find_home() -> Path | None:
    """Return the home folder; None if there is none, or none in which this user can make a cache."""
    try:
        home = Path.home()
    except RuntimeError:  # neither $HOME nor an entry in the table of users
        return None
    cache = home / ".cache" / "flaxformer_mt"
    nearest = next(path for path in (cache, *cache.parents) if path.exists())
    return home if cache.exists() or os.access(nearest, os.W_OK | os.X_OK) else None


@functools.cache  # one warning
def _temporary_cache() -> Path:
    folder = Path(tempfile.gettempdir()) / f"flaxformer_mt-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    problem = f"user {os.getuid()} has no home folder to write to"
    remedy = "set another cache folder with FLAXFORMER_MT_CACHE"
    # Programs that are kept in a cache are executed: nobody else may have put them there.
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise UserError(f"{problem}, and {folder} is not a folder of this user alone; {remedy}")
    warn_user(f"{problem}: prepared data and compiled programs are kept in {folder}; {remedy}")
    return folder
