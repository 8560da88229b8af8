"""Several processes translate a text: who has which sentences, and that all get back what was sent."""

import json
import math

import pytest

from flaxformer_mt.translation import search_backend
from flaxformer_mt.translation.result import FAILED, Translation
from flaxformer_mt.translation.search_backend import gather_translations


@pytest.fixture
def processes(monkeypatch):
    """As if there were three processes: call with this one's number and the messages of all."""

    def pretend(number: int, messages: list[bytes] | None = None) -> list[bytes]:
        sent: list[bytes] = []
        monkeypatch.setattr(search_backend, "process_count", lambda: 3)
        monkeypatch.setattr(search_backend, "process_index", lambda: number)
        monkeypatch.setattr(search_backend, "exchange", lambda own: sent.append(own) or messages or [own] * 3)
        return sent

    return pretend


def make(text: str) -> Translation:
    other = Translation(text + "?", -2.5, -5.0, (4, 2), parts=2)
    return Translation(
        text, -1 / 3, -1e-9, (5, 2), alternatives=(other,), token_log_probs=(-0.1, -0.2), alignment=((0, 1),)
    )


def test_translations_travel_unchanged_and_come_back_in_order(processes):
    shares = [[make("a"), make("d")], [make("b"), FAILED], [make("c")]]
    messages = []
    for number, share in enumerate(shares):
        sent = processes(number)
        gather_translations(share)
        messages += sent
    processes(0, messages)
    gathered = gather_translations(shares[0])
    assert gathered == [make("a"), make("b"), make("c"), make("d"), FAILED]
    assert gathered[4].score == -math.inf and gathered[0].alternatives[0].parts == 2
    assert all(isinstance(json.loads(message), list) for message in messages)
