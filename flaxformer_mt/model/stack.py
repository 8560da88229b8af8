"""The parts that all models share: the embedding and the stack of blocks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.kernels import Kernels
from flaxformer_mt.kernels.bfloat16 import take_rows
from flaxformer_mt.kernels.relative_bias import RelativeBias
from flaxformer_mt.model.attention import GUIDED
from flaxformer_mt.model.initializers import Initializer, declare, make_initializers
from flaxformer_mt.model.layers import Dropout, make_norm
from flaxformer_mt.model.positions import SINUSOIDAL_TABLES, LearnedPositions, sinusoidal_positions
from flaxformer_mt.model.projections import PROJECTED
from flaxformer_mt.parallel.sharding import constrain, gather
from flaxformer_mt.shapes import Array

_REMAT_POLICIES = {"full": None, "dots": jax.checkpoint_policies.save_only_these_names(PROJECTED)}


class Embedding(nn.Module):
    """An embedding table [V, D] with an optional bias [D]; the output layer may share the table."""

    size: int
    model_dim: int
    table_init: Initializer
    # Initializer of the bias; None: no bias.
    bias_init: Initializer | None = None

    def setup(self) -> None:
        self.embedding = declare(self, "embedding", self.table_init, (self.size, self.model_dim))
        # Gathered once for all its uses, whose gradients are added up before devices exchange them.
        self.table = gather(self.embedding, "VD")
        if self.bias_init is not None:
            self.bias = declare(self, "bias", self.bias_init, (self.model_dim,))

    def __call__(self, ids: Array) -> Array:
        """Look up the float32 vectors [..., D] of ids [...]."""
        vectors = take_rows(self.table, ids).astype(jnp.float32)
        return vectors if self.bias_init is None else vectors + self.bias


def make_embedding(config: ModelConfig, size: int) -> Embedding:
    initializers = make_initializers(config)
    bias_init = initializers.bias(size) if config.embedding_bias else None
    return Embedding(size, config.model_dim, initializers.embedding, bias_init)


class Stack(nn.Module):
    """A stack of blocks: position encoding, dropout, an optional norm, the blocks, and the final norm."""

    config: ModelConfig
    kernels: Kernels
    num_layers: int
    block: type[nn.Module]
    # Index of the argument `deterministic` of the block's __call__; self is 0.
    deterministic_argument: int

    def setup(self) -> None:
        config = self.config
        if config.positions in ("learned", "one_vector"):
            initializers = make_initializers(config)
            rows = (config.longest_input or config.max_positions or 512) + config.first_position
            bias_init = initializers.bias(rows) if config.embedding_bias else None
            self.positions = LearnedPositions(rows, config.model_dim, initializers.positions, bias_init)
        if config.positions == "relative":
            self.relative_positions = LearnedPositions(
                config.relative_buckets, config.num_heads, make_initializers(config).positions
            )
        rate = config.embedding_dropout_rate
        self.embedding_dropout = Dropout(config.dropout_rate if rate is None else rate)
        if config.embedding_norm:
            self.embedding_norm = make_norm(config, self.kernels)
        block: Any = self.block
        if config.remat != "none":
            block = nn.remat(
                block,
                policy=_REMAT_POLICIES[config.remat],
                static_argnums=(self.deterministic_argument,),
                prevent_cse=not config.scan_layers,  # in a scan XLA cannot undo the recomputation
            )
        # With scan_layers one block represents all; `run` gives its parameters the axis [L, ...].
        make: Any = functools.partial(block, config, self.kernels)
        self.layers = make() if config.scan_layers else [make() for _ in range(self.num_layers)]
        if _has_final_norm(config):
            self.final_norm = make_norm(config, self.kernels)

    def start(
        self, embedded: Array, positions: Array, *, length: int, packed: bool = False, deterministic: bool
    ) -> Array:
        """Compute the input of the first block from embeddings [B, T, D] and positions [B, T] or [1, T].

        `embedded` has the unscaled vectors of the table. `length` is static and exceeds all `positions`,
        which may be traced. Raises UserError if `length` exceeds the positions that the config provides,
        unless `packed`: then a row may hold several inputs and be longer than the longest one.
        """
        config = self.config
        longest = config.longest_input
        if longest is not None and length > longest and not packed:
            raise UserError(
                f"an input of {length} tokens is longer than the {longest} positions of model.positions="
                f"{config.positions}; raise model.max_positions or shorten the input"
            )
        embedded = constrain(embedded, "BTD")
        x = embedded * config.model_dim**0.5 if config.embedding_scale else embedded
        first = config.first_position
        if config.positions in SINUSOIDAL_TABLES:
            x = x + sinusoidal_positions(
                positions + first, config.positions, length=length + first, model_dim=config.model_dim
            )
        elif config.positions == "learned":
            x = x + self.positions(positions + first)
        elif config.positions == "one_vector":
            x = x + self.positions.one_vector()
        x = x.astype(jnp.dtype(config.dtype))
        x = constrain(self.embedding_dropout(x, deterministic=deterministic), "BTD")
        return self.embedding_norm(x) if config.embedding_norm else x

    def run(self, x: Array, *arguments: Any) -> Array:
        """Run x [B, T, D] through all blocks in order; every block gets the same arguments."""
        if not self.config.scan_layers:
            for block in self.layers:
                x = block(x, *arguments)
            return x
        scanned = nn.scan(
            lambda block, x: (block(x, *arguments), None),
            variable_axes={"params": 0, "intermediates": 0, GUIDED: 0},
            split_rngs={"params": True, "dropout": True},
            length=self.num_layers,
        )
        return scanned(self.layers, x)[0]

    def blocks(self) -> list[nn.Module]:
        """Return the blocks as a list, for decoding; raise ValueError with `model.scan_layers`."""
        if self.config.scan_layers:
            raise ValueError(
                "model.scan_layers=True leaves no separate blocks to decode with; make the model with "
                "scan_layers=False and convert its parameters with unstack_layers"
            )
        return self.layers

    def finish(self, x: Array) -> Array:
        return constrain(self.final_norm(x), "BTD") if _has_final_norm(self.config) else x

    def relative_bias(self, *, bidirectional: bool) -> RelativeBias:
        """Return the relative-position bias, which the self-attention of all blocks adds to its scores."""
        return RelativeBias(self.relative_positions.embedding, self.config.relative_distance, bidirectional)

    def rotary(self, positions: Array) -> Array | None:
        """Return the positions for rotary embeddings; None if the model has other position encodings."""
        return positions + self.config.first_position if self.config.positions == "rotary" else None


def _has_final_norm(config: ModelConfig) -> bool:
    return config.norm_position == "pre" if config.final_norm is None else config.final_norm
