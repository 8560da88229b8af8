"""The engine over a backend without a model: what stands before and behind one is tested with it."""

from types import SimpleNamespace

from flaxformer_mt.config import Config
from flaxformer_mt.translation.engine import Engine
from flaxformer_mt.translation.requests import Request


class FakeBackend:
    """Answers each segment by a function of its request; notes the sizes of batches."""

    has_full_call, num_active, most_hypotheses = False, 0, 3

    def __init__(self, translate, *, description=None):
        self.translate, self._description = translate, description or {}
        self.waiting, self.windows = [], []

    def check_request(self, request):
        pass

    def check_sentence(self, sentence, name):
        pass

    def submit(self, segments, *, n_best):
        self.waiting += segments

    def cancel(self, segment):
        if segment in self.waiting:
            self.waiting.remove(segment)

    def step(self, *, more=False):
        waiting, self.waiting = self.waiting, []
        self.windows.append(len(waiting))
        return [(segment, self.translate(segment.request)) for segment in waiting]

    def __len__(self):
        return len(self.waiting)

    def describe(self):
        return self._description


def fake_engine(backend, *steps):
    """Steps of text, and this backend, or one whose answers are those of a function."""
    backend = backend if isinstance(backend, FakeBackend) else FakeBackend(backend)
    vocab = SimpleNamespace(eos_id=2, pieces=lambda ids: [f"p{n}" for n in ids])
    return Engine(steps, backend, Config(), SimpleNamespace(source=vocab, target=vocab), apart=False)


def read_lines(lines, *steps, **fields):
    """The lines with their parts, after these steps; `fields` are those of requests."""
    requests = [Request(line, seed=number, **fields) for number, line in enumerate(lines, start=1)]
    return fake_engine(None, *steps).read(requests)
