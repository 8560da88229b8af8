"""Batches as arrays, made ahead of the training step, from any position on.

Row 5 of the data path, and the only door to grain. Owns the layout of a batch and the order of epochs. Knows
nothing of devices, of text, or of how a plan came about.
"""

import sys
import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.batching import EpochPlan, PlannedBatch, plan_epoch, plan_in_order
from flaxformer_mt.data.buckets import make_training_shapes
from flaxformer_mt.data.token_store import EpochStores, Side, TokenStore
from flaxformer_mt.errors import UserError
from flaxformer_mt.shapes import Batch


class Position(NamedTuple):
    """A place in the endless sequence of batches: the next one is number `index` of `epoch`."""

    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which no position needs


BEGINNING = Position(epoch=0, index=0)


class RowShare(NamedTuple):
    """Which of a batch's rows to make, cut into `parts` of equal height: those in `own`, in order."""

    parts: int
    own: tuple[int, ...]


ALL_ROWS = RowShare(1, (0,))


def make_batch(
    store: TokenStore,
    plan: EpochPlan,
    index: int,
    *,
    pad_id: int,
    bos_id: int,
    share: RowShare = ALL_ROWS,
) -> Batch:
    """Batch `index` of `plan` as arrays, int32 and bool, in the layout that `Batch` draws.

    Rows that no pair fills are padding: their masks are False throughout. Of a share, only its rows are read.
    """
    planned = _take_rows(plan[index], share)
    rows, source, target = planned.shape
    from_source = _gather(store.source, planned)
    from_target = _gather(store.target, planned)
    # Shifted by one, each sentence's eos becomes the place of the next one's bos.
    inputs = np.empty_like(from_target.tokens)
    inputs[1:] = from_target.tokens[:-1]
    inputs[from_target.firsts] = bos_id
    batch = Batch(
        source=_lay_out(from_source, from_source.tokens, rows, source, pad_id),
        target_in=_lay_out(from_target, inputs, rows, target, pad_id),
        target_out=_lay_out(from_target, from_target.tokens, rows, target, pad_id),
        source_mask=_lay_out(from_source, True, rows, source, False),
        target_mask=_lay_out(from_target, True, rows, target, False),
    )
    if not plan.packed:
        return batch
    return batch._replace(
        source_segments=_lay_out(from_source, from_source.segments, rows, source, 0),
        target_segments=_lay_out(from_target, from_target.segments, rows, target, 0),
        source_positions=_lay_out(from_source, from_source.positions, rows, source, 0),
        target_positions=_lay_out(from_target, from_target.positions, rows, target, 0),
    )


def _take_rows(planned: PlannedBatch, share: RowShare) -> PlannedBatch:
    """The rows of a share, numbered from 0: of rows 0 0 1 2 3 in 4 parts, (1, 3) are rows 0 and 1."""
    if share == ALL_ROWS:
        return planned
    rows, source, target = planned.shape
    height = rows // share.parts
    places = np.full(share.parts, -1)
    places[list(share.own)] = np.arange(len(share.own))
    place = places[planned.rows // height]
    mine = place >= 0
    own_rows = place[mine] * height + planned.rows[mine] % height
    shape = planned.shape._replace(rows=height * len(share.own))
    return planned._replace(shape=shape, examples=planned.examples[mine], rows=own_rows)


class _Gathered(NamedTuple):
    """The tokens of a batch, end to end, and where each goes.

    rows, columns: each token's place in the batch.
    segments: the number of its sentence in the row, from 1. positions: its number in the sentence, from 0.
    firsts: where in `tokens` the sentences begin.
    """

    tokens: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    firsts: np.ndarray


def _gather(side: Side, planned: PlannedBatch) -> _Gathered:
    """Reads the sentences of a batch without a loop.

    Sentences of 2, 3 and 1 tokens in rows 0, 0 and 1 give
    rows 0 0 0 0 0 1, columns 0 1 2 3 4 0, segments 1 1 2 2 2 1, positions 0 1 0 1 2 0, firsts 0 2 5.
    """
    lengths = side.lengths[planned.examples]
    firsts = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(firsts, lengths)
    tokens = side.tokens[np.repeat(side.offsets[planned.examples], lengths) + positions]
    # Sentences of a row stand together; the first of each tells where the row begins.
    first_of_row = np.searchsorted(planned.rows, planned.rows)
    segments = np.arange(len(lengths)) - first_of_row + 1
    return _Gathered(
        tokens.astype(np.int32),
        np.repeat(planned.rows, lengths),
        positions + np.repeat(firsts - firsts[first_of_row], lengths),
        np.repeat(segments, lengths),
        positions,
        firsts,
    )


def _lay_out(
    gathered: _Gathered, values: np.ndarray | bool, rows: int, length: int, filling: int | bool
) -> np.ndarray:
    """[rows, length] of `filling`, with `values` where the gathered tokens go."""
    array = np.full((rows, length), filling, bool if isinstance(filling, bool) else np.int32)
    array[gathered.rows, gathered.columns] = values
    return array


def train_batches(
    stores: EpochStores,
    config: DataConfig,
    *,
    seed: int,
    pad_id: int,
    bos_id: int,
    start: Position = BEGINNING,
    share: RowShare = ALL_ROWS,
) -> Generator[tuple[Position, Batch], None, None]:
    """Batches without end, each with the position after it, which is where to start to go on from there.

    Batch (epoch, index) depends on the data, `config` and `seed` alone; to start anywhere costs one plan.
    `config.loader_threads` threads keep `config.prefetch` batches ready, across the ends of epochs; the next
    epoch's plan, and with sampling its store, is made while the current one is in use. Closing the iterator
    ends the threads.

    Raises:
      UserError: no pair is within the maximal lengths, or `start` is beyond the end of its epoch.
    """
    import grain  # takes half a second

    # Grain hands batches out in order; those under way differ by no more than its buffer.
    buffer = max(config.prefetch, config.loader_threads) if config.prefetch and config.loader_threads else 0
    epochs = _Epochs(stores, config, seed, start, spread=buffer + 1)

    def batch_at(step: int) -> tuple[Position, Batch]:
        running, index = epochs.find(step)
        batch = make_batch(running.store, running.plan, index, pad_id=pad_id, bos_id=bos_id, share=share)
        ended = index + 1 == len(running.plan)
        return Position(running.epoch + 1, 0) if ended else Position(running.epoch, index + 1), batch

    steps = grain.MapDataset.range(sys.maxsize).map(batch_at)
    options = grain.ReadOptions(num_threads=config.loader_threads, prefetch_buffer_size=buffer)
    batches = iter(steps.to_iter_dataset(options))
    try:
        yield from batches
    finally:
        batches.close()
        epochs.close()


class _Running(NamedTuple):
    """An epoch in use: steps `first` to `end` - 1, counted from the start of the loader, are its batches."""

    epoch: int
    first: int
    end: int
    store: TokenStore
    plan: EpochPlan


class _Epochs:
    """Finds the epoch of a step, counted from the start; plans each epoch while the one before is in use."""

    def __init__(
        self, stores: EpochStores, config: DataConfig, seed: int, start: Position, spread: int
    ) -> None:
        self._stores, self._config, self._seed, self._start = stores, config, seed, start
        self._spread = spread
        base = stores.base
        self._shapes = make_training_shapes(
            base.source_lengths, base.target_lengths, config=config, headroom=bool(stores.sampling)
        )
        self._lock = threading.Lock()
        self._running: list[_Running] = []
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan-epoch")
        self._next: Future[tuple[TokenStore, EpochPlan]] = self._executor.submit(self._make, start.epoch)
        self._next_epoch = start.epoch

    def find(self, step: int) -> tuple[_Running, int]:
        """The epoch of `step`, and which batch of it that is."""
        while True:
            with self._lock:
                for running in self._running:
                    if running.first <= step < running.end:
                        return running, step - running.first
                planned = self._next
            planned.result()  # outside the lock: batches of the current epoch go on meanwhile
            with self._lock:
                if planned is self._next:
                    self._begin_next(step)

    def close(self) -> None:
        """Ends the planning of the epoch that will not come."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin_next(self, step: int) -> None:
        epoch, (store, plan) = self._next_epoch, self._next.result()
        if self._running:
            first = self._running[-1].end
        else:
            first = -self._start.index
            if self._start.index > len(plan):
                raise UserError(
                    f"training should go on at batch {self._start.index} of epoch {epoch}, which has "
                    f"{len(plan)} batches; the data or config.data is not the checkpoint's: set it back"
                )
        self._running = [running for running in self._running if running.end > step - self._spread]
        self._running.append(_Running(epoch, first, first + len(plan), store, plan))
        self._next_epoch = epoch + 1
        self._next = self._executor.submit(self._make, epoch + 1)

    def _make(self, epoch: int) -> tuple[TokenStore, EpochPlan]:
        store = self._stores.store(epoch)
        plan = plan_epoch(
            store.source_lengths,
            store.target_lengths,
            config=self._config,
            seed=self._seed,
            epoch=epoch,
            parts=store.parts,
            shapes=self._shapes,
        )
        return store, plan


def valid_batches(
    store: TokenStore, config: DataConfig, *, pad_id: int, bos_id: int, share: RowShare = ALL_ROWS
) -> list[Batch]:
    """All pairs of a set for measuring, each once, in fixed order and few shapes, however long they are."""
    plan = plan_in_order(store.source_lengths, store.target_lengths, config=config)
    return [
        make_batch(store, plan, index, pad_id=pad_id, bos_id=bos_id, share=share)
        for index in range(len(plan))
    ]
