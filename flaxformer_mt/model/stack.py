"""What all models share: the embedding, the stack of blocks with what is before and after it, the logits.

Knows nothing of what a stack attends to, of special ids, or of devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.initializers import Initializer, make_initializers
from flaxformer_mt.model.layers import Dropout, make_norm
from flaxformer_mt.model.positions import LearnedPositions, sinusoidal_positions
from flaxformer_mt.shapes import Array

_REMAT_POLICIES = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


class Embedding(nn.Module):
    """The table [V, D] that turns ids into vectors, with a bias [D] or not; the output may share its rows."""

    size: int
    model_dim: int
    table_init: Initializer
    # Of the bias; None: there is none.
    bias_init: Initializer | None = None

    def setup(self) -> None:
        self.embedding = self.param("embedding", self.table_init, (self.size, self.model_dim))
        if self.bias_init is not None:
            self.bias = self.param("bias", self.bias_init, (self.model_dim,))

    def __call__(self, ids: Array) -> Array:
        """Vectors [..., D] of ids [...]."""
        vectors = jnp.take(self.embedding, ids, axis=0)
        return vectors if self.bias_init is None else vectors + self.bias


def make_embedding(config: ModelConfig, size: int) -> Embedding:
    """The embedding of a vocabulary of `size` words."""
    initializers = make_initializers(config)
    bias_init = initializers.bias(size) if config.embedding_bias else None
    return Embedding(size, config.model_dim, initializers.embedding, bias_init)


class Stack(nn.Module):
    """Positions added to embeddings, a norm there or not, dropout, blocks, and the norm after the last."""

    config: ModelConfig
    num_layers: int
    block: type[nn.Module]
    # Which argument of the block's call is `deterministic`, counted from self as 0.
    deterministic_argument: int

    def setup(self) -> None:
        config = self.config
        if config.positions in ("learned", "one_vector"):
            initializers = make_initializers(config)
            rows = (config.longest_input or config.max_positions or 512) + config.first_position
            bias_init = initializers.bias(rows) if config.embedding_bias else None
            self.positions = LearnedPositions(rows, config.model_dim, initializers.positions, bias_init)
        rate = config.embedding_dropout_rate
        self.embedding_dropout = Dropout(config.dropout_rate if rate is None else rate)
        if config.embedding_norm:
            self.embedding_norm = make_norm(config)
        block = self.block
        if config.remat != "none":
            block = nn.remat(
                block,
                policy=_REMAT_POLICIES[config.remat],
                static_argnums=(self.deterministic_argument,),
                prevent_cse=not config.scan_layers,  # a loop's body is a program of its own: nothing to merge
            )
        # Scanned, one block stands for all: its parameters get an axis [L, ...] where it is run.
        self.layers = block(config) if config.scan_layers else [block(config) for _ in range(self.num_layers)]
        if _has_final_norm(config):
            self.final_norm = make_norm(config)

    def start(
        self, embedded: Array, positions: Array, *, length: int, packed: bool = False, deterministic: bool
    ) -> Array:
        """What enters the first block: scaled embeddings [B, T, D] and their positions [B, T] or [1, T].

        Args:
          length: all positions are below it; a number, where positions may be traced.
          packed: rows hold several inputs, so that a row may be longer than any of them.

        Raises:
          UserError: there are not as many positions as `length`.
        """
        config = self.config
        longest = config.longest_input
        if longest is not None and length > longest and not packed:
            raise UserError(
                f"an input of {length} tokens is longer than the {longest} that model.positions "
                f"{config.positions} reach; raise model.max_positions or shorten the input"
            )
        x = embedded * config.model_dim**0.5 if config.embedding_scale else embedded
        first = config.first_position
        if config.positions == "sinusoidal":
            x = x + sinusoidal_positions(positions + first, length=length + first, model_dim=config.model_dim)
        elif config.positions == "learned":
            x = x + self.positions(positions + first)
        elif config.positions == "one_vector":
            x = x + self.positions.one_vector()
        x = self.embedding_dropout(x.astype(jnp.dtype(config.dtype)), deterministic=deterministic)
        return self.embedding_norm(x) if config.embedding_norm else x

    def run(self, x: Array, *arguments: Any) -> Array:
        """x [B, T, D] through all blocks, from the first to the last; every block gets the same arguments."""
        if not self.config.scan_layers:
            for block in self.layers:
                x = block(x, *arguments)
            return x
        scanned = nn.scan(
            lambda block, x: (block(x, *arguments), None),
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.num_layers,
        )
        return scanned(self.layers, x)[0]

    def blocks(self) -> list[nn.Module]:
        """The blocks one by one, as decoding runs them.

        Raises:
          ValueError: the model scans its layers; translate with one that does not, and unstacked parameters.
        """
        if self.config.scan_layers:
            raise ValueError(
                "a model with scan_layers has no single blocks; decode with the model of the same config and "
                "scan_layers=False, and the parameters that unstack_layers makes"
            )
        return self.layers

    def finish(self, x: Array) -> Array:
        """The norm after the last block, where there is one."""
        return self.final_norm(x) if _has_final_norm(self.config) else x

    def rotary(self, positions: Array) -> Array | None:
        """The positions that turn queries and keys, if they are of that kind."""
        return positions + self.config.first_position if self.config.positions == "rotary" else None


def _has_final_norm(config: ModelConfig) -> bool:
    return config.norm_position == "pre" if config.final_norm is None else config.final_norm


def make_logits(x: Array, table: Array, bias: Array | None) -> Array:
    """Scores [..., V] in float32 of x [..., D] against the rows of a table [V, D]."""
    scores = jnp.einsum("...D,VD->...V", x, table.astype(x.dtype), preferred_element_type=jnp.float32)
    return scores if bias is None else scores + bias
