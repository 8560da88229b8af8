"""The user's own cache folder, which is always on a local or shared file system."""

import os
from pathlib import Path

from flaxformer_mt.errors import local_path


def user_cache_dir() -> Path:
    """The user's own cache folder: $FLAXFORMER_MT_CACHE, else ~/.cache/flaxformer_mt."""
    given = os.environ.get("FLAXFORMER_MT_CACHE", "")
    return local_path(given) if given else Path.home() / ".cache" / "flaxformer_mt"
