"""Reads the body of a request within the limits of the server, and watches for clients that leave."""

import asyncio
import hmac
from collections.abc import Awaitable, Collection
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from flaxformer_mt.commands.options import ServeOptions
from flaxformer_mt.commands.server.request_fields import Refusal, read_fields

Answer = TypeVar("Answer")


async def read_body(request: Request, options: ServeOptions, keys: Collection[bytes]) -> dict[str, Any]:
    """Return the fields of a request that may be answered."""
    # A form of another site's page, which a browser sends without asking.
    if request.headers.get("sec-fetch-site") == "cross-site":
        if not {"*", request.headers.get("origin")} & set(options.cors):
            raise Refusal(403, "a page of another site asks; its origin is none of --cors of this server")
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise Refusal(400, f"the Content-Encoding is {coding:.20}; send the body as it is")
    # A character takes at most 12 bytes, as an escape, and the other fields take little.
    body = await _read_bytes(request, 12 * options.max_characters + 65_536, options.timeout)
    fields = read_fields(body, request.headers.get("content-type", ""), request.url.query)
    if keys:
        _check_key(fields.get("api_key"), keys)
    return fields


async def _read_bytes(request: Request, most: int, seconds: float) -> bytes:
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > most:
        raise Refusal(413, f"the body has {length[:20]} bytes; this server reads {most}")
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise Refusal(413, f"the body has more than the {most} bytes that this server reads")
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {seconds:g} seconds") from None
    return bytes(body)


def _check_key(api_key: object, keys: Collection[bytes]) -> None:
    if api_key is None or api_key == "":
        raise Refusal(403, "the field api_key is missing: this server needs a key from its operator")
    content = api_key.encode("utf-8", "replace") if isinstance(api_key, str) else b""
    # All keys are compared, in constant time, so that no duration tells how much of a key is right.
    if not sum(hmac.compare_digest(key, content) for key in keys):
        raise Refusal(403, "the api_key is unknown")


async def answer_in_time(request: Request, work: Awaitable[Answer], seconds: float) -> Answer:
    """Return the result of a coroutine; cancel it when the client leaves, or when the time is over."""

    async def wait_until_left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.ensure_future(work), asyncio.ensure_future(wait_until_left())
    try:
        await asyncio.wait({task, left}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if left.done():
            raise ClientDisconnect
        raise Refusal(
            504,
            f"no answer within {seconds:g} seconds; a server that was started a moment ago still compiles: "
            "try again, or raise --timeout",
        )
    finally:
        task.cancel()
        left.cancel()
