"""Characters that nobody sees, which the normalization of a text leaves out.

They come with text that is copied from pages and documents: soft hyphens inside words, byte order marks, and
marks of the direction of writing. SentencePiece's own rules keep them or make spaces of them. Contains a pure
function of rules, which are pairs of a text and its replacement.
"""

from collections.abc import Iterable

# Soft hyphen, Arabic letter mark, zero-width space, marks of direction, embeddings and overrides of it, word
# joiner, invisible operators of formulas, isolates, deprecated format characters, byte order mark.
INVISIBLE = frozenset(
    map(
        chr,
        (
            0x00AD,
            0x061C,
            0x200B,
            *range(0x200E, 0x2010),
            *range(0x202A, 0x202F),
            *range(0x2060, 0x2065),
            *range(0x2066, 0x2070),
            0xFEFF,
        ),
    )
)
# The zero-width non-joiner and joiner change how the letters beside them look: words of Persian or Hindi are
# misspelt without them, and emoji fall apart.
_JOINERS = frozenset("\u200c\u200d")


def leave_out_invisible(rules: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the rules of a normalization with rules that delete invisible characters, and keep joiners."""
    kept = {text: replacement for text, replacement in rules if text not in _JOINERS}
    return kept | dict.fromkeys(sorted(INVISIBLE), "")
