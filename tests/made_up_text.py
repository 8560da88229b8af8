"""A parallel text for tests that train: small enough for seconds, regular enough to be learned."""

import random
from pathlib import Path


def write_text(folder: Path, split: str, pairs: int, seed: int) -> None:
    """Sentences of made-up words; the translation is the same words in capitals, backwards."""
    generator = random.Random(seed)
    words = ["ba", "do", "fi", "gu", "ka", "lo", "mi", "nu"]
    sources = [[generator.choice(words) for _ in range(generator.randint(1, 5))] for _ in range(pairs)]
    targets = [[word.upper() for word in reversed(source)] for source in sources]
    for name, side in (("xx", sources), ("yy", targets)):
        lines = "".join(" ".join(words) + "\n" for words in side)
        (folder / f"{split}.{name}").write_text(lines, encoding="utf-8")
