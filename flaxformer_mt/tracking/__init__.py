"""Training metrics: recorded in files, shown to the user."""

from flaxformer_mt.tracking.progress_display import (
    Sample,
    announce_if_slow,
    format_duration,
    format_train_line,
)
from flaxformer_mt.tracking.tracker import Tracker, make_tracker, read_metrics

__all__ = [
    "Sample",
    "Tracker",
    "announce_if_slow",
    "format_duration",
    "format_train_line",
    "make_tracker",
    "read_metrics",
]
