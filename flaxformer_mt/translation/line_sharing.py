"""Translation of one text by several processes: each translates a share, and all receive all translations."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from flaxformer_mt.parallel.processes import exchange, process_count, process_index
from flaxformer_mt.translation.result import Translation


def own_share(*, together: bool = False) -> slice:
    """Return the slice of a list of sentences that this process translates.

    Of three processes, the second has sentences 1, 4, 7, ...; all have all sentences if they translate each
    sentence `together`, with parameters that are split over them.
    """
    return slice(None) if together else slice(process_index(), None, process_count())


def gather_translations(share: Sequence[Translation], *, together: bool = False) -> list[Translation]:
    """Return the translations of all sentences, in order, given those of this process's `own_share`.

    All processes call it together: with [a, c] in one process and [b] in the other, both get [a, b, c].
    """
    if process_count() == 1 or together:
        return list(share)
    message = json.dumps([dataclasses.asdict(translation) for translation in share]).encode()
    shares = [[_from_json(values) for values in json.loads(text)] for text in exchange(message)]
    all_translations: list[Translation] = [translation for part in shares for translation in part]
    for number, part in enumerate(shares):
        all_translations[number :: len(shares)] = part
    return all_translations


def _from_json(values: dict[str, Any]) -> Translation:
    alternatives = tuple(_from_json(alternative) for alternative in values.pop("alternatives"))
    fields = {name: _to_tuples(value) for name, value in values.items()}
    return Translation(**fields, alternatives=alternatives)


def _to_tuples(value: Any) -> Any:
    """Convert lists to tuples: JSON has lists only."""
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value
