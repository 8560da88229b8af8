"""Files that appear complete: readers, and a process that is killed, leave the old content or the new one."""

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Write `.NAME.XXXXXXXX` beside the file, eight random digits, and rename it; the folder must exist.

    Args:
      parts: the content, one after the other.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("wb") as file:
            for part in parts:
                file.write(part)
        os.replace(partial, path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # the user knows this name, not the temporary one
        raise
    finally:
        partial.unlink(missing_ok=True)
