"""Config of cleaning: what happens to suspicious training pairs. A section of the schema's `data`.

A field's comment is its `--help` text.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from flaxformer_mt.config.bounds import at_least


@dataclass(frozen=True)
class CleanConfig:
    """Rules for suspicious training pairs.

    `refuse` ends the command with an error, `drop` leaves the pairs out, `keep` only reports them. Validation
    and test pairs are never dropped, so that a score always covers the whole set.
    """

    # Text files with different numbers of lines: refuse (error), or drop the longer file's surplus lines.
    unequal_lines: Literal["refuse", "drop"] = "refuse"
    # Training pairs that are not valid UTF-8: refuse (error with file and line), or drop the pair.
    invalid_utf8: Literal["refuse", "drop"] = "refuse"
    # Training pairs with a side that is empty or shows nothing (white space, byte order marks, marks of
    # direction): refuse (error), drop, or keep and report.
    empty: Literal["refuse", "drop", "keep"] = "drop"
    # Training pairs with a side of more than max_characters: refuse (error), drop, or keep and report.
    too_long: Literal["refuse", "drop", "keep"] = "drop"
    # Maximum length of a sentence in characters, for the rule too_long.
    max_characters: Annotated[int, at_least(1)] = 2000
    # Training pairs whose lengths in characters differ by more than max_length_ratio: refuse, drop or keep.
    length_ratio: Literal["refuse", "drop", "keep"] = "drop"
    # Maximum ratio of the longer to the shorter side in characters, for the rule length_ratio.
    max_length_ratio: Annotated[float, at_least(1)] = 9.0
    # Training pairs identical to an earlier pair: refuse (error), drop the repetitions, or keep and report.
    duplicates: Literal["refuse", "drop", "keep"] = "keep"
