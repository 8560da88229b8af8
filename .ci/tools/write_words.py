"""Writes sentences of made-up words as a parallel text: the small corpus that pages take as given.

python -m tools.write_words FOLDER --languages=cs,en
"""

import argparse
import json
import random
from pathlib import Path

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]


def main() -> None:
    """Writes train, valid and test in both languages; a translation is the words in capitals, backwards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--languages", required=True)
    parser.add_argument("--words", type=int, default=20_000, help="number of different words")
    parser.add_argument("--pairs", type=int, default=4000, help="number of training pairs")
    parser.add_argument("--jsonl", action="store_true", help="one file of JSON lines for each split")
    options = parser.parse_args()
    dice = random.Random(1)
    sizes = [1] if options.words < len(_SYLLABLES) else [2, 3, 4]
    words = ["".join(dice.choices(_SYLLABLES, k=dice.choice(sizes))) for _ in range(options.words)]
    options.folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in {"train": options.pairs, "valid": 20, "test": 20}.items():
        sources = [dice.choices(words, k=dice.randint(1, 5)) for _ in range(pairs)]
        targets = [[word.upper() for word in reversed(source)] for source in sources]
        languages = options.languages.split(",")
        sides = [[" ".join(words) for words in side] for side in (sources, targets)]
        if options.jsonl:
            rows = (dict(zip(languages, pair, strict=True)) for pair in zip(*sides, strict=True))
            files = {"jsonl": [json.dumps(row) for row in rows]}
        else:
            files = dict(zip(languages, sides, strict=True))
        for ending, lines in files.items():
            text = "".join(f"{line}\n" for line in lines)
            (options.folder / f"{split}.{ending}").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
