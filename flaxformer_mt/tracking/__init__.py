"""Records training metrics in files and services, and shows them to the user."""

from flaxformer_mt.tracking.metrics_file import read_metrics
from flaxformer_mt.tracking.progress_display import Sample, format_duration
from flaxformer_mt.tracking.tracker import Tracker
