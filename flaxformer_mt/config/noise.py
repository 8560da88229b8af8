"""Config of noise in training text: spelling, case, punctuation and spaces. A section of the schema's `data`.

A field's comment is its `--help` text. The names and rates of typos are those of OpusTrainer.
"""

from dataclasses import dataclass, field
from typing import Annotated

from flaxformer_mt.config.bounds import between

# Kinds of noise that change sources alone.
SOURCE_NOISE = ("lower_case", "punctuation", "whitespace", "typos")
# Kinds of noise that change sources and targets.
TARGET_NOISE = ("upper_case", "title_case", "end_punctuation")
# Kinds of noise that change the number of words.
SPACE_NOISE = ("punctuation", "whitespace", "typo_kinds.random_space", "typo_kinds.skipped_space")


@dataclass(frozen=True)
class TypoConfig:
    """Kinds of typos: the probability of each in a line that data.noise.typos has chosen."""

    # Two neighbouring letters of a word change places.
    char_swap: Annotated[float, between(0, 1)] = 0.1
    # A letter of a word is missing.
    missing_char: Annotated[float, between(0, 1)] = 0.1
    # A letter is followed or preceded by one beside it on the keyboard.
    extra_char: Annotated[float, between(0, 1)] = 0.1
    # A letter is replaced by one beside it on the keyboard.
    nearby_char: Annotated[float, between(0, 1)] = 0.1
    # A letter is replaced by one that looks like it, such as a letter without its accent.
    similar_char: Annotated[float, between(0, 1)] = 0.1
    # A space between two words is missing; refused with data.alignments, which count words.
    skipped_space: Annotated[float, between(0, 1)] = 0.1
    # There is a space inside a word; refused with data.alignments, which count words.
    random_space: Annotated[float, between(0, 1)] = 0.1
    # A letter is written twice.
    repeated_char: Annotated[float, between(0, 1)] = 0.1
    # A letter that is written twice is written once.
    unichar: Annotated[float, between(0, 1)] = 0.1


@dataclass(frozen=True)
class NoiseConfig:
    """Noise in training text, drawn anew in each epoch: the share of lines that each kind changes."""

    # Share of pairs of which both sides are in upper case.
    upper_case: Annotated[float, between(0, 1)] = 0.0
    # Share of pairs of which every word on both sides begins with a capital letter.
    title_case: Annotated[float, between(0, 1)] = 0.0
    # Share of sources in lower case; their targets stay as they are.
    lower_case: Annotated[float, between(0, 1)] = 0.0
    # Share of pairs that lose the mark at the end, if both sides end in one of the same kind.
    end_punctuation: Annotated[float, between(0, 1)] = 0.0
    # Share of sources of which one punctuation mark is missing, doubled or of another style.
    punctuation: Annotated[float, between(0, 1)] = 0.0
    # Share of sources with a missing space, a space inside a word or one before a punctuation mark.
    whitespace: Annotated[float, between(0, 1)] = 0.0
    # Share of sources that may have typos: each kind of typo_kinds occurs at most once, with its probability.
    typos: Annotated[float, between(0, 1)] = 0.0
    # Kinds of typos: the probability of each in a line that data.noise.typos has chosen.
    typo_kinds: TypoConfig = field(default_factory=TypoConfig)

    @property
    def active(self) -> bool:
        """Whether any line is changed."""
        return any(getattr(self, kind) for kind in (*SOURCE_NOISE, *TARGET_NOISE))
