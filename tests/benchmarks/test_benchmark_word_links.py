"""The lexicon of the toy corpus knows the words of its sentences; what occurs twice links nothing."""

import importlib.util
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "word_links.py"


def test_links_are_known_where_the_lexicon_is_clear():
    spec = importlib.util.spec_from_file_location("benchmark_word_links", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lexicon = module.make_lexicon()
    pair = "Der alte Hund hat Anna und den Hut oft gesehen.", "The old dog often saw Anna and the hat."
    found = sorted((i, j) for i, j, _ in module.known_links(*pair, lexicon))
    assert found == [(1, 1), (2, 2), (4, 5), (7, 8), (8, 3)]
    assert module.known_links("Hund und Hund", "dog and dog", lexicon) == []
