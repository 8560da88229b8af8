"""The benchmark of the server: its texts, and that each answer belongs to the line that was sent."""

import importlib.util
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "serve.py"


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(FILE.parent))  # as when it is run as a script
    spec = importlib.util.spec_from_file_location("benchmark_serve", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(FILE.parent))
    return module


class Capitals(BaseHTTPRequestHandler):
    """Translates to capitals, and has 3 MiB of memory."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert (self.path, fields["source"], fields["target"]) == ("/translate", "de", "en")
        self.answer(json.dumps({"translatedText": fields["q"].upper()}))

    def do_GET(self):
        self.answer("# TYPE x gauge\nflaxformer_mt_resident_bytes 3.14573e+06\n")

    def answer(self, text):
        self.send_response(200)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


def test_texts_are_sent_by_several_clients_and_answers_are_in_order(benchmark):
    texts = benchmark.make_texts([f"wort{number}" for number in range(100)], 60)
    assert texts == benchmark.make_texts([f"wort{number}" for number in range(100)], 60)
    counts = {len(text.split()) for text in texts}
    assert min(counts) < 5 and 35 < max(counts) <= 40
    with ThreadingHTTPServer(("127.0.0.1", 0), Capitals) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        figures, found = benchmark.measure(url, texts, ("de", "en"), 4)
        server.shutdown()
    assert found == [text.upper() for text in texts]
    assert (figures["clients"], figures["requests"], figures["mib"]) == (4, 60, [3.0] * 11)
    assert 0 < figures["p50_ms"] <= figures["p95_ms"] <= figures["p99_ms"] and figures["per_second"] > 0
