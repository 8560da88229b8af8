"""Several models as one: `next_logits` of an ensemble from those of its members.

Owns how their opinions are averaged. Knows nothing of what a member is.
"""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from flaxformer_mt.errors import UserError
from flaxformer_mt.search.types import NextLogits
from flaxformer_mt.shapes import Array, Cache


def ensemble_caches(caches: Sequence[Cache]) -> Cache:
    """The members' caches as one. All of them, or none, follow `ancestors`."""
    first = caches[0]
    if len({cache.ancestors is None for cache in caches}) > 1:
        raise ValueError("some caches have ancestors and some have none; search reorders one kind at a time")
    per_beam, shared = (tuple(getattr(cache, name) for cache in caches) for name in ("per_beam", "shared"))
    return Cache(per_beam, shared, first.index, first.ancestors, first.begun)


def ensemble(members: Sequence[NextLogits], *, mean: Literal["log_probs", "probs"]) -> NextLogits:
    """`next_logits` over `ensemble_caches`: the mean of the members' log-probabilities, or of probabilities.

    The mean of log-probabilities is a geometric mean, which is divided by its sum to be a distribution again:
    a token that one member rules out is out. The mean of probabilities keeps what any member believes in.

    Raises:
      UserError: while tracing, if the members' vocabularies are of different sizes.
    """

    def next_logits(tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        opinions, grown = [], []
        for member, per_beam, shared in zip(members, cache.per_beam, cache.shared, strict=True):
            logits, after = member(tokens, cache._replace(per_beam=per_beam, shared=shared))
            opinions.append(jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1))
            grown.append(after)
        sizes = [opinion.shape[-1] for opinion in opinions]
        if len(set(sizes)) > 1:
            raise UserError(
                f"the models of an ensemble have vocabularies of {' and '.join(map(str, sizes))} entries; "
                "combine models with one and the same vocabulary"
            )
        together = jnp.stack(opinions)
        if mean == "log_probs":
            logits = together.mean(axis=0)
        else:
            logits = jax.nn.logsumexp(together, axis=0) - jnp.log(len(opinions))
        return logits, ensemble_caches(grown)

    return next_logits
