"""Translation data sets of the Hugging Face Hub: `hf:OWNER/NAME[/CONFIG]`, or `hf:DIR` for a local folder."""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flaxformer_mt.atomic_folder import digest, digest_file
from flaxformer_mt.corpus.pairs import RawSplit, check_languages
from flaxformer_mt.corpus.tfds_cache import match_split
from flaxformer_mt.errors import UserError, describe_error, importing

PREFIX = "hf:"


class HubRows:
    """Rows of a Hub data set: one column per language or, if `nested`, a column of {language: text} dicts."""

    def __init__(self, rows: Any, languages: tuple[str, str], *, nested: bool) -> None:
        self._rows, self._languages, self._nested = rows, languages, nested

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Iterable[int]) -> list[tuple[bytes, bytes]]:
        numbers, (source, target) = list(indices), self._languages
        columns = self._rows[numbers]
        if self._nested:
            rows = columns["translation"]
            columns = {name: [row and row[name] for row in rows] for name in self._languages if name}
        sources = columns[source] if source else [""] * len(numbers)
        pairs = zip(sources, columns[target], strict=True)
        return [((left or "").encode(), (right or "").encode()) for left, right in pairs]


def open_hub_set(name: str, split: str, *, languages: tuple[str, str], cache: Path) -> RawSplit:
    """Open a split, and download the set if necessary; `valid` and `validation` are interchangeable."""
    path, config = _read_name(name)
    real_split = match_split(split, present := _list_splits(name))
    if real_split is None:
        raise UserError(f"{name} has no split {split}; it has {', '.join(sorted(present))}")
    datasets = _import_datasets(name)
    with _naming(name):
        rows = datasets.load_dataset(path, config, split=real_split, cache_dir=str(cache / "hub"))
    translation = rows.features.get("translation")
    nested = translation is not None
    available = (
        getattr(translation, "languages", None) or dict(translation)
        if nested
        else [key for key, kind in rows.features.items() if getattr(kind, "dtype", "").endswith("string")]
    )
    check_languages(name, languages, available)
    side, files = f"{name} {real_split}", [digest_file(Path(file["filename"])) for file in rows.cache_files]
    return RawSplit(
        name=name,
        identity=f"{digest(files)}-{real_split}",
        rows=HubRows(rows, languages, nested=nested),
        languages=languages,
        sides=(f"{side} {languages[0]}", f"{side} {languages[1]}"),
        unit="pair",
        metadata={"split": real_split},
    )


def has_hub_split(name: str, split: str) -> bool:
    return match_split(split, _list_splits(name)) is not None


def _list_splits(name: str) -> list[str]:
    path, config = _read_name(name)
    # The splits of a set on the Hub are cached, since listing takes several requests; a folder may change.
    ask = _ask_for_splits.__wrapped__ if Path(path).is_dir() else _ask_for_splits
    return ask(name, path, config)


@functools.cache
def _ask_for_splits(name: str, path: str, config: str | None) -> list[str]:
    datasets = _import_datasets(name)
    with _naming(name):
        return datasets.get_dataset_split_names(path, config)


def _import_datasets(name: str) -> Any:
    with importing("datasets", what=name):
        import datasets
    datasets.disable_progress_bars()  # only our own progress is shown
    return datasets


def _read_name(name: str) -> tuple[str, str | None]:
    location = name.removeprefix(PREFIX)
    if location and Path(location).expanduser().is_dir():  # Path("") would be the working folder
        return str(Path(location).expanduser()), None
    owner, _, rest = location.partition("/")
    repository, _, config = rest.partition("/")
    if not owner or not repository:
        raise UserError(
            f"{name} is no folder, and no set of the Hub; write hf:OWNER/NAME or hf:OWNER/NAME/CONFIG"
        )
    return f"{owner}/{repository}", config or None


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turn any exception of the library `datasets` into a UserError that names the data set."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{name} cannot be read: {describe_error(error)}") from error
