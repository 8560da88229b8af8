"""A pool that maps a function over blocks of work and survives the death of workers.

Workers are processes of this machine or actors of a Ray cluster. A ProcessPoolExecutor is not suitable: when
a process dies, it ends all others, does not say which block the process had, and may wait forever for the
rest of a result.
"""

import collections
import contextlib
import functools
import itertools
import queue
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from flaxformer_mt.errors import UserError, importing, warn_user
from flaxformer_mt.processor import core_count
from flaxformer_mt.workers.worker_process import Answer, WorkerLost, WorkerProcess

# How often a block is tried: what kills three workers would kill a fourth.
TRIES = 3
# Blocks per worker that are read before the first result is yielded: one to work on, and one to do next.
# So memory is bounded, and no worker waits for the others.
_AHEAD = 2


class PoolOptions(NamedTuple):
    """The number of workers, and the Ray cluster on which they run; both None: no workers."""

    workers: int | None = None
    ray: str | None = None


NO_POOL = PoolOptions()


def choose_pool(workers: int | None, ray: str | None) -> PoolOptions:
    """Return the pool that the flags --workers and --ray select; without flags, one process per core."""
    return PoolOptions(core_count() if workers is None and ray is None else workers, ray)


@contextlib.contextmanager
def open_workers(make: Callable[[], Callable[[Any], Any]], pool: PoolOptions) -> Iterator[Any]:
    """Start workers, and stop them after the body; without workers, this process does their work.

    Yields a function `map_blocks(blocks, name=...)`, which yields the results of the blocks in order. `name`
    returns the name of a block in messages, such as "lines 1 to 9". `make`, which is pickled and called once
    in each worker, returns the function that processes a block.
    """
    if pool == NO_POOL:
        function = make()
        yield lambda blocks, *, name: map(function, blocks)
        return
    with contextlib.ExitStack() as stack:
        start: Callable[[int], Any] = functools.partial(WorkerProcess, make)
        count = pool.workers
        if pool.ray is not None:
            with importing("ray", what=f"--ray={pool.ray}"):
                from flaxformer_mt.workers.ray_actors import open_cluster
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # for messages that Ray prints
            start, count = stack.enter_context(open_cluster(make, pool.ray, count))
        assert count is not None
        workers = _WorkerPool(start, count)
        stack.callback(workers.close)
        yield workers.map_blocks


class _WorkerPool:
    """A pool of workers; each has a thread in this process that waits for its answers."""

    def __init__(self, start: Callable[[int], Any], count: int) -> None:
        self._start, self._count, self._closed = start, count, False
        # By place; a worker that has died has another one in its place.
        self._workers = {place: start(place) for place in range(count)}
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in self._workers:
            self._idle.put(place)
        self._threads = ThreadPoolExecutor(count)
        # Texts of warnings: each worker has those of loading a model.
        self._passed_on: set[str] = set()

    def map_blocks(self, blocks: Iterable[Any], *, name: Callable[[Any], str]) -> Iterator[Any]:
        unread, answers = self._submit(blocks, name), collections.deque[Future[Answer]]()
        while True:
            answers.extend(itertools.islice(unread, _AHEAD * self._count - len(answers)))
            if not answers:
                return
            answer = answers.popleft().result()
            for warning in answer.warnings:  # and the error, as if they had been made here
                if warning[0] not in self._passed_on:
                    self._passed_on.add(warning[0])
                    warnings.warn_explicit(*warning)
            if answer.error is not None:
                raise answer.error
            yield answer.result

    def _submit(self, blocks: Iterable[Any], name: Callable[[Any], str]) -> Iterator[Future[Answer]]:
        """Yield a future for each block; a UserError that `blocks` raises is the last answer."""
        try:
            for block in blocks:
                yield self._threads.submit(self._work, block, name(block))
        except UserError as error:
            yield self._threads.submit(Answer, error=error)

    def _work(self, block: Any, name: str) -> Answer:
        """Send a block to an idle worker; if the worker dies, start another one and try again."""
        place, losses = self._idle.get(), 0
        try:
            while True:
                try:
                    return self._workers[place].ask(block)
                except WorkerLost as loss:
                    losses += 1
                    self._tell_loss(loss, name, losses)
                self._workers[place] = self._start(place)
                if self._closed:  # meanwhile
                    self._workers[place].stop()
        finally:
            self._idle.put(place)

    def _tell_loss(self, loss: WorkerLost, name: str, losses: int) -> None:
        """Warn that a worker has died; raise UserError if this was the last try."""
        if self._closed:
            raise loss
        if losses == TRIES:
            raise UserError(
                f"{name}: {TRIES} workers, one after the other, have died while they started or "
                f"worked on it; the last one {loss}. Look for what ends them (is there memory for "
                f"{self._count} workers?), and give fewer workers, or a smaller --window"
            )
        warn_user(f"a worker {loss}; {name}, which it worked on, will be done by another one")

    def close(self) -> None:
        self._closed = True
        for worker in self._workers.values():
            worker.stop()
        self._threads.shutdown(cancel_futures=True)
