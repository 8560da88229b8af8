"""Closes connections whose next request does not begin in time; uvicorn waits for its headers for ever.

After a request with two lengths they are closed as well (RFC 9112, 6.3): for a proxy that believes the other
length, what follows is the rest of the body, where a client may hide another request.
"""

from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# From a connection, or an answer, until all headers of the next request are there.
_SECONDS = 10.0


class DeadlineProtocol(H11Protocol):
    _answered = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(_SECONDS, self._close_if_idle, 0)

    def on_response_complete(self) -> None:
        if {b"content-length", b"transfer-encoding"} <= dict(self.headers).keys():
            self.transport.close()
        self._answered += 1
        self.loop.call_later(_SECONDS, self._close_if_idle, self._answered)
        super().on_response_complete()

    def _close_if_idle(self, answered: int) -> None:
        if self._answered == answered and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()
