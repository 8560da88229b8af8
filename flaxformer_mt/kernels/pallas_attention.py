"""Attention over short rows as one TPU kernel; neither scores nor weights are written to the chip's memory.

A program of the kernel holds whole rows of queries, keys and values with all heads, in the projections'
layout [B, T, H * K]. Heads that share the 128 lanes of a register are multiplied together: one operand has
the lanes of the other heads zeroed, so that no head is moved to other lanes. Scores are computed as [M, Q],
so that sums over the attended positions run along sublanes and cost additions; sums along lanes would cost
shuffles. The backward pass computes the weights again.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxformer_mt.shapes import Array

LANES = 128
# Lengths must be multiples of the sublanes of a tile of bfloat16 numbers.
LENGTH_MULTIPLE = 16
# Maximum number of a head's scores in one row, Q * M; registers and fast memory hold several copies.
MAX_SCORES = 256 * 256
# Groups of heads that one program computes, of one row or several: their latencies hide each other.
_GROUPS_OF_PROGRAM = 8

_MASKED = -1e30
_LAST_AXES = ((1,), (1,))
_LAST_BY_FIRST = ((1,), (0,))
_FIRST_AXES = ((0,), (0,))


class Segments(NamedTuple):
    """The segment numbers of queries, int32 [B, 1, Q], and attended positions, [B, 1, M]; 0 is padding."""

    query: Array
    memory: Array


def fits_kernel(query_length: int, memory_length: int, *, heads: int, size: int) -> bool:
    """Return whether the kernel supports rows of these lengths and heads of this size."""
    whole = (LANES % size == 0 or size % LANES == 0) and heads * size % LANES == 0
    return (
        whole
        and query_length % LENGTH_MULTIPLE == 0
        and memory_length % LENGTH_MULTIPLE == 0
        and 0 < query_length * memory_length <= MAX_SCORES
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attend_rows(
    heads: int,
    causal: bool,
    interpret: bool,
    projected: tuple[Array, Array, Array],
    biases: tuple[Array, ...],
    segments: Segments,
) -> Array:
    """Return attention [B, Q, W], where W = H * K; scores are scaled by 1 / sqrt(K).

    A query attends to the positions of its segment, and if `causal` only to its own and earlier positions. A
    query that may attend to no position gets the average of all values.

    Args:
      interpret: whether to run on a CPU, slowly.
      projected: queries [B, Q, W], keys and values [B, M, W].
      biases: none, or the biases that were added to queries, keys and values as constants. The backward
        kernel sums their gradients from numbers that it already holds; reading them again would take as long
        as a product.
    """
    del biases
    output = jax.ShapeDtypeStruct(projected[0].shape, projected[0].dtype)
    return _call(_forward, heads, causal, interpret, segments, projected, (), results=[output])[0]


def _attend_forward(
    heads: int,
    causal: bool,
    interpret: bool,
    projected: tuple[Array, Array, Array],
    biases: tuple[Array, ...],
    segments: Segments,
) -> tuple[Array, Any]:
    saved = projected, biases, segments
    return attend_rows(heads, causal, interpret, *saved), saved


def _attend_backward(
    heads: int, causal: bool, interpret: bool, saved: Any, gradient: Array
) -> tuple[tuple[Array, ...], tuple[Array, ...], None]:
    projected, biases, segments = saved
    extra = (gradient.astype(projected[0].dtype),)
    batch, _, width = projected[0].shape
    sums = [jax.ShapeDtypeStruct((batch, 1, width), jnp.float32) for _ in biases]  # of each row
    results = [*projected, *sums]
    found = _call(_backward, heads, causal, interpret, segments, projected, extra, results=results)
    d_biases = (x.sum((0, 1)).reshape(bias.shape) for x, bias in zip(found[3:], biases, strict=True))
    return tuple(found[:3]), tuple(d_biases), None


attend_rows.defvjp(_attend_forward, _attend_backward)


def _call(
    kernel: Callable[..., None],
    heads: int,
    causal: bool,
    interpret: bool,
    segments: Segments,
    projected: Sequence[Array],
    extra: Sequence[Array],
    *,
    results: Sequence[Any],
) -> Sequence[Array]:
    from jax.experimental import pallas as pl  # a seventh of a second, which other platforms do not need
    from jax.experimental.pallas import tpu as pltpu

    batch = projected[0].shape[0]
    width = projected[0].shape[-1]
    scores = heads * segments.query.shape[-1] * segments.memory.shape[-1]
    rows = _rows_of_program(projected, heads)

    def block(array: Any) -> Any:
        return pl.BlockSpec((array.shape[0] * rows // batch, *array.shape[1:]), lambda i: (i, 0, 0))

    def run(query_segments: Any, memory_segments: Any, *references: Any) -> None:
        inputs, others = references[: len(projected)], references[len(projected) :]
        parts = list(map(_Part, inputs))
        masks = [_mask(query_segments[row], memory_segments[row], causal=causal) for row in range(rows)]
        turns = [(row, group) for row in range(rows) for group in _groups(width, width // heads)]
        kernel(masks, turns, parts, list(map(_Part, others)), scale=(width // heads) ** -0.5)

    arrays = (*segments, *projected, *extra)
    products = 5 if extra else 2
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*arrays, *results))
    return pl.pallas_call(
        run,
        grid=(batch // rows,),
        in_specs=[block(x) for x in arrays],
        out_specs=[block(x) for x in results],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        name=f"attention{kernel.__name__}",
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=products * 2 * batch * scores * (width // heads),
            transcendentals=batch * scores,
            bytes_accessed=size,
        ),
    )(*arrays)


def _rows_of_program(projected: Sequence[Array], heads: int) -> int:
    groups = max(1, min(projected[0].shape[-1] // LANES, heads))
    return math.gcd(projected[0].shape[0], 2 ** max(0, (_GROUPS_OF_PROGRAM // groups).bit_length() - 1))


class _Group(NamedTuple):
    """The heads that share a register's lanes: the first lane, number of lanes, and a mask per head."""

    start: int
    width: int
    heads: list[Array | None]


class _Part(NamedTuple):
    """A reference to queries, keys, values, results or their gradients, [rows, T, W]."""

    array: Any

    def read(self, row: int, group: _Group) -> Array:
        """Read the lanes of a group of heads in one row: [T, width]."""
        return self.array[row, slice(None), slice(group.start, group.start + group.width)]

    def write(self, row: int, group: _Group, numbers: Array) -> None:
        """Write the lanes of a group of heads in one row."""
        place = row, slice(None), slice(group.start, group.start + group.width)
        self.array[place] = numbers.astype(self.array.dtype)


def _groups(width: int, size: int) -> list[_Group]:
    if size >= LANES:
        return [_Group(start, size, [None]) for start in range(0, width, size)]
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    masks: list[Array | None] = [(lane >= start) & (lane < start + size) for start in range(0, LANES, size)]
    return [_Group(start, LANES, masks) for start in range(0, width, LANES)]


def _select(x: Array, lanes: Array | None) -> Array:
    return x if lanes is None else jnp.where(lanes, x, jnp.zeros((), x.dtype))


def _join(parts: Sequence[Array], group: _Group) -> Array:
    """Join the products of a group: take the lanes of each head from the head's own product."""
    joined = parts[0]
    for part, lanes in zip(parts[1:], group.heads[1:], strict=True):
        assert lanes is not None
        joined = jnp.where(lanes, part, joined)
    return joined


def _dot(x: Array, y: Array, axes: Any) -> Array:
    return jax.lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=jnp.float32)


def _mask(query_segments: Any, memory_segments: Any, *, causal: bool) -> Array:
    """Return which positions queries may attend to: bool [M, Q]."""
    length, memory_length = query_segments.shape[-1], memory_segments.shape[-1]
    shape = (memory_length, length)
    memory = jnp.broadcast_to(memory_segments, (length, memory_length)).T
    mask = (memory == jnp.broadcast_to(query_segments, shape)) & (memory > 0)
    if causal:
        position = functools.partial(jax.lax.broadcasted_iota, jnp.int32, shape)
        mask &= position(0) <= position(1)
    return mask


def _weights(query: Array, keys: Array, mask: Array, group: _Group) -> list[Array]:
    """Return the attention weights of each head of a group: float32 [M, Q]."""
    scores = [
        jnp.where(mask, _dot(_select(keys, lanes), query, _LAST_AXES), _MASKED) for lanes in group.heads
    ]
    exponentials = [jnp.exp(x - x.max(0, keepdims=True)) for x in scores]
    return [x / x.sum(0, keepdims=True) for x in exponentials]


def _in_turns(
    turns: Sequence[tuple[int, _Group]], first: Callable[..., Any], second: Callable[..., None]
) -> None:
    """Run first(row, group), then second(row, group, result) for each turn, overlapping consecutive turns.

    `second` of a turn runs after `first` of the next turn, so that the products of one turn fill the time in
    which the other turn waits for its results.
    """
    waiting: tuple[int, _Group, Any] | None = None
    for row, group in turns:
        result = first(row, group)
        if waiting is not None:
            second(*waiting)
        waiting = row, group, result
    if waiting is not None:
        second(*waiting)


def _forward(
    masks: Any, turns: Any, parts: Sequence[_Part], others: Sequence[_Part], *, scale: float
) -> None:
    query, keys, values = parts
    (output,) = others

    def weigh(row: int, group: _Group) -> list[Array]:
        scaled = _scale(query.read(row, group), scale)
        return _weights(scaled, keys.read(row, group), masks[row], group)

    def average(row: int, group: _Group, weights: list[Array]) -> None:
        own = values.read(row, group)
        output.write(row, group, _join([_dot(x.astype(own.dtype), own, _FIRST_AXES) for x in weights], group))

    _in_turns(turns, weigh, average)


def _backward(
    masks: Any, turns: Any, parts: Sequence[_Part], others: Sequence[_Part], *, scale: float
) -> None:
    query, keys, values = parts
    gradient, results, sums = others[0], others[1:4], others[4:]

    def weigh(row: int, group: _Group) -> tuple[Array, list[Any], list[Any]]:
        """Return the scaled queries, the weights, and the gradients of the scores."""
        scaled = _scale(query.read(row, group), scale)
        weights = _weights(scaled, keys.read(row, group), masks[row], group)
        own, d_output = values.read(row, group), gradient.read(row, group)
        d_weights = [_dot(_select(own, lanes), d_output, _LAST_AXES) for lanes in group.heads]
        d_scores = [
            jnp.where(masks[row], w * (d - (w * d).sum(0, keepdims=True)), 0).astype(own.dtype)
            for w, d in zip(weights, d_weights, strict=True)
        ]
        return scaled, [w.astype(own.dtype) for w in weights], d_scores

    def multiply(row: int, group: _Group, weighed: tuple[Array, list[Any], list[Any]]) -> None:
        scaled, weights, d_scores = weighed
        d_output, own = gradient.read(row, group), keys.read(row, group)
        found = (
            scale * _join([_dot(x, own, _FIRST_AXES) for x in d_scores], group),
            _join([_dot(x, scaled, _LAST_BY_FIRST) for x in d_scores], group),
            _join([_dot(x, d_output, _LAST_BY_FIRST) for x in weights], group),
        )
        for result, numbers in zip(results, found, strict=True):
            result.write(row, group, numbers)
        for total, numbers in zip(sums, found, strict=False):
            total.write(row, group, numbers.sum(0, keepdims=True))

    _in_turns(turns, weigh, multiply)


def _scale(x: Array, scale: float) -> Array:
    return (x.astype(jnp.float32) * scale).astype(x.dtype)
