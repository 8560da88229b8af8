"""Training metrics: recorded in files, shown to the user."""

from flaxformer_mt.tracking.metrics_file import read_metrics
from flaxformer_mt.tracking.progress_display import Sample, format_duration
from flaxformer_mt.tracking.tracker import Tracker
