"""Training metrics: recorded in files, shown to the user."""

from flaxformer_mt.tracking.progress_display import Sample, format_duration
from flaxformer_mt.tracking.tracker import Tracker, read_metrics
