"""Asks a server with OpenAI's interface for n translations of each line, for `distil --candidates`.

ask.py LINES OUTPUT.jsonl --model=NAME --url=http://127.0.0.1:8000/v1 --prompt="Translate to Czech: {line}"
The same command continues after an interruption. A key is in the environment variable OPENAI_API_KEY.
"""

import argparse
import collections
import concurrent.futures
import http.client
import json
import os
import random
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

OPTIONS = {
    "url": ("http://127.0.0.1:8000/v1", "base URL of the server"),
    "model": ("", "name of the model"),
    "prompt": ("", "text or @FILE; {line} is the line, {context} are the lines before it"),
    "context": (0, "lines before a line, up to a blank one, for {context}"),
    "n": (8, "translations of each line"),
    "temperature": (1.0, "temperature of the samples"),
    "max_tokens": (1024, "tokens of an answer; longer ones become empty"),
    "concurrency": (8, "lines that are asked for at a time"),
    "retries": (8, "attempts after the first, with growing pauses"),
    "pause": (1.0, "seconds before the first of them"),
    "timeout": (300.0, "seconds to wait for an answer"),
}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("lines", type=Path, help="text, one sentence per line")
parser.add_argument("output", type=Path, help="JSON lines with a source and its translations")
for name, (default, text) in OPTIONS.items():
    parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default: {default})")
options = parser.parse_args()
if options.prompt.startswith("@") and Path(options.prompt[1:]).is_file():
    options.prompt = Path(options.prompt[1:]).read_text(encoding="utf-8")
if not options.model or "{line}" not in options.prompt or min(options.n, options.concurrency) < 1:
    parser.error("give --model, --prompt with {line}, and --n and --concurrency of at least 1")


def ask(prompt, n):
    """Return up to n answers; end the program if no attempt succeeds."""
    messages = {"messages": [{"role": "user", "content": prompt}], "n": n}
    data = {name: getattr(options, name) for name in ("model", "temperature", "max_tokens")} | messages
    key, headers = os.environ.get("OPENAI_API_KEY"), {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    url, encoded = f"{options.url.rstrip('/')}/chat/completions", json.dumps(data).encode()
    request = urllib.request.Request(url, encoded, headers)
    for attempt in range(options.retries + 1):
        pause = min(60.0, options.pause * 2**attempt) * random.uniform(0.5, 1.0)
        try:
            with urllib.request.urlopen(request, timeout=options.timeout) as answer:
                found = json.load(answer)["choices"]
            return [x.get("finish_reason") != "length" and x["message"]["content"] or "" for x in found]
        except urllib.error.HTTPError as error:
            problem = f"{error} {error.read()[:300].decode(errors='replace')}"
            if error.code not in (408, 409, 429) and error.code < 500:
                break
            wait = error.headers["Retry-After"] or ""
            pause = max(pause, float(wait)) if wait.isdigit() else pause
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
            problem = repr(error)
        if attempt < options.retries:
            time.sleep(pause)
    raise SystemExit(f"error: {url}: {problem}; the same command continues")


def translate(line, before):
    texts, prompt = [], options.prompt.replace("{context}", "\n".join(before)).replace("{line}", line)
    while line and len(texts) < options.n:  # a server may give fewer answers than it is asked for
        answers = ask(prompt, options.n - len(texts)) or [""]
        texts += [re.sub(r"^\s*<think>.*?</think>", "", text, flags=re.S).strip() for text in answers]
    return json.dumps({"source": line, "translations": texts[: options.n]}).encode() + b"\n"


if not options.lines.is_file():
    raise SystemExit(f"error: {options.lines} is no file")
with options.lines.open(encoding="utf-8-sig", newline="\n") as lines, options.output.open("a+b") as output:
    output.seek(0)
    size = sum(len(row) for row in output if row.endswith(b"\n"))
    output.truncate(size)  # a killed command may have written half of a line
    output.seek(0)
    before, tasks = collections.deque(maxlen=options.context), collections.deque()
    with concurrent.futures.ThreadPoolExecutor(options.concurrency) as pool:
        for number, line in enumerate(map(str.strip, lines), start=1):
            if output.tell() >= size:
                tasks.append(pool.submit(translate, line, tuple(before)))
            elif json.loads(output.readline())["source"] != line:
                raise SystemExit(f"error: {options.output} line {number} is of another source")
            before.append(line) if line else before.clear()
            if len(tasks) > 4 * options.concurrency:
                output.write(tasks.popleft().result())
                output.flush()
        for task in tasks:
            output.write(task.result())
            output.flush()
