"""Batches as arrays, built ahead of the training step, from any position in the sequence of epochs."""

import sys
import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.batching import EpochPlan, PlannedBatch, plan_epoch, plan_in_order
from flaxformer_mt.data.buckets import make_training_shapes
from flaxformer_mt.data.curriculum import BEGINNING, Position, make_curriculum
from flaxformer_mt.data.epoch_stores import EpochStores
from flaxformer_mt.data.piece_links import lay_out_links
from flaxformer_mt.data.token_store import Side, TokenStore
from flaxformer_mt.errors import UserError
from flaxformer_mt.shapes import Batch


class RowShare(NamedTuple):
    """The rows of a batch to build: of `parts` blocks of equal height, those of the numbers `blocks`."""

    parts: int
    blocks: tuple[int, ...]


ALL_ROWS = RowShare(1, (0,))


def make_batch(
    store: TokenStore, plan: EpochPlan, index: int, *, pad_id: int, bos_id: int, share: RowShare = ALL_ROWS
) -> Batch:
    """Build batch `index` of `plan` as int32 and bool arrays, in the layout described at `Batch`.

    Rows without a pair are padding: their masks are False throughout. Only the rows of `share` are read.
    """
    planned = _take_rows(plan[index], share)
    rows, source, target = planned.shape
    from_source = _gather(store.source, planned)
    from_target = _gather(store.target, planned)
    # The shift by one puts each sentence's eos first in the next sentence, where bos replaces it.
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
    if store.weights is not None:
        weights = np.repeat(store.weights[planned.examples], store.target.lengths[planned.examples])
        batch = batch._replace(target_weights=_lay_out(from_target, weights, rows, target, 0.0))
    if store.links is not None:
        starts = (from_source.columns[from_source.firsts], from_target.columns[from_target.firsts])
        shape = (rows, target, source)
        links = lay_out_links(store.links, planned.examples, planned.rows, starts, shape)
        batch = batch._replace(alignment=links)
    if store.teacher is not None:
        places = (from_target.rows, from_target.columns)
        lengths = store.target.lengths[planned.examples]
        teacher = store.teacher.lay_out(planned.examples, lengths, places, (rows, target))
        batch = batch._replace(teacher=teacher)
    if not plan.packed:
        return batch
    return batch._replace(
        source_segments=_lay_out(from_source, from_source.segments, rows, source, 0),
        target_segments=_lay_out(from_target, from_target.segments, rows, target, 0),
        source_positions=_lay_out(from_source, from_source.positions, rows, source, 0),
        target_positions=_lay_out(from_target, from_target.positions, rows, target, 0),
    )


def _take_rows(planned: PlannedBatch, share: RowShare) -> PlannedBatch:
    """Keep the rows of a share, renumbered from 0: of rows 0 0 1 2 3 in 4 parts, (1, 3) become 0 and 1.

    Parts have equal heights: if the number of rows is not divisible by them, rows of padding are added.
    """
    if share == ALL_ROWS:
        return planned
    height = -(-planned.shape.rows // share.parts)
    new_numbers = np.full(share.parts, -1)
    new_numbers[list(share.blocks)] = np.arange(len(share.blocks))
    new_part = new_numbers[planned.rows // height]
    inside = new_part >= 0
    own_rows = new_part[inside] * height + planned.rows[inside] % height
    shape = planned.shape._replace(rows=height * len(share.blocks))
    return planned._replace(shape=shape, examples=planned.examples[inside], rows=own_rows)


class _Gathered(NamedTuple):
    """The tokens of one side of a batch, concatenated, and the row and column of each in the batch.

    segments, positions: number of the sentence within the row, from 1, and index within the sentence, from 0.
    firsts: index in `tokens` of the first token of each sentence.
    """

    tokens: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    firsts: np.ndarray


def _gather(side: Side, planned: PlannedBatch) -> _Gathered:
    """Read the sentences of a batch by array indexing, without a loop over sentences.

    Sentences of 2, 3 and 1 tokens in rows 0, 0 and 1 give
    rows 0 0 0 0 0 1, columns 0 1 2 3 4 0, segments 1 1 2 2 2 1, positions 0 1 0 1 2 0, firsts 0 2 5.
    """
    lengths = side.lengths[planned.examples]
    firsts = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(firsts, lengths)
    tokens = side.tokens[np.repeat(side.offsets[planned.examples], lengths) + positions]
    # The sentences of a row are adjacent, so a search finds the first sentence of each row.
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
    gathered: _Gathered, values: np.ndarray | bool, rows: int, length: int, filling: int | bool | float
) -> np.ndarray:
    """[rows, length] array of `filling`, with `values` at the rows and columns of the tokens."""
    array = np.full((rows, length), filling, {bool: bool, int: np.int32, float: np.float32}[type(filling)])
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
    accumulation: int = 1,
) -> Generator[tuple[Position, Batch], None, None]:
    """Yield batches, each with the position after it, from which training can resume; the last stage may end.

    Batch (epoch, index) depends on the data, `config` and `seed` alone; starting at any position costs one
    plan. `config.loader_threads` threads keep `config.prefetch` batches ready, across the ends of epochs. The
    plan of the next epoch, and with subword sampling or noise its token store, is built while the current
    epoch is in use. Closing the iterator ends the threads. `accumulation` is the number of batches of an
    update, in which the steps of stages are counted.
    """
    import grain  # imported late: the import takes half a second

    # Grain returns batches in order; the steps in progress lie within its buffer.
    buffer = max(config.prefetch, config.loader_threads) if config.prefetch and config.loader_threads else 0
    epochs = _Epochs(stores, config, seed, start, buffer + 1, accumulation)

    def batch_at(step: int) -> tuple[Position, Batch | None]:
        located = epochs.find(step)
        if located is None:
            return start, None
        active, index = located
        batch = make_batch(active.store, active.plan, index, pad_id=pad_id, bos_id=bos_id, share=share)
        ended = index + 1 == len(active.plan)
        return active.after if ended else active.place._replace(index=index + 1), batch

    steps = grain.MapDataset.range(sys.maxsize).map(batch_at)
    options = grain.ReadOptions(num_threads=config.loader_threads, prefetch_buffer_size=buffer)
    batches = iter(steps.to_iter_dataset(options))
    try:
        for position, batch in batches:
            if batch is None:
                return
            yield position, batch
    finally:
        batches.close()
        epochs.close()


class _ActiveEpoch(NamedTuple):
    """The epoch from `place` to `after`: steps `first` to `end` - 1, counted from the loader's start."""

    place: Position
    after: Position
    first: int
    end: int
    store: TokenStore
    plan: EpochPlan


class _Epochs:
    """Maps a step of the loader to its epoch; plans each epoch while the previous epoch is in use."""

    def __init__(
        self,
        stores: EpochStores,
        config: DataConfig,
        seed: int,
        start: Position,
        spread: int,
        accumulation: int,
    ) -> None:
        self._stores, self._config, self._seed, self._start = stores, config, seed, start
        self._spread = spread
        base = stores.base
        self._curriculum = make_curriculum(config, base.parts, seed=seed, accumulation=accumulation)
        self._shapes = make_training_shapes(
            base.source_lengths, base.target_lengths, config=config, headroom=stores.varies
        )
        self._lock = threading.Lock()
        self._active: list[_ActiveEpoch] = []
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan-epoch")
        self._next_place = start._replace(index=0)
        self._next = self._plan_ahead()

    def find(self, step: int) -> tuple[_ActiveEpoch, int] | None:
        """The epoch of `step`, and the index of the batch within that epoch; None after the last stage."""
        while True:
            with self._lock:
                for active in self._active:
                    if active.first <= step < active.end:
                        return active, step - active.first
                planned = self._next
            if planned is None:
                return None
            planned.result()  # outside the lock: other threads continue with the current epoch
            with self._lock:
                if planned is self._next:
                    self._begin_next(step, *planned.result())

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _plan_ahead(self) -> Future[tuple[TokenStore, EpochPlan]] | None:
        over = self._curriculum is not None and self._curriculum.is_over(self._next_place)
        return None if over else self._executor.submit(self._make, self._next_place)

    def _begin_next(self, step: int, store: TokenStore, plan: EpochPlan) -> None:
        place = self._next_place
        if self._active:
            first = self._active[-1].end
        else:
            first = -self._start.index
            if self._start.index > len(plan):
                raise UserError(
                    f"training should resume at batch {self._start.index} of epoch {place.epoch}, which has "
                    f"{len(plan)} batches; the data or config.data differs from the checkpoint's: restore it"
                )
        after = Position(place.epoch + 1, 0)
        if self._curriculum is not None:
            after = self._curriculum.after(place, len(plan))
        self._active = [active for active in self._active if active.end > step - self._spread]
        self._active.append(_ActiveEpoch(place, after, first, first + len(plan), store, plan))
        self._next_place = after
        self._next = self._plan_ahead()

    def _make(self, place: Position) -> tuple[TokenStore, EpochPlan]:
        if self._curriculum is None:
            store = self._stores.store(place.epoch)
            return store, self._plan(store, place, None)
        stage = self._curriculum.stages[place.stage]
        store, drawn = self._stores.draw(place.epoch, self._curriculum.draw(place), stage.noise)
        plan = self._plan(store, place, drawn)
        if not len(plan):
            raise UserError(
                f"epoch {place.stage_epoch + 1} of stage {stage.name} has {len(drawn)} pairs, none of which "
                "is within data.max_source_length and data.max_target_length; raise these limits, or give "
                "the stage larger sets"
            )
        left = self._curriculum.batches_left(place)
        return store, plan if left is None else plan.shorten(left)

    def _plan(self, store: TokenStore, place: Position, drawn: np.ndarray | None) -> EpochPlan:
        return plan_epoch(
            store.source_lengths,
            store.target_lengths,
            config=self._config,
            seed=self._seed,
            epoch=place.epoch,
            parts=store.parts,
            shapes=self._shapes,
            drawn=drawn,
        )


def valid_batches(
    store: TokenStore, config: DataConfig, *, pad_id: int, bos_id: int, share: RowShare = ALL_ROWS
) -> list[Batch]:
    """All batches of an evaluation set: each pair once, of any length, in fixed order and few shapes."""
    plan = plan_in_order(store.source_lengths, store.target_lengths, config=config)
    return [
        make_batch(store, plan, index, pad_id=pad_id, bos_id=bos_id, share=share)
        for index in range(len(plan))
    ]
