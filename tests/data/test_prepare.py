"""Preparation: the parts of the work, as they are shown."""

import contextlib

from flaxformer_mt.data import prepare as preparing
from flaxformer_mt.tracking.work_progress import WorkProgress


def test_each_part_that_takes_long_is_shown(tiny_config):
    parts = []

    class Progress(WorkProgress):
        @contextlib.contextmanager
        def part(self, name, **options):
            counts = []
            yield counts.append
            parts.append((name, options.get("total"), sum(counts)))

    preparing.prepare(tiny_config, progress=Progress(None))
    assert parts == [
        ("reading parallel_text", None, 0),
        ("checking parallel_text", 64, 64),
        ("training the vocabulary (bpe, 40 pieces)", None, 0),
        ("tokenizing", 64, 64),
    ]
