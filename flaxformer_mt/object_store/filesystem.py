"""The objects below a URL such as gs://bucket/runs/x: listed, read, written, created, copied and removed.

The only module that imports fsspec, which in turn imports gcsfs for gs:// and s3fs for s3://. Every failure
of a store becomes a UserError that names the URL and a remedy. Knows nothing of runs.
"""

import concurrent.futures
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from flaxformer_mt.errors import DISK_FULL, UserError, install_command

T = TypeVar("T")

# Scheme -> the extra of this package that its store needs. `file` is a bucket that is mounted as a folder.
_SCHEMES = {"gs": "gs", "gcs": "gs", "s3": "s3", "file": "", "memory": ""}
_LOGIN = {
    "gs": "log in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "": "give this user the permission",
}
# Seconds before each further attempt after a failure that may pass, in addition to those of the store's
# package. A store that has never answered gets one attempt: its address may be wrong.
_DELAYS = (1.0, 4.0, 16.0)
# Objects that are transferred at the same time.
_TRANSFERS = 8
# Smaller files are read at once, so that one that grows meanwhile is stored as it was at one moment.
_SMALL_BYTES = 1 << 25
# What a store tells about the version of an object; it changes whenever the object is written.
_VERSION_FACTS = ("ETag", "etag", "generation", "md5Hash", "LastModified", "mtime", "ino", "created")
_REFUSED = r"Credential|RefreshError|Forbidden|Unauthorized|Anonymous|Access ?Denied|InvalidAccessKeyId"
_REFUSED += r"|SignatureDoesNotMatch|\b401\b|\b403\b"


class ObjectStore:
    """The objects below one URL; their names are relative to it, as `checkpoints/500/progress.json`."""

    def __init__(self, url: str) -> None:
        """Connects to the store of a URL, such as gs://bucket/runs/x.

        Raises:
          UserError: the scheme is unknown, its package is absent, or there are no credentials.
        """
        scheme = url.partition(":")[0]
        if scheme not in _SCHEMES:
            raise UserError(f"{url}: the scheme {scheme} is unknown; give a folder, gs://... or s3://...")
        self.url, self._extra, self._answered = url, _SCHEMES[scheme], False
        import fsspec

        for package in ("gcsfs", "s3fs", "aiobotocore", "botocore", "google"):
            # They log each attempt, with a traceback; the exception of the last one is enough.
            logging.getLogger(package).setLevel(logging.CRITICAL)
        options = {"auto_mkdir": True} if scheme == "file" else {"use_listings_cache": False}
        try:
            self._files, self._base = self._call("opened", fsspec.url_to_fs, url, **options)
        except ImportError as error:
            raise UserError(
                f"{url} needs a package that this Python lacks ({error}); install it: "
                f"{install_command(extra=self._extra)}"
            ) from error
        self._base = self._base.rstrip("/")

    def list(self, folder: str = "") -> dict[str, str]:
        """The names of all objects, or of those below a folder, each with a text that names its version."""
        found = self._call("listed", self._files.find, self._path(folder), detail=True)
        if list(found.values()) == [{}]:  # one object of that very name, in some stores without its facts
            found = {path: self._call("listed", self._files.info, path) for path in found}
        objects = {}
        for path, facts in found.items():
            name = path[len(self._base) + 1 :]
            # Consoles of stores make objects that end in /, to show a folder; others must not leave ours.
            if not {"", ".", ".."} & set(name.split("/")):
                version = [str(facts[fact]) for fact in _VERSION_FACTS if facts.get(fact) is not None]
                objects[name] = " ".join([str(facts.get("size")), *version])
        return objects

    def require_bucket(self) -> None:
        """Raises UserError if the bucket does not exist: a store lists nothing below one that is absent."""
        bucket = self._base.strip("/").partition("/")[0]
        if self._extra:
            try:
                self._files.ls(bucket, detail=False)
            except FileNotFoundError as error:
                raise UserError(
                    f"{self.url}: there is no bucket {bucket}; create it, or correct the URL"
                ) from error
            except Exception:  # noqa: S110  may be allowed to read a part of the bucket only
                pass

    def read(self, name: str) -> bytes:
        """The content of an object. Raises FileNotFoundError if there is none of that name."""
        return self._call("read", self._files.cat_file, self._path(name), may_miss=True)

    def write(self, name: str, content: bytes) -> None:
        """Writes an object at once: readers see the old one or the new one."""
        self._call("written", self._files.pipe_file, self._path(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Writes an object unless one of that name exists, in one step; returns whether it did."""
        try:
            # An attempt whose answer was lost would find its own object: the caller compares the content.
            self._call("written", self._files.pipe_file, self._path(name), content, mode="create")
        except FileExistsError:
            return False
        return True

    def download(self, names: Iterable[tuple[str, Path]]) -> None:
        """Copies objects into files, each of which appears at once.

        Raises:
          FileNotFoundError: an object does not exist.
          OSError: the local disk is full.
        """

        def get(name: str, path: Path) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
            try:
                self._call("read", self._files.get_file, self._path(name), str(partial), may_miss=True)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)

        _in_parallel(get, names)

    def upload(self, files: Iterable[tuple[Path, str]]) -> None:
        """Copies files into objects, each of which appears at once."""

        def put(path: Path, name: str) -> None:
            if path.stat().st_size < _SMALL_BYTES:
                self.write(name, path.read_bytes())
            else:
                self._call("written", self._files.put_file, str(path), self._path(name))

        _in_parallel(put, files)

    def copy(self, names: Iterable[tuple[str, str]]) -> None:
        """Copies objects within the store."""

        def copy_one(old: str, new: str) -> None:
            self._call("written", self._files.cp_file, self._path(old), self._path(new))

        _in_parallel(copy_one, names)

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects; those that are absent are left out."""

        def remove_one(name: str) -> None:
            try:
                self._call("removed", self._files.rm_file, self._path(name), may_miss=True)
            except FileNotFoundError:
                pass

        _in_parallel(remove_one, ((name,) for name in names))

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def _call(self, done: str, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Calls a function of the store, again after failures that may pass: "cannot be DONE"."""
        may_miss = options.pop("may_miss", False)
        for delay in (*(_DELAYS if self._answered else ()), None):
            try:
                result = function(*arguments, **options)
                self._answered = done != "opened"
                return result
            except (FileExistsError, ImportError):
                raise
            except FileNotFoundError as error:
                if may_miss:
                    raise
                raise self._refuse(done, error, "create the bucket, or correct the URL") from error
            except Exception as error:  # each store has exceptions of its own
                if isinstance(error, OSError) and error.errno in DISK_FULL:
                    raise
                if isinstance(error, PermissionError) or re.search(
                    _REFUSED, f"{type(error).__name__} {error}"
                ):
                    raise self._refuse(done, error, _LOGIN[self._extra]) from error
                if delay is None or isinstance(error, ValueError | TypeError):
                    remedy = "check the URL and the network, and run the command again"
                    raise self._refuse(done, error, remedy) from error
                time.sleep(delay)
        raise AssertionError("the last attempt returns or raises")

    def _refuse(self, done: str, error: Exception, remedy: str) -> UserError:
        reason = str(error).strip().partition("\n")[0]
        return UserError(f"{self.url} cannot be {done} ({type(error).__name__}: {reason}); {remedy}")


def _in_parallel(work: Callable[..., None], tasks: Iterable[tuple]) -> None:
    """Calls `work` for all tasks, several at a time; raises the first error, after all have ended."""
    tasks = list(tasks)
    if len(tasks) < 2:
        for task in tasks:
            work(*task)
        return
    with concurrent.futures.ThreadPoolExecutor(min(_TRANSFERS, len(tasks))) as pool:
        for done in [pool.submit(work, *task) for task in tasks]:
            done.result()
