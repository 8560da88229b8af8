"""How long others wait while clients send `serve` requests of hostile sizes.

    PYTHONPATH=. python benchmarks/bystanders.py --run=RUN

Starts a server, waits until its programs are ready, and sends --requests requests at once, of all kinds in
turn: many marks with a glossary, nested tags, unfinished tags, a long text, and a form whose header has many
quotation marks. All are within the server's default limits. Meanwhile a bystander asks for the translation of
a short sentence every second, and another for /health every fifth of a second.

Prints JSON: the slowest answers of both in seconds before and meanwhile, how many there were, and for each
kind the statuses of its answers and the slowest of them.
"""

import argparse
import collections
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve import running_server

SENTENCE = "Der Mann liest ein Buch und die Frau sieht den Hund. "
_FORM = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'


def make_requests(pair: dict[str, str]) -> dict[str, tuple[str, bytes]]:
    """Return the content type and body of each kind of request."""
    terms = "x\ty\n" + " ".join(["Hund"] * 3000) + "\tdog"
    nested = "<b>" * 99 + SENTENCE * 40 + "</b>" * 99 + " Ja."
    bodies: dict[str, dict[str, str]] = {
        "marks": {"q": "(" * 1500, "glossary": "x\ty"},
        "long term": {"q": "Hund " * 400, "glossary": terms},
        "nested tags": {"q": nested, "format": "html"},
        "unfinished tags": {"q": "<a " * 3300, "format": "html"},
        "long text": {"q": SENTENCE * (10_000 // len(SENTENCE))},
    }
    found = {
        kind: ("application/json", json.dumps(fields | pair).encode()) for kind, fields in bodies.items()
    }
    parts = (_FORM % (b'"' * 100_000, b""), b"--x--\r\n")
    return found | {"form": ("multipart/form-data; boundary=x", b"".join(parts))}


def ask(url: str, kind: str = "", body: bytes | None = None) -> tuple[int, float]:
    """Return the status of the answer, 0 if there is none, and the seconds until it was there."""
    start = time.perf_counter()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, body, {"Content-Type": kind}), timeout=300
        ) as response:
            response.read()
            status = response.status
    except urllib.error.HTTPError as error:
        status = error.code
    except OSError:
        status = 0
    return status, round(time.perf_counter() - start, 3)


@contextmanager
def bystanders(url: str, body: bytes) -> Iterator[dict[str, list[tuple[int, float]]]]:
    """Give the answers that bystanders get, as long as the context lasts."""
    ended = threading.Event()
    found: dict[str, list[tuple[int, float]]] = {"translation": [], "health": []}

    def watch(name: str, path: str, content: bytes | None, pause: float) -> None:
        while not ended.wait(pause):
            found[name].append(ask(url + path, "application/json", content))

    threads = [
        threading.Thread(target=watch, args=("translation", "translate", body, 1.0)),
        threading.Thread(target=watch, args=("health", "health", None, 0.2)),
    ]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def summarize(answers: list[tuple[int, float]]) -> dict[str, Any]:
    statuses = collections.Counter(str(status) for status, _ in answers)
    return {"slowest": max((seconds for _, seconds in answers), default=None), "statuses": dict(statuses)}


def measure(
    url: str, pair: dict[str, str], kinds: dict[str, tuple[str, bytes]], count: int
) -> dict[str, Any]:
    """Return what bystanders and requests of these kinds got."""
    body = json.dumps({"q": "Der Hund.", **pair}).encode()
    with bystanders(url, body) as before:
        time.sleep(5)
    sent = [list(kinds)[number % len(kinds)] for number in range(count)]
    with bystanders(url, body) as meanwhile, ThreadPoolExecutor(count) as threads:
        answers = list(threads.map(lambda kind: ask(url + "translate", *kinds[kind]), sent))
        time.sleep(2)
    of_kind = {
        kind: [answer for name, answer in zip(sent, answers, strict=True) if name == kind] for kind in kinds
    }
    return {
        "before": {name: summarize(found) for name, found in before.items()},
        "meanwhile": {name: summarize(found) for name, found in meanwhile.items()},
        "requests": {kind: summarize(found) for kind, found in of_kind.items() if found},
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", type=Path, required=True, help="a run directory, or an export for ctranslate2"
    )
    parser.add_argument("--backend", choices=("jax", "ctranslate2"), default="jax")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--kinds", default=",".join(make_requests({})))
    options = parser.parse_args()
    with running_server(options.run, options.backend) as url:
        with urllib.request.urlopen(url + "languages") as response:
            language = json.load(response)[0]
        pair = {"source": language["code"], "target": language["targets"][0]}
        kinds = {name: one for name, one in make_requests(pair).items() if name in options.kinds.split(",")}
        result = measure(url, pair, kinds, options.requests)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
