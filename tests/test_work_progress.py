"""The progress of long work: what is said, where, and when."""

import io

from flaxformer_mt.tracking.progress_display import Rate, WorkProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_rate_and_time_left_every_few_seconds():
    now = [0.0]
    rate, said = Rate(10_000, "pairs", every=5.0, clock=lambda: now[0]), []
    for time, items in ((0.0, 2000), (1.0, 500), (10.0, 1500), (11.0, 100), (20.0, 1900)):
        now[0] = time
        said.append(rate.add(items))
    # the first 2,000 were there before; 2,000 in 10 seconds
    assert said[2] == "4,000/10,000 pairs | 200 pairs/s | 0:30 left"
    assert said[4] == "6,000/10,000 pairs | 200 pairs/s | 0:20 left"
    assert said[0] == said[1] == said[3] == ""


def test_a_file_receives_lines_and_a_terminal_one_bar_that_disappears(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for stream in (io.StringIO(), Terminal()):
        now = [0.0]
        with WorkProgress(stream, clock=lambda now=now: now[0]).part("counting", total=1000) as count:
            for time, items in ((0.0, 0), (10.0, 400), (11.0, 600)):
                now[0] = time
                count(items)
        lines = stream.getvalue()
        if stream.isatty():
            assert "counting | 1,000/1,000 pairs | 91 pairs/s | 0:00 left" in lines
            assert lines.endswith("\x1b[2K")  # the last thing is that the line is erased
        else:
            assert lines == "400/1,000 pairs | 40 pairs/s | 0:15 left\n"


def test_without_a_stream_nothing_is_said():
    with WorkProgress(None).part("counting", total=2) as count:
        count(1)
        count(1)
