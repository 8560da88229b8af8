"""The server's interface: every answer is that of `translate`, every failure has its status and one line."""

import collections
import concurrent.futures
import random
import re
import socket
import threading
import time

import numpy as np
import pytest
from starlette.exceptions import HTTPException

from flaxformer_mt.commands.server.languages import find_models, list_languages
from flaxformer_mt.commands.server.model_thread import ModelThread
from flaxformer_mt.commands.server.request_fields import TextRequest
from flaxformer_mt.commands.server.translated_files import TranslatedFiles
from flaxformer_mt.commands.server.translations import DirectedModel, add_pivots, direct
from flaxformer_mt.config import DataConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.letter_case import LetterCase
from flaxformer_mt.translation.result import Annotations, Translation

WORDS = ["ba", "do", "fi", "gu", "ka", "lo", "mi", "nu"]


def make_lines(count: int, longest: int) -> list[str]:
    dice = random.Random(3)
    return [" ".join(dice.choices(WORDS, k=dice.randint(1, longest))) for _ in range(count)]


def test_each_of_200_requests_at_once_gets_the_translation_of_its_line(serving, translator):
    lines = make_lines(200, 6)
    expected = [one.text for one in translator.translate(lines)]
    with concurrent.futures.ThreadPoolExecutor(len(lines)) as threads:
        answers = list(threads.map(serving.translate, lines))
    assert answers == [(200, {"translatedText": text}) for text in expected]
    assert len(set(expected)) > 40, "an answer that is mixed up is another one"
    assert serving.take_log() == []


def test_lists_lines_long_lines_and_documents(serving, translator):
    long = " ".join(WORDS * 3)  # translated in parts
    first, second, whole = (one.text for one in translator.translate(["ba do", "gu", long]))
    status, answer = serving.translate(["ba do\r\n\ngu", long, ""], source="auto")
    assert status == 200
    assert answer["translatedText"] == [f"{first}\n\n{second}", whole, ""]
    assert answer["detectedLanguage"] == [{"confidence": 0.0, "language": "xx"}] * 3
    assert serving.translate([]) == (200, {"translatedText": []})
    text = "<p><b>12:30</b></p><p>😀</p>"
    assert serving.translate(text, format="html") == (200, {"translatedText": text})
    _, answer = serving.translate("<p><i>ba do</i><br>gu</p>", format="html")
    assert answer == {"translatedText": f"<p><i>{first}</i><br>{second}</p>"}
    marked = "ba <b>do fi</b> gu"
    (expected,) = translator.translate([marked], n_best=2, annotations=Annotations(markup=True))
    _, answer = serving.translate(f"<p>{marked}", format="html", alternatives=1)
    assert answer["translatedText"] == f"<p>{expected.text}" and "<b>" in expected.text
    assert answer["alternatives"] == [f"<p>{expected.alternatives[0].text}"]


def test_alternatives_scores_alignments_and_attention(serving, translator):
    annotations = Annotations(alignments="words", attention=True)
    line = "ba do fi gu"
    (expected,) = translator.translate([line], n_best=2, annotations=annotations)
    (other,) = expected.alternatives
    status, answer = serving.translate(line, alternatives=1, scores=True, alignments="words", attention=True)
    assert status == 200 and answer["translatedText"] == expected.text
    assert answer["alternatives"] == [other.text]
    ((best, second),) = answer["hypotheses"]
    assert (best["text"], second["text"]) == (expected.text, other.text)
    assert best["score"] == pytest.approx(expected.score, abs=1e-4)
    assert best["alignment"] == [list(pair) for pair in expected.alignment]
    assert "".join(best["source_pieces"]).replace("\u2581", " ").strip() == line
    assert np.shape(best["attention"]) == (len(best["pieces"]), len(best["source_pieces"]))
    np.testing.assert_allclose(best["attention"], expected.attention, atol=2e-3)
    _, answer = serving.translate(line, n_best=2)
    assert answer["hypotheses"] == [[{"text": expected.text}, {"text": other.text}]]
    assert "alternatives" not in answer


def test_terms_of_a_glossary_are_in_the_translation(serving, translator):
    """As a text of lines, or as a file of a form; what is wrong is the client's."""
    lines, terms = "ba do\nfi gu", "# terms\nba\tNU MI\tnoun\n"
    required = translator.translate(["ba do", "fi gu"], required=[["NU MI"], []])
    expected = "\n".join(one.text for one in required)
    assert "NU MI" in expected and expected != serving.translate(lines)[1]["translatedText"]
    assert serving.translate(lines, glossary=terms) == (200, {"translatedText": expected})
    _, answer = post_file(serving, "a.txt", lines.encode(), glossary=terms)
    assert fetch(serving, answer["translatedFileUrl"]) == expected
    for glossary, named in [
        ("ba NU", "the field glossary, line 1, has no tab: 'ba NU'"),
        ("ba\tNU\nba\tMI", "line 2, translates 'ba' as 'MI', but line 1 as 'NU'"),
        ("# none\n", "the field glossary has no terms"),
        ("ba\t\ud800", "the body is not application/json: "),
        ({"ba": "NU"}, "the field glossary is {'ba': 'NU'}: Input should be a valid string"),
        ("ba\t" + "NU " * 40, "line 1 requires 1 phrases of up to"),
    ]:
        status, answer = serving.translate("ba", glossary=glossary)
        assert status == 400 and named in answer["error"] and len(serving.take_log()) == 1, answer
    status, answer = serving.translate("ba", glossary="ba\t" + "x" * 2000)
    assert status == 413 and answer["error"].startswith("q has 2005 characters in 1 texts and the glossary;")
    serving.take_log()


def test_clients_of_libretranslate_work(serving, translator):
    libretranslatepy = pytest.importorskip("libretranslatepy", reason="a client of LibreTranslate")
    client = libretranslatepy.LibreTranslateAPI(serving.url)
    assert client.translate("ba do & gu", "xx", "yy") == translator.translate(["ba do & gu"])[0].text
    assert client.languages() == [
        {"code": "xx", "name": "xx", "targets": ["yy"]},
        {"code": "yy", "name": "yy", "targets": []},
    ]
    assert client.detect("ba") == [{"confidence": 0.0, "language": "xx"}]
    _, settings = serving.ask("/frontend/settings")
    assert settings["charLimit"] == 2000 and settings["keyRequired"] is False
    assert serving.ask("/health") == (200, {"status": "ok", "ready": True})
    expected = {"translatedText": translator.translate(["ba do"])[0].text}
    query = "/translate?q=ba+do&source=xx&target=yy"
    assert serving.ask(query, b"", "") == serving.ask(query, b"", "application/x-www-form-urlencoded")
    assert serving.ask(query, b"", "") == (200, expected)
    _, text = serving.ask("/metrics")
    assert 'flaxformer_mt_requests_total{path="/translate",status="200"}' in text
    assert "\nflaxformer_mt_waiting_lines 0.0\n" in text and 'seconds_bucket{le="+Inf"}' in text


def fetch(serving, url: str) -> str:
    return serving.ask(url.removeprefix(serving.url))[1]


LANGUAGES = {"source": "xx", "target": "yy"}


def post_file(serving, name: str, content: bytes, headers=None, **fields) -> tuple[int, dict]:
    """Sends a form as browsers do."""
    parts = [(f'form-data; name="{key}"', value.encode()) for key, value in (LANGUAGES | fields).items()]
    parts.append((f'form-data; name="file"; filename="{name}"', content))
    body = b"".join(b"--edge\r\nContent-Disposition: %s\r\n\r\n%s\r\n" % (k.encode(), v) for k, v in parts)
    kind = "multipart/form-data; boundary=edge"
    return serving.ask("/translate_file", body + b"--edge--\r\n", kind, **(headers or {}))


def test_files_are_translated_and_can_be_fetched(serving, translator):
    first, second = (one.text for one in translator.translate(["ba do", "gu"]))
    for name, content, expected, kind in [
        ("a.txt", b"ba do\r\n\ngu", f"{first}\n\n{second}", "text/plain"),
        ("A.HTM", b"\xef\xbb\xbf<p>ba do</p><p>gu", f"<p>{first}</p><p>{second}", "text/html"),
    ]:
        status, answer = post_file(serving, name, content)
        assert status == 200 and answer["translatedFileUrl"].startswith(f"{serving.url}/download_file/")
        assert fetch(serving, answer["translatedFileUrl"]) == expected
        assert serving.headers.get_content_type() == kind
        assert "sandbox" in serving.headers["Content-Security-Policy"]
    assert serving.take_log() == []
    for status, named, answer in [
        (400, ".docx", post_file(serving, "a.docx", b"ba")),
        (400, "target", post_file(serving, "a.txt", b"ba", target="")),
        (400, "the field file is not UTF-8 text: ", post_file(serving, "a.txt", b"\xff")),
        (400, "file is missing", serving.ask("/translate_file", {"q": "ba", **LANGUAGES})),
        (404, "no such file", serving.ask("/download_file/x.txt")),
    ]:
        assert answer[0] == status and named in answer[1]["error"], answer
    assert len(serving.take_log()) == 5
    # Behind a proxy.
    proxied = {"X_Forwarded_Proto": "https", "X_Forwarded_Prefix": "/mt/", "Host": "example.org"}
    assert serving.ask("/spec", **proxied)[1]["servers"] == [{"url": "https://example.org/mt"}]
    _, answer = post_file(serving, "a.txt", b"ba", proxied)
    assert answer["translatedFileUrl"].startswith("https://example.org/mt/download_file/")


def test_the_oldest_files_are_dropped():
    files = TranslatedFiles(most_bytes=10)
    names = [files.keep("123456", ending=".txt", target="yy") for _ in range(3)]
    assert files.fetch(names[2]) == b"123456"
    for name in names[:2]:
        with pytest.raises(HTTPException):
            files.fetch(name)


def test_the_specification_names_every_path_and_field(serving):
    """What it calls required is refused when it is left out, and nothing else is."""
    status, spec = serving.ask("/spec")
    assert status == 200 and spec["openapi"].startswith("3.") and spec["servers"] == [{"url": serving.url}]
    known = {(route.path, min(route.methods - {"HEAD"}).lower()) for route in serving.app.routes}
    told = {(path, method) for path, methods in spec["paths"].items() for method in methods}
    assert told == known - {("/", "get")}
    schema = spec["paths"]["/translate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    given = {"q": "ba", **LANGUAGES}
    assert set(schema["required"]) == given.keys()
    assert schema["properties"].keys() == TextRequest.model_fields.keys()
    for name in given:
        assert serving.ask("/translate", {key: given[key] for key in given if key != name})[0] == 400
    serving.take_log()


def test_every_failure_has_its_status_and_one_line_in_the_log(serving):
    for status, path, body, named in [
        (400, "/translate", b"{", "application/json"),
        (400, "/translate", {"q": "a", "source": "xx", "target": "de"}, "xx-yy"),
        (400, "/translate", {"q": "a", "source": "x\n", "target": "yy"}, "no model"),
        (413, "/translate", {"q": "a" * 2001, **LANGUAGES}, "2001"),
        (413, "/translate", {"q": "\n" * 400, **LANGUAGES}, "401 lines"),
        (413, "/translate", b"x" * 200_000, "200000 bytes"),
        (400, "/translate", {"q": "a", "alternatives": 2, **LANGUAGES}, "1"),
        (400, "/translate", {"q": "a", "format": "html", "alignments": "pieces", **LANGUAGES}, "with format"),
        (400, "/detect", {}, "q is missing"),
        (404, "/nothing" + "x" * 5000, None, "Not Found"),
        (405, "/translate", None, "GET"),
    ]:
        answer = serving.ask(path, body)
        assert answer[0] == status and named in answer[1]["error"], (path, body, answer)
        (line,) = serving.take_log()
        assert line.startswith(f"{status} ") and path[:80] in line and named in line and len(line) < 500
    status, answer = serving.ask("/translate", b"\x1f\x8b", Content_Encoding="gzip")
    assert (status, answer) == (400, {"error": "the Content-Encoding is gzip; send the body as it is"})
    serving.take_log()


def exchange(serving, content: bytes) -> bytes:
    """All that a client that sends this reads until the connection ends."""
    with socket.create_connection(("127.0.0.1", serving.port)) as client:
        client.sendall(content)
        return b"".join(iter(lambda: client.recv(4096), b""))


CHUNKED = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"


def test_a_body_without_a_length_is_read_no_further_than_its_limit(serving):
    chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
    assert exchange(serving, CHUNKED % b"/translate" + b"\r\n" + 6 * chunk).startswith(b"HTTP/1.1 413 ")
    (line,) = serving.take_log()
    assert line.startswith("413 ")


@pytest.mark.parametrize("path", [b"/translate", b"/nothing"])
def test_a_request_with_two_lengths_hides_no_other_request(serving, path):
    """A proxy that believes Content-Length passes the second one on as part of the first."""
    hidden = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = exchange(serving, CHUNKED % path + b"Content-Length: %d\r\n\r\n" % len(hidden) + hidden)
    assert re.match(rb"HTTP/1.1 40[04] ", answer) and answer.count(b"HTTP/1.1") == 1
    serving.take_log()


def test_the_page_asks_no_other_machine(serving):
    _, page = serving.ask("/")
    policy = serving.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "Translating" in page and "compiles its programs" in page, "a reader knows what the page waits for"
    assert "//" not in "".join(line for line in page.split("\n") if not line.lstrip().startswith("//"))


class SlowEngine:
    """Translates a line to capitals when it is told to; is its own backend."""

    most_hypotheses = num_active = 1
    apart = True

    def __init__(self) -> None:
        self.backend, self.counts = self, collections.Counter({LetterCase.counted: 2})
        self.lines, self.asked, self.cancelled = {}, [], []
        self.go, self.error, self.answer = threading.Event(), None, self.shout
        self.name_line = lambda request: request.text

    def __len__(self):
        return len(self.lines)

    def submit(self, request):
        self.asked.append(request)
        self.lines[request.id] = self.name_line(request)

    def cancel(self, name):
        self.cancelled.append(self.lines.pop(name))

    def step(self):
        time.sleep(0.005)
        if self.error is not None:
            raise self.error
        done = {}
        if self.go.is_set():
            done, self.lines = self.lines, {}
        return [(name, self.answer(line)) for name, line in done.items()]

    def shout(self, line):
        return Translation(line.upper(), 0.0, -float(len(line)), (1,))

    def target_pieces(self, translation):
        return [translation.text]


@pytest.fixture
def slow():
    return SlowEngine()


@pytest.fixture
def slow_thread(slow):
    thread = ModelThread(slow, "xx-yy")
    yield thread
    slow.go.set()
    thread.stop()


def wait_until(true) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_too_many_and_too_slow_requests_and_clients_that_leave(serve, slow, slow_thread):
    server = serve({("xx", "yy"): DirectedModel(slow_thread)}, max_waiting=3)
    client = socket.create_connection(("127.0.0.1", server.port))
    body = b'{"q": ["left", "too"], "source": "xx", "target": "yy"}'
    head = (
        b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    client.sendall(head % len(body) + body)
    wait_until(lambda: len(slow.lines) == 2)
    status, answer = server.translate(["one", "two"])
    assert status == 429 and "2 lines wait" in answer["error"]
    client.close()  # frees its places, and its lines leave the search
    wait_until(lambda: sorted(slow.cancelled) == ["left", "too"])
    wait_until(lambda: len(server.log) == 2)
    assert [line.split()[0] for line in server.take_log()] == ["429", "499"]
    server = serve({("xx", "yy"): DirectedModel(slow_thread)}, timeout=0.5)
    assert server.translate(["one", "two"])[0] == 504
    wait_until(lambda: len(slow.cancelled) == 4)
    # A client that sends a part of its request, and no more.
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head % 1000 + b"{")
        assert client.recv(100).startswith(b"HTTP/1.1 408 ")
    slow.go.set()
    assert server.translate("one") == (200, {"translatedText": "ONE"})
    assert [line.split()[0] for line in server.take_log()] == ["504", "408"]


def test_a_line_or_a_model_that_fails_is_reported(serve, slow, slow_thread, caplog):
    """A line that fails ends neither the model nor the wait of others."""
    server = serve({("xx", "yy"): DirectedModel(slow_thread)})
    submit, slow.submit = slow.submit, lambda request: 1 / 0
    assert server.translate("one")[0] == 500
    failed, *traceback = server.take_log()
    assert failed.startswith("500 POST /translate ") and "division" not in failed
    assert traceback[0].startswith("Traceback") and traceback[-1] == "ZeroDivisionError: division by zero"
    slow.submit = submit
    slow.go.set()
    assert server.translate("two") == (200, {"translatedText": "TWO"})
    for error in (UserError("NaN, as the operator must know"), ZeroDivisionError("a bug")):
        slow.answer = lambda line, error=error: error
        assert server.translate("one")[0] == 500
        assert any(str(error) in line for line in server.take_log())
    slow.go.clear()
    slow.error = RuntimeError("broken\nmodel at /secret/path")
    for _ in range(2):  # what has gone wrong is for the log, not for clients
        assert server.translate("one") == (503, {"error": "the model has stopped"})
    assert server.ask("/health") == server.ask("/ready") == (503, {"error": "the model has stopped"})
    assert ["broken" in line for line in server.take_log()] == [True] * 4
    assert "RuntimeError: broken" in caplog.text and "in step" in caplog.text, "with its traceback"


def test_a_server_that_compiles_is_alive_and_not_ready(serve, slow):
    """It answers what needs no compiler, also a text of which there is nothing to translate."""
    slow.go.set()
    compiled = threading.Event()

    def prepare():
        while not compiled.wait(0.01):
            yield 0

    thread = ModelThread(slow, preparation=prepare())
    server = serve({("xx", "yy"): DirectedModel(thread)})
    assert server.ask("/ready") == (503, {"status": "ok", "ready": False}) and server.take_log() == []
    assert server.ask("/health") == (200, {"status": "ok", "ready": False})
    assert server.translate("one") == (200, {"translatedText": "ONE"})
    compiled.set()
    wait_until(lambda: server.ask("/ready") == (200, {"status": "ok", "ready": True}))
    assert server.ask("/health") == (200, {"status": "ok", "ready": True})
    thread.stop()


def test_pages_of_other_servers_may_ask_if_they_are_named(serve, slow, slow_thread):
    """As the CORS protocol of the Fetch standard has it: a preflight, then the request with its origin."""
    slow.go.set()
    models, allow = {("xx", "yy"): DirectedModel(slow_thread)}, "Access-Control-Allow-Origin"
    named, other = "https://example.org", "https://evil.example"
    some, every, none = (serve(models, cors=cors) for cors in ((named, "http://localhost:3000"), ("*",), ()))
    preflight = {"method": "OPTIONS", "Access_Control_Request_Method": "POST"}
    preflight["Access_Control_Request_Headers"] = "content-type"
    for server, origin, allowed in ((some, named, named), (every, other, "*")):
        assert server.ask("/translate", Origin=origin, **preflight)[0] == 200
        assert server.headers[allow] == allowed and "Access-Control-Allow-Credentials" not in server.headers
        assert "POST" in server.headers["Access-Control-Allow-Methods"]
        assert "content-type" in server.headers["Access-Control-Allow-Headers"].lower()
        for path, body in (("/languages", None), ("/translate", {}), ("/absent", None)):
            _, answer = server.ask(path, body, Origin=origin)
            assert server.headers[allow] == allowed, path
            assert path == "/languages" or "error" in answer  # which the page can read
    assert some.ask("/translate", Origin=other, **preflight)[0] == 400
    assert none.ask("/translate", Origin=named, **preflight)[0] == 405
    for server, origin in ((some, other), (none, named)):
        server.ask("/languages", Origin=origin)
        assert allow not in server.headers
    none.take_log()
    # Browsers say where forms come from, which need no preflight.
    fields = b"q=one&source=xx&target=yy"
    for server, site, origin, status in [
        (none, "cross-site", named, 403),
        (none, "cross-site", "null", 403),
        (none, "same-origin", named, 200),
        (none, "none", "", 200),
        (some, "cross-site", named, 200),
        (some, "cross-site", other, 403),
        (every, "cross-site", other, 200),
    ]:
        headers = {"Sec_Fetch_Site": site} | ({"Origin": origin} if origin else {})
        answer = server.ask("/translate", fields, "application/x-www-form-urlencoded", **headers)
        assert answer[0] == status, (site, origin)
    assert none.ask("/languages", Sec_Fetch_Site="cross-site")[0] == 200  # as a link to the page does
    assert [line.split()[0] for line in none.take_log()] == ["403"] * 2


def test_other_hosts_and_clients_without_a_key_are_refused(serve, slow, slow_thread):
    """A name that leads elsewhere tomorrow is not this server's."""
    slow.go.set()
    models = {("xx", "yy"): DirectedModel(slow_thread)}
    server = serve(models, allowed_hosts=("127.0.0.1", "::1"))
    assert server.translate("one")[0] == server.ask("/health", Host="[::1]:80")[0] == 200
    status, answer = server.ask("/languages", Host="rebind.evil.example:5000")
    assert status == 400 and "the host 'rebind.evil.example' is none of --allowed_hosts" in answer["error"]
    assert len(server.take_log()) == 1
    server = serve(models, keys=["secret"])
    for fields in ({}, {"api_key": "other"}, {"api_key": 7}):
        assert server.translate("one", **fields)[0] == 403, fields
    assert server.translate("one", api_key="secret")[0] == 200
    assert server.ask("/frontend/settings")[1]["keyRequired"] is True
    assert "secret" not in "".join(server.take_log())


def test_connections_whose_request_does_not_begin_are_closed(serve, slow, slow_thread, monkeypatch):
    """One that says nothing, one that sends a header now and then, also after an answer; no slow answer."""
    monkeypatch.setattr("flaxformer_mt.commands.server.http_server._HEADER_SECONDS", 0.5)
    server = serve({("xx", "yy"): DirectedModel(slow_thread)})

    def drip(client):
        client.settimeout(0.1)
        for _ in range(100):
            try:
                client.sendall(b"X-A: b\r\n")
                if not client.recv(1000):
                    return
            except TimeoutError:
                pass
            except OSError:
                return
        raise AssertionError("it is still open")

    clients = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(3)]
    clients[1].sendall(b"GET / HTTP/1.1\r\n")
    clients[2].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert clients[2].recv(1000).startswith(b"HTTP/1.1 200 ")
    clients[2].sendall(b"GET / HTTP/1.1\r\n")
    assert clients[0].recv(1) == b""
    for client in clients[1:]:
        drip(client)
    for client in clients:
        client.close()
    threading.Timer(1.5, slow.go.set).start()
    assert server.translate("slow") == (200, {"translatedText": "SLOW"})


def test_one_model_serves_several_pairs(serve):
    system = SlowEngine()
    system.name_line = lambda request: f"{request.source_language}-{request.target_language}|{request.text}"
    system.answer = lambda line: Translation(line, 0.0, -1.0, (1,))
    system.go.set()
    thread = ModelThread(system, "many")
    server = serve(direct(thread, DataConfig(dataset="a:en-de,a:en-fr,a:de-en")))
    languages = [(one["code"], one["targets"]) for one in server.ask("/languages")[1]]
    assert languages == [("en", ["de", "fr"]), ("de", ["en"]), ("fr", [])]
    for source, target in (("en", "fr"), ("en", "de"), ("de", "en")):
        _, answer = server.translate(">>xx<< a", source=source, target=target)
        assert answer["translatedText"] == f"{source}-{target}|>>xx<< a"
    assert server.translate("a", source="fr", target="en") == (
        400,
        {"error": "no model translates from 'fr' to 'en'; this server has en-de, en-fr, de-en"},
    )
    assert "active_sentences 1.0\n" in server.ask("/metrics")[1]  # of one thread
    thread.stop()
    assert direct(thread, DataConfig()) == {("de", "en"): DirectedModel(thread, "de", "en")}


def test_models_in_a_row_serve_languages_that_none_translates(serve, slow, slow_thread):
    slow.answer = lambda line: Translation(f"{line}!", -1.0, -1.0, (1,), alignment=((0, 0),))
    onward = SlowEngine()
    slow.go.set(), onward.go.set()
    thread = ModelThread(onward, "en-fr")
    models = direct(slow_thread, DataConfig(dataset="a:de-en,a:en-de"), title="A")
    models |= direct(thread, DataConfig(dataset="b:en-fr"), title="B")
    every = add_pivots(models)
    assert list(every) == [*models, ("de", "fr")] and every["de", "fr"].title == "A; then B"
    assert add_pivots({**models, ("de", "fr"): models["en", "fr"]})["de", "fr"].then is None
    server = serve(every)
    languages = [(one["code"], one["targets"]) for one in server.ask("/languages")[1]]
    assert languages == [("de", ["en", "fr"]), ("en", ["de", "fr"]), ("fr", [])]
    status, answer = server.translate("eins", source="de", target="fr", scores=True, attention=True)
    assert (status, answer["translatedText"]) == (200, "EINS!")
    ((hypothesis,),) = answer["hypotheses"]
    assert hypothesis["score"] == -1.0 and hypothesis["attention"] is None
    (request,) = onward.asked
    assert (request.source_language, request.target_language) == ("en", "fr")
    assert request.sentence_starts == (0,)
    _, answer = server.translate("eins", source="auto", target="fr")
    assert answer["detectedLanguage"]["language"] in ("de", "en")
    status, answer = server.translate("eins", source="de", target="fr", alignments="pieces")
    assert status == 400 and "must be words" in answer["error"]
    # Of two engines.
    assert 'flaxformer_mt_guarded_total{guard="capitals"} 4.0\n' in server.ask("/metrics")[1]
    onward.error = ValueError("a bug")
    assert server.translate("eins", source="de", target="fr")[0] == 503
    assert server.translate("eins", source="de", target="en")[0] == 200
    thread.stop()


@pytest.mark.parametrize("what", ["read_html", "_answer_text"])
def test_long_work_on_one_text_keeps_no_other_client_waiting(serve, slow, slow_thread, monkeypatch, what):
    from flaxformer_mt.commands.server import translations

    begun, release, own = threading.Event(), threading.Event(), getattr(translations, what)

    def work(*arguments):
        begun.set()
        assert release.wait(30)
        return own(*arguments)

    monkeypatch.setattr(translations, what, work)
    slow.go.set()
    server = serve({("xx", "yy"): DirectedModel(slow_thread)}, timeout=1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.translate, "<b>One</b>", format="html")
        assert begun.wait(30)
        assert server.ask("/health") == (200, {"status": "ok", "ready": True})
        assert answer.result(30)[0] == 504  # the time limit holds meanwhile
        release.set()


def test_a_placeholder_may_begin_a_sentence_of_a_document(serve, slow, slow_thread):
    slow.go.set()
    server = serve({("de", "en"): DirectedModel(slow_thread, "de", "en")})
    server.translate("<p>Er schläft. {0} liest.</p>", source="de", target="en", format="html")
    assert [(one.text, one.sentence_starts) for one in slow.asked] == [("Er schläft. liest.", (0, 12))]


def test_the_language_of_a_text_is_that_of_the_surest_model(serve, slow, slow_thread):
    other = SlowEngine()
    other.answer = lambda line: Translation(line.lower(), 0.0, -1.0, (1, 2, 3))
    thread = ModelThread(other, "zz-yy")
    slow.go.set(), other.go.set()
    server = serve({("xx", "yy"): DirectedModel(slow_thread), ("zz", "yy"): DirectedModel(thread)})
    _, answer = server.translate("One", source="auto")
    assert answer["translatedText"] == "one" and answer["detectedLanguage"]["language"] == "zz"
    _, found = server.ask("/detect", {"q": "One"})
    assert [one["language"] for one in found] == ["zz", "xx"] and sum(
        one["confidence"] for one in found
    ) == 100
    # What has no words is in no language, and no model is asked.
    slow.go.clear(), other.go.clear()
    _, found = server.ask("/detect", {"q": " 1, 2 ..."})
    assert found == [{"confidence": 0.0, "language": "xx"}, {"confidence": 0.0, "language": "zz"}]
    thread.stop()
    pairs = [("de", "en"), ("de", "fr"), ("zh-Hant", "en")]
    assert list_languages(pairs) == [
        {"code": "de", "name": "German", "targets": ["en", "fr"]},
        {"code": "zh-Hant", "name": "Chinese", "targets": ["en"]},
        {"code": "en", "name": "English", "targets": []},
        {"code": "fr", "name": "French", "targets": []},
    ]
    assert find_models(dict.fromkeys(pairs, 1), "auto", "en") == {"de": 1, "zh-Hant": 1}
    for asked in ("zh-Hant", "zh_Hant", "ZH-HANT"):
        assert find_models(dict.fromkeys(pairs, 1), asked, "EN") == {"zh-Hant": 1}
    for source, target in [("zh", "en"), ("de-AT", "en"), ("de", "en-US")]:
        with pytest.raises(HTTPException, match=f"no model translates from '{source}' to '{target}'"):
            find_models(dict.fromkeys(pairs, 1), source, target)
