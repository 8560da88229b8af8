"""Lists, reads, writes and removes the objects below a URL such as gs://bucket/runs/x, with fsspec."""

import logging
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flaxformer_mt.errors import DISK_FULL, UserError, describe_error, install_command

# Scheme -> the extra of this package that its store needs. `file` is a bucket that is mounted as a folder.
_SCHEMES = {"gs": "gs", "gcs": "gs", "s3": "s3", "file": "", "memory": ""}
_LOGIN = {
    "gs": "log in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "": "give this user the permission",
}
_REFUSED = r"Credential|RefreshError|Forbidden|Unauthorized|Anonymous|Denied|AccessKeyId|Signature|\b40[13]\b"
# Smaller files are read at once, so that one that grows meanwhile is stored as it was at one moment.
_SMALL_BYTES = 1 << 25
# What a store tells about the version of an object; it changes whenever the object is written.
_VERSION_FIELDS = ("size", "ETag", "etag", "generation", "md5Hash", "LastModified", "mtime", "ino", "created")


class ObjectStore:
    """The objects below one URL; object names are relative to the URL, as in `checkpoints/500/manifest.json`.

    If the store cannot be reached, all methods raise a UserError, which names the URL and a remedy.
    """

    def __init__(self, url: str) -> None:
        scheme = url.partition(":")[0]
        if scheme not in _SCHEMES:
            raise UserError(f"{url}: the scheme {scheme} is unknown; give a folder, gs://... or s3://...")
        self.url, self._extra = url, _SCHEMES[scheme]
        import fsspec

        for package in ("gcsfs", "s3fs", "aiobotocore", "botocore", "google"):
            # They log each attempt, with a traceback; the exception of the last one is enough.
            logging.getLogger(package).setLevel(logging.CRITICAL)
        options = {"auto_mkdir": True} if scheme == "file" else {"use_listings_cache": False}
        try:
            self._files, base = self._call("opened", fsspec.url_to_fs, url, **options)
        except ImportError as error:
            needed = f"{url} needs a package that this Python lacks ({error})"
            raise UserError(f"{needed}; install it: {install_command(extra=self._extra)}") from error
        self._base = base.rstrip("/")

    def list(self, folder: str = "") -> dict[str, str]:
        """Return the name of each object below `folder`, with a text that identifies the object's version."""
        objects = self._call("listed", self._files.find, self._path(folder), detail=True)
        if list(objects.values()) == [{}]:  # one object of that very name, in some stores without its fields
            objects = {path: self._call("listed", self._files.info, path) for path in objects}
        if not objects and self._extra:  # a bucket that is absent lists as an empty one
            self._call("listed", self._files.info, self._base.strip("/").partition("/")[0])
        named = {path[len(self._base) + 1 :]: info for path, info in objects.items()}
        return {
            name: " ".join(str(info[field]) for field in _VERSION_FIELDS if info.get(field) is not None)
            for name, info in named.items()
            # Web consoles create objects that end in / as folders; names with .. must not leave our folder.
            if not {"", ".", ".."} & set(name.split("/"))
        }

    def read(self, name: str) -> bytes:
        """Return the content of an object; raise FileNotFoundError if it does not exist."""
        return self._call("read", self._files.cat_file, self._path(name))

    def write(self, name: str, content: bytes, *, mode: str = "overwrite") -> None:
        """Write an object atomically; with mode "create", raise FileExistsError if it already exists."""
        self._call("written", self._files.pipe_file, self._path(name), content, mode=mode)

    def download(self, pairs: Iterable[tuple[str, Path]]) -> None:
        """Copy objects to files, which appear atomically; raise FileNotFoundError if an object is missing."""
        names, partial = [], {}
        for name, path in pairs:
            path.parent.mkdir(parents=True, exist_ok=True)
            names.append(self._path(name))
            partial[path.with_name(f".{path.name}.{os.getpid()}.tmp")] = path
        try:
            self._call("read", self._files.get, names, list(map(str, partial)))
            for written, path in partial.items():
                os.replace(written, path)
        finally:
            for written in partial:
                written.unlink(missing_ok=True)

    def upload(self, pairs: Iterable[tuple[Path, str]]) -> None:
        small, large = {}, {}
        for path, name in pairs:
            if path.stat().st_size < _SMALL_BYTES:
                small[self._path(name)] = path.read_bytes()
            else:
                large[str(path)] = self._path(name)
        self._call("written", self._files.pipe, small)
        self._call("written", self._files.put, list(large), list(large.values()))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects in order; missing objects are ignored."""
        for name in names:
            try:
                self._call("removed", self._files.rm_file, self._path(name))
            except FileNotFoundError:
                pass

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def _call(self, done: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function of the store; its failures become UserErrors that say "URL cannot be DONE"."""
        try:
            return function(*arguments, **options)
        except (FileExistsError, ImportError):
            raise
        except Exception as error:  # each store has exceptions of its own
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            remedy = "check the URL and the network, and run the command again"
            if isinstance(error, FileNotFoundError):
                if done in ("read", "removed"):
                    raise
                remedy = "create the bucket, or correct the URL"
            elif isinstance(error, PermissionError) or re.search(_REFUSED, f"{type(error).__name__} {error}"):
                remedy = _LOGIN[self._extra]
            reason = describe_error(error)
            raise UserError(f"{self.url} cannot be {done} ({reason}); {remedy}") from error
