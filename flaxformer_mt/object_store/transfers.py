"""Single files and folders in object stores: inputs are fetched, complete outputs are uploaded."""

import json
import shutil
from collections.abc import Collection
from pathlib import Path

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.errors import UserError, find_url, local_path, show_as
from flaxformer_mt.object_store.filesystem import ObjectStore
from flaxformer_mt.object_store.mirror import Mirror, cache_of

# The folders of outputs that are being made, and where they go.
_outputs: dict[Path, tuple[ObjectStore, str]] = {}
# What a folder of inputs knows of the files in it, for the next command.
_EQUAL = ".equal.json"


def fetch_input(path: str | Path) -> Path:
    """Return the path with its ~ expanded; for a URL, a local copy of the file or folder there.

    Raises:
      UserError: there is nothing at the URL, or the store cannot be read.
    """
    if not (url := find_url(path)):
        return local_path(path)
    above, _, name = url.rpartition("/")
    folder = cache_of(above) / "inputs"
    if not fetch_files(above, folder, below=name):
        raise UserError(f"{url} does not exist; correct the URL")
    show_as(folder, above)
    return folder / name


def fetch_files(
    url: str, folder: Path, *, below: str = "", wanted: Collection[str] | None = None
) -> list[str]:
    """Make the files of a folder equal to objects below a URL; return the names of all objects there.

    Files whose objects have the same version as when they were fetched are left as they are, and their times
    of change with them.

    Args:
      below: the name of an object, or of a folder; "": all objects.
      wanted: the names of the objects to fetch; None: all of them.
    """
    mirror, record = Mirror(ObjectStore(url), folder), folder / _EQUAL
    try:
        mirror.equal = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        pass
    mirror.look(below)
    for name in [name for name in mirror.equal if f"{name}/".startswith(f"{below}/" if below else "")]:
        if name not in mirror.objects:
            (folder / name).unlink(missing_ok=True)
            del mirror.equal[name]
    try:
        mirror.fetch(name for name in mirror.objects if wanted is None or name in wanted)
    except FileNotFoundError as error:
        raise UserError(f"{url} has changed while it was read ({error}); run the command again") from error
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(record, json.dumps(mirror.equal).encode())
    return sorted(mirror.objects)


def open_output(path: str | Path, *, empty: bool = False) -> Path:
    """Return the path with its ~ expanded; for a URL, the path of a local file or folder until
    `publish_output`.

    Args:
      empty: whether there must be nothing at the URL.

    Raises:
      UserError: there is something, or the store cannot be read.
    """
    if not (url := find_url(path)):
        return local_path(path)
    above, _, name = url.rpartition("/")
    store = ObjectStore(above)
    if (present := store.list(name)) and empty:
        raise UserError(f"{url} is not empty: it has {', '.join(sorted(present)[:3])}; give another --output")
    folder = cache_of(url) / "outputs"
    folder.mkdir(parents=True, exist_ok=True)
    show_as(folder, above)
    _outputs[folder / name] = (store, name)
    return folder / name


def publish_output(path: Path) -> None:
    """Upload what has been made at a path that `open_output` returned for a URL, and remove it here."""
    if path in _outputs:
        store, name = _outputs.pop(path)
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        store.upload(
            (file, f"{name}/{file.relative_to(path).as_posix()}".removesuffix("/.")) for file in files
        )
        shutil.rmtree(path.parent, ignore_errors=True)
