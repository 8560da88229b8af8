"""Config of cleaning: what happens to suspicious training pairs. A section of the schema's `data`.

A field's comment is its `--help` text.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from flaxformer_mt.config.bounds import at_least, between


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
    # Training pairs whose target an earlier pair has, whatever their sources: off, refuse, drop or keep.
    repeated_targets: Literal["off", "refuse", "drop", "keep"] = "off"
    # Training pairs whose sides differ in the digits from 1 to 9, whatever their order: off, refuse, drop or
    # keep.
    numbers: Literal["off", "refuse", "drop", "keep"] = "off"
    # Training pairs with a side of which fewer letters than min_script_share are of its script: off, refuse,
    # drop or keep.
    script: Literal["off", "refuse", "drop", "keep"] = "off"
    # For the rule script, the first word of the Unicode names of the source's letters, as LATIN, CYRILLIC or
    # ARABIC; of several scripts, CJK+HIRAGANA+KATAKANA. Empty: any.
    source_script: str = ""
    # The same for the target.
    target_script: str = ""
    # Smallest share of letters of its script on a side, for the rule script. A side without letters passes.
    min_script_share: Annotated[float, between(0, 1)] = 0.5
    # Training pairs with a side in another language, as language_model says: off, refuse, drop or keep.
    language: Literal["off", "refuse", "drop", "keep"] = "off"
    # fastText model of language identification, such as lid.176.bin (needs the extra languages), for the rule
    # language and the search for swapped sides. Empty: none.
    language_model: str = ""
    # Smallest probability of another language, for the rule language.
    min_language_probability: Annotated[float, between(0, 1)] = 0.5

    def describe(self) -> dict[str, Any]:
        """Return the values that results depend on: without those of rules that are off."""
        values = dataclasses.asdict(self)
        added = ("repeated_targets", "numbers", "script", "language")
        off = [name for name in added if values[name] == "off"]
        if "script" in off:
            off += ["source_script", "target_script", "min_script_share"]
        if "language" in off:
            off += ["language_model", "min_language_probability"]
        return {name: value for name, value in values.items() if name not in off}
