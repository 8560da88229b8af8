"""Ensembles: combines several models into one `next_logits` that averages their distributions."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flaxformer_mt.errors import UserError
from flaxformer_mt.search.types import NextLogits
from flaxformer_mt.shapes import Array, Cache


def ensemble_caches(caches: Sequence[Cache]) -> Cache:
    """Combine the members' caches into one; raise ValueError if only some of them have `ancestors`."""
    first = caches[0]
    if len({cache.ancestors is None for cache in caches}) > 1:
        raise ValueError("only some of the caches have ancestors; give ancestors to all members or to none")
    per_beam, shared = (tuple(getattr(cache, name) for cache in caches) for name in ("per_beam", "shared"))
    return Cache(per_beam, shared, first.index, first.ancestors, first.start_steps)


def average_logits(logits: Sequence[Array]) -> Array:
    """Return the mean of the models' log-probabilities, as unnormalized logits.

    A token with probability 0 in one model has probability 0 in the result.
    """
    sizes = [each.shape[-1] for each in logits]
    if len(set(sizes)) > 1:
        raise UserError(
            f"the models of an ensemble have vocabularies of {' and '.join(map(str, sizes))} entries; "
            "combine models that share one vocabulary"
        )
    log_probs = jnp.stack([jax.nn.log_softmax(each.astype(jnp.float32), axis=-1) for each in logits])
    return log_probs.mean(axis=0)


def ensemble(members: Sequence[NextLogits]) -> NextLogits:
    """Return a `next_logits` that averages the members; its cache comes from `ensemble_caches`."""

    def next_logits(tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        member_logits, caches = [], []
        for member, per_beam, shared in zip(members, cache.per_beam, cache.shared, strict=True):
            logits, after = member(tokens, cache._replace(per_beam=per_beam, shared=shared))
            member_logits.append(logits)
            caches.append(after)
        return average_logits(member_logits), ensemble_caches(caches)

    return next_logits
