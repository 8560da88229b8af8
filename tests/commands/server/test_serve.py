"""The command `serve`: its flags, and a process that answers what it has begun when it is told to end."""

import contextlib
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny_experiment import quick_environment

from flaxformer_mt.commands.main import _speak, main
from flaxformer_mt.commands.server.serve import log

uvicorn = pytest.importorskip("uvicorn", reason="the server needs the extra serve")


def test_a_container_names_the_address_by_its_environment(monkeypatch, capsys):
    monkeypatch.setenv("FLAXFORMER_MT_HOST", "256.0.0.2")
    for flags, address in ([], "256.0.0.2"), (["--host=256.0.0.3"], "256.0.0.3"):
        assert main(["serve", "--run=a", *flags]) == 2
        assert f"cannot listen at --host={address}" in capsys.readouterr().err


def test_a_quiet_server_logs_failed_requests(capfd):
    with _speak("error"):
        log("500 POST /translate from 127.0.0.1: KeyError")
    assert capfd.readouterr().err.endswith(" 500 POST /translate from 127.0.0.1: KeyError\n")


def test_mistakes_are_named(tiny_run, tmp_path, capsys):
    keys = tmp_path / "keys"
    keys.write_text("# no key\n\n")
    for flags, named in [
        (["--port=70000"], "65535"),
        ([f"--api_key_file={keys}"], "has no key"),
        ([f"--api_key_file={keys}x"], "does not exist; did you mean"),
        (["--host=256.0.0.1"], "cannot listen"),
        (["--cors=https://example.org/", "--host=.a"], "--cors has 'https://example.org/'"),
        (["--cors=*,localhost:3000"], "--cors has 'localhost:3000'"),
        (["--cors=https://example.org", "--host=.a"], "cannot listen at --host=.a"),
        (["--backend=ctranslate2", "--dtype=float32"], "--dtype=float32 has no effect"),
        (["--backend=ctranslate2", "--quantization=int8"], "--quantization=int8 has no effect"),
        (["--backend=ctranslate2", "--shortlist=a"], "--shortlist=a has no effect"),
        (["--backend=ctranslate2", "--port=0"], "no model.bin"),
        ([f"--run={tiny_run}", "--port=0", "--warm_up=False"], "two of --run translate from xx to yy"),
    ]:
        assert main(["serve", f"--run={tiny_run}", *flags]) == 2
        assert named in capsys.readouterr().err, flags


@contextlib.contextmanager
def started(*command: object):
    """A process that serves, and its address."""
    command = [*map(str, command)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=quick_environment())
    try:
        line = next(line for line in process.stderr if "serving" in line)
        yield process, re.search(r"http://127\.0\.0\.1:\d+/", line)[0]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_sigterm_ends_the_process_when_all_that_was_begun_is_answered(tiny_run):
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limited = ["sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh"]
    flags = ["serve", f"--run={tiny_run}", "--port=0", "--warm_up=False", "--max_waiting=5000"]
    with started(*limited, sys.executable, "-m", "flaxformer_mt", *flags) as (process, url):
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert limits == (most_files, most_files), "connections are files"
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2][:-1]))) as client:
            client.sendall(b"this is no HTTP\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 400 ")
        texts = ["ba do", "gu fi ka"] * 100
        body = json.dumps({"q": texts, "source": "xx", "target": "yy"}).encode()
        request = urllib.request.Request(url + "translate", body, {"Content-Type": "application/json"})
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(_read, request)
            while "waiting_lines 200" not in _read(url + "metrics"):
                assert not answer.done(), "the request was answered before the signal"
            process.send_signal(signal.SIGTERM)
            found = json.loads(answer.result())["translatedText"]
        assert len(found) == 200 and found[:2] * 100 == found
        assert process.wait(timeout=60) == 0
        bad_request, *_, end = process.stderr.read().rstrip("\n").split("\n")
        assert "Invalid HTTP request" in bad_request and end == "all requests are answered; the server ends"


def test_ctrl_c_ends_a_server_that_compiles(tiny_run):
    """Every function sleeps where it would be compiled."""
    program = """
import signal, sys, time
from flaxformer_mt.commands.launch import launch
from flaxformer_mt.decoding import compiled_programs
compiled_programs.lower_kept = lambda *arguments: time.sleep(100)
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let programs in the background ignore it
launch(["serve", sys.argv[1], "--port=0"])
"""
    with started(sys.executable, "-c", program, tiny_run) as (process, url):
        assert json.loads(_read(url + "health"))["ready"] is False  # uvicorn has its handlers now
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130, "it does not wait for the compiler"
        assert process.stderr.read().strip().endswith("all requests are answered; the server ends")


def _read(url: str | urllib.request.Request) -> str:
    with urllib.request.urlopen(url, timeout=100) as response:
        return response.read().decode()
