"""A server in a thread of the tests, with the tiny run behind it."""

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from flaxformer_mt.commands.options import ServeOptions
from flaxformer_mt.commands.server.translations import DirectedModel


class Serving:
    def __init__(self, models, keys=(), **limits) -> None:
        pytest.importorskip("starlette", reason="the server needs the extra serve")
        from flaxformer_mt.commands.server.app import make_app
        from flaxformer_mt.commands.server.http_server import make_server

        self.log: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.app = make_app(models, ServeOptions(run=(), **limits), keys=keys, log=self.log.append)
        self._server = make_server(self.app)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[self.listener]))
        )
        self._thread.start()

    def ask(self, path: str, body=None, kind="application/json", method=None, **headers: str):
        """The status and the body; the headers of the last answer are in `headers`."""
        data = json.dumps(body).encode() if isinstance(body, dict | list) else body
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": kind, **headers}, method=method
        )
        try:
            response = urllib.request.urlopen(request, timeout=100)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            self.headers, content = response.headers, response.read()
        is_json = self.headers.get_content_type() == "application/json"
        return response.status, json.loads(content) if is_json else content.decode()

    def translate(self, q, **more):
        return self.ask("/translate", {"q": q, "source": "xx", "target": "yy", **more})

    def take_log(self) -> list[str]:
        lines = list(self.log)
        self.log.clear()
        return lines

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="module")
def translator(tiny_run):
    from flaxformer_mt.translation.translator import Translator

    return Translator.load(tiny_run, use_all_devices=False, warn=lambda message: None)


@pytest.fixture(scope="module")
def model(translator):
    from flaxformer_mt.commands.server.model_thread import ModelThread

    thread = ModelThread(translator.engine(arriving=True), "xx-yy")
    yield DirectedModel(thread)
    thread.stop()


@pytest.fixture(scope="module")
def serve():
    started: list[Serving] = []

    def start(*args, **options) -> Serving:
        started.append(Serving(*args, **options))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(scope="module")
def serving(serve: Callable[..., Serving], model):
    return serve({("xx", "yy"): model}, max_characters=2000, max_waiting=300)
