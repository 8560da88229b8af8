"""Tokens per batch, halved when the device runs out of memory, from then on."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax

from flaxformer_mt.errors import UserError

Result = TypeVar("Result")

# Occurs in XLA's message about a failed allocation on every backend.
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"

# Minimum number of tokens of a batch. A batch of fewer tokens has one short sentence, so halving has no
# effect.
_MIN_TOKENS = 8


class TokenBudget:
    """The number of tokens per batch: as requested until the device runs out of memory, then fewer."""

    def __init__(self, tokens: int, *, warn: Callable[[str], None]) -> None:
        """Start with `tokens` per batch; `warn` receives a warning when the number is first halved."""
        self.tokens = tokens
        self._requested = tokens
        self._warn = warn

    def run_all(
        self, work: Callable[[Sequence[int], int], Iterator[tuple[int, Result]]], count: int
    ) -> Iterator[tuple[int, Result]]:
        """Yield the index of each of `count` items with the result of `work`, in any order.

        Args:
          work: takes the indices of items and the tokens per batch; yields the result of each item, with its
            position in these indices. When the device runs out of memory, `work` is called again for the
            remaining items.

        Raises:
          UserError: the device runs out of memory with the smallest batch.
        """
        remaining = dict.fromkeys(range(count))
        while remaining:
            indices = list(remaining)
            try:
                for position, result in work(indices, self.tokens):
                    del remaining[indices[position]]
                    yield indices[position], result
            except jax.errors.JaxRuntimeError as error:
                if not self.halve_after(error):
                    raise

    def halve_after(self, error: jax.errors.JaxRuntimeError) -> bool:
        """Halve the tokens after an error by too little memory; return whether it was such an error.

        Raises:
          UserError: the device ran out of memory with the smallest batch.
        """
        message = str(error)
        if _OUT_OF_MEMORY not in message:
            return False
        if self.tokens // 2 < _MIN_TOKENS:
            raise UserError(
                f"the device has too little memory for a batch of {self.tokens} tokens "
                f"({message.strip()[:200]}); free device memory, or use a smaller beam"
            )
        if self.tokens == self._requested:
            self._warn(
                f"the device has too little memory for batches of {self.tokens} tokens; continuing with "
                f"smaller batches. Give --batch_tokens={self.tokens // 2} or less next time"
            )
        self.tokens //= 2
        return True
