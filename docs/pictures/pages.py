"""What pictures say (pictures.toml), and the numbers of the pages: a picture has none that no page says."""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("benchmarks/README.md", "benchmarks/ablations.md", "docs/performance.md", "docs/results.md")
SAYS = tomllib.loads((Path(__file__).parent / "pictures.toml").read_text(encoding="utf-8"))

# 2,744 tokens/s (2,112 to 2,881): the unit and the range may be missing.
_NUMBER = r"([\d,]*\d(?:\.\d+)?)(?: tokens/s)?(?: \(([\d,.]+) to ([\d,.]+)\))?"


class Number(NamedTuple):
    """A number as the page writes it, its value, and its range (or the value twice)."""

    text: str
    value: float
    low: float
    high: float


def read_numbers(quotation: str, root: Path = ROOT) -> list[Number]:
    """Return the numbers that a page has at each # of `quotation`; `*` is the rest of a cell of a table.

    Bold type, links and line breaks of the page do not count.

    Raises:
      ValueError: not exactly one page says this, once.
    """
    pattern = re.escape(quotation).replace(r"\ ", " ").replace(r"\#", _NUMBER).replace(r"\*", "[^|]*?")
    matches: list[re.Match[str]] = []
    for page in PAGES:
        text = (root / page).read_text(encoding="utf-8").replace("**", "")
        text = " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).split())
        matches += re.finditer(pattern, text)
    if len(matches) != 1:
        pages = ", ".join(PAGES)
        raise ValueError(
            f"{len(matches)} places of {pages} say: {quotation}; change docs/pictures/pictures.toml"
        )
    parts = matches[0].groups()
    triples = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return [
        Number(text, *(_value(part or text) for part in (text, low, high))) for text, low, high in triples
    ]


def _value(text: str) -> float:
    return float(text.replace(",", ""))
