"""Batches built ahead of the training step, from any position in the sequence of epochs."""

import collections
import functools
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.batch_array import ALL_ROWS, BatchArray, RowShare, make_batch
from flaxformer_mt.data.batching import EpochPlan, plan_epoch, plan_in_order
from flaxformer_mt.data.buckets import make_training_shapes
from flaxformer_mt.data.curriculum import BEGINNING, Position, make_curriculum
from flaxformer_mt.data.epoch_stores import EpochStores
from flaxformer_mt.data.token_store import TokenStore
from flaxformer_mt.errors import UserError


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
    """Yield batches, each with the position after it, from which training can resume; the last stage may end.

    Batch (epoch, index) depends on the data, `config` and `seed` alone; starting at any position costs one
    plan. `config.loader_threads` threads keep `config.prefetch` batches ready, across the ends of epochs. The
    plan of the next epoch, and with subword sampling or noise its token store, is built while the current
    epoch is in use. Closing the iterator ends the threads. `accumulation` is the number of batches of an
    update, in which the steps of stages are counted.
    """
    planner = _Planner(stores, config, seed, accumulation)
    build = functools.partial(make_batch, pad_id=pad_id, bos_id=bos_id, share=share)
    ahead = max(config.prefetch, config.loader_threads) if config.prefetch and config.loader_threads else 0
    waiting = collections.deque[tuple[Position, Future[BatchArray]]]()
    planning = ThreadPoolExecutor(1, thread_name_prefix="plan-epoch")
    building = ThreadPoolExecutor(max(1, config.loader_threads), thread_name_prefix="make-batch")

    def take() -> tuple[Position, BatchArray]:
        position, batch = waiting.popleft()
        return position, batch.result()

    try:
        place, first = start._replace(index=0), start.index
        planned = planning.submit(planner.plan, place)
        while True:
            while waiting and (not planned.done() or planned.exception()):
                yield take()
            if (epoch := planned.result()) is None:
                break
            store, plan = epoch
            _check_resumed(first, place, plan)
            after = planner.after(place, plan)
            planned = planning.submit(planner.plan, after)
            for index in range(first, len(plan)):
                position = after if index + 1 == len(plan) else place._replace(index=index + 1)
                if not ahead:
                    yield position, build(store, plan[index])
                    continue
                waiting.append((position, building.submit(build, store, plan[index])))
                if len(waiting) > ahead:
                    yield take()
            place, first = after, 0
        while waiting:
            yield take()
    finally:
        for threads in (planning, building):
            threads.shutdown(wait=False, cancel_futures=True)


def _check_resumed(index: int, place: Position, plan: EpochPlan) -> None:
    if index > len(plan):
        raise UserError(
            f"training should resume at batch {index} of epoch {place.epoch}, which has "
            f"{len(plan)} batches; the data or config.data differs from the checkpoint's: restore it"
        )


class _Planner:
    """Plans the epochs, and builds their stores where they vary."""

    def __init__(self, stores: EpochStores, config: DataConfig, seed: int, accumulation: int) -> None:
        self._stores, self._config, self._seed, base = stores, config, seed, stores.base
        self._curriculum = make_curriculum(config, base.parts, seed=seed, accumulation=accumulation)
        self._shapes = make_training_shapes(
            base.source_lengths, base.target_lengths, config=config, headroom=stores.varies
        )

    def after(self, place: Position, plan: EpochPlan) -> Position:
        if self._curriculum is None:
            return Position(place.epoch + 1, 0)
        return self._curriculum.after(place, len(plan))

    def plan(self, place: Position) -> tuple[TokenStore, EpochPlan] | None:
        """The store and the plan of an epoch; None after the last stage."""
        if self._curriculum is None:
            store = self._stores.store(place.epoch)
            return store, self._plan(store, place, None)
        if self._curriculum.is_over(place):
            return None
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
    """All batches of an evaluation set: each pair once, of any length, in fixed order and few shapes."""
    plan = plan_in_order(store.source_lengths, store.target_lengths, config=config)
    return [
        make_batch(store, plan[index], pad_id=pad_id, bos_id=bos_id, share=share)
        for index in range(len(plan))
    ]
