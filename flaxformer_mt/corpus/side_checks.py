"""Checks whether the sides of a corpus are swapped, misaligned by some lines, or in another language.

The language of a sample is checked by letter trigrams of the training set, or by a model for language
identification. Misaligned lines are found by the correlation of source and target lengths.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config.tag_styles import find_codes
from flaxformer_mt.corpus.language_identification import LanguageIdentifier
from flaxformer_mt.corpus.pairs import Pair, Pairs
from flaxformer_mt.unicode_text import find_script, lacks_spaces

# A sample of a set: consecutive pairs, in blocks that are spread evenly over it.
_BLOCK, _BLOCKS = 200, 20
# A block with fewer pairs or letters is not checked.
_FEWEST_PAIRS, _FEWEST_LETTERS = 100, 1000
# Maximum shift in lines. Sides are shifted if the correlation of lengths with a shift is at least
# _CORRELATION, and exceeds the correlation without a shift by _MORE.
_LARGEST_SHIFT = 3
_CORRELATION, _MORE = 0.5, 0.3
# Sides are swapped if each is closer to the other language by _CLOSER (cosine similarity of letter trigrams).
# A side is in another language if its similarity to its own language is below _UNLIKE.
_CLOSER, _UNLIKE = 0.1, 0.4
# A line is in another language if the model gives that language this probability.
_PROBABLE = 0.5
_EXAMPLES = 3
# Frequent words of languages, which show that a whole training set is swapped: on each side, words that only
# the other language has are at least _COMMON_SHARE of all words, and _COMMON_TIMES as frequent as its own.
_COMMON_SHARE, _COMMON_TIMES = 0.03, 3
_COMMON_WORDS = dict(
    entry.strip().split(": ")
    for entry in """cs: a se je že na to v není jsem; da: og det at er ikke en jeg til på;
    de: der die das und ist nicht ein eine ich sie zu; en: the and of to is not with you i that;
    es: el los las que es una por con no está; fi: ja on ei se että hän oli minä ovat;
    fr: le la les et est des une pas que je il; hu: a az és nem hogy egy is van ez;
    it: il che di è non per una della sono; nl: de het een en niet van dat is ik;
    pl: i nie się na jest że to w z; pt: o os que não uma para com do é você;
    ro: și nu este în o cu de la pe; ru: и не что в на это он я с;
    sv: och att det som är inte en jag för; tr: bir ve bu için ne de değil ben çok;
    uk: і не що в на це він я з""".split(";")
)

_Profile = collections.Counter[str]


class Block(NamedTuple):
    """Consecutive pairs of a data set, from pair `start` on, and the letter trigram counts of both sides."""

    start: int
    pairs: list[Pair]
    profiles: tuple[_Profile, _Profile]


@dataclasses.dataclass(frozen=True)
class SideProblem:
    """A problem of a data set: "swapped", "shifted", or the side in another language ("source", "target").

    blocks, of: number of blocks with the problem, and of all blocks. first: number, from 1, of the first pair
    of the first block with the problem. shift: the target of a source is this number of lines later.
    """

    split: str
    name: str
    problem: str
    blocks: int
    of: int
    first: int
    examples: list[dict[str, Any]]
    shift: int = 0
    language: str = ""


def find_side_problems(
    splits: Mapping[str, Pairs], identifier: LanguageIdentifier | None = None
) -> list[SideProblem]:
    """Check the sides of each data set with `identifier` or, if it is None, against the split `train`."""
    samples = {name: list(_take_samples(pairs)) for name, pairs in splits.items()}
    known: dict[str, _Profile] = collections.defaultdict(collections.Counter)
    for _, languages, blocks in samples["train"]:
        for block in blocks:
            for language, counts in zip(languages, block.profiles, strict=True):
                known[language].update(counts)
    known = {name: profile for name, profile in known.items() if name and profile.total() >= _FEWEST_LETTERS}
    findings = []
    for split, parts in samples.items():
        for name, languages, blocks in parts:
            blocks_by_problem: dict[tuple[str, str], list[tuple[Block, int]]] = collections.defaultdict(list)
            for block in blocks:
                if identifier is not None:
                    problems = dict(_identify(block, languages, identifier))
                elif split == "train" and _speak_reversed(block, languages):
                    problems = {"swapped": languages[1]}
                else:
                    problems = dict.fromkeys(_compare(block, languages, known), "")
                for kind in problems.items():
                    blocks_by_problem[kind].append((block, 0))
                if languages[0] and "swapped" not in problems and (shift := find_shift(block.pairs)):
                    blocks_by_problem["shifted", ""].append((block, shift))
            for (problem, language), where in blocks_by_problem.items():
                block, shift = where[0]
                numbers = len(where), len(blocks), block.start + 1
                examples = [
                    {"pair": block.start + number, "source": pair.source[:80], "target": pair.target[:80]}
                    for number, pair in enumerate(block.pairs[:_EXAMPLES], start=1)
                ]
                findings.append(SideProblem(split, name, problem, *numbers, examples, shift, language))
    return findings


def find_shift(pairs: Sequence[Pair]) -> int:
    """Return by how many lines the targets are late: 1 if the target of each source is in the next pair."""
    lengths = np.log1p([[len(source), len(target)] for source, target in pairs])
    if len(pairs) < _FEWEST_PAIRS:
        return 0
    correlations = {
        shift: _correlate(
            lengths[max(0, -shift) : len(pairs) - max(0, shift), 0],
            lengths[max(0, shift) : len(pairs) + min(0, shift), 1],
        )
        for shift in range(-_LARGEST_SHIFT, _LARGEST_SHIFT + 1)
    }
    best = max(correlations, key=correlations.__getitem__)
    is_clear = correlations[best] >= _CORRELATION and correlations[best] - correlations[0] >= _MORE
    return best if is_clear else 0


def count_sequences(texts: Iterable[str]) -> _Profile:
    """Count letter trigrams, with the spaces around words; count single letters in text without spaces."""
    texts = [text.lower() for text in texts]
    counts: _Profile = collections.Counter()
    size = 1 if lacks_spaces(texts) else 3
    for text in texts:
        letters = "".join(letter if find_script(letter) else " " for letter in text)
        line = f" {' '.join(letters.split())} " if size > 1 else letters.replace(" ", "")
        counts.update(line[start : start + size] for start in range(len(line) - size + 1))
    return counts


def compare_sequences(left: _Profile, right: _Profile) -> float:
    product = sum(count * right[key] for key, count in left.items())
    norms = [np.sqrt(sum(count * count for count in counts.values())) for counts in (left, right)]
    return float(product / (norms[0] * norms[1])) if all(norms) else 0.0


def _take_samples(pairs: Pairs) -> Iterator[tuple[str, tuple[str, str], list[Block]]]:
    for number, (part, languages) in enumerate(zip(pairs.parts, pairs.languages, strict=True)):
        last = max(0, part.size - _BLOCK)
        count = min(_BLOCKS, -(-part.size // _BLOCK))
        starts = np.unique(np.linspace(0, last, count).astype(int)).tolist()
        blocks = []
        for start in starts:
            block = pairs.read_range(number, range(start, min(start + _BLOCK, part.size)))
            source, target = (count_sequences(pair[side] for pair in block) for side in (0, 1))
            blocks.append(Block(start, block, (source, target)))
        yield part.name, languages, blocks


def _identify(
    block: Block, languages: tuple[str, str], identifier: LanguageIdentifier
) -> Iterator[tuple[str, str]]:
    """Yield ("swapped", language), or (side, language) for each side with most lines in another language."""
    others = ["", ""]
    for side, language in enumerate(languages):
        if language:
            texts = [pair[side] for pair in block.pairs]
            counts = collections.Counter(identifier.find_others(texts, language, least=_PROBABLE))
            common, count = counts.most_common(1)[0]
            others[side] = common if 2 * count > len(texts) else ""
    if all(others) and all(map(identifier.is_same, others, languages[::-1])):
        yield "swapped", others[0]
        return
    for name, other in zip(("source", "target"), others, strict=True):
        if other:
            yield name, other


def _compare(block: Block, languages: tuple[str, str], known: Mapping[str, _Profile]) -> Iterator[str]:
    """Yield "swapped", or each side whose letters differ from its language in the training set."""
    source, target = languages
    profiles = block.profiles
    is_enough = [counts.total() >= _FEWEST_LETTERS for counts in profiles]
    if source and target in known and source in known and source != target and all(is_enough):
        gains = [
            compare_sequences(profiles[0], known[target]) - compare_sequences(profiles[0], known[source]),
            compare_sequences(profiles[1], known[source]) - compare_sequences(profiles[1], known[target]),
        ]
        if min(gains) >= _CLOSER:
            yield "swapped"
            return
    sides = zip(("source", "target"), languages, profiles, is_enough, strict=True)
    for name, language, counts, enough in sides:
        if enough and language in known and compare_sequences(counts, known[language]) < _UNLIKE:
            yield name


def _speak_reversed(block: Block, languages: tuple[str, str]) -> bool:
    """Return whether each side has frequent words of the other language, and hardly any of its own."""
    words = [
        {word for code in find_codes(language) for word in _COMMON_WORDS.get(code, "").split()}
        for language in languages
    ]
    words = [words[0] - words[1], words[1] - words[0]]
    if not all(words):
        return False
    for side in (0, 1):
        texts = [word for pair in block.pairs for word in pair[side].lower().split()]
        foreign, own = (sum(word in known for word in texts) for known in (words[1 - side], words[side]))
        if foreign < _COMMON_SHARE * len(texts) or foreign < _COMMON_TIMES * own:
            return False
    return True


def _correlate(left: np.ndarray, right: np.ndarray) -> float:
    if min(left.std(), right.std()) < 1e-9:
        return 0.0
    return float(np.corrcoef(left, right)[0, 1])


def describe_side_problem(finding: SideProblem) -> str:
    where = f"the {finding.split} set {finding.name}"
    example = finding.examples[0]
    shown = f"pair {example['pair']:,} is {example['source'][:50]!r} | {example['target'][:50]!r}"
    amount = "" if finding.blocks == finding.of else f" in {finding.blocks} of {finding.of} places"
    if finding.problem == "swapped":
        compared = "" if finding.language else ", compared with the training set"
        return (
            f"source and target of {where} look swapped{amount}{compared} ({shown}); exchange the two files "
            "or columns"
        )
    if finding.problem == "shifted":
        order = "after" if finding.shift > 0 else "before"
        lines = f"{abs(finding.shift)} line{'s' * (abs(finding.shift) > 1)}"
        return (
            f"the two sides of {where} look shifted against each other{amount}: lengths of sources fit "
            f"targets {lines} {order} them, first near {shown}; look for a line that one of the files lacks"
        )
    language = f"another language{amount} than those of the training set"
    if finding.language:
        language = f"the language {finding.language}{amount}"
    looks = f"the {finding.problem}s of {where} look like {language}"
    return f"{looks} ({shown}); check the files and their languages"
