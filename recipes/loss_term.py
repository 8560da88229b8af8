"""A loss term of your own, R-Drop: PYTHONPATH=. python recipes/loss_term.py toy_de_en runs/r_drop 100"""

import sys

import jax
import jax.numpy as jnp

from flaxformer_mt import fit, load_config
from flaxformer_mt.losses import TokenSums
from flaxformer_mt.training.update import LossTerm

ALPHA = 5.0


def sum_r_drop(model, hidden, batch):
    """Add a second pass with other dropout, and how far both passes differ (Liang et al. 2021).

    Equations 2 to 4: the cross-entropy of the second pass, plus ALPHA times the mean of KL(p || q) and
    KL(q || p), summed over the target tokens. Training adds the cross-entropy of the first pass.
    """
    other = model.hidden(batch, deterministic=False)
    p, q = (jax.nn.log_softmax(model.logits(states)) for states in (hidden, other))  # [B, T, V]
    cross_entropy = -jnp.take_along_axis(q, batch.target_out[..., None], axis=-1)[..., 0]
    divergence = ((jnp.exp(p) - jnp.exp(q)) * (p - q)).sum(axis=-1) / 2
    real = batch.target_mask.astype(jnp.float32)
    return TokenSums(((cross_entropy + ALPHA * divergence) * real).sum(), real.sum())


if __name__ == "__main__":
    name, run, updates = sys.argv[1:]
    config = load_config(name).replace({"train.steps": int(updates)})
    report = fit(config, run, progress=sys.stderr, loss_terms=[LossTerm(sum_r_drop)])
    print(f"{report['test']['bleu']:.2f} BLEU")
