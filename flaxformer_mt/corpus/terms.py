"""Terms in sources, each with its translation beside it, from which a model inflects it.

As in Dinu et al. 2019, with lemmas of the translations as in Bergmanis and Pinnis 2021.
"""

import functools
import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from flaxformer_mt.corpus.word_alignment import MARKS
from flaxformer_mt.unicode_text import WORD, split_words
from flaxformer_mt.vocab.symbols import TERM_MARKS

# Most words of a term and of its translation, and most terms of a pair, in training.
_LONGEST, _MOST = 3, 3


class Term(NamedTuple):
    """The characters `start` to `end` of a source, and their translation."""

    start: int
    end: int
    target: str


def write_terms(text: str, terms: Iterable[Term]) -> str:
    """Write translations beside terms: "der Hund." becomes "der <term> Hund <means> dog </term>."."""
    begin, means, end = TERM_MARKS
    for term in sorted(terms, reverse=True):
        written = f"{begin} {text[term.start : term.end]} {means} {term.target} {end}"
        text = text[: term.start] + written + text[term.end :]
    return text


@functools.cache
def find_lemmatizer(language: str) -> Callable[[str], str] | None:
    """Return a function from forms to lemmas; None without simplemma, or its dictionary of a language."""
    try:
        import simplemma

        lemmatize = functools.partial(simplemma.lemmatize, lang=re.split("[-_]", language)[0].lower())
        lemmatize("a")
    except (ImportError, ValueError):
        return None
    return lemmatize


def find_cores(text: str) -> list[tuple[int, int]]:
    """Return where each word of a text begins and ends, without the marks around it."""
    cores = []
    for match in WORD.finditer(text):
        core = match[0].strip(MARKS) or match[0]
        start = match.start() + match[0].find(core)
        cores.append((start, start + len(core)))
    return cores


def annotate_pair(
    source: str, target: str, links: Sequence[tuple[int, int]], chance: random.Random, language: str
) -> str:
    """Return the source with the lemmas of aligned target words beside up to three terms.

    A term is one to three words without marks between them, which are aligned with adjacent words that have
    no other source words. Long words are chosen more often, since most of them are content words.

    Args:
      links: the word alignment, points of source and target words.
      language: of the target.
    """
    sources, targets = find_cores(source), find_cores(target)
    # Noise may have dropped a mark that was the last word.
    links = [(s, t) for s, t in links if s < len(sources) and t < len(targets)]
    if not links or any(mark in source for mark in TERM_MARKS):
        return source
    lemmatize = find_lemmatizer(language) or str
    wanted, terms, taken = 1 + int(_MOST * chance.random()), list[Term](), set[int]()
    for first in chance.choices(range(len(sources)), [end - start for start, end in sources], k=2 * _MOST):
        words = range(first, first + chance.choices(range(1, _LONGEST + 1), (4, 1, 1))[0])
        aligned = [t for s, t in links if s in words]
        if not aligned or len(terms) == wanted or taken & {*words}:
            continue
        translated = range(min(aligned), max(aligned) + 1)
        linked = {s for s, t in links if t in translated}
        if len(translated) > _LONGEST or not {words[0], words[-1]} <= linked <= {*words}:
            continue
        start, end = sources[words[0]][0], sources[words[-1]][1]
        unmarked = split_words(source[start:end]) == [source[slice(*sources[word])] for word in words]
        if unmarked and any(map(str.isalnum, source[start:end])):
            lemmas = " ".join(lemmatize(target[slice(*targets[t])]) for t in translated)
            terms.append(Term(start, end, lemmas))
            taken.update(words)
    return write_terms(source, terms)
