"""How the time of a function grows with a text: a request must never take more than its share of a server."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

# A text is made longer until its function takes this many seconds, or has this many characters.
_SECONDS, _CHARACTERS = 0.002, 20_000


def growth(
    function: Callable[[Any], object], make_text: Callable[[int], Any], sizes: Sequence[int] = (1, 2, 4, 8)
) -> float:
    """Return the power of the size of a text that the processor time of a function grows with.

    1 is linear, 2 quadratic; hold it against 1.6, because times are never exact. What takes no time up to
    the largest text counts as linear.

    Args:
      make_text: returns a text of so many units (or whatever the function reads).
      sizes: of the texts that are timed, in multiples of the smallest that takes a while.
    """
    unit = 16
    while _measure(function, make_text(unit), tries=1) < _SECONDS:
        if len(make_text(unit * sizes[-1])) > 8 * _CHARACTERS:
            return 1.0
        unit *= 2
    times = [_measure(function, make_text(unit * size)) for size in sizes]
    # The steepest line from the first time: a function that becomes slow only later shows in the last one.
    return max(
        math.log(after / times[0]) / math.log(size / sizes[0])
        for after, size in zip(times[2:], sizes[2:], strict=True)
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
