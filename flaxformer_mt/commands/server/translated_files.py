"""Stores translated files, which clients download by names that cannot be guessed."""

import secrets

from starlette.exceptions import HTTPException

# Ending of a file's name -> its format as of a text, and the type of its content.
FORMATS = {".txt": ("text", "text/plain"), ".html": ("html", "text/html"), ".htm": ("html", "text/html")}
# Bytes of all files together.
_MOST_BYTES = 1 << 26


class TranslatedFiles:
    """Keeps translated files by name; if they take too much memory, the oldest files are deleted."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._files: dict[str, bytes] = {}
        self._most, self._bytes = most_bytes, 0

    def keep(self, text: str, *, ending: str, target: str) -> str:
        name = f"{secrets.token_hex(16)}.{target}{ending}"
        self._files[name] = text.encode("utf-8", errors="replace")
        self._bytes += len(self._files[name])
        while self._bytes > self._most and len(self._files) > 1:
            self._bytes -= len(self._files.pop(next(iter(self._files))))
        return name

    def fetch(self, name: str) -> bytes:
        if name not in self._files:
            raise HTTPException(404, "there is no such file, or no longer; translate it again")
        return self._files[name]


def find_ending(name: str) -> str:
    ending = name[name.rfind(".") :].lower()
    if ending not in FORMATS:
        raise HTTPException(400, f"the file {name!r:.60} is none of {', '.join(FORMATS)}")
    return ending
