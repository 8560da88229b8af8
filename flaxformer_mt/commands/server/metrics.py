"""Prometheus metrics: counts and durations since the server started."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from flaxformer_mt.commands.server.languages import Pair
from flaxformer_mt.commands.server.translations import DirectedModel, Translations
from flaxformer_mt.translation.copied_text import CopiedText
from flaxformer_mt.translation.letter_case import LetterCase

# Upper bounds in seconds of the classes of durations.
_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
disable_created_metrics()


class Metrics:
    def __init__(self, models: Mapping[Pair, DirectedModel], translations: Translations) -> None:
        self._threads = {model.thread for model in models.values()}
        self._translations = translations
        self._registry = CollectorRegistry()
        common: dict[str, Any] = {"namespace": "flaxformer_mt", "registry": self._registry}
        self.requests = Counter("requests", "Requests answered.", ("path", "status"), **common)
        self.lines = Counter("lines", "Source lines translated.", **common)
        self.characters = Counter("characters", "Source characters translated.", **common)
        self.seconds = Histogram(
            "seconds", "Seconds from a request to its translation.", buckets=_BOUNDS, **common
        )
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that other objects count; the registry calls this for each report."""
        engines = [thread.engine for thread in self._threads]
        meaning = "Sentences whose letter case was changed, and texts without letters that were copied."
        guarded = CounterMetricFamily("flaxformer_mt_guarded", meaning, labels=("guard",))
        for guard, step in (("capitals", LetterCase), ("copies", CopiedText)):
            guarded.add_metric((guard,), sum(engine.counts[step.counted] for engine in engines))
        yield guarded
        active = sum(engine.backend.num_active for engine in engines)
        for name, meaning, value in (
            ("waiting_lines", "Lines that are not answered yet.", self._translations.num_waiting),
            ("active_sentences", "Sentences that are being searched.", active),
            ("resident_bytes", "Memory of the server.", _resident_bytes()),
        ):
            yield GaugeMetricFamily(f"flaxformer_mt_{name}", meaning, value)

    def format(self) -> bytes:
        return generate_latest(self._registry)


def _resident_bytes() -> int:
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0
