"""Files that appear complete: readers, and a process that is killed, leave the old content or the new one."""

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Writes `.NAME.XXXXXXXX` beside the file, eight random digits, and renames it; the folder must exist."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
