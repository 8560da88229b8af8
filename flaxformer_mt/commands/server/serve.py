"""The command `serve`: loads models, answers requests, and ends after it has answered the last ones."""

import collections
import contextlib
import dataclasses
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flaxformer_mt.commands.options import ServeOptions
from flaxformer_mt.config.directions import find_directions
from flaxformer_mt.config.files import split_checkpoint
from flaxformer_mt.errors import UserError, find_url, importing
from flaxformer_mt.object_store.remote_runs import open_copy
from flaxformer_mt.text_io.lines import open_lines

if TYPE_CHECKING:
    from flaxformer_mt.commands.server.translations import DirectedModel
    from flaxformer_mt.translation.engine import Engine


def serve(options: ServeOptions) -> None:
    with importing("serve", what="serve"):
        from flaxformer_mt.commands.server.app import make_app
        from flaxformer_mt.commands.server.http_server import answer_requests
    _check(options)
    keys = read_keys(options.api_key_file) if options.api_key_file is not None else []
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError):  # macOS, if that is infinite
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # connections are files
    with contextlib.ExitStack() as stack:
        # Bound first: a port that is taken is known before models are loaded.
        address = options.host or os.environ.get("FLAXFORMER_MT_HOST") or "127.0.0.1"
        listener = stack.enter_context(_bind(address, options.port))
        models = _start_models(options, stack)
        app = make_app(models, options, keys=keys, log=log)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        _say(f"serving {', '.join(map('-'.join, models))} at http://{shown}:{port}/ ; Ctrl-C ends the server")
        answer_requests(app, listener, options.timeout, log)
        threads = {model.thread for model in models.values()}
        counts = sum((thread.engine.counts for thread in threads), collections.Counter[str]())
        for counted, count in counts.items():
            _say(f"{counted}: {count:,}")
        _say("all requests are answered; the server ends")


def _start_models(
    options: ServeOptions, stack: contextlib.ExitStack
) -> "dict[tuple[str, str], DirectedModel]":
    """Load and return the models of all language pairs; their threads end with `stack`."""
    from flaxformer_mt.commands.server.model_thread import ModelThread
    from flaxformer_mt.commands.server.translations import add_pivots, direct

    models: dict[tuple[str, str], DirectedModel] = {}
    for path in options.run:
        run, named = split_checkpoint(str(path))
        engine, warm_up, checkpoint = _load(open_copy(run), options, named or options.checkpoint)
        data = engine.config.data
        pairs = find_directions(data)
        if twice := [pair for pair in pairs if pair in models]:
            raise UserError(
                f"two of --run translate from {twice[0].source} to {twice[0].target}; leave one out, or "
                "serve it beside this one, by a command of its own with another --port"
            )
        names = ", ".join(pair.name for pair in pairs)
        preparation = _warm_up(warm_up, f"{path}, {names}") if options.warm_up else ()
        thread = ModelThread(engine, names, preparation=preparation)
        stack.callback(thread.stop, patience=0.5)  # it may be waiting for the compiler
        models |= direct(thread, data, title=f"{find_url(run) or Path(run).name}{checkpoint}")
    return add_pivots(models) if options.pivots else models


def _warm_up(programs: Iterable[object], name: str) -> Iterator[object]:
    """Compile the functions of a model, yield after each, and print messages at the beginning and the end."""
    start = time.monotonic()
    _say(f"{name}: compiling or loading programs; requests are answered meanwhile")
    try:
        yield from programs
    except UserError as error:  # a request that needs the same is told it too
        _say(f"{name}: {error}")
    else:
        _say(f"{name}: all programs are ready after {time.monotonic() - start:.1f} s")


def log(message: str) -> None:
    """Print why a request failed, even with --quiet, which redirects `sys.stderr`."""
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in message)
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {line}", file=sys.__stderr__, flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read_keys(path: Path) -> list[str]:
    """Return the API keys of a file, one per line, without blank lines and lines that begin with #."""
    with open_lines(str(path), "--api_key_file", invalid_utf8="refuse") as text:
        keys = [line.strip() for line in text.lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise UserError(f"--api_key_file={path} has no key; write one a line, or leave out the flag")
    return keys


def _check(options: ServeOptions) -> None:
    for origin in options.cors:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+", origin):
            raise UserError(
                f"--cors has {origin!r}; an origin is such as https://example.org or http://localhost:3000, "
                "in small letters and without a path; * allows any"
            )
    if options.backend == "ctranslate2":
        for name in ("checkpoint", "dtype", "quantization", "shortlist"):
            if (value := getattr(options, name)) is not None:
                raise UserError(
                    f"--{name}={value} has no effect with --backend=ctranslate2, whose folders are used as "
                    "they were exported; leave it out, or give --backend=jax"
                )


def _bind(host: str, port: int) -> socket.socket:
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return socket.create_server(address, family=family, backlog=1024)
    except (OSError, UnicodeError) as error:  # the latter: no name of a host has such parts
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"cannot listen at --host={host} --port={port}: {reason}; give another --port (0: any "
            "free one) or --host"
        ) from error


def _load(
    path: Path, options: ServeOptions, checkpoint: str | None
) -> "tuple[Engine, Iterable[object], str]":
    """Return the engine of a model, an iterable that compiles its functions, and its checkpoint's name."""
    changes: dict[str, Any] = {} if options.beam_size is None else {"beam_size": options.beam_size}
    if options.backend == "ctranslate2":
        from flaxformer_mt.convert.ctranslate2.backend import load_engine

        changes |= {"split_sentences": options.split_sentences, "capitals": options.capitals}
        return load_engine(path, arriving=True, **changes), (), ""
    from flaxformer_mt.config.files import read_config
    from flaxformer_mt.config.load_options import LoadOptions
    from flaxformer_mt.runs.load_run import name_checkpoint
    from flaxformer_mt.scoring.metrics import try_scorers
    from flaxformer_mt.translation.translator import Translator

    search = dataclasses.replace(read_config(path / "config.json").search, **changes)
    loading = dataclasses.replace(LoadOptions.of(options, search), checkpoint=checkpoint)
    translator = Translator.load(path, loading)
    if judge := search.mbr or search.rerank:
        first = find_directions(translator.config.data)[0]
        try_scorers([judge], "search", with_references=bool(search.mbr), direction=first)
    engine: Any = translator.engine(arriving=True)
    name = f", checkpoint {name_checkpoint(translator.checkpoint, translator.step)}"
    return engine, engine.backend.warm_up(), name
