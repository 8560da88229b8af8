"""Files of a folder that equal objects of a store: what differs is fetched, or uploaded."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from flaxformer_mt.config.user_cache import user_cache_dir
from flaxformer_mt.object_store.filesystem import ObjectStore


class Mirror:
    """The objects of a store, and the files that have their names in the folder `root`."""

    def __init__(self, store: ObjectStore, root: Path) -> None:
        """Read nothing yet."""
        self.store, self.root = store, root
        # The objects that were there when we last looked, with their versions.
        self.objects: dict[str, str] = {}
        # Of each file that equals its object: the version of the object, and size and time of the file.
        self.equal: dict[str, list[str | int]] = {}

    def look(self, below: str = "") -> None:
        """List the objects, or those below a folder."""
        self.objects = self.store.list(below)

    def is_equal(self, name: str) -> bool:
        """Return whether file and object are both as they were when one was copied to the other."""
        path = self.root / name
        return name in self.objects and path.is_file() and self.equal.get(name) == self._facts(name)

    def fetch(self, names: Iterable[str]) -> None:
        """Fetch the objects whose files differ. Raises FileNotFoundError if one has been removed since."""
        wanted = [name for name in names if name in self.objects and not self.is_equal(name)]
        self.store.download((name, self.root / name) for name in wanted)
        self.note(wanted)

    def upload(self, names: Iterable[str]) -> None:
        """Upload files, and look at the store again."""
        names = list(names)
        self.store.upload((self.root / name, name) for name in names)
        self.look()
        self.note(names)

    def note(self, names: Iterable[str]) -> None:
        """Record that files equal their objects, where there are both."""
        for name in names:
            if name in self.objects and (self.root / name).is_file():
                self.equal[name] = self._facts(name)

    def _facts(self, name: str) -> list[str | int]:
        stat = (self.root / name).stat()
        return [self.objects[name], stat.st_size, stat.st_mtime_ns]


def cache_of(url: str) -> Path:
    """Return the folder for local copies of what is at a URL."""
    digest = hashlib.blake2b(os.fsencode(url), digest_size=8).hexdigest()
    return user_cache_dir().resolve() / "stores" / digest
