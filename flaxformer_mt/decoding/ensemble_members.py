"""The models of a search while a program is traced: one model, or the members of an ensemble."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.kernels.bfloat16 import cast_kernels
from flaxformer_mt.model.scanned_layers import unstack_layers
from flaxformer_mt.parallel import default_platform
from flaxformer_mt.search import Lines, NextLogits, ensemble, ensemble_caches
from flaxformer_mt.shapes import Array, Cache

if TYPE_CHECKING:
    from flaxformer_mt.model import Model


def make_models(configs: Sequence[ModelConfig], sizes: tuple[int, int]) -> list["Model"]:
    """Return the models for this process's platform; `sizes`: the source and target vocabulary sizes."""
    from flaxformer_mt.model import make_model

    source_size, target_size = sizes
    return [
        make_model(one, source_size=source_size, target_size=target_size, platform=default_platform())
        for one in configs
    ]


class Sources(NamedTuple):
    """Source sentences, one per row, and the search inputs of each, such as length limits and prefixes."""

    ids: Array  # [M, S]
    mask: Array  # [M, S]
    lines: Lines


class Members:
    """The model, or the members of an ensemble, with their parameters; used while a program is traced."""

    def __init__(
        self,
        models: Sequence[Any],
        params: tuple[Any, ...],
        configs: Sequence[ModelConfig],
        options: SearchConfig,
        *,
        common: np.ndarray | None,
    ) -> None:
        """`common`: with shortlists, the ids of the tokens that all lines may use."""
        self._models = models
        # Cast here, outside of the loop over tokens, unless the caller has done it.
        self._variables = [
            {"params": cast_kernels(unstack_layers(member_params), jnp.dtype(config.dtype))}
            for member_params, config in zip(params, configs, strict=True)
        ]
        self.covers = options.method == "beam" and options.coverage_penalty > 0
        several = len(models) > 1

        def combine(method: str, *outputs: Any) -> NextLogits:
            members = []
            for number, (model, config) in enumerate(zip(models, configs, strict=True)):
                layer = config.num_decoder_layers - 1 if self.covers else None
                more = [output[number] for output in outputs]
                members.append(_next_logits(model, self._variables[number], method, layer, *more))
            return ensemble(members) if several else members[0]

        self.read_prefix = combine("read_prefix")
        if common is None:
            self.next_logits = combine("decode_step")
        else:  # taken here, outside of the loop over tokens
            pairs = zip(models, self._variables, strict=True)
            outputs = [model.apply(variables, common, method="take_output") for model, variables in pairs]
            self.next_logits = combine("decode_step", outputs)
        self.attention = _mean_attention if several else _attention

    def encode(self, sources: Sources, beams: int, capacity: int) -> Cache:
        """Encode sources; return a cache without target tokens, with room for `capacity` tokens per beam."""
        ids, mask, caches = sources.ids, sources.mask, []
        for model, variables in zip(self._models, self._variables, strict=True):
            cache = model.apply(variables, ids, mask, beams, capacity, method="start_decoding")
            if sources.lines.shortlist is not None:
                cache = model.apply(variables, cache, sources.lines.shortlist, method="add_shortlists")
            if self.covers:
                attention = jnp.zeros((ids.shape[0], beams, ids.shape[1]), jnp.float32)
                cache = cache._replace(per_beam={"model": cache.per_beam, "attention": attention})
            caches.append(cache)
        return ensemble_caches(caches) if len(caches) > 1 else caches[0]

    def keep_last_attention(self, cache: Cache) -> Cache:
        """Keep only the last token's attention in a cache from `read_prefix`."""
        if not self.covers:
            return cache
        several = isinstance(cache.per_beam, tuple)
        kept = [
            member | {"attention": member["attention"][:, -1:]}
            for member in (cache.per_beam if several else [cache.per_beam])
        ]
        return cache._replace(per_beam=tuple(kept) if several else kept[0])

    def add_source_mask(self, sources: Sources) -> Lines:
        """Return the search inputs of the sources, with the source mask if there is a coverage penalty."""
        return sources.lines._replace(source_mask=sources.mask) if self.covers else sources.lines


def _next_logits(model: Any, variables: Any, method: str, layer: int | None, *more: Any) -> NextLogits:
    """Return a method of the model as a `next_logits`; `more` are the method's last arguments.

    If a layer is given, the cache also stores its cross-attention [B, W, S], averaged over heads.
    """

    def next_logits(tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        return model.apply(variables, tokens, cache, *more, method=method)

    def next_logits_and_attention(tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        model_cache = cache._replace(per_beam=cache.per_beam["model"])
        (logits, after), collections = model.apply(
            variables, tokens, model_cache, *more, method=method, mutable=["intermediates"]
        )
        block = collections["intermediates"]["decoder"][f"layers_{layer}"]
        (weights,) = block["cross_attention"]["attention_weights"]  # [B, H, W, S]
        per_beam = {"model": after.per_beam, "attention": weights.mean(axis=1)}
        return logits, after._replace(per_beam=per_beam)

    return next_logits if layer is None else next_logits_and_attention


def _attention(cache: Cache) -> Array:
    return cache.per_beam["attention"]


def _mean_attention(cache: Cache) -> Array:
    return jnp.stack([member["attention"] for member in cache.per_beam]).mean(axis=0)
