"""Beam search with a model of your own: PYTHONPATH=. python recipes/own_model.py"""

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.search import Lines, Symbols, search
from flaxformer_mt.shapes import Cache

PAD, BOS, EOS, A, B = range(5)
# The model: a table of probabilities. Row: the last token; column: the next one.
following = np.full((5, 5), 1e-9)
following[BOS, [A, B]] = 0.6, 0.4
following[A, [A, B, EOS]] = 0.3, 0.3, 0.4
following[B, [A, EOS]] = 0.1, 0.9


def next_logits(tokens, cache):
    table = cache.shared["table"]  # [B, V, V]: here the "encoded source"
    rows = jnp.arange(table.shape[0])[:, None]
    return table[rows, tokens], cache._replace(index=cache.index + 1)


@jax.jit
def translate(table, max_lengths):
    cache = Cache(per_beam={}, shared={"table": table}, index=jnp.zeros((), jnp.int32))
    return search(
        next_logits,
        cache,
        Lines(max_lengths),
        options=SearchConfig(beam_size=2, length_penalty=0.0),
        symbols=Symbols(pad_id=PAD, bos_id=BOS, eos_id=EOS),
        max_length=6,
        n_best=2,
    )


found = translate(jnp.log(following)[None], jnp.array([6]))
# [B EOS] with .4 * .9 = .36 is better than [A EOS] with .6 * .4 = .24, which greedy search would find.
print(found.tokens[0], jnp.exp(found.log_probs[0]))
