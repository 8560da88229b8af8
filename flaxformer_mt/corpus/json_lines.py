"""Lines of JSON as pairs of texts: `{"de": "...", "en": "..."}`, or the same inside of "translation"."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from flaxformer_mt.errors import UserError


def read_json_pairs(
    path: Path, block: Sequence[bytes], languages: tuple[str, str], *, first_line: int
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the texts of both languages of each line; the source is b"" if `languages[0]` is "".

    A line feed inside of a text becomes a space, since a sentence is one line.

    Args:
      first_line: number of the first line of the block, for messages.

    Raises:
      UserError: a line is not a JSON object with the texts of the languages.
    """
    for number, line in enumerate(block, first_line):
        try:
            values = json.loads(line)
            values = values.get("translation", values)
            source, target = (values[language] if language else "" for language in languages)
            yield _encode(source), _encode(target)
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            wanted = ", ".join(f'"{language}": "..."' for language in languages if language)
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{path} line {number} is no JSON object of texts such as {{{wanted}}}: {reason}"
            ) from None


def _encode(text: object) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"a text is {type(text).__name__}")
    return text.replace("\n", " ").encode("utf-8", "surrogatepass")
