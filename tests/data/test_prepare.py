"""Preparation: what takes long is said before it is done."""

import contextlib

from flaxformer_mt.data import prepare as preparing


def test_each_stage_that_takes_long_is_said(tiny_config, monkeypatch):
    events = []

    @contextlib.contextmanager
    def announce(text, say):
        say(text)
        yield

    monkeypatch.setattr(preparing, "announce_if_slow", announce)
    preparing.prepare(tiny_config, say=events.append)
    assert events == [
        "reading and checking parallel_text ...",
        "training the vocabulary (bpe, 40 pieces) ...",
        "tokenizing 64 pairs ...",
    ]
    monkeypatch.undo()
    preparing.prepare(tiny_config, say=events.append)
    assert len(events) == 3  # quick, since everything is in the cache
