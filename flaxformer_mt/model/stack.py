"""The parts that all models share: the embedding, the stack of blocks, and the logits.

The blocks arrive as a class; the models choose it and build the attention masks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.alignment_head import GUIDED
from flaxformer_mt.model.bfloat16 import take_rows
from flaxformer_mt.model.initializers import Initializer, make_initializers
from flaxformer_mt.model.layers import Dropout, make_norm
from flaxformer_mt.model.positions import LearnedPositions, sinusoidal_positions
from flaxformer_mt.model.products import contract
from flaxformer_mt.model.projections import PROJECTED
from flaxformer_mt.model.quantization import Quantized, contract_quantized
from flaxformer_mt.shapes import Array, constrain, map_row_parts, share_by_rows

_REMAT_POLICIES = {"full": None, "dots": jax.checkpoint_policies.save_only_these_names(PROJECTED)}


class Embedding(nn.Module):
    """The table [V, D] that maps ids to vectors, with an optional bias [D]; the output layer may share it."""

    size: int
    model_dim: int
    table_init: Initializer
    # Initializer of the bias; None: no bias.
    bias_init: Initializer | None = None

    def setup(self) -> None:
        self.embedding = self.param("embedding", self.table_init, (self.size, self.model_dim))
        # A table that is split along D is gathered: vectors split along D would be gathered for all rows.
        self.table = share_by_rows(self.embedding, "VD")
        if self.bias_init is not None:
            self.bias = self.param("bias", self.bias_init, (self.model_dim,))

    def __call__(self, ids: Array) -> Array:
        """Look up the float32 vectors [..., D] of ids [...]."""
        vectors = map_row_parts(lambda ids, table: take_rows(table, ids), ids, self.table)
        vectors = vectors.astype(jnp.float32)
        return vectors if self.bias_init is None else vectors + self.bias


def make_embedding(config: ModelConfig, size: int) -> Embedding:
    """Make the embedding of a vocabulary of `size` pieces."""
    initializers = make_initializers(config)
    bias_init = initializers.bias(size) if config.embedding_bias else None
    return Embedding(size, config.model_dim, initializers.embedding, bias_init)


class Stack(nn.Module):
    """Position encoding, dropout, an optional norm, the blocks, and the norm after the last block."""

    config: ModelConfig
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
                prevent_cse=not config.scan_layers,  # in a scan XLA cannot undo the recomputation
            )
        # With scan_layers one block represents all; `run` gives its parameters the axis [L, ...].
        self.layers = block(config) if config.scan_layers else [block(config) for _ in range(self.num_layers)]
        if _has_final_norm(config):
            self.final_norm = make_norm(config)

    def start(
        self, embedded: Array, positions: Array, *, length: int, packed: bool = False, deterministic: bool
    ) -> Array:
        """Compute the input of the first block from embeddings [B, T, D] and positions [B, T] or [1, T].

        Args:
          embedded: the unscaled vectors of the embedding table.
          length: static bound above all positions; the positions themselves may be traced.
          packed: a row holds several inputs, so it may be longer than the longest input.

        Raises:
          UserError: `length` exceeds the positions that the config provides.
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
        if config.positions == "sinusoidal":
            x = x + sinusoidal_positions(positions + first, length=length + first, model_dim=config.model_dim)
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
        """Return the blocks as a list, for decoding.

        Raises:
          ValueError: `model.scan_layers` is on; decode with scan_layers=False and unstacked parameters.
        """
        if self.config.scan_layers:
            raise ValueError(
                "model.scan_layers=True leaves no separate blocks to decode with; make the model with "
                "scan_layers=False and convert its parameters with unstack_layers"
            )
        return self.layers

    def finish(self, x: Array) -> Array:
        """Apply the norm after the last block, if the config has one."""
        return constrain(self.final_norm(x), "BTD") if _has_final_norm(self.config) else x

    def rotary(self, positions: Array) -> Array | None:
        """Return the positions for rotary embeddings; None with other position encodings."""
        return positions + self.config.first_position if self.config.positions == "rotary" else None


def _has_final_norm(config: ModelConfig) -> bool:
    return config.norm_position == "pre" if config.final_norm is None else config.final_norm


def make_logits(x: Array, table: Array | Quantized, bias: Array | None) -> Array:
    """Compute float32 logits [..., V] of x [..., D] against the rows of a table [V, D]."""
    spec = "...D,VD->...V"
    scores = contract_quantized(spec, x, table) if isinstance(table, Quantized) else contract(spec, x, table)
    return scores if bias is None else scores + bias


class ListedOutput(NamedTuple):
    """Columns of the output layer for the shortlist of each row: those of its own tokens."""

    # float32 in any dtype of the model: so few columns are multiplied faster in float32 on CPUs.
    kernel: Array  # [B, D, C]
    bias: Array | None  # [B, C]
    # Which columns belong to a token; the others are padding.
    listed: Array  # [B, C]


def list_output(table: Array, bias: Array | None, tokens: Array) -> ListedOutput:
    """Gather the output layer's columns of tokens [B, C], which are ids plus 1; 0: padding."""
    ids = jnp.maximum(tokens - 1, 0)
    kernel = jnp.swapaxes(take_rows(table, ids).astype(jnp.float32), 1, 2)
    return ListedOutput(kernel, None if bias is None else jnp.take(bias, ids).astype(jnp.float32), tokens > 0)


def make_listed_logits(x: Array, own: ListedOutput, common: tuple[Array, Array | None]) -> Array:
    """Compute float32 logits [B, W, N + C] of x [B, W, D]: of N common tokens, then of each row's own.

    Args:
      common: rows [N, D] of the table of the output layer, and their biases [N].
    """
    scores = contract("BWD,BDC->BWC", x.astype(jnp.float32), own.kernel)
    scores = scores if own.bias is None else scores + own.bias[:, None]
    scores = jnp.where(own.listed[:, None], scores, -jnp.inf)
    return jnp.concatenate([make_logits(x, *common), scores], axis=-1)
