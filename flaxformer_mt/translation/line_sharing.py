"""How several processes translate one text: each searches its share of the sentences, and all get everything.

Owns what is whose, and the form in which translations travel. Knows nothing of devices or of search. With one
process everything here is free.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from flaxformer_mt.parallel.processes import exchange, process_count, process_index
from flaxformer_mt.translation.result import Translation


def own_share() -> slice:
    """Which sentences of a list are this process's: of three, the second has numbers 1, 4, 7, ..."""
    return slice(process_index(), None, process_count())


def gather_translations(own: Sequence[Translation]) -> list[Translation]:
    """The translations of all sentences, in order, from those of each `own_share`.

    All processes call it together; two of them with [a, c] and [b] both get [a, b, c].
    """
    if process_count() == 1:
        return list(own)
    message = json.dumps([dataclasses.asdict(translation) for translation in own]).encode()
    shares = [[_read(values) for values in json.loads(text)] for text in exchange(message)]
    everything: list[Translation] = [own_translation for share in shares for own_translation in share]
    for number, share in enumerate(shares):
        everything[number :: len(shares)] = share
    return everything


def _read(values: dict[str, Any]) -> Translation:
    alternatives = tuple(_read(one) for one in values.pop("alternatives"))
    plain = {name: _to_tuples(value) for name, value in values.items()}
    return Translation(**plain, alternatives=alternatives)


def _to_tuples(value: Any) -> Any:
    """JSON has lists where we have tuples."""
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value
