"""The setting `many` of translate.py: many lines from text to text, and what the device waits for.

The model has random weights; its translations are as long as the limit, so that nothing depends on training.
Reported are sentences a second, the processor time of the main thread a sentence, and the share of the time
between the first and the last call of the device in which no call was running (idle).
"""

import argparse
import dataclasses
import queue
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxformer_mt.config import Config, DataConfig, ModelConfig, SearchConfig, VocabConfig
from flaxformer_mt.decoding.compiled_programs import StatePrograms
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.runs.load_run import TrainedModel
from flaxformer_mt.translation.translator import Translator
from flaxformer_mt.vocab import Vocabs, make_vocabs

SIZES = {64: (1, 1, 256), 512: (6, 6, 2048)}


class CallWatch:
    """Notes when the device begins and ends calls of `generate`, which it makes one after the other."""

    def __init__(self) -> None:
        self.busy = self.idle = 0.0
        self.calls = 0
        self._last_end: float | None = None
        self._started: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._generate = StatePrograms.generate

    def __enter__(self) -> "CallWatch":
        watch, generate = self, self._generate

        def watched(programs: StatePrograms, *arguments: Any, **limits: Any) -> Any:
            started = time.perf_counter()
            found = generate(programs, *arguments, **limits)
            watch._started.put((started, found.owners))
            return found

        StatePrograms.generate = watched  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        StatePrograms.generate = self._generate  # type: ignore[method-assign]
        self._started.put(None)
        self._thread.join()

    def _wait(self) -> None:
        while (item := self._started.get()) is not None:
            started, owners = item
            owners.block_until_ready()
            end = time.perf_counter()
            begin = started if self._last_end is None else max(started, self._last_end)
            self.idle += 0.0 if self._last_end is None else max(0.0, started - self._last_end)
            self.busy, self._last_end, self.calls = self.busy + end - begin, end, self.calls + 1


class _Pair:
    def __init__(self, source: str, target: str) -> None:
        self.source, self.target = source, target


def make_translator(lines: list[str], width: int, batch_tokens: int, beam_size: int) -> Translator:
    """Make a model with random weights, and a vocabulary of these lines."""
    encoder, decoder, ffn = SIZES[width]
    model = ModelConfig(
        model_dim=width, ffn_dim=ffn, num_encoder_layers=encoder, num_decoder_layers=decoder, num_heads=4
    )
    search = SearchConfig(
        beam_size=beam_size, max_length_ratio=1.0, max_length_offset=0, batch_tokens=batch_tokens
    )
    config = Config(
        data=DataConfig(max_source_length=128), vocab=VocabConfig(size=8000), model=model, search=search
    )
    with tempfile.TemporaryDirectory() as folder:
        vocabs: Vocabs = make_vocabs(config.vocab, [_Pair(line, line) for line in lines], Path(folder) / "v")
    network = make_model(
        dataclasses.replace(model, scan_layers=False),
        source_size=vocabs.source.size,
        target_size=vocabs.target.size,
    )
    params = init_params(network, jax.random.key(1))
    return Translator(TrainedModel(config, vocabs, params, checkpoint="", progress={}))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Translate the lines several times; return the figures of each round."""
    text = (options.text_dir / "train.de").read_text(encoding="utf-8").split("\n")[:-1]
    lines = (text * (1 + options.lines // len(text)))[: options.lines]
    translator = make_translator(lines, options.width, options.batch_tokens, beam_size=5)
    start = time.perf_counter()
    translator.translate(lines[: min(len(lines), 4000)])
    report: dict[str, Any] = {
        "sentences": len(lines),
        "width": options.width,
        "batch_tokens": options.batch_tokens,
        "device": jax.devices()[0].device_kind,
        "first_call_seconds": round(time.perf_counter() - start, 1),
        "rounds": [],
    }
    for _ in range(options.rounds):
        with CallWatch() as watch:
            start, busy, main = time.perf_counter(), time.process_time(), time.thread_time()
            found = translator.translate(lines)
            main, wall = time.thread_time() - main, time.perf_counter() - start
            busy = time.process_time() - busy
        assert len(found) == len(lines)
        report["rounds"].append(
            {
                "sentences_per_second": round(len(lines) / wall, 1),
                "main_thread_microseconds": round(main / len(lines) * 1e6, 1),
                "processor_seconds": round(busy, 2),
                "device_busy_seconds": round(watch.busy, 3),
                "device_idle_share": round(watch.idle / max(watch.busy + watch.idle, 1e-9), 4),
                "calls": watch.calls,
            }
        )
    lowest = np.median([one["main_thread_microseconds"] for one in report["rounds"]])
    return report | {"main_thread_microseconds": float(lowest)}
