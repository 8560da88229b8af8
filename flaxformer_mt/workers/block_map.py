"""A map over blocks by workers that may die: one result for each block, in order.

Contains the loop that gives out blocks, and gives that of a dead worker to another one. The workers are
processes of this machine (worker_processes.py) or actors of a Ray cluster (ray_actors.py).
"""

import collections
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flaxformer_mt.errors import UserError, warn_user

# How often a block, or the start of a worker, is tried: what kills three workers would kill a fourth.
TRIES = 3
# Blocks for each worker that are read before the first of them is yielded: its own, and one while that is the
# last to be done. So memory is bounded, and no worker waits for the others.
_AHEAD = 2


class Work(Protocol):
    """What a worker does; it is made once in each worker."""

    def describe(self) -> dict[str, Any]:
        """Return what results depend on, as JSON values; it has to be the same in all workers."""

    def __call__(self, block: Any) -> Any:
        """Return the result of one block, which must not depend on the blocks before."""


# Makes the work in a worker, given a function that receives warnings. It is sent there as pickle does it.
MakeWork = Callable[[Callable[[str], None]], Work]


class WorkerLost(Exception):
    """A worker has ended before it answered; the message says how, as in "was ended by SIGKILL"."""


class Worker(Protocol):
    """A worker as this process sees it. Its first answer, to no block, is the description of its work."""

    # Its number among the workers; the worker that replaces it has the same.
    place: int

    def send(self, block: Any) -> None:
        """Give it a block; it has answered everything before."""

    def receive(self) -> "Answer":
        """Return the answer to what it was sent last. Raises WorkerLost if there will be none."""

    def stop(self) -> None:
        """End it at once."""


class Engine(Protocol):
    """Where workers run."""

    count: int

    def start(self, place: int) -> Worker:
        """Start a worker, without waiting until it is ready."""

    def wait(self, workers: Sequence[Any]) -> Worker:
        """Wait until one of these workers, all of its own, has answered or ended, and return it."""

    def close(self) -> None:
        """End what was started besides workers."""


@dataclass(frozen=True)
class Answer:
    """What a worker says about one block."""

    result: Any = None
    warnings: tuple[str, ...] = ()
    # The message of a UserError.
    problem: str = ""
    # The traceback of any other exception.
    bug: str = ""


class WorkPlace:
    """The inside of a worker: makes the work, and turns what it returns, warns of or raises into answers."""

    def __init__(self, make: MakeWork) -> None:
        self._make, self._warnings = make, list[str]()
        self._work: Work | None = None

    def start(self) -> Answer:
        """Make the work; the result is its description."""
        return self._attempt(self._describe)

    def answer(self, block: Any) -> Answer:
        """Work on a block."""
        assert self._work is not None
        return self._attempt(self._work, block)

    def _describe(self) -> dict[str, Any]:
        self._work = self._make(self._warnings.append)
        return self._work.describe()

    def _attempt(self, function: Callable[..., Any], *arguments: Any) -> Answer:
        answer: dict[str, Any] = {}
        try:
            answer["result"] = function(*arguments)
        except UserError as error:
            answer["problem"] = str(error)
        # A bug that ended the worker would look like a lost one: its block would be tried by others, and end
        # them too, without a traceback. As an answer, it ends the map in the process that started it.
        except Exception:
            answer["bug"] = traceback.format_exc()
        answer["warnings"] = tuple(self._warnings)
        self._warnings.clear()
        return Answer(**answer)


class WorkerPool:
    """Workers of one engine, which start when it is made and load while this process goes on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._idle: list[Worker] = []
        # Worker -> the number of the block that it works on; None: it is starting.
        self._busy: dict[Worker, int | None] = {}
        self._description: dict[str, Any] | None = None
        self._lost_starts = 0
        # Warnings that were passed on: each worker has those of loading a model.
        self._passed_on: set[str] = set()
        for place in range(engine.count):
            self._busy[engine.start(place)] = None

    def describe(self) -> dict[str, Any]:
        """Return what results depend on; wait for the first worker that has loaded."""
        while self._description is None:
            self._receive()
        return self._description

    def map(self, blocks: Iterable[Any], *, name: Callable[[Any], str]) -> Iterator[Any]:
        """Yield the result of each block, in the order of the blocks, which are read ahead but for a few.

        Args:
          name: what messages call a block, as "lines 1 to 9".
        """
        unread = enumerate(blocks)
        open_blocks: dict[int, Any] = {}  # those without a result
        waiting: collections.deque[int] = collections.deque()
        answers: dict[int, Answer] = {}
        losses: collections.Counter[int] = collections.Counter()
        problem: UserError | None = None
        following = 0  # the number of the block whose result is yielded next
        while True:
            while len(open_blocks) + len(answers) < _AHEAD * self._engine.count:
                try:
                    item = next(unread, None)
                except UserError as error:  # raised when the blocks before are done
                    item, problem = None, error
                if item is None:
                    break
                open_blocks[item[0]] = item[1]
                waiting.append(item[0])
            while waiting and self._idle:
                worker, number = self._idle.pop(), waiting.popleft()
                self._busy[worker] = number
                worker.send(open_blocks[number])
            if following in answers:
                yield self._open(answers.pop(following))
                following += 1
                continue
            if not open_blocks:
                if problem is not None:
                    raise problem
                return
            done, found = self._receive()
            if done is None:
                continue
            if isinstance(found, Answer):
                answers[done] = found
                del open_blocks[done]
                continue
            what = name(open_blocks[done])
            losses[done] += 1
            if losses[done] == TRIES:
                raise UserError(
                    f"{what}: {TRIES} workers, one after the other, have died while they worked on it; the "
                    f"last one {found}. Look for what ends them (is there memory for {self._engine.count} "
                    "workers?), and give fewer workers, or a smaller --window"
                )
            warn_user(f"a worker {found}; {what}, which it worked on, will be done by another one")
            waiting.appendleft(done)

    def _receive(self) -> tuple[int | None, Answer | WorkerLost]:
        """Return the number of a block, and its answer or the loss of its worker; None after a start."""
        worker = self._engine.wait(list(self._busy))
        number = self._busy.pop(worker)
        try:
            answer = worker.receive()
        except WorkerLost as loss:
            self._replace(worker, loss, starting=number is None)
            return number, loss
        self._idle.append(worker)
        if number is None:
            self._lost_starts = 0
            self._check_description(self._open(answer))
        return number, answer

    def _open(self, answer: Answer) -> Any:
        """Return the result of an answer, with its warnings and errors as if it had been made here."""
        for warning in answer.warnings:
            if warning not in self._passed_on:
                self._passed_on.add(warning)
                warn_user(warning)
        if answer.problem:
            raise UserError(answer.problem)
        if answer.bug:
            raise RuntimeError(f"in a worker:\n{answer.bug}")
        return answer.result

    def _replace(self, worker: Worker, loss: WorkerLost, *, starting: bool) -> None:
        worker.stop()
        self._lost_starts += starting
        if self._lost_starts == TRIES:
            raise UserError(
                f"{TRIES} workers, one after the other, have died while they started; the last one {loss}. "
                f"Look for what ends them (is there memory for {self._engine.count} workers?), and give fewer"
            )
        self._busy[self._engine.start(worker.place)] = None

    def _check_description(self, found: dict[str, Any]) -> None:
        """Raise UserError unless all workers give the same results."""
        first = self._description = found if self._description is None else self._description
        for name in first | found:
            if first.get(name) != found.get(name):
                raise UserError(
                    f"workers differ in {name}: {first.get(name)} in one and {found.get(name)} in another, "
                    "so that their results would too; give all of them the same files, versions and devices"
                )

    def close(self) -> None:
        for worker in (*self._idle, *self._busy):
            worker.stop()
