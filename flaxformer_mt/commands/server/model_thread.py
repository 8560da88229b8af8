"""An engine in a thread of its own, for the requests of a server."""

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from flaxformer_mt.translation.engine import Engine
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import Translation


class Stopped(Exception):
    """The thread has ended, because of an error or because the server stops."""


class ModelThread:
    """Runs an engine in a thread of its own: requests come at any time, and their answers are futures."""

    def __init__(self, engine: Engine, name: str = "", *, preparation: Iterable[object] = ()) -> None:
        """Start the thread, which does `preparation`, work in parts, as long as there are no requests."""
        self.engine = engine
        self._preparation = iter(preparation)
        # Whether the preparation is done; may be asked by any thread.
        self.is_ready = False
        # Why the thread has ended, if it has.
        self.failure: BaseException | None = None
        self._arriving: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # Of the requests that the engine has, by number.
        self._futures: dict[int, Future[Translation]] = {}
        self._count = 0
        self._thread = threading.Thread(target=self._run, name=f"model {name}", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Future[Translation]:
        """Add a request, whose id is of no account. To cancel the future removes it from the search.

        The future raises why the request cannot be translated, and `Stopped` when the thread has ended.
        """
        future: Future[Translation] = Future()
        if self.failure is not None:
            future.set_exception(Stopped(f"the model has stopped: {self.failure}"))
        else:
            self._arriving.put(lambda: self._enter(future, request))
        return future

    def stop(self, *, patience: float | None = None) -> None:
        """End the thread after what it is doing, and wait; requests that are not answered then fail."""
        self._arriving.put(None)
        self._thread.join(patience)

    def _run(self) -> None:
        try:
            while self._take_arrivals():
                for number, answer in self.engine.step():
                    self._answer(number, answer)
            self.failure = Stopped("the server stops")
        except Exception as error:  # a bug: what waits for this thread must not wait forever
            self.failure = error
            logging.exception("the model has stopped")
        failure = Stopped(f"the model has stopped: {type(self.failure).__name__}: {self.failure}")
        while not self._arriving.empty():
            if action := self._arriving.get():
                action()
        for number in list(self._futures):
            self._answer(number, failure)

    def _take_arrivals(self) -> bool:
        """Accept and remove requests, and wait for the first if there is no other work; False: stop."""
        idle = not len(self.engine)
        while idle or not self._arriving.empty():
            if self._arriving.empty() and not self.is_ready:
                self.is_ready = next(self._preparation, self) is self
                continue
            action = self._arriving.get()
            if action is None:
                return False
            action()
            idle = not len(self.engine)
        return True

    def _enter(self, future: Future[Translation], request: Request) -> None:
        if future.cancelled():
            return
        number = self._count
        self._count += 1
        self._futures[number] = future

        def drop_cancelled(done: Future[Translation]) -> None:
            if done.cancelled():
                self._arriving.put(lambda: self._drop(number))

        future.add_done_callback(drop_cancelled)
        try:
            self.engine.submit(dataclasses.replace(request, id=number))
        except Exception as error:  # of this request alone
            self._answer(number, error)

    def _drop(self, number: int) -> None:
        if self._futures.pop(number, None) is not None:
            self.engine.cancel(number)

    def _answer(self, number: int, answer: Translation | BaseException) -> None:
        future = self._futures.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)
