"""How the time of a function grows with a text: a request must never take more than its share of a server."""

import gc
import math
import time
from collections.abc import Callable
from typing import Any

# A text is made longer until its function takes this many seconds, or has this many characters.
_SECONDS, _CHARACTERS = 0.002, 20_000
# Of the texts that are timed, in multiples of the smallest that takes a while.
_SIZES = (1, 4, 8)


def growth(function: Callable[[Any], object], make_text: Callable[[int], Any]) -> float:
    """Return the power of the size of a text that the processor time of a function grows with.

    1 is linear, 2 quadratic; hold it against 1.6, because times are never exact. What takes no time up to
    the largest text counts as linear.

    Args:
      make_text: returns a text of so many units (or whatever the function reads).
    """
    unit = 16
    while _measure(function, make_text(unit), tries=1) < _SECONDS:
        if len(make_text(unit * _SIZES[-1])) > 8 * _CHARACTERS:
            return 1.0
        unit *= 2
    times = [_measure(function, make_text(unit * size)) for size in _SIZES]
    # The steepest line from the first time: a function that becomes slow only later shows in the last one.
    return max(
        math.log(after / times[0]) / math.log(size) for after, size in zip(times[1:], _SIZES[1:], strict=True)
    )


def _measure(function: Callable[[Any], object], text: Any, *, tries: int = 3) -> float:
    """Return the processor seconds of a call, the least of so many."""
    found = []
    gc.disable()
    try:
        for _ in range(tries):
            start = time.thread_time()
            function(text)
            found.append(time.thread_time() - start)
    finally:
        gc.enable()
    return min(found)
