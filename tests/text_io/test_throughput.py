"""What is said of the speed: nothing at first, then lines, tokens, and the time left; compiling apart."""

import io

import jax
import pytest

from flaxformer_mt.text_io.throughput import Throughput


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock():
    return Clock()


def test_nothing_is_said_of_what_takes_a_moment(clock):
    stream = io.StringIO()
    with Throughput(total=10, stream=stream, clock=clock) as throughput:
        for _ in range(10):
            clock.now += 0.4
            throughput.add(tokens=7)
    assert stream.getvalue() == ""


def test_now_and_then_a_line_and_one_at_the_end(clock):
    stream = io.StringIO()
    with Throughput(total=100, stream=stream, clock=clock) as throughput:
        for _ in range(50):
            clock.now += 1.0
            throughput.add(lines=2, tokens=30)
    first, last = stream.getvalue().rstrip("\n").split("\n")
    # as it was when the last lines before this moment were complete
    assert first == "58/100 lines | 2.0 lines/s | 30 target tokens/s | 0:21 left"
    assert last == "100/100 lines | 2.0 lines/s | 30 target tokens/s | 0:50 in total"


def test_compiling_and_an_earlier_run_do_not_count_as_speed(clock):
    stream = io.StringIO()
    with Throughput(total=2040, done=1000, stream=stream, clock=clock) as throughput:
        clock.now += 20.0
        throughput._compile_clock.listen("/jax/core/compile/backend_compile_duration", 20.0)
        throughput._compile_clock.listen("/jax/some/other/thing", 99.0)
        clock.now += 20.0
        throughput.add(lines=40, tokens=400)
        clock.now += 1.0
        throughput.add(lines=2, tokens=20)
    first, last = stream.getvalue().rstrip("\n").split("\n")
    assert first == "1,040/2,040 lines | 2.0 lines/s | 20 target tokens/s | compile/load 0:20 | 8:20 left"
    assert last.endswith("0:41 in total")


def test_compiling_after_the_last_lines_is_not_taken_from_their_time(clock):
    stream = io.StringIO()
    with Throughput(total=100, stream=stream, clock=clock) as throughput:
        clock.now += 25.0
        throughput.add(lines=50, tokens=500)
        clock.now += 30.0
        throughput._compile_clock.listen("/jax/core/compile/backend_compile_duration", 30.0)
        throughput.add(lines=50, tokens=500)
    first, last = stream.getvalue().rstrip("\n").split("\n")
    assert first == "50/100 lines | 2.0 lines/s | 20 target tokens/s | 0:25 left"
    assert last == "100/100 lines | 4.0 lines/s | 40 target tokens/s | compile/load 0:30 | 0:55 in total"


def test_programs_that_threads_compile_at_the_same_time_take_it_once(clock):
    stream = io.StringIO()
    with Throughput(stream=stream, clock=clock) as throughput:
        for seconds, at in ((3.0, 4.0), (1.0, 4.5), (2.0, 8.0), (9.0, 9.5), (1.0, 11.5)):
            clock.now = 100.0 + at  # compiled from 0.5 to 9.5 and from 10.5 to 11.5
            throughput._compile_clock.listen("/jax/core/compile/backend_compile_duration", seconds)
        clock.now = 120.0
        throughput.add(lines=20, tokens=200)
    assert stream.getvalue() == (
        "20 lines | 2.0 lines/s | 20 target tokens/s | compile/load 0:10 | 0:20 in total\n"
    )


def test_what_jax_compiles_is_heard_and_only_while_it_lasts():
    with Throughput(stream=io.StringIO()) as throughput:
        jax.jit(lambda x: x * 3 + 1)(2.0).block_until_ready()
    heard = throughput._compile_clock.compiling()
    assert heard > 0
    jax.jit(lambda x: x * 5 + 1)(2.0).block_until_ready()
    assert throughput._compile_clock.compiling() == heard


def test_quiet_is_quiet(clock):
    stream = io.StringIO()
    with Throughput(quiet=True, stream=stream, clock=clock) as throughput:
        clock.now += 60.0
        throughput.add(tokens=7)
    assert stream.getvalue() == ""


def test_without_a_total_no_time_is_left(clock):
    stream = Terminal()
    with Throughput(stream=stream, clock=clock) as throughput:
        clock.now += 6.0
        throughput.add(lines=12, tokens=60)
        clock.now += 1.0
        throughput.add(lines=2, tokens=10)
    written = stream.getvalue()
    assert "14 lines | 2.0 lines/s | 10 target tokens/s" in written and "left" not in written
    assert written.rstrip("\n").endswith("0:07 in total")


def test_the_first_line_of_a_window_does_not_spoil_the_rates(clock):
    """A window of 2,048 lines arrives at once, after all of its time."""
    stream = Terminal()
    with Throughput(total=6144, stream=stream, clock=clock) as throughput:
        shown = []
        throughput._show = shown.append
        for _ in range(3):
            clock.now += 32.0
            for _ in range(2048):
                throughput.add(tokens=10)
    assert shown == [
        "2,048/6,144 lines | 64.0 lines/s | 640 target tokens/s | 1:04 left",
        "4,096/6,144 lines | 64.0 lines/s | 640 target tokens/s | 0:32 left",
    ]


def test_one_line_is_singular(clock):
    for total, done in [(1, 1), (None, 1)]:
        throughput = Throughput(total=total, stream=io.StringIO(), clock=clock)
        throughput.add(lines=done, tokens=3)
        assert throughput.format(clock.now + 2).split(" | ")[0] in ("1/1 line", "1 line")
    assert Throughput(total=2, stream=io.StringIO(), clock=clock).format(clock.now).startswith("0/2 lines")
