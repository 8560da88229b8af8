"""Attention over short rows as one GPU kernel, with dropout and biases; stores no scores or weights.

Written in Pallas for Triton. A program of the forward kernel has one head's block of queries and loops over
tiles of keys. A program of the backward kernel has a tile of keys, loops over all blocks of queries, and
computes the weights again. Random numbers equal those that `dropout` uses for weights [B, H, Q, M]; they are
hashed where they are used.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxformer_mt.kernels.dropout import dropout_scale, hash_numbers, keep_threshold
from flaxformer_mt.shapes import Array

# Sizes of heads, which are sizes of Triton's tiles; and the longest rows of keys.
HEAD_SIZES, MAX_LENGTH = (16, 32, 64, 128), 512
# Keys of a tile, numbers of its keys, and queries of a block: compilers for A100 and H100 then keep nearly
# all in registers.
_TILE_KEYS, _TILE_NUMBERS = 128, 128 * 64
_FORWARD_QUERIES, _BACKWARD_QUERIES = 64, 32
_FORWARD_WARPS, _BACKWARD_WARPS = 4, 8
_LEAST = 16
# With biases, each program sums their gradients over a part of the batch; this is the number of parts.
_BIAS_PARTS = 16

_MASKED = -1e30
_LAST_AXES = ((1,), (1,))
_LAST_BY_FIRST = ((1,), (0,))
_FIRST_AXES = ((0,), (0,))


class Rule(NamedTuple):
    """Settings fixed at compile time: whether later positions are masked, and the factor of the scores.

    rate: the dropout rate. interpret: whether to run on a CPU, slowly.
    """

    causal: bool
    scale: float
    rate: float = 0.0
    interpret: bool = False


class Inputs(NamedTuple):
    """The input arrays other than queries, keys and values.

    query_segments, memory_segments: int32 [B, Q] and [B, M]; 0 is padding. key: the two words of the dropout
    key. first_numbers: uint32 [B, H], the number of the first weight of each row and head, for dropout. bias:
    float32 [H, Q, M].
    """

    query_segments: Array
    memory_segments: Array
    key: Array | None = None
    first_numbers: Array | None = None
    bias: Array | None = None


def fits_kernel(memory_length: int, *, size: int) -> bool:
    """Return whether the kernel supports rows of this length and heads of this size."""
    return size in HEAD_SIZES and 0 < memory_length <= MAX_LENGTH


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_rows(rule: Rule, heads: tuple[Array, Array, Array], inputs: Inputs) -> Array:
    """Return attention [B, Q, H, K] of queries [B, Q, H, K] over keys and values [B, M, H, K].

    A query attends to the positions of its segment, and if `causal` only to its own and earlier positions. A
    query that may attend to no position gets the average of all values.
    """
    return _attend_forward(rule, heads, inputs)[0]


def _attend_forward(rule: Rule, heads: tuple[Array, Array, Array], inputs: Inputs) -> tuple[Array, Any]:
    batch, length, count, _ = heads[0].shape
    tiles = _find_tiles(rule, heads, _FORWARD_QUERIES)
    statistic = jax.ShapeDtypeStruct((batch, count, length), jnp.float32)
    results = {"queries": [heads[0]], "statistics": [statistic, statistic]}
    grid = batch, count, -(-length // tiles.block)
    output, highest, total = _call(_forward, tiles, grid, 1, heads, inputs, {}, results)
    return output, (heads, inputs, output if tiles.number > 1 else None, (highest, total))


def _attend_backward(rule: Rule, saved: Any, gradient: Array) -> tuple[tuple[Array, ...], Inputs]:
    heads, inputs, output, statistics = saved
    query, keys, values = heads
    batch, length, count, _ = query.shape
    tiles = _find_tiles(rule, heads, _BACKWARD_QUERIES)
    biased, parts = inputs.bias is not None, batch
    if biased:
        parts = max(number for number in range(1, _BIAS_PARTS + 1) if batch % number == 0)
    # Where keys have several tiles, queries have a gradient from each.
    many = tiles.number > 1
    d_query = jax.ShapeDtypeStruct((tiles.number, *query.shape), jnp.float32) if many else query
    results = {"parts" if many else "queries": [d_query], "memory": [keys, values], "biases": []}
    if biased:
        results["biases"] = [jax.ShapeDtypeStruct((parts, count, length, keys.shape[1]), jnp.float32)]
    extra = {"queries": [gradient.astype(query.dtype), *[output] * many], "statistics": statistics}
    grid = parts, count, tiles.number
    found = _call(_backward, tiles, grid, batch // parts, heads, inputs, extra, results)
    first = found[0].sum(0).astype(query.dtype) if many else found[0]
    bias: Any = found[3].sum(0) if biased else None
    nothing: Any = None
    return (first, found[1], found[2]), Inputs(nothing, nothing, bias=bias)


attend_rows.defvjp(_attend_forward, _attend_backward)


class _Tiles(NamedTuple):
    """How a row is divided: the sizes of query blocks and of key tiles, and the number of tiles."""

    rule: Rule
    block: int
    tile: int
    number: int
    length: int
    memory_length: int


def _find_tiles(rule: Rule, heads: Sequence[Array], block: int) -> _Tiles:
    def round_up(length: int) -> int:
        return max(_LEAST, 1 << (length - 1).bit_length())

    (_, length, _, size), memory_length = heads[0].shape, heads[1].shape[1]
    tile = min(round_up(memory_length), _TILE_KEYS, _TILE_NUMBERS // size)
    number = -(-memory_length // tile)
    return _Tiles(rule, min(round_up(length), block), tile, number, length, memory_length)


def _call(
    kernel: Callable[..., None],
    tiles: _Tiles,
    grid: tuple[int, int, int],
    group: int,
    heads: Sequence[Array],
    inputs: Inputs,
    extra: dict[str, Sequence[Array]],
    results: dict[str, Sequence[Any]],
) -> Sequence[Array]:
    """Run a kernel, whose programs each loop over `group` rows of the batch.

    The last axis of the grid indexes the blocks of queries in the forward kernel, and the tiles of keys in
    the backward kernel. `extra` and `results` map the form of a block to arrays.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    forward, rows, size = kernel is _forward, None if group == 1 else group, heads[0].shape[-1]
    queries = tiles.block if forward else -(-tiles.length // tiles.block) * tiles.block
    memory = tiles.tile * tiles.number if forward else tiles.tile

    def of(axis: int, number: Any) -> Any:
        """Return the index of a program's block along the queries (axis 0) or the keys (axis 1)."""
        return number if forward == (axis == 0) else 0

    blocks = {
        "queries": pl.BlockSpec((rows, queries, None, size), lambda b, h, i: (b, of(0, i), h, 0)),
        "parts": pl.BlockSpec((None, rows, queries, None, size), lambda b, h, i: (i, b, 0, h, 0)),
        "memory": pl.BlockSpec((rows, memory, None, size), lambda b, h, i: (b, of(1, i), h, 0)),
        "statistics": pl.BlockSpec((rows, None, queries), lambda b, h, i: (b, h, of(0, i))),
        "biases": pl.BlockSpec((None, None, queries, memory), lambda b, h, i: (b, h, of(0, i), of(1, i))),
    }
    specs = Inputs(
        pl.BlockSpec((rows, queries), lambda b, h, i: (b, of(0, i))),
        pl.BlockSpec((rows, memory), lambda b, h, i: (b, of(1, i))),
        None if inputs.key is None else pl.BlockSpec((2,), lambda b, h, i: (0,)),
        None if inputs.first_numbers is None else pl.BlockSpec((rows, None), lambda b, h, i: (b, h)),
        None
        if inputs.bias is None
        else pl.BlockSpec((None, queries, memory), lambda b, h, i: (h, of(0, i), of(1, i))),
    )

    def list_blocks(arrays: dict[str, Sequence[Any]]) -> list[Any]:
        return [blocks[form] for form, some in arrays.items() for _ in some]

    def run(*references: Any) -> None:
        (query, keys, values, inputs), others = references[:4], references[4:]
        begins = (of(0, pl.program_id(2)) * queries, of(1, pl.program_id(2)) * memory)
        kernel(_Program(tiles, begins, inputs, pl, triton), group, (query, keys, values), others)

    return pl.pallas_call(
        run,
        grid=grid,
        in_specs=[blocks["queries"], blocks["memory"], blocks["memory"], specs, *list_blocks(extra)],
        out_specs=list_blocks(results),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for some in results.values() for x in some],
        name=f"attention{kernel.__name__}",
        interpret=tiles.rule.interpret,
        compiler_params=triton.CompilerParams(
            num_warps=_FORWARD_WARPS if forward else _BACKWARD_WARPS, num_stages=1
        ),
    )(*heads, inputs, *(x for some in extra.values() for x in some))


class _Program(NamedTuple):
    """A program: where its queries and keys begin in their rows, and its other input arrays.

    Methods take the row of the group, (index,) or () if there is only one row, and the place of a block or
    tile within the program.
    """

    tiles: _Tiles
    begins: tuple[Any, Any]
    inputs: Any
    pl: Any
    triton: Any

    def read(self, array: Any, row: Any, place: Any, *, of_queries: bool = True) -> Array:
        """Read queries [block, K], keys [tile, K] or query statistics [block]; zeros after the row's end."""
        index, inside = self._find(array, row, place, of_queries)
        return self.triton.load(index, mask=inside, other=0)

    def write(self, array: Any, row: Any, place: Any, numbers: Array, *, of_queries: bool = True) -> None:
        """Write numbers to the positions that `read` reads with the same arguments."""
        index, inside = self._find(array, row, place, of_queries)
        self.triton.store(index, numbers.astype(array.dtype), mask=inside)

    def _find(self, array: Any, row: Any, place: Any, of_queries: bool) -> tuple[Any, Array]:
        inside = self._positions(place, 0 if of_queries else 1) < self._lengths[0 if of_queries else 1]
        part = self.pl.ds(place, self.tiles.block if of_queries else self.tiles.tile)
        if len(array.shape) - len(row) == 1:
            return array.at[*row, part], inside
        return array.at[*row, part, :], inside[:, None]

    def score(self, row: Any, places: tuple[Any, Any], query: Array, keys: Array) -> tuple[Array, Array]:
        """Return float32 scores of a block of queries with a tile of keys, and a mask of allowed scores."""
        inputs = self.inputs
        segments = self.read(inputs.query_segments, row, places[0])
        others = self.read(inputs.memory_segments, row, places[1], of_queries=False)
        attended = (segments[:, None] == others[None]) & (others > 0)[None]
        queries, positions = (self._positions(place, axis) for axis, place in enumerate(places))
        if self.tiles.rule.causal:
            attended &= queries[:, None] >= positions[None]
        scores = _dot(query, keys, _LAST_AXES) * self.tiles.rule.scale
        if inputs.bias is not None:
            index, inside = self._find_scores(inputs.bias, places)
            scores += self.triton.load(index, mask=inside, other=0.0)
        scores = jnp.where(attended, scores, _MASKED)
        return jnp.where((positions < self._lengths[1])[None], scores, -jnp.inf), attended

    def drop(self, row: Any, places: tuple[Any, Any], numbers: Sequence[Array]) -> list[Array]:
        """Drop and rescale numbers [block, tile] as `dropout` does for the weights at the same positions."""
        rate = self.tiles.rule.rate
        if not rate:
            return list(numbers)
        queries, positions = (self._positions(place, axis) for axis, place in enumerate(places))
        index = (queries[:, None] * self._lengths[1] + positions[None]).astype(jnp.uint32)
        key = self.inputs.key
        random = hash_numbers(self.inputs.first_numbers[*row, ...] + index, (key[0], key[1]))
        kept = random >= jnp.uint32(keep_threshold(rate))
        return [jnp.where(kept, x * dropout_scale(rate), 0.0) for x in numbers]

    def add_to(self, sums: Any, row: Any, places: tuple[Any, Any], numbers: Array) -> None:
        """Add numbers to sums that only this program uses; the first row of a group sets the sums."""
        index, inside = self._find_scores(sums, places)
        if row:
            numbers = numbers + self.triton.load(index, mask=inside & (row[0] > 0), other=0.0)
        self.triton.store(index, numbers, mask=inside)
        if not self.tiles.rule.interpret:
            self.triton.debug_barrier()

    def _find_scores(self, array: Any, places: tuple[Any, Any]) -> tuple[Any, Array]:
        queries, memory = (
            self._positions(place, axis) < self._lengths[axis] for axis, place in enumerate(places)
        )
        index = array.at[self.pl.ds(places[0], self.tiles.block), self.pl.ds(places[1], self.tiles.tile)]
        return index, queries[:, None] & memory[None]

    @property
    def _lengths(self) -> tuple[int, int]:
        return self.tiles.length, self.tiles.memory_length

    def _positions(self, place: Any, axis: int) -> Array:
        size = self.tiles.tile if axis else self.tiles.block
        return self.begins[axis] + place + jnp.arange(size, dtype=jnp.int32)


def _go_through(count: int, step: int, compute: Callable[[Any, Any], Any], state: Any) -> Any:
    """Apply compute(place, state) at places 0, step, 2 * step, ..., `count` times."""
    if count == 1:
        return compute(0, state)
    return jax.lax.fori_loop(0, count, lambda number, state: compute(number * step, state), state)


def _dot(x: Array, y: Array, axes: Any) -> Array:
    return jax.lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=jnp.float32)


def _forward(program: _Program, group: int, heads: Sequence[Any], others: Sequence[Any]) -> None:
    del group  # a program has one row
    output, highest_of_rows, total_of_rows = others
    query, tiles = program.read(heads[0], (), 0), program.tiles

    def add(place: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Add a tile of keys to the unnormalized running averages (Milakov and Gimelshein 2018)."""
        averages, highest, total = state
        keys, values = (program.read(x, (), place, of_queries=False) for x in heads[1:])
        scores, _ = program.score((), (0, place), query, keys)
        before, highest = highest, jnp.maximum(highest, scores.max(1))
        exponentials, factor = jnp.exp(scores - highest[:, None]), jnp.exp(before - highest)
        (dropped,) = program.drop((), (0, place), [exponentials])
        averages = averages * factor[:, None] + _dot(dropped.astype(values.dtype), values, _LAST_BY_FIRST)
        return averages, highest, total * factor + exponentials.sum(1)

    zeros = jnp.zeros(query.shape, jnp.float32)
    start = zeros, jnp.full(query.shape[:1], -jnp.inf, jnp.float32), jnp.zeros(query.shape[:1], jnp.float32)
    averages, highest, total = _go_through(tiles.number, tiles.tile, add, start)
    program.write(output, (), 0, averages / total[:, None])
    program.write(highest_of_rows, (), 0, highest)
    program.write(total_of_rows, (), 0, total)


def _backward(program: _Program, group: int, heads: Sequence[Any], others: Sequence[Any]) -> None:
    tiles = program.tiles
    gradient, *others = others
    output = others.pop(0) if tiles.number > 1 else None
    highest_of_rows, total_of_rows, d_query, d_keys, d_values, *d_bias = others
    scale = tiles.rule.scale

    def go_through_row(row: tuple[Any, ...]) -> None:
        keys, values = (program.read(x, row, 0, of_queries=False) for x in heads[1:])

        def add(place: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            query, d_output = (program.read(x, row, place) for x in (heads[0], gradient))
            highest, total = (program.read(x, row, place) for x in (highest_of_rows, total_of_rows))
            scores, attended = program.score(row, (place, 0), query, keys)
            weights = jnp.exp(scores - highest[:, None]) / jnp.where(total > 0, total, 1.0)[:, None]
            d_weights = _dot(d_output, values, _LAST_AXES)
            dropped, d_weights = program.drop(row, (place, 0), [weights, d_weights])
            if output is None:
                mean = (weights * d_weights).sum(1)
            else:  # the same, over all tiles
                mean = jnp.sum(d_output.astype(jnp.float32) * program.read(output, row, place), 1)
            d_scores = jnp.where(attended, weights * (d_weights - mean[:, None]), 0.0)
            if d_bias:
                program.add_to(d_bias[0], row, (place, 0), d_scores)
            small = d_scores.astype(keys.dtype)
            program.write(d_query, row, place, scale * _dot(small, keys, _LAST_BY_FIRST))
            return (
                sums[0] + _dot(small, query, _FIRST_AXES),
                sums[1] + _dot(dropped.astype(keys.dtype), d_output, _FIRST_AXES),
            )

        zeros = jnp.zeros(keys.shape, jnp.float32)
        blocks = -(-tiles.length // tiles.block)
        key_sums, value_sums = _go_through(blocks, tiles.block, add, (zeros, zeros))
        program.write(d_keys, row, 0, scale * key_sums, of_queries=False)
        program.write(d_values, row, 0, value_sums, of_queries=False)

    if group == 1:
        go_through_row(())
    else:
        jax.lax.fori_loop(0, group, lambda number, _: go_through_row((number,)), None)
