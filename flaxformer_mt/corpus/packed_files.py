"""Files that are packed by gzip (.gz) or Zstandard (.zst), as their names say, and unpacked while read."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from flaxformer_mt.corpus.arrow_files import open_zst
from flaxformer_mt.errors import UserError

# Endings of names; "" of files that are not packed.
PACKINGS = ("", ".gz", ".zst")
_NAMES = {".gz": "gzip", ".zst": "Zstandard"}
# Bytes that are skipped at a time.
_SKIPPED = 1 << 20


def find_packing(path: Path) -> str:
    """Return the ending that says how a file is packed; "" if it is not."""
    return path.suffix if path.suffix in _NAMES else ""


def name_unpacked(path: Path) -> str:
    """Return the name that a file has when it is not packed."""
    return path.name.removesuffix(find_packing(path))


@contextlib.contextmanager
def open_unpacked(path: Path, *, start: int = 0) -> Iterator[io.BufferedReader]:
    """Open a file for reading its unpacked bytes from number `start` on.

    Raises:
      UserError: inside of the context too: the file cannot be read, or is damaged or not complete.
    """
    packing = find_packing(path)
    try:
        with contextlib.ExitStack() as stack:
            if packing == ".zst":
                file = stack.enter_context(open_zst(path))
                while start and (skipped := len(file.read(min(start, _SKIPPED)))):
                    start -= skipped
            else:
                opened = gzip.open(path) if packing else path.open("rb")
                file = cast(io.BufferedReader, stack.enter_context(opened))
                file.seek(start)
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
        raise UserError(
            f"{path} is not a complete {_NAMES.get(packing, 'text')} file ({error}); compress it again or "
            "unpack it"
        ) from None
