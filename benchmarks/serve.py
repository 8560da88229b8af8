"""Requests a second and latency of `serve`, and whether each answer is the translation of its own line.

    PYTHONPATH=. python benchmarks/serve.py --run=RUN

Starts a server for each system, ours and CTranslate2 (float32, exported from the run) behind the same
interface, one after the other. Clients send one request after the other over connections that stay open, 1, 8
and 64 clients at a time, all from one process beside the server. A request is a text of 1 to 40 words: words
that follow each other in the sources of the run's test set.

Prints JSON: for each system and number of clients the requests a second, the 50th, 95th and 99th percentile
of the latency in milliseconds, and the server's memory in MiB at the beginning and after each tenth of the
time; and for ours how many answers differ from what the command `translate` writes for the same lines.
--requests is the number for the most clients; fewer clients send fewer, in proportion to their number, but at
least 200.
"""

import argparse
import asyncio
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from systems import choose_systems, require_packages

from flaxformer_mt.config.files import read_config
from flaxformer_mt.convert.export_run import export_run
from flaxformer_mt.corpus.reader import read_pairs

CLIENTS = (1, 8, 64)
LONGEST = 40


def make_texts(words: Sequence[str], count: int) -> list[str]:
    """Return texts of 1 to 40 words that follow each other, the same ones in every call."""
    dice = random.Random(1)
    texts = []
    for _ in range(count):
        length = dice.randint(1, LONGEST)
        first = dice.randrange(max(1, len(words) - length))
        texts.append(" ".join(words[first : first + length]))
    return texts


def read_words(run: Path) -> list[str]:
    """Return the words of the sources of the run's test set."""
    pairs = read_pairs(read_config(run / "config.json").data, "test")
    return [word for source, _ in itertools.islice(iter(pairs), 3000) for word in source.split()]


@contextmanager
def running_server(folder: Path, backend: str) -> Iterator[str]:
    """Start `serve` and give its address; check that it ends as it should."""
    command = [sys.executable, "-m", "flaxformer_mt", "serve", f"--run={folder}", "--port=0"]
    process = subprocess.Popen([*command, f"--backend={backend}"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url, ready = "", False
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if found := re.search(r" at (http://\S+/)", line):
                url = found[1]
            ready |= "all programs are ready" in line
            if url and ready:
                break
        else:
            raise SystemExit("the server did not start")
        yield url
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 0 and rest.endswith("the server ends\n"), rest
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def read_memory(url: str) -> float:
    """Return the memory of a server in MiB."""
    with urllib.request.urlopen(url + "metrics") as response:
        found = re.search(r"^flaxformer_mt_resident_bytes (\S+)$", response.read().decode(), re.M)
    assert found is not None
    return round(float(found[1]) / 2**20, 1)


@contextmanager
def memory_samples(url: str) -> Iterator[list[float]]:
    """Give a list that gets the server's memory in MiB now, every second, and at the end."""
    samples, ended = [read_memory(url)], threading.Event()

    def sample() -> None:
        while not ended.wait(1):
            samples.append(read_memory(url))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
    samples.append(read_memory(url))


async def send_all(
    url: str, texts: Sequence[str], pair: tuple[str, str], clients: int
) -> tuple[list[str], list[float]]:
    """Send a request for each text; return the translations, and the seconds that each took."""
    _, host, port = re.split(r"://|:", url.rstrip("/"))
    translations, seconds = [""] * len(texts), [0.0] * len(texts)
    waiting = iter(range(len(texts)))

    async def work() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for number in waiting:
            body = json.dumps({"q": texts[number], "source": pair[0], "target": pair[1]}).encode()
            start = time.perf_counter()
            writer.write(
                b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert head.startswith(b"HTTP/1.1 200 ") and length is not None, head
            answer = json.loads(await reader.readexactly(int(length[1])))
            seconds[number] = time.perf_counter() - start
            translations[number] = answer["translatedText"]
        writer.close()

    await asyncio.gather(*(work() for _ in range(clients)))
    return translations, seconds


def measure(
    url: str, texts: Sequence[str], pair: tuple[str, str], clients: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the figures of one number of clients, and the translations."""
    start = time.perf_counter()
    with memory_samples(url) as memory:
        translations, seconds = asyncio.run(send_all(url, texts, pair, clients))
    took, ordered = time.perf_counter() - start, sorted(seconds)
    percentiles = {
        f"p{share}_ms": round(1000 * ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 1)
        for share in (50, 95, 99)
    }
    figures = {"clients": clients, "requests": len(texts), "per_second": round(len(texts) / took, 1)}
    return figures | percentiles | {
        "mib": [memory[len(memory) * tenth // 10] for tenth in range(10)] + memory[-1:]
    }, translations


def compare(
    run: Path, work: Path, *, requests: int, clients: Sequence[int], systems: Sequence[str]
) -> dict[str, Any]:
    """Measure all systems."""
    config, words = read_config(run / "config.json"), read_words(run)
    pair = (config.data.source_language, config.data.target_language)
    texts = make_texts(words, requests)
    (work / "texts").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    result: dict[str, Any] = {"run": str(run), "words": f"1 to {LONGEST}"}
    for system in systems:
        folder = run
        if system == "ctranslate2":
            folder = work / "ctranslate2"
            export_run(run, format_name="ctranslate2", output=folder)
        with running_server(folder, "jax" if system == "ours" else system) as url:
            asyncio.run(send_all(url, texts[:64], pair, 8))
            rows = []
            for count in clients:
                number = min(requests, max(200, requests * count // max(clients)))
                figures, found = measure(url, texts[:number], pair, count)
                print(system, figures, file=sys.stderr)
                rows.append(figures)
        result[system] = rows
        if system == "ours":
            translate = [sys.executable, "-m", "flaxformer_mt", "translate", f"--run={run}"]
            files = [f"--input={work / 'texts'}", f"--output={work / 'expected'}", "--overwrite"]
            subprocess.run([*translate, *files], check=True, stderr=subprocess.DEVNULL)
            expected = (work / "expected").read_text(encoding="utf-8").split("\n")
            result["answers_that_differ"] = sum(
                one != other for one, other in zip(found, expected, strict=False)
            )
            result["answers_compared"] = len(found)
    return result


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", default=",".join(map(str, CLIENTS)))
    parser.add_argument("--systems", default="ours,ctranslate2")
    options = parser.parse_args()
    systems = choose_systems(parser, options.systems, ("ctranslate2",))
    require_packages(systems)
    with tempfile.TemporaryDirectory() as work:
        result = compare(
            options.run,
            Path(work),
            requests=options.requests,
            clients=[int(count) for count in options.clients.split(",")],
            systems=systems,
        )
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
