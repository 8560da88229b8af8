"""Requests in, translations out: an engine is driven by `submit` and `step`, as docs/api.md shows."""

import concurrent.futures
import dataclasses
import pickle
import random
import threading
import time

import pytest
from fake_engine import FakeEngine

from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.translation.requests import EngineThread, Request, Stopped, run, run_windows
from flaxformer_mt.translation.result import Annotations, Translation

LINES = ["der Hund", "", "Katze! Buch!", "Milch"]


def test_an_engine_is_driven_by_submit_and_step(shared_translator):
    translator, answers = shared_translator, {}
    engine = translator.engine()
    for number, line in enumerate(LINES):
        engine.submit(Request(line, id=number, n_best=2))
    engine.submit(Request("ein Hund", id="cancelled"), Request("Milch", id="scored", target="milk ."))
    engine.cancel("cancelled")
    while len(engine):
        answers |= dict(engine.step())
    expected = translator.translate(LINES, n_best=2)
    assert [answers.pop(number).tokens for number in range(4)] == [one.tokens for one in expected]
    (scored,) = answers.values()
    assert scored.text == "milk ." and sum(scored.token_log_probs) == pytest.approx(scored.log_prob)


def test_requests_that_arrive_are_answered_as_those_of_a_text(shared_translator):
    """A few steps at a time, with annotations, prefixes and phrases, which may be found in any part."""
    asked = Annotations(alignments="words", token_log_probs=True)
    more = [
        {"annotations": asked},
        {"prefix": "we "},
        {"required": ("red apples",)},
        {"annotations": Annotations(markup=True)},
    ]
    lines = [*LINES[:3], "<b>die Katze</b> {0}"]
    translator, answers = shared_translator, {}
    engine = translator.engine(arriving=True)
    for number, (line, fields) in enumerate(zip(lines, more, strict=True)):
        engine.submit(Request(line, id=number, **fields))
        answers |= dict(engine.step())
    while len(engine):
        answers |= dict(engine.step())
    whole = list(run(translator.engine(), [Request(x, **y) for x, y in zip(lines, more, strict=True)]))
    assert [answers[number].text for number in range(4)] == [one.text for one in whole]
    assert answers[0].alignment == whole[0].alignment and len(answers[0].token_log_probs)
    assert answers[2].satisfied and "red apples" in answers[2].text and answers[2].parts == 2
    assert "<b>" in answers[3].text and answers[3].alignment is None


def test_a_request_travels_as_pickle():
    full = Request(
        *("a", "id", 7, "b", "p", ("x", "y"), 3, "de", "en"),
        Annotations(alignments="pieces", layer=-1),
        ("c", "d"),
        Glossary((("Hund", "dog"),)),
        (0, 2),
    )
    assert all(getattr(full, field.name) != field.default for field in dataclasses.fields(Request))
    assert pickle.loads(pickle.dumps(full)) == full


def shout(request):
    return Translation(request.text.upper(), -1.0, -1.0, (request.seed,))


def test_windows_are_answered_in_order_and_what_is_wrong_is_raised_after_those_before():
    engine = FakeEngine(shout)
    found = run(engine, (Request(str(number), seed=number) for number in range(7)), 3)
    assert [one.tokens[0] for one in found] == list(range(7)) and engine.windows == [3, 3, 1]

    def windows():
        yield [Request("a")]
        raise UserError("line 2 is bad")

    found = run_windows(FakeEngine(shout), windows())
    assert [one.text for one in next(found)] == ["A"]
    with pytest.raises(UserError, match="line 2 is bad"):
        next(found)
    failing = run(FakeEngine(lambda request: ValueError(request.text)), [Request("broken")])
    with pytest.raises(ValueError, match="broken"):
        next(failing)


def test_a_request_whose_client_has_left_is_not_read():
    begun, go, read = threading.Event(), threading.Event(), []

    class Slow(FakeEngine):
        def step(self, **how):
            begun.set()
            go.wait(30)
            return super().step(**how)

        def read(self, requests):
            read.extend(request.text for request in requests)
            return super().read(requests)

    thread = EngineThread(Slow(shout), preparation=[1, 2])
    first = thread.submit(Request("first"))
    begun.wait(30)
    late = thread.submit(Request("late"))
    late.cancel()
    go.set()
    assert first.result(30).text == "FIRST"
    thread.stop()
    assert read == ["first"] and isinstance(thread.failure, Stopped)


def test_a_thread_is_ready_when_its_preparation_has_ended():
    go = threading.Event()

    def prepare():
        while not go.wait(0.01):
            yield 0  # others compile

    thread = EngineThread(FakeEngine(shout), preparation=prepare())
    assert thread.submit(Request("a")).result(30).text == "A" and not thread.is_ready
    go.set()
    while not thread.is_ready:
        time.sleep(0.01)
    assert thread.submit(Request("b")).result(30).text == "B"
    thread.stop()


def test_of_10_000_requests_of_64_clients_none_is_lost_or_mixed():
    class Slow(FakeEngine):
        """Answers some of what waits, in any order."""

        def step(self, *, more=False):
            dice.shuffle(self._waiting)
            rest = self._waiting[len(self._waiting) // 2 :]
            self._waiting = self._waiting[: len(self._waiting) // 2]
            return [(request.id, self._translate(request)) for request in rest]

    dice, thread = random.Random(1), EngineThread(Slow(shout))

    def ask(number):
        return thread.submit(Request(f"line {number}", seed=number)).result(60)

    with concurrent.futures.ThreadPoolExecutor(64) as clients:
        answers = list(clients.map(ask, range(10_000)))
    thread.stop()
    assert [(one.text, one.tokens) for one in answers] == [(f"LINE {n}", (n,)) for n in range(10_000)]
