"""`recipes/teachers/ask.py` against a server that fails in several ways, and killed half way."""

import collections
import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "recipes" / "teachers" / "ask.py"
LINES = ["one", "two", "", "three", "four", "five", "six", "seven"]


class Server(http.server.ThreadingHTTPServer):
    """Answers with `errors`, then after `delay` seconds with the prompt in capitals, at most two times."""

    def handle_error(self, *request):  # the program does not wait for slow answers
        pass

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.errors, self.delay, self.bodies, self.keys = collections.deque(), 0.0, [], set()
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Answers(http.server.BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.add(self.headers["Authorization"])
        error = self.server.errors.popleft() if self.server.errors else None
        if error == "closed":
            return
        if isinstance(error, int):
            self.send_response(error)
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(b"busy, or wrong")
            return
        time.sleep(self.server.delay if error is None else 5)
        self.server.bodies.append(body)
        text = body["messages"][0]["content"].upper()
        choices = [{"message": {"content": text}, "finish_reason": "stop"}] * min(2, body["n"])
        reply = b'{"choices": 1' if error == "half" else json.dumps({"choices": choices}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(reply)


@pytest.fixture
def server():
    with Server() as running:
        yield running
        running.shutdown()


@pytest.fixture
def command(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    return [sys.executable, str(PROGRAM), str(tmp_path / "in"), str(tmp_path / "out.jsonl"), "--model=m",
            f"--url={server.url}", "--prompt={context}>{line}", "--context=1", "--n=3", "--pause=0.01",
            "--timeout=1", "--concurrency=2"]  # fmt: skip


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


BEFORE = ["", "one", "", "", "three", "four", "five", "six"]
EXPECTED = [
    {"source": line, "translations": [f"{before}>{line}".upper()] * 3 if line else []}
    for line, before in zip(LINES, BEFORE, strict=True)
]


def test_errors_slow_answers_and_fewer_answers_than_asked_for(server, command, tmp_path):
    server.errors.extend([429, 500, "slow", "half", "closed", 503])
    subprocess.run(command, check=True)
    assert read(tmp_path / "out.jsonl") == EXPECTED
    assert server.keys == {"Bearer secret"}
    assert {body["n"] for body in server.bodies} == {3, 1} and server.bodies[0]["temperature"] == 1.0
    before = len(server.bodies)
    subprocess.run(command, check=True)  # all is done
    assert len(server.bodies) == before


def test_a_killed_program_continues_with_the_line_after_the_last_whole_one(server, command, tmp_path):
    server.delay, output = 0.1, tmp_path / "out.jsonl"
    program = subprocess.Popen(command)
    while not output.exists() or output.read_bytes().count(b"\n") < 2:
        time.sleep(0.02)
    program.send_signal(signal.SIGKILL)
    program.wait()
    with output.open("ab") as file:
        file.write(b'{"source": "thr')
    done, asked = output.read_bytes().count(b"\n"), len(server.bodies)
    subprocess.run(command, check=True)
    assert read(output) == EXPECTED
    prompts = {body["messages"][0]["content"] for body in server.bodies[asked + 2 :]}
    assert not prompts & {
        f"{before}>{line}" for line, before in zip(LINES[:done], BEFORE[:done], strict=True)
    }


def test_mistakes_are_one_line(server, command, tmp_path):
    server.errors.append(401)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "401" in done.stderr
    for flags, message in (
        (["--n=0"], "at least 1"),
        (["--prompt=x"], "--prompt with {line}"),
        ([], "line 1 is of another source"),
    ):
        (tmp_path / "out.jsonl").write_text(json.dumps({"source": "other", "translations": []}) + "\n")
        done = subprocess.run([*command, *flags], capture_output=True, text=True)
        assert done.returncode != 0 and message in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
