"""An engine without a model: what stands before and behind one is tested with it."""

from types import SimpleNamespace

from flaxformer_mt.vocab import Vocab


class FakeEngine:
    """Answers each request by a function, window by window; notes the sizes of windows."""

    has_full_call = False
    on_progress = None
    vocabs = SimpleNamespace(target=Vocab)

    def __init__(self, translate, *, description=None):
        self._translate, self._description = translate, description or {}
        self._waiting, self.windows, self.num_recased = [], [], 0

    def read(self, requests):
        return list(requests)

    def enter(self, requests):
        self._waiting += requests

    def submit(self, *requests):
        self.enter(self.read(requests))

    def step(self, *, more=False):
        waiting, self._waiting = self._waiting, []
        self.windows.append(len(waiting))
        return [(request.id, self._translate(request)) for request in waiting]

    def __len__(self):
        return len(self._waiting)

    def take_warnings(self):
        return []

    def describe(self):
        return self._description
