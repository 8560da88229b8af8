"""Backends that translate with this package's search: in a single process, or shared by several processes."""

import collections
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax

import flaxformer_mt
from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.checks import check_n_best
from flaxformer_mt.decoding.forced_decoding import TokenScorer
from flaxformer_mt.decoding.scheduler import Scheduler
from flaxformer_mt.decoding.search_engine import PATIENCE, SearchEngine
from flaxformer_mt.decoding.search_inputs import Sentence
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.parallel import default_device_kind, local_device_count
from flaxformer_mt.parallel.processes import exchange, process_count, process_index
from flaxformer_mt.search import SearchResult, search_width
from flaxformer_mt.translation.alignment import annotate, check_annotations, choose_watched
from flaxformer_mt.translation.minimum_bayes_risk import count_candidates, rank_candidates
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import FAILED, NO_ANNOTATIONS, Annotations, Translation, one_line, rank
from flaxformer_mt.translation.segments import Segment
from flaxformer_mt.vocab import Vocab

# Decoding steps after which sentences that arrive may enter.
_STEPS = 8
# Minimum number of results at a time that are read in another thread.
_MANY = 16

Translated = tuple[Segment, Translation | Exception]


class SearchBackend:
    """Translates with one model, or an ensemble, on the devices of this process."""

    def __init__(
        self,
        engine: SearchEngine,
        scorer: TokenScorer,
        params: tuple[Any, ...],
        search: SearchConfig,
        *,
        describe: Callable[[], dict[str, Any]],
        arriving: bool,
    ) -> None:
        """Create a backend without segments; `params` holds the parameters of each model.

        `describe` returns what translations depend on, except devices and versions. `arriving`: whether
        segments arrive while others are translated; calls to the device are then short and use few programs.
        """
        self._engine, self._scorer, self._params, self._search = engine, scorer, params, search
        self._scheduler, self._describe, self._arriving = Scheduler(engine, params), describe, arriving
        # Results that are read in another thread, in order; translations that wait for annotations, and those
        # that get them in other threads.
        self._reading: collections.deque[Future[list[tuple[Segment, Translation]]]] = collections.deque()
        self._unannotated: list[tuple[Segment, Translation]] = []
        self._annotating: set[Future[list[Translated]]] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._count = 0

    most_hypotheses = property(lambda self: search_width(self._search, 1), doc="The largest n_best.")
    num_active = property(lambda self: self._scheduler.num_active)
    has_full_call: Any = property(lambda self: self._scheduler.has_full_call)

    def __len__(self) -> int:
        return self._count

    def check_request(self, request: Request) -> None:
        if request.n_best != 1:
            check_n_best(self._search, request.n_best)
        if request.annotations != NO_ANNOTATIONS:
            check_annotations(request.annotations, self._scorer.models)

    def check_sentence(self, sentence: Sentence, name: str) -> None:
        self._engine.check(sentence, name)

    def submit(self, segments: Sequence[Segment], *, n_best: int) -> None:
        self._count += len(segments)
        # Where segments arrive, two kinds of programs: for the best hypothesis, and for all of them.
        searched = (
            self.most_hypotheses if self._arriving and n_best > 1 else count_candidates(self._search, n_best)
        )
        self._scheduler.submit({segment: segment.sentence for segment in segments}, n_best=searched)

    def cancel(self, segment: Segment) -> None:
        before = len(self._scheduler)
        self._scheduler.cancel(segment)
        self._count -= before - len(self._scheduler)

    def step(self, *, more: bool = False) -> list[Translated]:
        """Continue the search; if there are many results, another thread converts them to text meanwhile."""
        done: list[Translated] = []
        results: list[tuple[Segment, SearchResult]] = []
        for segment, result in self._scheduler.step(_STEPS if self._arriving else None, more=more):
            if isinstance(result, Exception):
                done.append((segment, result))
            else:
                results.append((segment, result))
        if self._arriving:
            done += self._try_to_read(results)
        elif len(results) < _MANY:
            done += self._take(self._read(results))
        else:
            self._reading.append(self._start(self._read, results))
        is_idle = not (more or len(self._scheduler))
        while self._reading and (is_idle or self._reading[0].done()):
            done += self._take(self._reading.popleft().result())
        if self._arriving:
            done += self._annotate_beside()
        elif is_idle and self._unannotated:
            done += self._annotate(self._unannotated)
            self._unannotated = []
        self._count -= len(done)
        return done

    def _start(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self._threads is None:
            # If requests arrive, some threads work while others compile.
            self._threads = ThreadPoolExecutor(4 if self._arriving else 1, thread_name_prefix="results")
        return self._threads.submit(function, *arguments)

    def _read(self, found: Sequence[tuple[Segment, SearchResult]]) -> list[tuple[Segment, Translation]]:
        """Convert search results to translations; can run in any thread."""
        translations = read_results([result for _, result in found], self._scorer.vocabs.target)
        segments = [segment for segment, _ in found]
        return rank_candidates(list(zip(segments, translations, strict=True)), self._search)

    def _try_to_read(self, found: list[tuple[Segment, SearchResult]]) -> list[Translated]:
        try:
            return self._take(self._read(found))
        except UserError as error:  # of a scorer: these segments fail, and the next may succeed
            warn_user(str(error))  # its command is not for clients
            failure = UserError("a scorer of this server fails; a warning of the server says why")
            return [(segment, failure) for segment, _ in found]

    def _take(self, read: list[tuple[Segment, Translation]]) -> list[Translated]:
        """Return translations that need no annotations; the others are queued for annotation."""
        self._unannotated += [pair for pair in read if pair[0].annotations.needs_reading]
        return [pair for pair in read if not pair[0].annotations.needs_reading]

    def _annotate_beside(self) -> list[Translated]:
        """Annotate in other threads, because a program may have to be compiled; return what is done."""
        if self._unannotated:
            self._annotating.add(self._start(self._try_to_annotate, self._unannotated))
            self._unannotated = []
        if not self._annotating:
            return []
        timeout = 0 if len(self._scheduler) else PATIENCE
        done, self._annotating = wait(self._annotating, timeout=timeout)
        return [pair for future in done for pair in future.result()]

    def _try_to_annotate(self, pairs: list[tuple[Segment, Translation]]) -> list[Translated]:
        try:
            return self._annotate(pairs)
        except Exception as error:  # of these segments alone
            return [(segment, error) for segment, _ in pairs]

    def _annotate(self, pairs: list[tuple[Segment, Translation]]) -> list[Translated]:
        groups: dict[Annotations, list[tuple[Segment, Translation]]] = {}
        for segment, translation in pairs:
            groups.setdefault(segment.annotations, []).append((segment, translation))
        done: list[Translated] = []
        for annotations, group in groups.items():
            segments, translations = zip(*group, strict=True)
            found = annotate(segments, translations, annotations, scorer=self._scorer, params=self._params)
            done += zip(segments, found, strict=True)
        return done

    def compile(self) -> None:
        """Compile the programs for the segments submitted so far, and wait for them."""
        self._scheduler.compile()

    def warm_up(self) -> Iterator[object]:
        """Compile the programs that most lines need; yield often, so that the caller can translate lines."""
        for n_best in dict.fromkeys((1, self.most_hypotheses)):
            yield from self._engine.warm_up(self._params, n_best=n_best)
        watched = choose_watched(Annotations(attention=True), self._scorer.models)
        scored = self._start(lambda: self._scorer.warm_up(params=self._params, watched=watched))
        while wait([scored], PATIENCE).not_done:
            yield 0
        scored.result()

    def describe(self) -> dict[str, Any]:
        return {
            **self._describe(),
            # Devices share batches, so another number of devices rounds differently.
            "devices": [process_count(), local_device_count()],
            "device_kind": default_device_kind(),
            # Other versions may compute, round or split lines differently.
            "versions": {"flaxformer_mt": flaxformer_mt.__version__, "jax": jax.__version__},
        }


def read_results(results: Sequence[SearchResult], vocab: Vocab) -> list[Translation]:
    """Return the best hypothesis of each sentence with its alternatives; `FAILED` if there is none."""
    found: list[list[tuple[int, list[int]]]] = []
    for result in results:
        tokens = result.tokens.tolist()
        lengths = enumerate(result.lengths.tolist())
        found.append([(number, tokens[number][:length]) for number, length in lengths if length > 0])
    texts = iter(vocab.detokenize_all([tokens for own in found for _, tokens in own]))
    translations = []
    for result, own in zip(results, found, strict=True):
        scores, log_probs, satisfied = result.scores, result.log_probs, result.satisfied
        hypotheses = [
            Translation(
                one_line(next(texts)),
                float(scores[number]),
                float(log_probs[number]),
                tuple(tokens),
                satisfied=satisfied is None or bool(satisfied[number]),
            )
            for number, tokens in own
        ]
        translations.append(rank(hypotheses or [FAILED]))
    return translations


class SharedSearchBackend(SearchBackend):
    """A backend for several processes: all get the same segments, and each translates a share of them."""

    has_full_call = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # All segments that are not done, in order; and the translations of this process.
        self._segments: list[Segment] = []
        self._own: dict[Segment, Translation] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def submit(self, segments: Sequence[Segment], *, n_best: int) -> None:
        """Add this process's share of the segments: the second of three processes gets 1, 4, 7, ..."""
        first, count = len(self._segments), process_count()
        self._segments += segments
        share = itertools.islice(segments, (process_index() - first) % count, None, count)
        super().submit(list(share), n_best=n_best)

    def step(self, *, more: bool = False) -> list[Translated]:
        for segment, result in super().step(more=more):
            if isinstance(result, Exception):
                raise result
            self._own[segment] = result
        if more or super().__len__() or not self._segments:
            return []
        segments, self._segments = self._segments, []
        own = [self._own.pop(segment) for segment in segments[process_index() :: process_count()]]
        return list(zip(segments, gather_translations(own), strict=True))


def gather_translations(share: Sequence[Translation]) -> list[Translation]:
    """Return the translations of all sentences, in order; `share` has the translations of this process.

    All processes must call it together: with [a, c] in one process and [b] in the other, both get [a, b, c].
    """
    message = json.dumps([dataclasses.asdict(translation) for translation in share]).encode()
    shares = [[_from_json(values) for values in json.loads(text)] for text in exchange(message)]
    all_translations: list[Translation] = [translation for part in shares for translation in part]
    for number, part in enumerate(shares):
        all_translations[number :: len(shares)] = part
    return all_translations


def _from_json(values: dict[str, Any]) -> Translation:
    alternatives = tuple(_from_json(alternative) for alternative in values.pop("alternatives"))
    fields = {name: _to_tuples(value) for name, value in values.items()}
    return Translation(**fields, alternatives=alternatives)


def _to_tuples(value: Any) -> Any:
    """Convert lists, the only sequences of JSON, to tuples."""
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value
