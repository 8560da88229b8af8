"""The loader, which builds batches ahead of the training step and can start at any position of training."""

import sys
import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.batch_array import ALL_ROWS, BatchArray, RowShare, make_batch
from flaxformer_mt.data.batching import EpochPlan, plan_epoch, plan_in_order
from flaxformer_mt.data.buckets import make_training_shapes
from flaxformer_mt.data.curriculum import BEGINNING, Position, make_curriculum
from flaxformer_mt.data.epoch_stores import EpochStores
from flaxformer_mt.data.token_store import TokenStore
from flaxformer_mt.errors import UserError

# Threads that build batches, and batches that they keep ready ahead of the training step.
_THREADS, _READY = 2, 8


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
) -> Generator[tuple[Position, BatchArray], None, None]:
    """Yield batches from `start` on, each with the position after it, from which training can resume.

    With stages of training, the batches end after the last stage. Batch (epoch, index) is determined by the
    data, `config` and `seed`; to start at any position, only one epoch is planned. Threads keep batches
    ready, even across the end of an epoch. While an epoch is in use, the plan of the next one is made and,
    with subword sampling or noise, its token store is built. Closing the iterator ends the threads.

    Only the rows of `share` are built. For stages whose length is given in steps, a step has `accumulation`
    batches.
    """
    import grain  # imported late: the import takes half a second

    # Grain returns batches in order; the steps in progress lie within its buffer.
    epochs = _Epochs(stores, config, seed, start, _READY + 1, accumulation)

    def batch_at(step: int) -> tuple[Position, BatchArray | None]:
        located = epochs.find(step)
        if located is None:
            return start, None
        active, index = located
        batch = make_batch(active.store, active.plan[index], pad_id=pad_id, bos_id=bos_id, share=share)
        ended = index + 1 == len(active.plan)
        return active.after if ended else active.place._replace(index=index + 1), batch

    steps = grain.MapDataset.range(sys.maxsize).map(batch_at)
    options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_READY)
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
    """The epoch between positions `place` and `after`: batches `first` to `end` - 1 of the loader."""

    place: Position
    after: Position
    first: int
    end: int
    store: TokenStore
    plan: EpochPlan


class _Epochs:
    """Finds the epoch of each batch of the loader, and plans each epoch while the previous one is in use."""

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
        """Return the epoch that has batch `step`, and the batch's index in it; None after the last stage."""
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
) -> list[BatchArray]:
    """Make the batches of an evaluation set in few shapes: each pair once, of any length, in fixed order."""
    plan = plan_in_order(store.source_lengths, store.target_lengths, config=config)
    return [
        make_batch(store, plan[index], pad_id=pad_id, bos_id=bos_id, share=share)
        for index in range(len(plan))
    ]
