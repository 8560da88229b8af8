"""Share of lines that are in the language that was asked for: does a model of many languages mix them up?

    pip install lingua-language-detector
    python -m flaxformer_mt translate --run=RUN --input=test.en --target_language=de --output=out.de
    python -m flaxformer_mt translate --run=RUN --input=test.en --target_language=fr --output=out.fr
    python benchmarks/languages.py --others=en de=out.de fr=out.fr de=reference.de fr=reference.fr

Each line is judged by lingua, which chooses among the languages of all files and --others. It errs on short
lines, so give the references, too: their share is what a perfect model would get. Prints one JSON object:
for each file its lines, the share in its language, and how many lines are in which other language.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any


def main() -> None:
    """Read the files and print the shares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="CODE=FILE", help="ISO 639-1 code, and lines in it")
    parser.add_argument("--others", default="", help="codes, separated by commas, that lines may be in, too")
    options = parser.parse_args()
    files = [tuple(file.split("=", 1)) for file in options.files]
    codes = {code for code, _ in files} | set(filter(None, options.others.split(",")))
    detector = make_detector(codes)
    print(json.dumps({name: judge(detector, Path(name), code) for code, name in files}, indent=2))


def make_detector(codes: set[str]) -> Any:
    """Build lingua's detector of the languages with these codes."""
    from lingua import IsoCode639_1, LanguageDetectorBuilder

    known = [getattr(IsoCode639_1, code.upper()) for code in sorted(codes)]
    return LanguageDetectorBuilder.from_iso_codes_639_1(*known).build()


def judge(detector: Any, path: Path, code: str) -> dict[str, Any]:
    """Count the lines of a file by language; `code` is that asked for."""
    found: Counter[str] = Counter()
    for line in path.read_text(encoding="utf-8").splitlines():
        language = detector.detect_language_of(line)
        found["unknown" if language is None else language.iso_code_639_1.name.lower()] += 1
    lines = found.total()
    return {
        "lines": lines,
        "share": round(found[code] / lines, 4),
        "others": {other: number for other, number in found.most_common() if other != code},
    }


if __name__ == "__main__":
    main()
