"""How sums of a loss become those of the whole batch, where a program sees a shard of it."""

from typing import Any, Protocol


class Reduce(Protocol):
    """Sums a pytree over the shards of a batch, as `lax.psum` does under pmap."""

    @property
    def shard(self) -> Any:
        """The index of the shard, or None where the program sees the whole batch."""

    def __call__(self, tree: Any) -> Any:
        """The sums over all shards."""


class _Keep:
    """The `reduce` of a program that sees the whole batch: the identity."""

    shard: Any = None

    def __call__(self, tree: Any) -> Any:
        return tree


keep = _Keep()
