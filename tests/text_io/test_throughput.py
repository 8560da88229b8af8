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


COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.mark.parametrize(
    ("options", "events", "expected"),
    [
        # Of seconds, those of compilation among them, lines and tokens. What takes a moment says nothing.
        ({"total": 10}, [(0.4, 0, 1, 7)] * 10, []),
        ({"total": 7, "quiet": True}, [(60.0, 0, 1, 7)], []),
        # As it was when the last lines before this moment were complete.
        (
            {"total": 100},
            [(1.0, 0, 2, 30)] * 50,
            ["58/100 lines | 2.0 lines/s | 30 target tokens/s | 0:21 left"]
            + ["100/100 lines | 2.0 lines/s | 30 target tokens/s | 0:50 in total"],
        ),
        # Neither compilation nor the lines of an earlier command count as speed.
        (
            {"total": 2040, "done": 1000},
            [(20.0, 20, 0, 0), (20.0, 0, 40, 400), (1.0, 0, 2, 20)],
            ["1,040/2,040 lines | 2.0 lines/s | 20 target tokens/s | compile/load 0:20 | 8:20 left"]
            + [
                "1,042/2,040 lines | 2.0 lines/s | 20 target tokens/s | compile/load 0:20 | 8:19 left"
                " | 0:41 in total"
            ],
        ),
        # What compiles after the last lines is not taken from their time.
        (
            {"total": 100},
            [(25.0, 0, 50, 500), (30.0, 30, 50, 500)],
            ["50/100 lines | 2.0 lines/s | 20 target tokens/s | 0:25 left"]
            + ["100/100 lines | 4.0 lines/s | 40 target tokens/s | compile/load 0:30 | 0:55 in total"],
        ),
    ],
    ids=["a moment", "quiet", "now and then", "compiling", "compiling later"],
)
def test_what_is_said(clock, options, events, expected):
    stream = io.StringIO()
    with Throughput(stream=stream, clock=clock, **options) as throughput:
        for seconds, compiling, lines, tokens in events:
            clock.now += seconds
            if compiling:
                throughput._compile_clock.listen(COMPILED, float(compiling))
                throughput._compile_clock.listen("/jax/some/other/thing", 99.0)
            if lines:
                throughput.add(lines=lines, tokens=tokens)
    assert stream.getvalue().splitlines() == expected


def test_programs_that_threads_compile_at_the_same_time_take_it_once(clock):
    stream = io.StringIO()
    with Throughput(stream=stream, clock=clock) as throughput:
        for seconds, at in ((3.0, 4.0), (1.0, 4.5), (2.0, 8.0), (9.0, 9.5), (1.0, 11.5)):
            clock.now = 100.0 + at  # compiled from 0.5 to 9.5 and from 10.5 to 11.5
            throughput._compile_clock.listen(COMPILED, seconds)
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


def test_the_first_line_of_a_window_does_not_spoil_the_rates(clock):
    """A window of 2,048 lines arrives at once, after all of its time; without a total no time is left."""
    for total, left in ((6144, [" | 1:04 left", " | 0:32 left"]), (None, ["", ""])):
        of, shown = "" if total is None else "/6,144", []
        with Throughput(total=total, stream=Terminal(), clock=clock) as throughput:
            throughput._show = shown.append
            for _ in range(3):
                clock.now += 32.0
                for _ in range(2048):
                    throughput.add(tokens=10)
        rates = "lines | 64.0 lines/s | 640 target tokens/s"
        assert shown == [f"2,048{of} {rates}{left[0]}", f"4,096{of} {rates}{left[1]}"]


def test_one_line_is_singular(clock):
    for total, expected in ((1, "1/1 line"), (None, "1 line"), (2, "1/2 lines")):
        throughput = Throughput(total=total, stream=io.StringIO(), clock=clock)
        throughput.add(tokens=3)
        assert throughput.format(clock.now + 2).startswith(f"{expected} |")
