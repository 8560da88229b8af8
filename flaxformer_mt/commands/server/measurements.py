"""What the server counts, and its form for Prometheus."""

import bisect
import collections
import os
from collections.abc import Mapping
from pathlib import Path

# Upper bounds in seconds of the classes of durations.
_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Measurements:
    """Counts of requests, lines and seconds since the server started; for the thread that answers alone."""

    def __init__(self) -> None:
        self._requests: collections.Counter[tuple[str, int]] = collections.Counter()
        self._durations = [0] * (len(_BOUNDS) + 1)
        self._seconds = 0.0
        self._totals = {"lines": 0, "characters": 0}

    def add_request(self, path: str, status: int, seconds: float) -> None:
        """Count a request that was answered; only the durations of translations are kept."""
        self._requests[path, status] += 1
        if path == "/translate" and status == 200:
            self._durations[bisect.bisect_left(_BOUNDS, seconds)] += 1
            self._seconds += seconds

    def add_text(self, *, lines: int, characters: int) -> None:
        """Count the lines and characters of a request that was translated."""
        self._totals["lines"] += lines
        self._totals["characters"] += characters

    def format(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Return all counts as text for Prometheus.

        Args:
          gauges: name -> what it means, and its present value.
        """
        rows = _head("requests_total", "counter", "Requests answered.")
        for (path, status), count in sorted(self._requests.items()):
            rows.append(f'flaxformer_mt_requests_total{{path="{path}",status="{status}"}} {count}')
        for name, count in self._totals.items():
            rows += _head(f"{name}_total", "counter", f"Source {name} translated.")
            rows.append(f"flaxformer_mt_{name}_total {count}")
        rows += _head("seconds", "histogram", "Seconds from a request to its translation.")
        below = 0
        for bound, count in zip([*map(str, _BOUNDS), "+Inf"], self._durations, strict=True):
            below += count
            rows.append(f'flaxformer_mt_seconds_bucket{{le="{bound}"}} {below}')
        rows += [f"flaxformer_mt_seconds_sum {self._seconds:.6f}", f"flaxformer_mt_seconds_count {below}"]
        for name, (meaning, value) in gauges.items():
            rows += [*_head(name, "gauge", meaning), f"flaxformer_mt_{name} {value:g}"]
        return "\n".join(rows) + "\n"


def _head(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP flaxformer_mt_{name} {meaning}", f"# TYPE flaxformer_mt_{name} {kind}"]


def resident_bytes() -> int:
    """Return the memory of this process in bytes; 0 on systems without /proc."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0
