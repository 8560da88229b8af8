"""Text for `experiments/terms.sh`: the grammar of toy_de_en with 2,000 more nouns, 200 of them unseen.

    PYTHONPATH=. python benchmarks/toy_terms.py --output=data/toy_terms
    PYTHONPATH=. python benchmarks/toy_terms.py --output=data/rare_terms --nouns=12000 --longest=16 --rare

Needs simplemma, whose dictionaries have the nouns: German ones in -ung and the like, and English ones whose
plural is regular (-s, -es, -ies), in random pairs. Writes train, valid and test without the 200 nouns,
terms.de and terms.en with them, and terms.tsv, the glossary. With --rare, every second noun of a sentence is
one of toy_de_en, so that the others are rare, as most words of a text are.
"""

import argparse
import random
from pathlib import Path

from simplemma.strategies.dictionaries import DefaultDictionaryFactory

from flaxformer_mt.corpus.toy import lexicon
from flaxformer_mt.corpus.toy.grammar import make_pairs

SIZES = {"train": 20_000, "valid": 500, "test": 500}
UNSEEN, SENTENCES = 200, 1000
KINDS = ("animal", "text", "thing", "box", "machine", "vehicle", "food", "clothes")
ENDINGS = ("ung", "heit", "keit", "schaft", "ion", "tät")


def add_plural(noun: str) -> str:
    if noun[-1] == "y" and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return noun + ("es" if noun.endswith(("s", "x", "z", "ch", "sh")) else "s")


def read_lemmas(language: str) -> dict[str, str]:
    return dict(DefaultDictionaryFactory().get_dictionary(language).items())


def make_nouns(dice: random.Random, count: int, longest: int) -> list[lexicon.Noun]:
    english, german = read_lemmas("en"), read_lemmas("de")
    singulars = [
        lemma
        for form, lemma in english.items()
        if 4 <= len(lemma) <= 8 and lemma.isascii() and lemma.isalpha() and lemma.islower()
        if form == add_plural(lemma) and english.get(lemma, lemma) == lemma
    ]
    regular = [lemma for lemma in singulars if add_plural(lemma) == f"{lemma}s"]
    others = [lemma for lemma in singulars if lemma not in {*regular}]
    some = min(count // 2, len(others))
    chosen = dice.sample(sorted({*regular}), count - some) + dice.sample(sorted({*others}), some)
    sources = {
        lemma
        for form, lemma in german.items()
        if lemma.endswith(ENDINGS) and lemma.istitle() and len(lemma) <= longest and form == f"{lemma}en"
    }
    taken = {noun.german for noun in lexicon.NOUNS} | {noun.english for noun in lexicon.NOUNS}
    pairs = zip(dice.sample(sorted(sources - taken), count), dice.sample(chosen, count), strict=True)
    return [
        lexicon.Noun(dice.choice(KINDS), source, "f", f"{source}en", f"{target}/{add_plural(target)}")
        for source, target in pairs
        if target not in taken
    ]


def write(folder: Path, name: str, pairs: list[tuple[str, str]]) -> None:
    for side, language in enumerate(("de", "en")):
        text = "".join(f"{pair[side]}\n" for pair in pairs)
        (folder / f"{name}.{language}").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--nouns", type=int, default=2000)
    parser.add_argument("--longest", type=int, default=12, help="letters of a German noun")
    parser.add_argument("--rare", action="store_true")
    options = parser.parse_args()
    folder = options.output
    folder.mkdir(parents=True, exist_ok=True)
    known = list(lexicon.NOUNS)
    nouns = make_nouns(random.Random(1), options.nouns, options.longest)
    unseen = nouns[:UNSEEN]
    lexicon.NOUNS[:] = known * (options.nouns // len(known) if options.rare else 1) + nouns[UNSEEN:]
    for name, pairs in zip(SIZES, make_pairs(tuple(SIZES.values())), strict=True):
        write(folder, name, pairs)
    lexicon.NOUNS[:] = known + unseen
    sources = [noun.german for noun in unseen]
    with_terms = [
        pair for pair in make_pairs([2 * SENTENCES], seed=2)[0] if any(one in pair[0] for one in sources)
    ]
    write(folder, "terms", with_terms[:SENTENCES])
    lines = (f"{noun.german}\t{noun.english.partition('/')[0]}\n" for noun in unseen)
    (folder / "terms.tsv").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
