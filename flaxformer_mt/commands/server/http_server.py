"""Runs uvicorn with a deadline for request headers, and writes its messages to the server's log."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# Seconds from a connection, or an answer, until all headers of the next request are there.
_HEADER_SECONDS = 10.0
# Seconds that a connection may take to end after the last answer, once the server stops.
_GRACE = 5.0


class DeadlineProtocol(H11Protocol):
    """Closes connections whose next request does not arrive in time; uvicorn alone would wait forever."""

    _answered = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(_HEADER_SECONDS, self._close_if_idle, 0)

    def on_response_complete(self) -> None:
        # For a proxy that believes the other length (RFC 9112, 6.3), what follows is the rest of the body,
        # where a client may hide another request.
        if {b"content-length", b"transfer-encoding"} <= dict(self.headers).keys():
            self.transport.close()
        self._answered += 1
        self.loop.call_later(_HEADER_SECONDS, self._close_if_idle, self._answered)
        super().on_response_complete()

    def _close_if_idle(self, answered: int) -> None:
        if self._answered == answered and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()


def make_server(app: Any, timeout: float = 60.0) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=DeadlineProtocol,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=int(timeout + _GRACE),
        )
    )


def answer_requests(app: Any, listener: socket.socket, timeout: float, log: Callable[[str], None]) -> None:
    """Answer requests until a signal arrives, then finish the requests in progress."""
    # What uvicorn itself refuses, such as what is no HTTP, is logged in the form of the other lines.
    logger, handler = logging.getLogger("uvicorn.error"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: log(record.getMessage())  # type: ignore[method-assign]
    logger.propagate = False
    logger.addHandler(handler)
    with contextlib.ExitStack() as handlers:
        for number in (signal.SIGTERM, signal.SIGINT):
            # uvicorn answers what was begun, then raises the signal again, which then has no effect.
            handlers.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
        asyncio.run(make_server(app, timeout).serve(sockets=[listener]))
