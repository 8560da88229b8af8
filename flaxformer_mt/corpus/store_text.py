"""Text files in an object store: a local copy of those that a config reads, in the cache folder."""

import hashlib
import itertools
from collections.abc import Iterable
from pathlib import Path

from flaxformer_mt.config import DataConfig
from flaxformer_mt.config.directions import find_directions
from flaxformer_mt.corpus.packed_files import PACKINGS
from flaxformer_mt.corpus.text_files import TABLES
from flaxformer_mt.corpus.tfds_cache import cache_dir
from flaxformer_mt.errors import UserError, show_as
from flaxformer_mt.object_store.transfers import fetch_files


def copy_text(url: str, config: DataConfig) -> Path:
    """Return the local copy of a folder: texts of the config's splits and languages, weights, alignments,
    scores.

    Files that have not changed in the store are not fetched again.

    Raises:
      UserError: there is no file at the URL, or the store cannot be read.
    """
    folder = cache_dir(config) / "text" / hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    splits = {config.train_split, config.valid_split, config.test_split, "valid", "validation"}
    languages = {language for direction in find_directions(config) for language in direction}
    texts = _name_files(splits, {*filter(None, languages), *TABLES})
    wanted = texts | _name_files(splits, ["weights"])
    wanted |= {name for name in (*config.alignments, *config.teacher_scores) if name}
    folder.mkdir(parents=True, exist_ok=True)
    show_as(folder, url)
    present = fetch_files(url, folder, wanted=wanted)
    if not texts & set(present):
        found = f"it has {', '.join(present[:10])}" if present else "it is empty, or does not exist"
        raise UserError(
            f"{url} has no text file of the splits and languages of data: {found}; the files are named as "
            f"{config.train_split}.{config.target_language}; set --config.data.text_dir"
        )
    return folder


def _name_files(splits: Iterable[str], suffixes: Iterable[str]) -> set[str]:
    return {"".join(parts) for parts in itertools.product(splits, ["."], suffixes, PACKINGS)}
