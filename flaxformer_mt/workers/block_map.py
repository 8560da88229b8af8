"""A map over blocks by workers that may die: one result for each block, in order.

Contains the inside of a worker, and the loop that gives out blocks, that of a dead worker to another one. The
workers are processes of this machine (worker_pool.py) or actors of a Ray cluster (ray_actors.py).
"""

import collections
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

from flaxformer_mt.errors import FlaxformerWarning, UserError, warn_user

# How often a block, or the start of a worker, is tried: what kills three workers would kill a fourth.
TRIES = 3
# Blocks for each worker that are read before the first of them is yielded: its own, and one while that is the
# last to be done. So memory is bounded, and no worker waits for the others.
_AHEAD = 2


class Answer(NamedTuple):
    """What a worker says about one block; of each warning its text, category, file and line."""

    result: Any = None
    error: Exception | None = None
    warnings: tuple[tuple[str, type[Warning], str, int], ...] = ()


class BlockFunction:
    """The inside of a worker: makes the function of a block, and turns all that comes of it into answers."""

    def __init__(self) -> None:
        self._function: Callable[[Any], Any] | None = None

    def answer(self, message: Any) -> Answer:
        """Work on a block; the first message is what makes the function."""
        result: Any = None
        error: Exception | None = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FlaxformerWarning)
            try:
                if self._function is None:
                    self._function = message()
                else:
                    result = self._function(message)
            except UserError as problem:
                error = UserError(str(problem))
            except Exception:  # if it ended the worker, its block would be tried by others
                error = RuntimeError(f"in a worker:\n{traceback.format_exc()}")
        texts = ((str(one.message), one.category, one.filename, one.lineno) for one in caught)
        return Answer(result, error, tuple(texts))


class WorkerLost(Exception):
    """A worker has ended before it answered; the message says how, as in "was ended by SIGKILL"."""


@dataclass(eq=False)
class _Task:
    """A block, or the start of a worker, which has no name; `losses` counts the workers that died of it."""

    message: Any
    name: str = ""
    answer: Answer | None = None
    losses: int = 0


class WorkerPool:
    """Workers, which start when this is made and load while this process goes on."""

    def __init__(self, make: Callable[[], Any], start: Callable[[int], Any], count: int) -> None:
        self._start_worker, self._count = start, count
        self._start = _Task(make)
        self._idle: list[Any] = []
        self._threads = ThreadPoolExecutor(count)  # each waits for a worker
        self._busy: dict[Future[Answer], tuple[Any, _Task]] = {}
        # Texts of warnings: each worker has those of loading a model.
        self._passed_on: set[str] = set()
        for place in range(count):
            self._give(start(place), self._start)

    def map_blocks(self, blocks: Iterable[Any], *, name: Callable[[Any], str]) -> Iterator[Any]:
        unread = _read_tasks(blocks, name)
        tasks = collections.deque[_Task]()  # in order, those whose results were not yielded
        waiting = collections.deque[_Task]()  # of these, those that no worker has
        while True:
            while len(tasks) < _AHEAD * self._count and (task := next(unread, None)):
                tasks.append(task)
                if task.answer is None:
                    waiting.append(task)
            while waiting and self._idle:
                self._give(self._idle.pop(), waiting.popleft())
            if not tasks:
                return
            if (answer := tasks[0].answer) is not None:
                tasks.popleft()
                yield self._open(answer)
            elif lost := self._receive():
                waiting.appendleft(lost)

    def _give(self, worker: Any, task: _Task) -> None:
        self._busy[self._threads.submit(worker.ask, task.message)] = worker, task

    def _receive(self) -> _Task | None:
        """Wait for an answer; return its block again if its worker has died instead."""
        future = wait(self._busy, return_when=FIRST_COMPLETED).done.pop()
        worker, task = self._busy.pop(future)
        try:
            answer = future.result()
        except WorkerLost as loss:
            worker.stop()
            self._count_loss(task, loss)
            self._give(self._start_worker(worker.place), self._start)
            return task if task.name else None
        self._idle.append(worker)
        if task.name:
            task.answer = answer
        else:
            self._open(answer)
            task.losses = 0
        return None

    def _count_loss(self, task: _Task, loss: WorkerLost) -> None:
        """Warn that a worker died of a task. Raises UserError if that was the last try."""
        task.losses += 1
        if task.losses == TRIES:
            subject, work = (f"{task.name}: ", "worked on it") if task.name else ("", "started")
            remedy = " workers, or a smaller --window" if task.name else ""
            raise UserError(
                f"{subject}{TRIES} workers, one after the other, have died while they {work}; the last one "
                f"{loss}. Look for what ends them (is there memory for {self._count} workers?), and give "
                f"fewer{remedy}"
            )
        if task.name:
            warn_user(f"a worker {loss}; {task.name}, which it worked on, will be done by another one")

    def _open(self, answer: Answer) -> Any:
        """Return the result of an answer, with its warnings and its error as if it had been made here."""
        for warning in answer.warnings:
            if warning[0] not in self._passed_on:
                self._passed_on.add(warning[0])
                warnings.warn_explicit(*warning)
        if answer.error is not None:
            raise answer.error
        return answer.result

    def close(self) -> None:
        for worker in (*self._idle, *(worker for worker, _ in self._busy.values())):
            worker.stop()
        self._threads.shutdown()


def _read_tasks(blocks: Iterable[Any], name: Callable[[Any], str]) -> Iterator[_Task]:
    """Yield the task of each block; what is wrong with one is raised when those before are done."""
    try:
        for block in blocks:
            yield _Task(block, name(block))
    except UserError as error:
        yield _Task(None, answer=Answer(error=error))
