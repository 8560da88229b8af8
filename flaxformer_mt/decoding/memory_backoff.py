"""How many tokens are worked on at a time, and what happens when the device has no room for them.

Owns that running out of device memory halves the batches, once and for all, instead of ending the work. Knows
nothing of what is done with a batch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax

from flaxformer_mt.errors import UserError

Result = TypeVar("Result")

# Of the message with which XLA says that an allocation failed, on every backend.
_NO_ROOM = "RESOURCE_EXHAUSTED"

# Fewer tokens than this are one short sentence: halving them further changes nothing.
_FEWEST = 8


class TokenBudget:
    """The tokens of a batch: as many as asked for, until the device turns out to hold fewer."""

    def __init__(self, tokens: int, *, warn: Callable[[str], None]) -> None:
        """Starts with `tokens`; `warn` is told the first time that there is less room."""
        self.tokens = tokens
        self._asked = tokens
        self._warn = warn

    def run_all(
        self, work: Callable[[Sequence[int], int], Iterator[tuple[int, Result]]], count: int
    ) -> Iterator[tuple[int, Result]]:
        """Gives what `work` gives of each of `count` items, with the items' indices, in any order.

        Args:
          work: takes indices of items and the tokens of a batch, and gives places among those indices with
            their results. It is called again for what is left when the device ran out of memory.

        Raises:
          UserError: there is no room for the smallest of batches.
        """
        left = dict.fromkeys(range(count))
        while left:
            indices = list(left)
            try:
                for place, result in work(indices, self.tokens):
                    del left[indices[place]]
                    yield indices[place], result
            except jax.errors.JaxRuntimeError as error:
                if _NO_ROOM not in str(error):
                    raise
                self._halve(str(error))

    def _halve(self, message: str) -> None:
        if self.tokens // 2 < _FEWEST:
            raise UserError(
                f"the device has no room for a batch of {self.tokens} tokens ({message.strip()[:200]}); free "
                "its memory, or use a smaller beam"
            )
        if self.tokens == self._asked:
            self._warn(
                f"the device has no room for batches of {self.tokens} tokens; going on with smaller ones. "
                f"Give --batch_tokens={self.tokens // 2} or less next time"
            )
        self.tokens //= 2
