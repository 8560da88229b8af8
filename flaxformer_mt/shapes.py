"""Axis letters, array types, the structures `Batch` and `Cache`, and the sharding of activations by letters.

B batch · S source length · T target length · Q query length · M attended (memory) length · D model width ·
H heads · K query/key size of a head · E value size of a head · F feed-forward width · V vocabulary ·
W beam width · L layers. Masks are bool, True = may attend.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

Array = jax.Array | np.ndarray

Tokens = Int[Array, "B T"]
Activations = Float[Array, "B T D"]
AttentionMask = Bool[Array, "#B #H #Q M"]

Function = TypeVar("Function", bound=Callable[..., Any])


def typed(function: Function) -> Function:
    """Check the annotated shapes of a function at each call; under jit only once, while tracing.

    The checker is loaded at the first call: a program that was traced by an earlier process needs none.
    """

    @functools.cache
    def make_checked() -> Callable[..., Any]:
        from beartype import beartype
        from jaxtyping import jaxtyped

        return jaxtyped(typechecker=beartype)(function)

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        return make_checked()(*arguments, **named)

    return cast(Function, checked)


class TeacherTokens(NamedTuple):
    """A teacher's k most probable tokens at each target position, and their probabilities in float16.

    All probabilities of a position are 0 where the teacher has no scores, as in padding.
    """

    ids: Int[Array, "B T K"]
    probs: Float[Array, "B T K"]


class Batch(NamedTuple):
    """Sentence pairs as arrays, padded to one of a few static shapes.

    With pad 0, bos 1, eos 2, the pair ([5, 6, 2], [7, 8, 9, 2]) in a 4x6 bucket is the row
    source [5 6 2 0], target_in [1 7 8 9 0 0], target_out [7 8 9 2 0 0].
    Packed rows number their pairs 1, 2, ... in `*_segments` (0: padding) and restart `*_positions` at each
    pair; bucketed rows hold one pair, and these four arrays are None.
    `target_weights` are the weights of the tokens in the loss, those of their pairs; None: all are 1.
    With guided alignment, bit s % 8 of alignment[b, t, s // 8] tells whether target_out t is aligned with
    source s. With word-level distillation, `teacher` are the teacher's scores of target_out.
    """

    source: Int[Array, "B S"]
    target_in: Int[Array, "B T"]
    target_out: Int[Array, "B T"]
    source_mask: Bool[Array, "B S"]
    target_mask: Bool[Array, "B T"]
    source_segments: Int[Array, "B S"] | None = None
    target_segments: Int[Array, "B T"] | None = None
    source_positions: Int[Array, "B S"] | None = None
    target_positions: Int[Array, "B T"] | None = None
    target_weights: Float[Array, "B T"] | None = None
    alignment: UInt8[Array, "B T S8"] | None = None
    teacher: TeacherTokens | None = None


class Cache(NamedTuple):
    """The state of incremental decoding between two steps.

    `per_beam` leaves are [B, W, ...] and follow their hypothesis when beams are reordered; `shared` leaves
    are [B, ...], computed once per source and shared by its beams; `index` counts the decoding steps so far.
    With `ancestors`, per_beam leaves stay in place when beams are reordered: ancestors[b, w, t] is the beam
    that wrote the token of step t < index of hypothesis w; initially each beam refers to itself.
    With `start_steps` (continuous batching), the sentence of row b starts at step start_steps[b], and arrays
    with capacity T are ring buffers: the token of step i is in slot i % T.
    """

    per_beam: Any
    shared: Any
    index: Int[Array, ""]
    ancestors: Int[Array, "B W T"] | None = None
    start_steps: Int[Array, "B"] | None = None

    def prefix_lengths(self) -> Array:
        """Count the decoded tokens of each row, [B, 1], or of all rows alike, [1, 1]."""
        return (
            jnp.full((1, 1), self.index)
            if self.start_steps is None
            else (self.index - self.start_steps)[:, None]
        )


class ActivationSharding(Protocol):
    """How a program that is being traced splits its activations over devices.

    row_parts: number of parts into which the rows of a batch are split. gathers_again: see `gathers_again`.
    """

    row_parts: int
    gathers_again: bool

    def constrain(self, x: Array, axes: str) -> Array:
        """Pin the sharding of x; `axes` has one axis letter for each of its dimensions."""

    def constrain_gradient(self, x: Array, axes: str) -> Array:
        """Pin the gradient of a parameter, whose axes have these letters, as the parameter is split."""

    def gather_after(self, earlier: tuple[Array, str], x: Array, axes: str) -> Array:
        """Gather a split parameter, but not before the activation `earlier` has been computed."""

    def map_parts(self, function: Callable[..., Any], parts: Any, *shared: Any) -> Any:
        """Apply function(part, *shared) to each part [row_parts, ...] on the devices that hold it."""

    def copy_to_parts(self, x: Array, axes: str) -> Array:
        """Copy x to the devices of each part of the rows: [row_parts, ...]."""

    def local_shape(self, shape: tuple[int, ...], axes: str) -> tuple[int, ...]:
        """Return the shape of a device's part of an activation whose dimensions have these letters."""

    def map_devices(
        self,
        function: Callable[..., Array],
        inputs: Sequence[tuple[Array, str]],
        result: tuple[tuple[int, ...], str],
    ) -> Array:
        """Apply a function to the parts of the inputs on each device; see `map_devices`."""


_sharding: contextvars.ContextVar[ActivationSharding | None] = contextvars.ContextVar(
    "sharding", default=None
)


@contextlib.contextmanager
def shard_activations(sharding: ActivationSharding) -> Iterator[None]:
    """Use a sharding for all programs that are traced inside the context."""
    token = _sharding.set(sharding)
    try:
        yield
    finally:
        _sharding.reset(token)


def constrain(x: Array, axes: str) -> Array:
    """Pin the sharding of an activation by the letters of its axes, as in constrain(x, "BTD").

    Outside of `shard_activations`, as on one device, x is returned unchanged.
    """
    sharding = _sharding.get()
    return x if sharding is None else sharding.constrain(x, axes)


def constrain_gradient(x: Array, axes: str) -> Array:
    """Pin the gradient of a parameter as the parameter is split, by the letters of its axes.

    Outside of `shard_activations`, as on one device, x is returned unchanged.
    """
    sharding = _sharding.get()
    return x if sharding is None else sharding.constrain_gradient(x, axes)


def gathers_again() -> bool:
    """Tell whether devices gather a split parameter for each use, and again in the backward pass.

    Otherwise each keeps the gathered parameter from the forward pass on.
    """
    sharding = _sharding.get()
    return sharding is not None and sharding.gathers_again


def gather_after(earlier: tuple[Array, str], x: Array, axes: str) -> Array:
    """Gather a split parameter, but not before an activation has been computed.

    Args:
      earlier: the activation, with the letters of its axes; of its leading axes, the first has the rows.
      x: the parameter, as it is split.
      axes: the letters of its axes.
    """
    sharding = _sharding.get()
    return x if sharding is None else sharding.gather_after(earlier, x, axes)


def local_shape(shape: tuple[int, ...], axes: str) -> tuple[int, ...]:
    """Return the shape of a device's part of an activation; on one device, the shape itself."""
    sharding = _sharding.get()
    return shape if sharding is None else sharding.local_shape(shape, axes)


def map_devices(
    function: Callable[..., Array], *inputs: tuple[Array, str], result: tuple[tuple[int, ...], str]
) -> Array:
    """Apply a function to the part of each input that a device holds, on every device.

    For kernels that XLA cannot split.

    Args:
      inputs: arrays with the letters of their axes.
      result: the shape of the result, and the letters of its axes.
    """
    sharding = _sharding.get()
    if sharding is None:
        return function(*(array for array, _ in inputs))
    return sharding.map_devices(function, inputs, result)


def activations_are_sharded() -> bool:
    """Tell whether the program that is being traced splits its activations over devices."""
    return _sharding.get() is not None


def row_parts(rows: int) -> int:
    """Return into how many parts of equal size the devices split `rows` rows of a batch; 1 on one device."""
    sharding = _sharding.get()
    return 1 if sharding is None or rows % sharding.row_parts else sharding.row_parts


_part: contextvars.ContextVar[Any] = contextvars.ContextVar("part", default=None)


@contextlib.contextmanager
def part_of_batch(index: Array | int | None) -> Iterator[None]:
    """Tell the programs traced inside which part of a batch, of equal parts, they see; None: all of it."""
    token = _part.set(index)
    try:
        yield
    finally:
        _part.reset(token)


def current_part() -> Array | int | None:
    """Return the index of the part of a batch that the program sees, or None for the whole batch."""
    return _part.get()


_slots: contextvars.ContextVar[Array | None] = contextvars.ContextVar("slots", default=None)


@contextlib.contextmanager
def tokens_of_slots(slots: Array | None) -> Iterator[None]:
    """Tell what is traced inside which slots of a padded array the entries [R, N, ...] are; None: all."""
    token = _slots.set(slots)
    try:
        yield
    finally:
        _slots.reset(token)


def current_slots() -> Array | None:
    """Return the slots of the entries of arrays without padding, or None where arrays have padding."""
    return _slots.get()


class SharedByRows(NamedTuple):
    """A parameter that several functions of a batch's rows use, and its copies for the parts of the rows.

    Each device adds up the gradients of its own copy over all uses, and their sum is sent to other devices
    once; the gradients of `whole` would be sent once for each use. copies: [row_parts, ...]; None on one
    device.
    """

    whole: Array
    copies: Array | None


def share_by_rows(x: Array, axes: str) -> SharedByRows:
    """Copy a parameter, whose axes have these letters, to the devices of each part of a batch's rows."""
    sharding = _sharding.get()
    copies = None if sharding is None or sharding.row_parts == 1 else sharding.copy_to_parts(x, axes)
    return SharedByRows(constrain(x, axes), copies)


def map_row_parts(function: Callable[..., Any], rows: Any, *shared: Any) -> Any:
    """Apply function(part of rows, *shared) to each part of a batch, on the devices that hold it.

    The function computes nothing across rows. On one device this is function(rows, *shared).

    Args:
      rows: tree of arrays [B, ...].
      shared: trees of arrays; of a `SharedByRows`, the function gets the copy of its part.
    """
    parts = _map_row_parts(function, rows, shared)
    if parts is None:
        return function(rows, *_whole(shared))
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), parts)


def sum_over_row_parts(function: Callable[..., Any], rows: Any, *shared: Any) -> Any:
    """Sum the trees function(part of rows, *shared) over the parts of a batch that the devices hold.

    Each device sums over its own rows, and results and the gradients of `shared` are summed over devices
    after that: a loop in `function` communicates nothing. On one device this is function(rows, *shared).

    Args:
      rows: tree of arrays [B, ...].
      shared: trees of arrays; of a `SharedByRows`, the function gets the copy of its part.
    """
    parts = _map_row_parts(function, rows, shared)
    if parts is None:
        return function(rows, *_whole(shared))
    return jax.tree.map(lambda x: x.sum(0), parts)


def _is_shared(x: Any) -> bool:
    return isinstance(x, SharedByRows)


def _whole(shared: Any) -> Any:
    return jax.tree.map(lambda x: x.whole if _is_shared(x) else x, shared, is_leaf=_is_shared)


def _map_row_parts(function: Callable[..., Any], rows: Any, shared: tuple[Any, ...]) -> Any:
    """Return the results of all parts, [parts, ...], or None where the rows are not split."""
    sharding = _sharding.get()
    count = row_parts(len(jax.tree.leaves(rows)[0]))
    if sharding is None or count == 1:
        return None
    parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), rows)
    leaves, structure = jax.tree.flatten(shared, is_leaf=_is_shared)
    copies = [leaf.copies if _is_shared(leaf) else None for leaf in leaves]
    others = [None if _is_shared(leaf) else leaf for leaf in leaves]

    def apply(part: tuple[Any, list[Any]], *others: Any) -> Any:
        rows, copies = part
        own = [other if copy is None else copy for copy, other in zip(copies, others, strict=True)]
        return function(rows, *jax.tree.unflatten(structure, own))

    return sharding.map_parts(apply, (parts, copies), *others)
