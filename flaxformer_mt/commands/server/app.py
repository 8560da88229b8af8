"""The server's interface: paths, statuses and errors, as LibreTranslate's clients expect them.

Every request that fails is answered with {"error": MESSAGE}, and leaves one line in the log.
"""

import asyncio
import bisect
import collections
import hmac
import importlib.resources
import json
import os
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

import flaxformer_mt
from flaxformer_mt.commands.options import ServeOptions
from flaxformer_mt.commands.server import request_fields
from flaxformer_mt.commands.server.model_thread import Stopped
from flaxformer_mt.commands.server.request_fields import Pair, Refusal
from flaxformer_mt.commands.server.translations import DirectedModel, Translations
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.letter_case import LetterCase

# Of OpenAPI.
_VERSION = "3.1.0"
_FORMS = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")

# Path -> what it does, the fields that must be given with POST and those that may (none: the method is GET),
# and an example of the answer, None for text.
_PATHS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], Any]] = {
    "/translate": (
        "Translate texts",
        ("q", "source", "target"),
        (*request_fields.OPTIONS, "api_key"),
        {"translatedText": "A man reads a book."},
    ),
    "/translate_file": (
        "Translate a file",
        ("file", "source", "target"),
        ("documents", "glossary", "api_key"),
        {"translatedFileUrl": "http://127.0.0.1:5000/download_file/0123456789abcdef.en.txt"},
    ),
    "/download_file/{name}": ("Fetch a translated file, as often as it is kept", (), (), None),
    "/detect": (
        "Guess the language of a text, among the languages of the server",
        ("q",),
        ("api_key",),
        [{"confidence": 83.1, "language": "de"}, {"confidence": 16.9, "language": "fr"}],
    ),
    "/languages": ("List the languages", (), (), [{"code": "de", "name": "German", "targets": ["en"]}]),
    "/frontend/settings": (
        "Tell the limits of requests, the models and the version",
        (),
        (),
        {"charLimit": 10000, "models": {"de-en": "runs/a, checkpoint best"}},
    ),
    "/health": ("Tell whether all models run", (), (), {"status": "ok", "ready": True}),
    "/ready": ("As /health; status 503 while it compiles", (), (), {"status": "ok", "ready": True}),
    "/metrics": ("Counts and durations, for Prometheus", (), (), None),
    "/spec": ("This interface as an OpenAPI document", (), (), {"openapi": _VERSION}),
}


# Upper bounds in seconds of the classes of durations.
_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Ending of a file's name -> its format as of a text, and the type of its content.
FORMATS = {".txt": ("text", "text/plain"), ".html": ("html", "text/html"), ".htm": ("html", "text/html")}
# Bytes of all files together.
_MOST_BYTES = 1 << 26
Log = Callable[[str], None]
# The client has gone; nobody reads the status, but the log and the counts have it.
_CLIENT_LEFT = 499
# Paths whose requests have a body.
_POSTED = ("/translate", "/translate_file", "/detect")
# The page loads nothing and talks to this server only.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def make_specification(url: str) -> dict[str, Any]:
    return {
        "openapi": _VERSION,
        "info": {
            "title": "flaxformer_mt",
            "version": flaxformer_mt.__version__,
            "description": "Machine translation, with the interface of LibreTranslate.",
        },
        "servers": [{"url": url}],
        "paths": {
            path: {"post" if entry[1] else "get": _describe(path, *entry)} for path, entry in _PATHS.items()
        },
    }


def _name_server(request: Request) -> str:
    """Return the address that clients use: a proxy may serve the paths under a prefix, which it names."""
    return str(request.base_url).rstrip("/") + request.headers.get("x-forwarded-prefix", "").rstrip("/")


def _describe(
    path: str, summary: str, required: tuple[str, ...], optional: tuple[str, ...], example: Any
) -> dict[str, Any]:
    content = {"text/plain": {}} if example is None else {"application/json": {"example": example}}
    answer = {"description": "The answer", "content": content}
    error = {"description": "What is wrong", "content": {"application/json": {"example": {"error": "..."}}}}
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": answer, "default": error}}
    if "{name}" in path:
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if required:
        fields = {name: request_fields.FIELDS[name] for name in required + optional}
        schema = {"type": "object", "required": list(required), "properties": fields}
        forms = _FORMS[-1:] if "file" in required else _FORMS
        operation["requestBody"] = {"required": True, "content": {form: {"schema": schema} for form in forms}}
    return operation


class Measurements:
    """Counts of requests, lines and seconds since the server started; for the thread that answers alone."""

    def __init__(self) -> None:
        self._requests: collections.Counter[tuple[str, int]] = collections.Counter()
        self._durations = [0] * (len(_BOUNDS) + 1)
        self._seconds = 0.0
        self._totals = {"lines": 0, "characters": 0}

    def add_request(self, path: str, status: int, seconds: float) -> None:
        self._requests[path, status] += 1
        if path == "/translate" and status == 200:
            self._durations[bisect.bisect_left(_BOUNDS, seconds)] += 1
            self._seconds += seconds

    def add_text(self, *, lines: int, characters: int) -> None:
        self._totals["lines"] += lines
        self._totals["characters"] += characters

    def format(self, gauges: Mapping[str, tuple[str, float]], num_recased: int) -> str:
        rows = _head("guarded_total", "counter", "Sentences whose letter case was changed.")
        rows.append(f'flaxformer_mt_guarded_total{{guard="capitals"}} {num_recased}')
        rows += _head("requests_total", "counter", "Requests answered.")
        for (path, status), count in sorted(self._requests.items()):
            rows.append(f'flaxformer_mt_requests_total{{path="{path}",status="{status}"}} {count}')
        for name, count in self._totals.items():
            rows += _head(f"{name}_total", "counter", f"Source {name} translated.")
            rows.append(f"flaxformer_mt_{name}_total {count}")
        rows += _head("seconds", "histogram", "Seconds from a request to its translation.")
        below = 0
        for bound, count in zip([*map(str, _BOUNDS), "+Inf"], self._durations, strict=True):
            below += count
            rows.append(f'flaxformer_mt_seconds_bucket{{le="{bound}"}} {below}')
        rows += [f"flaxformer_mt_seconds_sum {self._seconds:.6f}", f"flaxformer_mt_seconds_count {below}"]
        for name, (meaning, value) in gauges.items():
            rows += [*_head(name, "gauge", meaning), f"flaxformer_mt_{name} {value:g}"]
        return "\n".join(rows) + "\n"


def _head(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP flaxformer_mt_{name} {meaning}", f"# TYPE flaxformer_mt_{name} {kind}"]


def resident_bytes() -> int:
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


class TranslatedFiles:
    """Files by names that cannot be guessed; the oldest are dropped where there are too many."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._files: dict[str, bytes] = {}
        self._most, self._bytes = most_bytes, 0

    def keep(self, text: str, *, ending: str, target: str) -> str:
        name = f"{secrets.token_hex(16)}.{target}{ending}"
        self._files[name] = text.encode("utf-8", errors="replace")
        self._bytes += len(self._files[name])
        while self._bytes > self._most and len(self._files) > 1:
            self._bytes -= len(self._files.pop(next(iter(self._files))))
        return name

    def fetch(self, name: str) -> bytes:
        if name not in self._files:
            raise Refusal(404, "there is no such file, or no longer; translate it again")
        return self._files[name]


def find_ending(name: str) -> str:
    ending = name[name.rfind(".") :].lower()
    if ending not in FORMATS:
        raise Refusal(400, f"the file {name!r:.60} is none of {', '.join(FORMATS)}")
    return ending


def make_app(
    models: dict[Pair, DirectedModel], options: ServeOptions, *, keys: Collection[str] = (), log: Log
) -> Starlette:
    server = _Server(models, options, frozenset(key.encode() for key in keys), log)
    answers = {
        "/": _show("page.html"),
        "/docs": _show("docs.html"),
        "/spec": server.specify,
        "/translate": server.translate,
        "/translate_file": server.translate_file,
        "/download_file/{name}": server.download_file,
        "/detect": server.detect,
        "/languages": server.list_languages,
        "/frontend/settings": server.describe_settings,
        "/health": server.tell_health,
        "/ready": server.tell_health,
        "/metrics": server.tell_measurements,
    }
    routes = [
        Route(path, server.endpoint(path, answer), methods=["POST"] if path in _POSTED else ["GET"])
        for path, answer in answers.items()
    ]
    # Without it, pages of other servers cannot read the answers; forms that they send are refused in `_read`.
    sharing = Middleware(
        CORSMiddleware,
        allow_origins=options.cors,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("Content-Disposition", "Retry-After"),
    )
    return Starlette(
        routes=routes,
        middleware=[sharing] if options.cors else [],
        exception_handlers={HTTPException: server.refuse_path},
    )


class _Server:
    def __init__(
        self, models: dict[Pair, DirectedModel], options: ServeOptions, keys: frozenset[bytes], log: Log
    ) -> None:
        self._models, self._options, self._keys, self._log = models, options, keys, log
        self._files = TranslatedFiles()
        self._translations = Translations(models, most_waiting=options.max_waiting)
        self._measurements = Measurements()

    def endpoint(
        self, path: str, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a function that answers errors, log them, and count all requests by `path`."""

        async def respond(request: Request) -> Response:
            start, hosts = time.monotonic(), self._options.allowed_hosts
            try:
                if hosts and (host := request.url.hostname) not in hosts:
                    raise Refusal(400, f"the host {host!r:.80} is none of --allowed_hosts={','.join(hosts)}")
                response = await answer(request)
            except Refusal as refusal:
                response = self._refuse(request, refusal.status, str(refusal))
            except UserError as error:  # of whoever runs the server, such as a model whose scores are NaN
                response = self._refuse(request, 500, str(error))
            except ClientDisconnect:
                response = self._refuse(request, _CLIENT_LEFT, "the client left")
            except Stopped as error:
                response = self._refuse(request, 503, "the model has stopped", cause=str(error))
            except Exception:  # a bug, which must not end the server
                response = self._refuse(request, 500, "an error inside the server, which its log names")
                for line in traceback.format_exc().rstrip().split("\n"):
                    self._log(line)
            self._measurements.add_request(path, response.status_code, time.monotonic() - start)
            return response

        return respond

    async def refuse_path(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        asked = f"{request.method} {request.url.path:.80}"
        response = self._refuse(request, error.status_code, f"{error.detail}: {asked}")
        response.headers.update(error.headers or {})
        self._measurements.add_request("other", error.status_code, 0)
        return response

    def _refuse(self, request: Request, status: int, message: str, *, cause: str = "") -> Response:
        """Return the answer, and log it, or the cause, which is not for the client."""
        client = request.client.host if request.client else "?"
        self._log(f"{status} {request.method} {request.url.path:.80} from {client}: {cause or message}")
        headers = {"Retry-After": "1"} if status == 429 else {}
        if status in (408, 413):  # the rest of the body has not been read
            headers["Connection"] = "close"
        return _to_json({"error": message}, status, headers)

    async def specify(self, request: Request) -> Response:
        return _to_json(make_specification(_name_server(request)))

    async def translate(self, request: Request) -> Response:
        return _to_json(await self._translate(request, await self._read(request)))

    async def _translate(self, request: Request, fields: dict[str, Any]) -> dict[str, Any]:
        wanted = request_fields.read_request(fields, self._options.max_characters)
        answer = await _unless_left(request, self._translations.translate(wanted), self._options.timeout)
        lines = sum(text.count("\n") + 1 for text in wanted.texts)
        self._measurements.add_text(lines=lines, characters=sum(map(len, wanted.texts)))
        return answer

    async def translate_file(self, request: Request) -> Response:
        fields = await self._read(request)
        file = request_fields.read_file(fields)
        ending = find_ending(file.name)
        fields |= {"q": file.text, "format": FORMATS[ending][0]}
        answer = await self._translate(request, fields)
        name = self._files.keep(answer["translatedText"], ending=ending, target=fields["target"])
        return _to_json({"translatedFileUrl": f"{_name_server(request)}/download_file/{name}"})

    async def download_file(self, request: Request) -> Response:
        name = request.path_params["name"]
        content = self._files.fetch(name)
        headers = {
            "Content-Disposition": f'attachment; filename="{name}"',
            "X-Content-Type-Options": "nosniff",
            "Content-Security-Policy": "sandbox",
        }
        return Response(content, headers=headers, media_type=FORMATS[find_ending(name)][1])

    async def detect(self, request: Request) -> Response:
        texts, several = request_fields.read_texts(await self._read(request), self._options.max_characters)
        guesses = await _unless_left(request, self._translations.detect(texts), self._options.timeout)
        return _to_json(guesses if several else guesses[0])

    async def list_languages(self, request: Request) -> Response:
        return _to_json(request_fields.list_languages(self._models))

    async def describe_settings(self, request: Request) -> Response:
        first = dict(zip(("source", "target"), next(iter(self._models)), strict=True))
        return _to_json(
            {
                "apiKeys": bool(self._keys),
                "keyRequired": bool(self._keys),
                "charLimit": self._options.max_characters,
                "frontendTimeout": 200,
                "suggestions": False,
                "filesTranslation": True,
                "supportedFilesFormat": list(FORMATS),
                "language": {
                    side: {"code": code, "name": request_fields.name_language(code)}
                    for side, code in first.items()
                },
                "alternatives": {
                    "-".join(pair): model.most_hypotheses - 1 for pair, model in self._models.items()
                },
                "models": {"-".join(pair): model.title for pair, model in self._models.items()},
                # Number of lines that are read before each line.
                "documents": {"-".join(pair): model.context for pair, model in self._models.items()},
                "version": flaxformer_mt.__version__,
            }
        )

    async def tell_health(self, request: Request) -> Response:
        threads = [model.thread for model in self._models.values()]
        if failures := [thread.failure for thread in threads if thread.failure is not None]:
            raise Stopped(failures[0])
        ready = all(thread.is_ready for thread in threads)
        status = 200 if ready or request.url.path == "/health" else 503
        return _to_json({"status": "ok", "ready": ready}, status)

    async def tell_measurements(self, request: Request) -> Response:
        threads = {model.thread for model in self._models.values()}
        active = sum(thread.engine.backend.num_active for thread in threads)
        gauges = {
            "waiting_lines": ("Lines that are not answered yet.", self._translations.num_waiting),
            "active_sentences": ("Sentences that are being searched.", active),
            "resident_bytes": ("Memory of the server.", resident_bytes()),
        }
        num_recased = sum(thread.engine.counts[LetterCase.counted] for thread in threads)
        return PlainTextResponse(self._measurements.format(gauges, num_recased))

    async def _read(self, request: Request) -> dict[str, Any]:
        # A form of another site's page, which a browser sends without asking.
        own = request.headers.get("sec-fetch-site") != "cross-site"
        if not own and not {"*", request.headers.get("origin")} & set(self._options.cors):
            raise Refusal(403, "a page of another site asks; its origin is none of --cors of this server")
        if (coding := request.headers.get("content-encoding", "identity")) != "identity":
            raise Refusal(400, f"the Content-Encoding is {coding:.20}; send the body as it is")
        # A character takes at most 12 bytes, as an escape, and the other fields take little.
        most, seconds = 12 * self._options.max_characters + 65_536, self._options.timeout
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
        kind, query = request.headers.get("content-type", ""), request.url.query
        fields = request_fields.read_fields(bytes(body), kind, query)
        self._check_key(fields.get("api_key"))
        return fields

    def _check_key(self, api_key: object) -> None:
        if not self._keys:
            return
        if api_key is None or api_key == "":
            raise Refusal(403, "the field api_key is missing: this server needs a key from its operator")
        content = api_key.encode("utf-8", "replace") if isinstance(api_key, str) else b""
        # All keys are compared, in constant time, so that no duration tells how much of a key is right.
        if not sum(hmac.compare_digest(key, content) for key in self._keys):
            raise Refusal(403, "the api_key is unknown")


def _show(name: str) -> Callable[[Request], Awaitable[Response]]:
    page = importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": _PAGE_POLICY, "X-Content-Type-Options": "nosniff"}

    async def show(request: Request) -> Response:
        return HTMLResponse(page, headers=headers)

    return show


async def _unless_left(request: Request, work: Any, seconds: float) -> Any:
    """Return the result of a coroutine; cancel it when the client leaves, or when the time is over."""

    async def wait_until_left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.ensure_future(work), asyncio.ensure_future(wait_until_left())
    try:
        await asyncio.wait({task, left}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        late = f"no answer within {seconds:g} seconds; a server that was started a moment ago still compiles"
        raise ClientDisconnect if left.done() else Refusal(504, f"{late}: try again, or raise --timeout")
    finally:
        task.cancel()
        left.cancel()


def _to_json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", errors="backslashreplace")
    return Response(body, status, headers, media_type="application/json")
