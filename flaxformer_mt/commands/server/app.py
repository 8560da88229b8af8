"""The HTTP interface, with LibreTranslate's paths, statuses and errors ({"error": MESSAGE})."""

import functools
import importlib.resources
import time
import traceback
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import flaxformer_mt
from flaxformer_mt.commands.options import ServeOptions
from flaxformer_mt.commands.server.languages import Pair, list_languages, name_language
from flaxformer_mt.commands.server.metrics import Metrics
from flaxformer_mt.commands.server.model_thread import Stopped
from flaxformer_mt.commands.server.request_fields import (
    FORM,
    JSON,
    PARTS,
    DetectionRequest,
    Fields,
    FileRequest,
    TextRequest,
    answer_in_time,
    read_body,
)
from flaxformer_mt.commands.server.translated_files import FORMATS, TranslatedFiles, find_ending
from flaxformer_mt.commands.server.translations import DirectedModel, Translations
from flaxformer_mt.errors import UserError

Log = Callable[[str], None]
Endpoint = Callable[[Request], Awaitable[Response]]
# The client has gone; nobody reads the status, but the log and the counts have it.
_CLIENT_LEFT = 499
# The page loads nothing and talks to this server only.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def make_app(
    models: dict[Pair, DirectedModel], options: ServeOptions, *, keys: Collection[str] = (), log: Log
) -> Starlette:
    server = _Server(models, options, frozenset(key.encode() for key in keys), log)
    routes = [Route("/", functools.partial(server.answer, "/", server.show_page))]
    for path, (endpoint, fields) in server.operations.items():
        answer = functools.partial(server.answer, path, endpoint)
        routes.append(Route(path, answer, methods=["GET" if fields is None else "POST"]))
    # Without it, pages of other servers cannot read answers; their forms are refused in `read_body`.
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
        self._page = importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
        self._files = TranslatedFiles()
        self._translations = Translations(models, most_waiting=options.max_waiting)
        self._metrics = Metrics(models, self._translations)
        # What answers, with a docstring that describes it, and the fields of a POST; None: the method is GET.
        self.operations: dict[str, tuple[Endpoint, type[Fields] | None]] = {
            "/translate": (self.translate, TextRequest),
            "/translate_file": (self.translate_file, FileRequest),
            "/download_file/{name}": (self.download_file, None),
            "/detect": (self.detect, DetectionRequest),
            "/languages": (self.list_languages, None),
            "/frontend/settings": (self.describe_settings, None),
            "/health": (self.tell_health, None),
            "/ready": (self.tell_health, None),
            "/metrics": (self.tell_metrics, None),
            "/spec": (self.specify, None),
        }

    async def answer(self, path: str, endpoint: Endpoint, request: Request) -> Response:
        """Answer a request, possibly with an error, and count it by `path`."""
        start = time.monotonic()
        try:
            hosts = self._options.allowed_hosts
            if hosts and (host := request.url.hostname) not in hosts:
                message = f"the host {host!r:.80} is none of --allowed_hosts={','.join(hosts)}"
                raise HTTPException(400, message)
            response = await endpoint(request)
        except Exception as error:
            response = self._answer_error(request, error)
        self._metrics.requests.labels(path, response.status_code).inc()
        if path == "/translate" and response.status_code == 200:
            self._metrics.seconds.observe(time.monotonic() - start)
        return response

    async def refuse_path(self, request: Request, error: Exception) -> Response:
        """Answer a path or a method that has no route."""
        assert isinstance(error, HTTPException)
        error.detail += f": {request.method} {request.url.path:.80}"
        self._metrics.requests.labels("other", error.status_code).inc()
        return self._answer_error(request, error)

    def _answer_error(self, request: Request, error: Exception) -> Response:
        """Return the answer to a failed request; log its message, or a cause that clients do not see."""
        headers, cause, lines = None, "", []
        match error:
            case HTTPException():
                status, message, headers = error.status_code, error.detail, error.headers
            case UserError():  # of whoever runs the server, such as a model whose scores are NaN
                status, message = 500, str(error)
            case ClientDisconnect():
                status, message = _CLIENT_LEFT, "the client left"
            case Stopped():
                status, message, cause = 503, "the model has stopped", str(error)
            case _:  # a bug, which must not end the server
                status, message = 500, "an error inside the server, which its log names"
                lines = "".join(traceback.format_exception(error)).rstrip().split("\n")
        client = request.client.host if request.client else "?"
        self._log(f"{status} {request.method} {request.url.path:.80} from {client}: {cause or message}")
        for line in lines:
            self._log(line)
        return JSONResponse({"error": message}, status, headers)

    async def show_page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=_PAGE_HEADERS)

    async def specify(self, request: Request) -> Response:
        """This interface as an OpenAPI document."""
        error = {"description": "What is wrong", "content": {JSON: {"example": {"error": "..."}}}}
        paths: dict[str, dict[str, Any]] = {}
        for path, (endpoint, fields) in self.operations.items():
            described: dict[str, Any] = {
                "summary": endpoint.__doc__,
                "responses": {"200": {"description": "The answer"}, "default": error},
            }
            if "{name}" in path:
                place = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
                described["parameters"] = [place]
            if fields is not None:
                schema = {"schema": fields.model_json_schema()}
                forms = (PARTS,) if fields is FileRequest else (JSON, FORM, PARTS)
                described["requestBody"] = {"required": True, "content": dict.fromkeys(forms, schema)}
            paths[path] = {"get" if fields is None else "post": described}
        info = {
            "title": "flaxformer_mt",
            "version": flaxformer_mt.__version__,
            "description": "Machine translation, with the interface of LibreTranslate.",
        }
        servers = [{"url": _find_address(request)}]
        return JSONResponse({"openapi": "3.1.0", "info": info, "servers": servers, "paths": paths})

    async def translate(self, request: Request) -> Response:
        """Translate texts."""
        fields = await read_body(request, self._options, self._keys)
        return JSONResponse(await self._translate(request, fields))

    async def _translate(self, request: Request, fields: dict[str, Any]) -> dict[str, Any]:
        wanted = TextRequest.read(fields)
        wanted.check_size(self._options.max_characters, wanted.glossary)
        work = self._translations.translate(wanted)
        answer = await answer_in_time(request, work, self._options.timeout)
        self._metrics.lines.inc(sum(text.count("\n") + 1 for text in wanted.texts))
        self._metrics.characters.inc(sum(map(len, wanted.texts)))
        return answer

    async def translate_file(self, request: Request) -> Response:
        """Translate a file; the answer is the address of the translation."""
        fields = await read_body(request, self._options, self._keys)
        wanted = FileRequest.read(fields)
        ending = find_ending(wanted.file.name)
        answer = await self._translate(
            request, fields | {"q": wanted.file.text, "format": FORMATS[ending][0]}
        )
        name = self._files.keep(answer["translatedText"], ending=ending, target=wanted.target)
        return JSONResponse({"translatedFileUrl": f"{_find_address(request)}/download_file/{name}"})

    async def download_file(self, request: Request) -> Response:
        """Download a translated file, as long as the server stores it."""
        name = request.path_params["name"]
        headers = {
            "Content-Disposition": f'attachment; filename="{name}"',
            "X-Content-Type-Options": "nosniff",
            "Content-Security-Policy": "sandbox",
        }
        content = self._files.fetch(name)
        return Response(content, headers=headers, media_type=FORMATS[find_ending(name)][1])

    async def detect(self, request: Request) -> Response:
        """Guess the language of a text, among the languages of the server."""
        fields = await read_body(request, self._options, self._keys)
        wanted = DetectionRequest.read(fields)
        wanted.check_size(self._options.max_characters)
        work = self._translations.detect(wanted.texts)
        guesses = await answer_in_time(request, work, self._options.timeout)
        return JSONResponse(guesses if isinstance(wanted.q, list) else guesses[0])

    async def list_languages(self, request: Request) -> Response:
        """List the languages, each with its target languages."""
        return JSONResponse(list_languages(self._models))

    async def describe_settings(self, request: Request) -> Response:
        """Report the limits of requests, the models and the version."""
        source, target = next(iter(self._models))
        models = {"-".join(pair): model for pair, model in self._models.items()}
        return JSONResponse(
            {
                "apiKeys": bool(self._keys),
                "keyRequired": bool(self._keys),
                "charLimit": self._options.max_characters,
                "frontendTimeout": 200,
                "suggestions": False,
                "filesTranslation": True,
                "supportedFilesFormat": list(FORMATS),
                "language": {
                    "source": {"code": source, "name": name_language(source)},
                    "target": {"code": target, "name": name_language(target)},
                },
                "alternatives": {pair: model.most_hypotheses - 1 for pair, model in models.items()},
                "models": {pair: model.title for pair, model in models.items()},
                # Number of lines that are read before each line.
                "documents": {pair: model.context for pair, model in models.items()},
                "version": flaxformer_mt.__version__,
            }
        )

    async def tell_health(self, request: Request) -> Response:
        """Report whether all models run; /ready has status 503 until they are compiled."""
        threads = [model.thread for model in self._models.values()]
        if failures := [thread.failure for thread in threads if thread.failure is not None]:
            raise Stopped(failures[0])
        ready = all(thread.is_ready for thread in threads)
        status = 200 if ready or request.url.path == "/health" else 503
        return JSONResponse({"status": "ok", "ready": ready}, status)

    async def tell_metrics(self, request: Request) -> Response:
        """Report counts and durations for Prometheus."""
        return PlainTextResponse(self._metrics.format())


def _find_address(request: Request) -> str:
    """Return the server's address for clients, with the path prefix that a proxy names in a header."""
    return str(request.base_url).rstrip("/") + request.headers.get("x-forwarded-prefix", "").rstrip("/")
