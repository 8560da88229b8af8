"""Runs a translation engine in a separate thread, for the requests of a server."""

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
    """Raised for requests to a thread that has ended, after an error or because the server stops."""


class ModelThread:
    """Runs an engine in a separate thread, which accepts requests at any time and answers with futures."""

    def __init__(self, engine: Engine, name: str = "", *, preparation: Iterable[object] = ()) -> None:
        """Start the thread; while there are no requests, it runs the steps of the iterable `preparation`."""
        self.engine = engine
        self._preparation = iter(preparation)
        # Whether the preparation is done; may be asked by any thread.
        self.is_ready = False
        # Why the thread has ended, if it has.
        self.failure: BaseException | None = None
        self._arriving: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # Of the requests that the engine has, which are called by them.
        self._futures: set[Future[Translation]] = set()
        self._thread = threading.Thread(target=self._run, name=f"model {name}", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Future[Translation]:
        """Queue a request (its id is ignored); canceling the future removes the request from the search.

        The future raises the error of a request that cannot be translated, or `Stopped` if the thread has
        ended.
        """
        future: Future[Translation] = Future()
        if self.failure is not None:
            future.set_exception(Stopped(f"the model has stopped: {self.failure}"))
        else:
            self._arriving.put(lambda: self._enter(future, request))
        return future

    def stop(self, *, patience: float | None = None) -> None:
        """End the thread after its current step; wait up to `patience` seconds; unfinished requests fail."""
        self._arriving.put(None)
        self._thread.join(patience)

    def _run(self) -> None:
        try:
            while self._take_arrivals():
                for future, answer in self.engine.step():
                    self._answer(future, answer)
            self.failure = Stopped("the server stops")
        except Exception as error:  # a bug: what waits for this thread must not wait forever
            self.failure = error
            logging.exception("the model has stopped")
        failure = Stopped(f"the model has stopped: {type(self.failure).__name__}: {self.failure}")
        while not self._arriving.empty():
            if action := self._arriving.get():
                action()
        for future in list(self._futures):
            self._answer(future, failure)

    def _take_arrivals(self) -> bool:
        """Accept and remove requests; wait for one if there is no other work. Return False to stop."""
        while not len(self.engine) or not self._arriving.empty():
            if self._arriving.empty() and not self.is_ready:
                self.is_ready = next(self._preparation, self) is self
            elif (action := self._arriving.get()) is None:
                return False
            else:
                action()
        return True

    def _enter(self, future: Future[Translation], request: Request) -> None:
        if future.cancelled():
            return
        self._futures.add(future)
        future.add_done_callback(lambda done: self._arriving.put(lambda: self._drop(done)))
        try:
            self.engine.submit(dataclasses.replace(request, id=future))
        except Exception as error:  # of this request alone
            self._answer(future, error)

    def _drop(self, future: Future[Translation]) -> None:
        """Remove a request from the search if it has been cancelled."""
        if future in self._futures:
            self._futures.remove(future)
            self.engine.cancel(future)

    def _answer(self, future: Future[Translation], answer: Translation | Exception) -> None:
        self._futures.discard(future)
        if not future.set_running_or_notify_cancel():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
