"""Attention over short rows as one GPU kernel, with dropout and biases: no scores, weights or masks in
memory.

Written in Pallas for Triton. A program of the forward kernel computes a head of a block of queries, with all
keys of the row at once; one of the backward kernel all queries of a head, block after block, and computes the
weights again. Dropout's numbers are those of `dropout` for weights [B, H, Q, M], hashed where they are used.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxformer_mt.kernels.dropout import dropout_scale, hash_numbers, keep_threshold
from flaxformer_mt.shapes import Array

# Sizes of heads, which are sizes of Triton's tiles.
HEAD_SIZES = (16, 32, 64, 128)
# Numbers of the keys of a head, and of the values, that a program holds: 256 keys of 64 numbers.
MAX_KEYS = 256 * 64
# Scores that a program holds at a time, in registers: of the forward and of the backward kernel.
_FORWARD_SCORES, _BACKWARD_SCORES = 64 * 128, 32 * 128
_MIN_BLOCK = 16
# Warps of a program, by the numbers of its keys: their registers hold the gradients of keys and values.
_WARPS, _MANY_KEYS, _WARPS_FOR_MANY = 8, 128 * 64, 16
# With biases, a program adds up their gradients over a part of the batch, so that so many parts are left to
# add.
_BIAS_PARTS = 16

_MASKED = -1e30
_LAST_AXES = ((1,), (1,))
_LAST_BY_FIRST = ((1,), (0,))
_FIRST_AXES = ((0,), (0,))


class Rule(NamedTuple):
    """What is fixed at compile time: whether later positions are masked, and the factor of the scores.

    rate: of dropout. interpret: whether to run on a CPU, slowly.
    """

    causal: bool
    scale: float
    rate: float = 0.0
    interpret: bool = False


class Inputs(NamedTuple):
    """Arrays beside queries, keys and values.

    query_segments, memory_segments: int32 [B, Q] and [B, M]; 0 is padding. key: two words of dropout's key.
    first_numbers: uint32 [B, H], what dropout counts the weights of a row's head from. bias: float32 [H, Q,
    M].
    """

    query_segments: Array
    memory_segments: Array
    key: Array | None = None
    first_numbers: Array | None = None
    bias: Array | None = None


def fits_kernel(memory_length: int, *, size: int) -> bool:
    """Tell whether the kernel can attend to rows of this length with heads of this size."""
    return size in HEAD_SIZES and 0 < memory_length and _tile(memory_length) * size <= MAX_KEYS


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_rows(rule: Rule, heads: tuple[Array, Array, Array], inputs: Inputs) -> Array:
    """Attend with queries [B, Q, H, K] over keys and values [B, M, H, K]: [B, Q, H, K].

    A query attends to the positions of its segment, and only to earlier ones and its own if `causal`. Where
    it may attend to none, it averages all values.
    """
    query = heads[0]
    batch, length, count, _ = query.shape
    rows = _block(length, heads[1].shape[1], _FORWARD_SCORES)
    grid = batch, count, -(-length // rows)
    return _call(_forward, rule, grid, rows, 1, heads, inputs, (), results=[query])[0]


def _attend_forward(rule: Rule, heads: tuple[Array, Array, Array], inputs: Inputs) -> tuple[Array, Any]:
    return attend_rows(rule, heads, inputs), (heads, inputs)


def _attend_backward(rule: Rule, saved: Any, gradient: Array) -> tuple[tuple[Array, ...], Inputs]:
    heads, inputs = saved
    query, keys, _ = heads
    batch, length, count, _ = query.shape
    biased = inputs.bias is not None
    parts = max(n for n in range(1, _BIAS_PARTS + 1) if batch % n == 0) if biased else batch
    results: list[Any] = list(heads)
    if biased:
        results.append(jax.ShapeDtypeStruct((parts, count, length, keys.shape[1]), jnp.float32))
    rows = _block(length, keys.shape[1], _BACKWARD_SCORES)
    extra = (gradient.astype(query.dtype),)
    grid = parts, count
    query, keys, values, *bias = _call(
        _backward, rule, grid, rows, batch // parts, heads, inputs, extra, results=results
    )
    d_inputs = Inputs(None, None, bias=bias[0].sum(0) if bias else None)
    return (query, keys, values), d_inputs


attend_rows.defvjp(_attend_forward, _attend_backward)


def _tile(length: int) -> int:
    return max(_MIN_BLOCK, 1 << (length - 1).bit_length())


def _block(length: int, memory_length: int, scores: int) -> int:
    return min(_tile(length), max(_MIN_BLOCK, scores // _tile(memory_length)))


def _call(
    kernel: Any,
    rule: Rule,
    grid: tuple[int, ...],
    block: int,
    group: int,
    heads: Sequence[Array],
    inputs: Inputs,
    extra: Sequence[Array],
    *,
    results: Sequence[Any],
) -> Sequence[Array]:
    """Run a kernel; its programs have all queries, or a block of them if there is a third axis of the grid.

    block: queries at a time. group: rows of the batch that a program goes through.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (_, length, _, size), memory_length = heads[0].shape, heads[1].shape[1]
    blocked = len(grid) == 3
    queries, memory = (block if blocked else -(-length // block) * block), _tile(memory_length)

    rows = None if group == 1 else group

    def of_queries(*index: Any) -> Any:
        return index[2] if blocked else 0

    by_query = pl.BlockSpec((rows, queries, None, size), lambda *i: (i[0], of_queries(*i), i[1], 0))
    by_memory = pl.BlockSpec((rows, memory, None, size), lambda *i: (i[0], 0, i[1], 0))
    bias = pl.BlockSpec((None, queries, memory), lambda *i: (i[1], of_queries(*i), 0))
    d_bias = pl.BlockSpec((None, None, queries, memory), lambda *i: (i[0], i[1], of_queries(*i), 0))
    specs = Inputs(
        pl.BlockSpec((rows, queries), lambda *i: (i[0], of_queries(*i))),
        pl.BlockSpec((rows, memory), lambda *i: (i[0], 0)),
        None if inputs.key is None else pl.BlockSpec((2,), lambda *i: (0,)),
        None if inputs.first_numbers is None else pl.BlockSpec((rows, None), lambda *i: (i[0], i[1])),
        None if inputs.bias is None else bias,
    )

    warps = _WARPS if memory * size <= _MANY_KEYS else _WARPS_FOR_MANY

    def run(*references: Any) -> None:
        (query, keys, values, inputs), others = references[:4], references[4:]
        begin = pl.program_id(2) * queries if blocked else 0
        blocks = 1 if blocked else queries // block
        tiles = _Tiles(rule, (block, memory), (length, memory_length), begin, blocks, inputs, triton)
        kernel(tiles, group, (query, keys, values), others)

    return pl.pallas_call(
        run,
        grid=grid,
        in_specs=[by_query, by_memory, by_memory, specs, *(by_query for _ in extra)],
        out_specs=[by_query, by_memory, by_memory, d_bias][: len(results)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        name=f"attention{kernel.__name__}",
        interpret=rule.interpret,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
    )(*heads, inputs, *extra)


class _Tiles(NamedTuple):
    """The tiles of a program: `blocks` times queries [block, K] from `begin` on, and all keys [memory, K]."""

    rule: Rule
    shape: tuple[int, int]
    lengths: tuple[int, int]
    begin: Any
    blocks: int
    inputs: Any
    triton: Any

    def for_each(self, compute: Any, state: Any) -> Any:
        """Apply compute(first query of a block, state) block after block."""
        if self.blocks == 1:
            return compute(0, state)
        return jax.lax.fori_loop(0, self.blocks, lambda i, state: compute(i * self.shape[0], state), state)

    def read_queries(self, array: Any, row: Any, start: Any) -> Array:
        """Read a block of queries or of their gradients; what exceeds the row is 0."""
        inside = self._query_positions(start) < self.lengths[0]
        place = array.at[*row, _slice(start, self.shape[0]), :]
        return self.triton.load(place, mask=inside[:, None], other=0.0)

    def write_queries(self, array: Any, row: Any, start: Any, numbers: Array) -> None:
        """Write a block of results."""
        inside = self._query_positions(start) < self.lengths[0]
        place = array.at[*row, _slice(start, self.shape[0]), :]
        self.triton.store(place, numbers.astype(array.dtype), mask=inside[:, None])

    def read_memory(self, array: Any, row: Any) -> Array:
        """Read all keys or values of a row; what exceeds it is 0."""
        inside = self._memory_positions() < self.lengths[1]
        return self.triton.load(array.at[*row, :, :], mask=inside[:, None], other=0.0)

    def write_memory(self, array: Any, row: Any, numbers: Array) -> None:
        """Write the gradients of keys or values."""
        inside = self._memory_positions() < self.lengths[1]
        self.triton.store(array.at[*row, :, :], numbers.astype(array.dtype), mask=inside[:, None])

    def weigh(self, row: Any, start: Any, query: Array, keys: Array) -> tuple[Array, Array]:
        """Return the weights of a block of queries, float32 [block, memory], and what they may attend to."""
        query_positions, positions = self._query_positions(start), self._memory_positions()
        load, inputs, inside = self.triton.load, self.inputs, positions < self.lengths[1]
        segments = load(
            inputs.query_segments.at[*row, _slice(start, self.shape[0])],
            mask=query_positions < self.lengths[0],
            other=0,
        )
        others = load(inputs.memory_segments.at[*row, :], mask=inside, other=0)
        attended = (segments[:, None] == others[None]) & (others > 0)[None]
        if self.rule.causal:
            attended &= query_positions[:, None] >= positions[None]
        scores = _dot(query, keys, _LAST_AXES) * self.rule.scale
        if inputs.bias is not None:
            scores += load(
                inputs.bias.at[_slice(start, self.shape[0]), :], mask=self.inside(start), other=0.0
            )
        scores = jnp.where(attended, scores, _MASKED)
        scores = jnp.where(inside[None], scores, -jnp.inf)
        exponentials = jnp.exp(scores - scores.max(1, keepdims=True))
        return exponentials / exponentials.sum(1, keepdims=True), attended

    def drop(self, row: Any, start: Any, numbers: Sequence[Array]) -> list[Array]:
        """Drop and rescale numbers [block, memory] as `dropout` does the weights that they belong to."""
        if not self.rule.rate:
            return list(numbers)
        key, first = self.inputs.key, self.inputs.first_numbers[*row, ...]
        index = self._query_positions(start)[:, None] * self.lengths[1] + self._memory_positions()[None]
        random = hash_numbers(first + index.astype(jnp.uint32), (key[0], key[1]))
        kept = random >= jnp.uint32(keep_threshold(self.rule.rate))
        return [jnp.where(kept, x * dropout_scale(self.rule.rate), 0.0) for x in numbers]

    def inside(self, start: Any) -> Array:
        """Mark the scores of the row: bool [block, memory]."""
        queries = self._query_positions(start) < self.lengths[0]
        return queries[:, None] & (self._memory_positions() < self.lengths[1])[None]

    def _query_positions(self, start: Any) -> Array:
        return self.begin + start + jnp.arange(self.shape[0], dtype=jnp.int32)

    def _memory_positions(self) -> Array:
        return jnp.arange(self.shape[1], dtype=jnp.int32)


def _slice(start: Any, size: int) -> Any:
    from jax.experimental import pallas as pl

    return pl.ds(start, size)


def _dot(x: Array, y: Array, axes: Any) -> Array:
    return jax.lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=jnp.float32)


def _forward(tiles: _Tiles, group: int, heads: Sequence[Any], others: Sequence[Any]) -> None:
    del group  # a program has one row
    (output,) = others
    query = tiles.read_queries(heads[0], (), 0)
    keys, values = (tiles.read_memory(x, ()) for x in heads[1:])
    weights, _ = tiles.weigh((), 0, query, keys)
    (weights,) = tiles.drop((), 0, [weights])
    tiles.write_queries(output, (), 0, _dot(weights.astype(values.dtype), values, _LAST_BY_FIRST))


def _backward(tiles: _Tiles, group: int, heads: Sequence[Any], others: Sequence[Any]) -> None:
    gradient, d_query, d_keys, d_values, *d_bias = others

    def go_through(row: tuple[Any, ...]) -> None:
        keys, values = (tiles.read_memory(x, row) for x in heads[1:])

        def add(start: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            query, d_output = (tiles.read_queries(x, row, start) for x in (heads[0], gradient))
            weights, attended = tiles.weigh(row, start, query, keys)
            dropped, d_weights = tiles.drop(row, start, [weights, _dot(d_output, values, _LAST_AXES)])
            d_scores = weights * (d_weights - (weights * d_weights).sum(1, keepdims=True))
            d_scores = jnp.where(attended, d_scores, 0.0)
            if d_bias:
                _add_to(tiles, d_bias[0], start, d_scores, row)
            small = d_scores.astype(keys.dtype)
            tiles.write_queries(d_query, row, start, tiles.rule.scale * _dot(small, keys, _LAST_BY_FIRST))
            return (
                sums[0] + _dot(small, query, _FIRST_AXES),
                sums[1] + _dot(dropped.astype(keys.dtype), d_output, _FIRST_AXES),
            )

        zeros = jnp.zeros(keys.shape, jnp.float32)
        key_sums, value_sums = tiles.for_each(add, (zeros, zeros))
        tiles.write_memory(d_keys, row, tiles.rule.scale * key_sums)
        tiles.write_memory(d_values, row, value_sums)

    if group == 1:
        go_through(())
    else:
        jax.lax.fori_loop(0, group, lambda i, _: go_through((i,)), None)


def _add_to(tiles: _Tiles, sums: Any, start: Any, numbers: Array, row: tuple[Any, ...]) -> None:
    """Add to sums in memory that no other program sees; the first of a program's numbers begin them."""
    place, inside = sums.at[_slice(start, tiles.shape[0]), :], tiles.inside(start)
    if row:
        numbers = numbers + tiles.triton.load(place, mask=inside & (row[0] > 0), other=0.0)
    tiles.triton.store(place, numbers, mask=inside)
    if not tiles.rule.interpret:
        tiles.triton.debug_barrier()
