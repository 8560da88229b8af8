"""Requests in, translations out: an engine is driven by `submit` and `step`, as docs/api.md shows."""

import dataclasses
import threading

import pytest
from fake_engine import FakeBackend, fake_engine

from flaxformer_mt.commands.server.model_thread import ModelThread, Stopped
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import Annotations, Translation

LINES = ["der Hund", "", "Katze! Buch!", "Milch"]


def answer_all(engine):
    answers = {}
    while len(engine):
        answers |= dict(engine.step())
    return answers


def test_an_engine_is_driven_by_submit_and_step(shared_translator):
    engine = shared_translator.engine()
    for number, line in enumerate(LINES):
        engine.submit(Request(line, id=number, n_best=2))
    engine.submit(Request("ein Hund", id="cancelled"))
    engine.cancel("cancelled"), engine.cancel("absent")
    answers, expected = answer_all(engine), shared_translator.translate(LINES, n_best=2)
    assert [answers.pop(number).tokens for number in range(4)] == [one.tokens for one in expected]
    assert not answers


def test_requests_that_arrive_are_answered_as_those_of_a_text(shared_translator):
    """A few steps at a time, with annotations, prefixes and phrases."""
    asked = Annotations(alignments="words", token_log_probs=True)
    more = [
        {"annotations": asked},
        {"prefix": "we "},
        {"required": ("red apples",)},
        {"annotations": Annotations(markup=True)},
    ]
    lines = [*LINES[:3], "<b>die Katze</b> {0}"]
    requests = [Request(line, **fields) for line, fields in zip(lines, more, strict=True)]
    engine, answers = shared_translator.engine(arriving=True), {}
    for number, request in enumerate(requests):
        engine.submit(dataclasses.replace(request, id=number))
        answers |= dict(engine.step())
    answers |= answer_all(engine)
    (whole,) = shared_translator.engine().run([requests])
    assert [answers[number].text for number in range(4)] == [one.text for one in whole]
    assert answers[0].alignment == whole[0].alignment and len(answers[0].token_log_probs)
    assert answers[2].satisfied and "red apples" in answers[2].text and answers[2].parts == 1
    assert "<b>" in answers[3].text and answers[3].alignment is None


def shout(request):
    return Translation(request.text.upper(), -1.0, -1.0, (request.seed,))


def test_windows_are_answered_in_order_and_what_is_wrong_is_raised_after_those_before():
    backend, counted = FakeBackend(shout), []
    requests = [Request(str(number), seed=number) for number in range(7)]
    windows = [requests[:3], [], requests[3:]]
    found = fake_engine(backend).run(windows, on_progress=lambda **counts: counted.append(counts))
    assert [[one.tokens[0] for one in window] for window in found] == [[0, 1, 2], [], [3, 4, 5, 6]]
    assert backend.windows == [3, 4] and counted == [{"lines": 1, "tokens": 1}] * 7

    def windows():
        yield [Request("a")]
        raise UserError("line 2 is bad")

    for ahead in (False, True):
        found = fake_engine(shout).run(windows(), ahead=ahead)
        assert [one.text for one in next(found)] == ["A"]
        with pytest.raises(UserError, match="line 2 is bad"):
            next(found)
    failing = fake_engine(lambda request: ValueError(request.text)).run([[Request("broken")]])
    with pytest.raises(ValueError, match="broken"):
        next(failing)


def test_a_request_whose_client_has_left_is_not_read():
    begun, go = threading.Event(), threading.Event()

    class Slow(FakeBackend):
        def step(self, **how):
            begun.set()
            go.wait(30)
            return super().step(**how)

    backend = Slow(shout)
    thread = ModelThread(fake_engine(backend), preparation=[1, 2])
    first = thread.submit(Request("first"))
    begun.wait(30)
    late = thread.submit(Request("late"))
    late.cancel()
    go.set()
    assert first.result(30).text == "FIRST"
    thread.stop()
    assert backend.windows == [1] and isinstance(thread.failure, Stopped)
    with pytest.raises(Stopped):
        thread.submit(Request("after")).result(30)
