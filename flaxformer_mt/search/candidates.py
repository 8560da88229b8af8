"""The best next tokens of each beam.

Owns how logits become log-probabilities and how the best are found quickly; knows nothing of loops or caches.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from flaxformer_mt.shapes import Array, typed

# Vocabularies are looked through in chunks of this many entries (see `top_k`).
_CHUNK = 64


@typed
def mask_logits(
    logits: Float[Array, "B W V"], *, banned: tuple[int, ...], allowed: Bool[Array, "B #W V"] | None = None
) -> Float[Array, "B W V"]:
    """Float32 logits, -inf where a token is banned everywhere or not allowed here."""
    choosable = np.ones(logits.shape[-1], bool)
    choosable[[token for token in banned if 0 <= token < choosable.size]] = False
    mask = jnp.asarray(choosable) if allowed is None else allowed & choosable
    return jnp.where(mask, logits.astype(jnp.float32), -jnp.inf)


@typed
def top_candidates(
    logits: Float[Array, "B W V"],
    *,
    count: int,
    banned: tuple[int, ...],
    barred: tuple[int, Array] | None = None,
    allowed: Bool[Array, "B #W V"] | None = None,
    discount: Float[Array, "B V"] | None = None,
) -> tuple[Float[Array, "B W C"], Int[Array, "B W C"]]:
    """The `count` best next tokens of each beam: float32 log-probabilities, best first, and ids.

    `barred` is one id more, and for which beams, [B, W or 1], it is banned as well.

    Ids that are banned or not allowed are never chosen, but keep their probability: scores are those of the
    model. A discount is taken off before tokens are compared, and is off what is returned too. Where any
    logit is not a number, the whole beam is impossible (-inf), so that it cannot displace a sound one.
    """
    if allowed is None and discount is None and count * _CHUNK < logits.shape[-1]:
        log_probs, tokens = _top_of_chunks(logits.astype(jnp.float32), count, banned, barred)
    else:
        if barred is not None:
            own = ~barred[1][..., None] | (jnp.arange(logits.shape[-1]) != barred[0])
            allowed = own if allowed is None else allowed & own
        total = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True)
        masked = mask_logits(logits, banned=banned, allowed=allowed)
        best, tokens = top_k(masked if discount is None else masked - discount[:, None, :], count)
        log_probs = best - total
    return jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs), tokens


def _top_of_chunks(
    logits: Array, count: int, banned: tuple[int, ...], barred: tuple[int, Array] | None
) -> tuple[Array, Array]:
    """The same where few ids are ruled out: the logits are read twice, and written nowhere again.

    Their chunks' maxima serve the sum of the exponentials as well; what is banned is taken out of the few
    chunks that it is in. For 192 beams over 32,000 tokens on a core of a CPU it takes 3 ms, the product 71.
    """
    size = logits.shape[-1]
    chunks = _in_chunks(logits)
    choosable = np.arange(chunks.shape[-2] * _CHUNK) < size
    choosable[[token for token in banned if 0 <= token < size]] = False
    choosable = choosable.reshape(-1, _CHUNK)
    touched = {*np.flatnonzero(~choosable.all(axis=-1)).tolist()}
    if barred is not None:
        touched.add(barred[0] // _CHUNK)
    partly = np.array(sorted(touched), np.int32)

    def keep(values: Array, numbers: Array | np.ndarray) -> Array:
        """Chunks [..., C, 64] of those numbers [..., C] or [C], -inf where nothing can be chosen."""
        kept = jnp.where(jnp.asarray(choosable)[numbers], values, -jnp.inf)
        if barred is None:
            return kept
        ids = numbers[..., None] * _CHUNK + np.arange(_CHUNK)
        return jnp.where((ids == barred[0]) & barred[1][..., None, None], -jnp.inf, kept)

    largest = chunks.max(axis=-1)
    top = largest.max(axis=-1)
    total = top + jnp.log(jnp.exp(chunks - top[..., None, None]).sum(axis=(-1, -2)))
    largest = largest.at[..., partly].set(keep(chunks[..., partly, :], partly).max(axis=-1))
    _, chosen = jax.lax.top_k(largest, count)  # [..., C]
    kept = keep(jnp.take_along_axis(chunks, chosen[..., None], axis=-2), chosen)
    best, tokens = _top_of_chosen(kept, chosen, count)
    return best - total[..., None], jnp.minimum(tokens, size - 1)


def top_k(values: Array, count: int) -> tuple[Array, Array]:
    """`lax.top_k` over the last axis, up to the order of ties, in two stages.

    The largest `count` values lie in the `count` chunks with the largest maxima, so only those are sorted:
    on a CPU, for 5 of 8,000, that takes a fifth of the time of `lax.top_k`.
    """
    size = values.shape[-1]
    if count * _CHUNK >= size:
        return jax.lax.top_k(values, count)
    chunks = _in_chunks(values)
    _, chosen = jax.lax.top_k(chunks.max(axis=-1), count)  # [..., C]
    kept = jnp.take_along_axis(chunks, chosen[..., None], axis=-2)
    best, ids = _top_of_chosen(kept, chosen, count)
    return best, jnp.minimum(ids, size - 1)  # a chunk's padding is chosen only where everything is -inf


def _in_chunks(values: Array) -> Array:
    """Values [..., V] as chunks [..., V / 64, 64], the last one filled up with -inf."""
    size = values.shape[-1]
    num_chunks = -(-size // _CHUNK)
    if size % _CHUNK:
        widths = [(0, 0)] * (values.ndim - 1) + [(0, num_chunks * _CHUNK - size)]
        values = jnp.pad(values, widths, constant_values=-jnp.inf)
    return values.reshape(*values.shape[:-1], num_chunks, _CHUNK)


def _top_of_chosen(kept: Array, chosen: Array, count: int) -> tuple[Array, Array]:
    """The largest values of some chunks [..., C, 64], and their places in all that chunks [..., C] number."""
    best, where = jax.lax.top_k(kept.reshape(*kept.shape[:-2], -1), count)
    return best, jnp.take_along_axis(chosen, where // _CHUNK, axis=-1) * _CHUNK + where % _CHUNK
