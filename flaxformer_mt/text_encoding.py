"""Encodings of text files: which ones are not UTF-8, told by the first bytes of a file.

Text in UTF-16 or UTF-32 is often valid UTF-8 as well, with a NUL beside each letter, so that reading it does
not fail.
"""

from flaxformer_mt.errors import UserError

# Bytes that are looked at.
BEGINNING = 4096
_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32LE",
    b"\x00\x00\xfe\xff": "UTF-32BE",
    b"\xff\xfe": "UTF-16LE",
    b"\xfe\xff": "UTF-16BE",
}
# Of UTF-16 in scripts below U+2000, at least this share of the high bytes are control characters, and at most
# that of the low ones.
_HIGH, _LOW = 0.9, 0.4


def find_encoding(beginning: bytes) -> str:
    """Return UTF-16LE, UTF-16BE, UTF-32LE or UTF-32BE as iconv names them, or "" if it is none of these.

    Args:
      beginning: the first bytes of a file; `BEGINNING` of them are looked at.
    """
    for mark, name in _MARKS.items():
        if beginning.startswith(mark):
            return name
    beginning = beginning[:BEGINNING]
    if 0 not in beginning or not any(beginning):
        return ""
    four = [beginning[start::4][: len(beginning) // 4] for start in range(4)]
    if len(four[0]) > 1:
        if not any(four[2] + four[3]):
            return "UTF-32LE"
        if not any(four[0] + four[1]):
            return "UTF-32BE"
    even, odd = (beginning[start::2][: len(beginning) // 2] for start in range(2))
    if len(even) > 1:
        if _count_controls(odd) >= _HIGH * len(odd) and _count_controls(even) <= _LOW * len(even):
            return "UTF-16LE"
        if _count_controls(even) >= _HIGH * len(even) and _count_controls(odd) <= _LOW * len(odd):
            return "UTF-16BE"
    return ""


def check_encoding(beginning: bytes, name: str) -> None:
    """Raise UserError if a file, `name` in the message, begins as one in UTF-16 or UTF-32."""
    if encoding := find_encoding(beginning):
        raise UserError(
            f"{name} is in {encoding}, not in UTF-8; convert it, as with "
            f"`iconv -f {encoding} -t UTF-8 {name} > {name}.utf8`"
        )


def _count_controls(text: bytes) -> int:
    return sum(byte < 32 for byte in text)
