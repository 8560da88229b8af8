"""Word links and tags on the toy corpus, whose lexicon knows which words translate each other.

    # Needs a run of configs/toy_de_en.py
    PYTHONPATH=. python benchmarks/word_links.py --run=runs/guided
    # Needs data of others: the data of the run
    PYTHONPATH=. python benchmarks/word_links.py --run=RUN

Prints one JSON object:

* `links`: the share of right links among the target words of the test set whose source word is known. The
  references are read (forced decoding), and each word is aligned as `translate --alignments` aligns it.
  `layers`: the same for the mean of all heads of each layer.
* `aligner_links`: the same, where the links one to one that `align` finds in the test set, together with the
  training set, count as right: they are links of most words, but not all right, and guided training has
  learned from the same aligner.
* `tags`: in 500 sentences, a random known word stands between <b> and </b>: the share of translations
  (`translate --markup`) that are balanced, and the share of those with exactly a translation of the word
  between the tags, among the translations that contain one (`translated`).

Known are nouns, adjectives, names and adverbs of one word, where each of both occurs once in its sentence.

A run of other data has no lexicon: `links` are those that IBM model 1, which is trained on its training and
test sets and knows no positions, has in both directions; `aligner_links` are as above, and tags are not
measured.
"""

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from flaxformer_mt.corpus.reader import read_pairs
from flaxformer_mt.corpus.toy.grammar import CASES, decline_noun, make_noun, make_pairs
from flaxformer_mt.corpus.toy.lexicon import ADJECTIVES, CITIES, FREQUENCIES, NAMES, NOUNS, TIMES
from flaxformer_mt.corpus.toy.toy_de_en import SIZES
from flaxformer_mt.corpus.word_alignment import align_corpus
from flaxformer_mt.decoding.forced_decoding import Pair
from flaxformer_mt.translation.alignment import align_words, choose_watched
from flaxformer_mt.translation.result import Annotations
from flaxformer_mt.translation.translator import Translator
from flaxformer_mt.vocab.words_of_pieces import number_pieces

_MARKS = ".,?!"
# Sentences with tags: of the test set, and then of the validation set.
_SENTENCES = 500


def make_lexicon() -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """Return the numbers of the lexemes that each German and each English form belongs to."""
    lexemes: list[tuple[set[str], set[str]]] = []
    for noun in NOUNS:
        numbers = (False, True) if noun.plural else (False,)
        german = {decline_noun(noun, case, plural) for case in CASES for plural in numbers}
        phrases = [make_noun(noun, "", plural).english[0] for plural in numbers]
        lexemes.append((german, set(phrases)))
    for adjective in ADJECTIVES:
        endings = ("e", "en", "er", "es", "em")
        word, stem = adjective.german.split("/")[0], adjective.german.split("/")[-1]
        lexemes.append(({word, *(stem + e for e in endings)}, {adjective.english}))
    lexemes += [({name}, {name}) for name in NAMES]
    lexemes += [({german}, {english}) for german, english, *_ in (*CITIES, *TIMES, *FREQUENCIES)]
    tables: tuple[dict[str, set[int]], dict[str, set[int]]] = ({}, {})
    for number, sides in enumerate(lexemes):
        for table, forms in zip(tables, sides, strict=True):
            for form in forms:
                table.setdefault(form.casefold(), set()).add(number)
    return tables


def known_links(
    source: str, target: str, lexicon: tuple[dict[str, set[int]], dict[str, set[int]]]
) -> list[tuple[int, int, int]]:
    """Source position, target position and lexeme of each word whose translation is known."""
    sides = []
    for text, table in zip((source, target), lexicon, strict=True):
        found: dict[int, list[int]] = {}
        for place, word in enumerate(text.split()):
            for lexeme in table.get(word.strip(_MARKS).casefold(), ()):
                found.setdefault(lexeme, []).append(place)
        sides.append(found)
    links = [
        (sides[0][lexeme][0], sides[1][lexeme][0], lexeme)
        for lexeme in sides[0].keys() & sides[1].keys()
        if len(sides[0][lexeme]) == len(sides[1][lexeme]) == 1
    ]
    # A form of two lexemes, of which both occur, is not known.
    once = [[link[side] for link in links] for side in (0, 1)]
    return [link for link in links if once[0].count(link[0]) == once[1].count(link[1]) == 1]


def lexicon_links(pairs: Sequence[tuple[str, str]]) -> list[list[tuple[int, int]]]:
    """Return the links of each pair that the lexicon knows."""
    lexicon = make_lexicon()
    return [[(i, j) for i, j, _ in known_links(*pair, lexicon)] for pair in pairs]


def aligner_links(
    pairs: Sequence[tuple[str, str]],
    others: Sequence[tuple[str, str]],
) -> list[list[tuple[int, int]]]:
    """Return the links of each pair that the aligner finds among these and other pairs, one to one."""
    words = [(source.split(), target.split()) for source, target in (*pairs, *others)]
    found = []
    for points in align_corpus(words)[: len(pairs)]:
        counts = [Counter(points[:, side].tolist()) for side in (0, 1)]
        found.append([(i, j) for i, j in points.tolist() if counts[0][i] == counts[1][j] == 1])
    return found


def model_1_links(
    pairs: Sequence[tuple[str, str]], others: Sequence[tuple[str, str]]
) -> list[list[tuple[int, int]]]:
    """Return the links of each pair that IBM model 1, trained on these and other pairs, has in both
    directions.
    """
    words = [(source.split(), target.split()) for source, target in (*pairs, *others)]
    found = align_corpus(words, iterations=(5, 0), intersect=True)[: len(pairs)]
    return [[(i, j) for i, j in points.tolist()] for points in found]


def measure_links(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    known: Sequence[Sequence[tuple[int, int]]],
    annotations: Annotations,
) -> dict[str, Any]:
    """Return the share of right links in the references, of those that are known."""
    vocabs = translator.vocabs
    ids = [(vocabs.source.tokenize(source), vocabs.target.tokenize(target)) for source, target in pairs]
    readings = translator.scorer.read_all(
        [Pair(*both) for both in ids],
        params=translator.all_params,
        watched=choose_watched(annotations, translator.models),
    )
    right = total = 0
    for (source, target), (s, t), reading, links in zip(pairs, ids, readings, known, strict=True):
        aligned = {
            j: i
            for i, j in align_words(
                reading.attention[0][:-1, :-1],
                number_pieces(vocabs.source, s[:-1], source),
                number_pieces(vocabs.target, t[:-1], target),
            )
        }
        total += len(links)
        right += sum(aligned.get(j) == i for i, j in links)
    return {"share": round(right / total, 4), "words": total}


def measure_tags(translator: Translator, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the shares of balanced tags, and of tags in place."""
    lexicon, dice = make_lexicon(), random.Random(1)
    lines, lexemes = [], []
    for source, target in pairs:
        known = known_links(source, target, lexicon)
        if not known or len(lines) == _SENTENCES:
            continue
        place, _, lexeme = dice.choice(sorted(known))
        words = source.split()
        core = words[place].rstrip(_MARKS)
        words[place] = f"<b>{core}</b>{words[place][len(core) :]}"
        lines.append(" ".join(words))
        lexemes.append(lexeme)
    english: dict[int, set[str]] = {}
    for form, owners in lexicon[1].items():
        for owner in owners:
            english.setdefault(owner, set()).add(form)
    balanced = in_place = translated = 0
    for lexeme, found in zip(lexemes, translator.translate(lines, markup=True), strict=True):
        parts = re.split(r"</?b>", found.text)
        balanced += re.findall(r"</?b>", found.text) == ["<b>", "</b>"]
        words = [word.strip(_MARKS).casefold() for word in "".join(parts).split()]
        if english[lexeme].isdisjoint(words):
            continue
        translated += 1
        in_place += len(parts) == 3 and parts[1].casefold() in english[lexeme]
    return {
        "sentences": len(lines),
        "balanced": round(balanced / len(lines), 4),
        "translated": translated,
        "in_place": round(in_place / translated, 4),
    }


def measure_layers(
    translator: Translator, pairs: Sequence[tuple[str, str]], known: Sequence[Sequence[tuple[int, int]]]
) -> dict[str, Any]:
    """`measure_links` of `--alignments` as it is, and of the mean of all heads of each layer."""
    layers = range(translator.config.model.num_decoder_layers)
    shares = [
        measure_links(translator, pairs, known, Annotations(alignments="words", layer=layer))["share"]
        for layer in layers
    ]
    return {**measure_links(translator, pairs, known, Annotations(alignments="words")), "layers": shares}


def main() -> None:
    """Measure a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", required=True, help="a run of configs/toy_de_en.py, or of other data")
    parser.add_argument("--checkpoint", help="best, last, average or a step (default: the run's)")
    options = parser.parse_args()
    translator = Translator.load(options.run, checkpoint=options.checkpoint)
    data = translator.config.data
    if data.dataset == "toy_de_en":
        train, valid, pairs = make_pairs(tuple(SIZES.values()))
        known = {"links": lexicon_links(pairs), "aligner_links": aligner_links(pairs, train)}
    else:
        train, pairs = (list(read_pairs(data, split)) for split in ("train", "test"))
        known = {
            "links": model_1_links(pairs, train),
            "aligner_links": aligner_links(pairs, train),
        }
    found = {name: measure_layers(translator, pairs, links) for name, links in known.items()}
    if data.dataset == "toy_de_en":
        found["tags"] = measure_tags(translator, [*pairs, *valid])
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
