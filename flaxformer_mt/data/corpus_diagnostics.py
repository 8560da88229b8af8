"""Finds text that a vocabulary cannot produce, and held-out pairs that occur in the training set."""

import collections
import hashlib
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from flaxformer_mt.corpus.cleaning import mix_hashes
from flaxformer_mt.corpus.pairs import Pairs
from flaxformer_mt.vocab import Vocab

# Maximum number of evenly spaced lines to check, and numbers of examples and characters in a report.
_MOST = 5000
_EXAMPLES, _CHARACTERS = 5, 10
_SHORT = 120


def find_lost_text(pairs: Pairs, vocab: Vocab) -> dict[str, Any]:
    """Tokenize and detokenize up to 5,000 evenly spaced targets, and report those that change.

    Repeated spaces and spaces at the ends do not count, since no translation has them. In the report,
    "characters" lists the characters that most often get lost, with the numbers of lines that lose them.
    """
    numbers = np.unique(np.linspace(0, len(pairs) - 1, min(len(pairs), _MOST)).astype(int)).tolist()
    texts = [" ".join(filter(None, pairs[number].target.split(" "))) for number in numbers]
    back = list(map(vocab.detokenize, vocab.tokenize_all(texts)))
    changed = [
        (number, text, restored)
        for number, text, restored in zip(numbers, texts, back, strict=True)
        if text != restored
    ]
    missing: collections.Counter[str] = collections.Counter()
    for _, text, restored in changed:  # characters that occur more often in a text than in what comes back
        missing.update((collections.Counter(text) - collections.Counter(restored)).keys())
    return {
        "lines": len(texts),
        "lost": len(changed),
        "characters": [
            {"character": _name(character), "lines": count}
            for character, count in missing.most_common(_CHARACTERS)
        ],
        "examples": [
            {"number": number + 1, "text": text[:_SHORT], "back": restored[:_SHORT]}
            for number, text, restored in changed[:_EXAMPLES]
        ],
    }


def describe_lost_text(report: Mapping[str, Any] | None) -> list[str]:
    if not report or not report["lost"]:
        return []
    characters = ", ".join(f"{entry['character']} ({entry['lines']:,})" for entry in report["characters"][:3])
    example: Mapping[str, Any] = report["examples"][0]
    shown = f"lines lack {characters}" if characters else "characters are in another order"
    shown += f"; line {example['number']} {example['text'][:60]!r} becomes {example['back'][:60]!r}"
    share = report["lost"] / report["lines"]
    return [
        f"{report['lost']:,} of {report['lines']:,} targets of the validation set ({share:.1%}) cannot be "
        f"produced with this vocabulary: {shown}. A vocabulary keeps its targets with "
        "vocab.target_normalization=identity, vocab.byte_fallback=True and vocab.character_coverage=1"
    ]


def _name(character: str) -> str:
    return f"U+{ord(character):04X} {unicodedata.name(character, '')}".rstrip()


_EMPTY = np.frombuffer(hashlib.blake2b(digest_size=8).digest(), "<u8")[0]


def find_overlap(train: Pairs, held_out: Mapping[str, Pairs]) -> dict[str, dict[str, int]]:
    """For each held-out split, count the pairs and the sources whose hashes occur in the training set.

    Without a source language, each sentence counts as a pair, and `sources` is 0.
    """
    known = _gather(train.read_hashes())
    report = {}
    for name, pairs in held_out.items():
        shared = zip(_gather(pairs.read_hashes()), known, strict=True)
        both, sources = (int(np.isin(*hashes).sum()) for hashes in shared)
        report[name] = {"of": len(pairs), "pairs": both, "sources": sources}
    return report


def _gather(parts: Iterable[tuple[tuple[str, ...], np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of all pairs and of all nonempty sources; a source is hashed with its tags."""
    mixed, sources = [], []
    for tags, hashes in parts:
        tagged = np.uint64(sum(_hash(tag) for tag in tags) % (1 << 64))
        mixed.append(mix_hashes(hashes) + tagged)
        sources.append(hashes[:, 0][hashes[:, 0] != _EMPTY] + tagged)
    return np.concatenate(mixed), np.concatenate(sources)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def describe_overlap(overlap: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        f"{count['pairs']:,} of the {count['of']:,} pairs of the {name} set "
        f"({count['pairs'] / count['of']:.1%}) also occur in the training set, so their scores show what the "
        "model remembers; remove them from one of the sets"
        for name, count in overlap.items()
        if count["pairs"]
    ]
