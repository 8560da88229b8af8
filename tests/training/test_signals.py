"""Being asked to stop: the first signal is noted, the second acts, and handlers are put back."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flaxformer_mt.training.stop_request import StopRequest


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_is_noted_and_said(number, status, capfd):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.received is None
        assert stop.exit_status == 0
        signal.raise_signal(number)
        assert stop.received is number
        assert stop.exit_status == status
    assert signal.getsignal(number) is before
    assert f"{number.name}: saving after this step" in capfd.readouterr().err


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_acts_at_once(second):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopRequest():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(second)
        raise AssertionError("not reached")
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_it_waits_for_nobody():
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(lambda: StopRequest().__enter__().received).result() is None


def test_a_signal_during_a_print_is_no_error():
    """A thousand signals into a process that does nothing but print: none may surface as an exception."""
    program = """
import os, signal, sys
from flaxformer_mt.training.stop_request import StopRequest
with StopRequest() as stop:
    def again(number, frame):
        stop.received = None
        stop._receive(signal.SIGTERM, frame)
        signal.setitimer(signal.ITIMER_REAL, 0.0005)  # not before, or a busy machine would nest them
    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, 0.0005)
    for _ in range(4000):
        print("x" * 200, file=sys.stderr)
    signal.setitimer(signal.ITIMER_REAL, 0)
print(stop.exit_status)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout == "143\n"
    assert "SIGTERM" in done.stderr
