"""Translation engines: lines are split, tokenized, searched, detokenized, annotated and joined, here alone.

`LineEngine` does what does not depend on the network's library; `SearchEngine` of decoding/ searches in
`JaxEngine`, CTranslate2 in convert/ctranslate2/engine.py.
"""

import collections
import dataclasses
import functools
import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

import flaxformer_mt
from flaxformer_mt.config import Config
from flaxformer_mt.config.checks import check_n_best
from flaxformer_mt.corpus.documents import Context, check_context, tokenize_before
from flaxformer_mt.corpus.sentence_split import split_sentences
from flaxformer_mt.decoding.engine import PATIENCE, SearchEngine
from flaxformer_mt.decoding.forced_decoding import UNBOUNDED, Pair, TokenScorer
from flaxformer_mt.decoding.scheduler import Scheduler
from flaxformer_mt.decoding.sentences import Sentence
from flaxformer_mt.errors import UserError
from flaxformer_mt.parallel import default_device_kind, local_device_count
from flaxformer_mt.parallel.processes import exchange, process_count, process_index
from flaxformer_mt.search import SearchResult, search_width
from flaxformer_mt.text_io.lines import format_line_numbers
from flaxformer_mt.translation.annotation import annotate, check_annotations, choose_watched
from flaxformer_mt.translation.constraints import check_constraints, check_size, make_sentences, require
from flaxformer_mt.translation.inline_markup import MarkedLine, put_back_all, take_out
from flaxformer_mt.translation.language_tags import LineTags, choose_line_tags
from flaxformer_mt.translation.letter_case import LetterCase, put_back
from flaxformer_mt.translation.minimum_bayes_risk import count_candidates, rank_candidates
from flaxformer_mt.translation.requests import Answer, Request
from flaxformer_mt.translation.result import (
    NO_ANNOTATIONS,
    Annotations,
    Translation,
    change_texts,
    check_phrases,
    join_parts,
    read_results,
)
from flaxformer_mt.translation.segmentation import (
    LongLines,
    SourcePart,
    check_lines,
    find_language_tags,
    read_sources,
)
from flaxformer_mt.unicode_text import spell
from flaxformer_mt.vocab import Vocabs

_NOT_NUMBERS = "the model's scores are not numbers (NaN)"
# Decoding steps after which sentences that arrive may enter.
_STEPS = 8
# Results that are read in another thread, if there are so many at once.
_MANY = 16


@dataclasses.dataclass(eq=False, slots=True)
class Line:
    """A request in work: its parts, and what is known of their translations."""

    request: Request
    # What alignments are computed for: `Request.annotations`, and what markup needs.
    annotations: Annotations
    parts: list[SourcePart]
    sentences: list[Sentence]
    # Of each part, as they are found.
    translations: list[Any]
    marked: MarkedLine | None = None
    # Of a line in several parts, the required phrases that no part has been tried with.
    phrases: list[str] = dataclasses.field(default_factory=list)
    # While the parts are searched with a phrase: their sentences, and the results so far.
    trial: tuple[list[Sentence], list[Any]] | None = None
    num_missing: int = 0
    # The tokens of a request with a given target, and the sides that were cut.
    pair: Pair | None = None
    cut: Sequence[str] = ()
    is_annotated: bool = False


# A part of a line, by number; with True, its search with a required phrase.
Part = tuple[Line, int, bool]


class LineEngine(ABC):
    """Translates requests, whatever searches their sentences; see `translation.requests.Engine`."""

    # Receives the numbers of `lines` and target `tokens` that have just been translated.
    on_progress: Callable[..., object] | None = None

    def __init__(
        self,
        config: Config,
        vocabs: Vocabs,
        searches: Any,
        *,
        long_lines: LongLines,
        sentences: bool,
        arriving: bool,
        together: bool = False,
        changed_cases: frozenset[str] = frozenset(),
    ) -> None:
        """Start without requests.

        Args:
          searches: a `Scheduler`, or what has its methods.
          sentences: whether each sentence of a line is translated apart.
          arriving: whether requests arrive while other requests are translated; steps are then short.
          changed_cases: letter cases that are changed, see `letter_case.py`.
          together: whether all processes search all sentences, with parameters that are split over them.
        """
        self.config, self.vocabs, self.arriving = config, vocabs, arriving
        self._searches, self._long_lines, self.apart = searches, long_lines, sentences
        # Letter cases that are changed, and the number of sentences that were.
        self._changed_cases, self.num_recased = changed_cases, 0
        self._tags: dict[tuple[str | None, str | None], LineTags] = {}
        self._lines: dict[Hashable, Line] = {}
        self._finished: collections.deque[tuple[Line, Exception | None]] = collections.deque()
        self._unannotated: list[Line] = []
        self._reading: collections.deque[Future[list[tuple[Part, Translation]]]] = collections.deque()
        self._annotating: set[Future[list[tuple[Line, Exception | None]]]] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._shares = process_count() > 1 and not together
        # With several processes that share sentences: those of all of them, in order.
        self._shared: list[Part] = []
        # Numbers of lines to be named to the user, by what happened to them; see `take_warnings`.
        self._named: dict[str, set[int]] = collections.defaultdict(set)

    @property
    def most_hypotheses(self) -> int:
        """The largest n_best."""
        return search_width(self.config.search, 1)

    @property
    def num_active(self) -> int:
        """Number of sentences on the device; may be asked by any thread."""
        return self._searches.num_active

    @property
    def has_full_call(self) -> bool:
        return self._searches.has_full_call and not self._shares

    @abstractmethod
    def describe(self) -> dict[str, Any]: ...

    # ---- what depends on the network's library ----

    @abstractmethod
    def _read(self, found: list[tuple[Part, Any]]) -> list[tuple[Part, Translation]]:
        """Return the translations of results, in any thread."""

    @abstractmethod
    def _annotate(self, parts: list[Part]) -> None:
        """Add to the translations of parts what the requests ask for besides."""

    @abstractmethod
    def _check_sentences(self, request: Request, sentences: Sequence[Sentence]) -> None:
        """Raise UserError for constraints that cannot be met."""

    @abstractmethod
    def _score(self, lines: list[Line]) -> None:
        """Score given targets."""

    # ---- requests in ----

    def submit(self, *requests: Request) -> None:
        self.enter(self.read(requests))

    def read(self, requests: Sequence[Request]) -> list[Line]:
        """Split and tokenize requests; in any thread, as nothing is changed."""
        lines: list[Line] = []
        for (*languages, is_given), group in itertools.groupby(requests, key=_kind_of):
            read = self._read_pairs if is_given else self._read_alike
            lines += read(list(group), self._choose_tags(*languages))
        return lines

    def _choose_tags(self, source: str | None, target: str | None) -> LineTags:
        if (source, target) not in self._tags:
            known, data = self.vocabs.target.tags, self.config.data
            self._tags[source, target] = choose_line_tags(data, source, target, vocab_tags=known)
        return self._tags[source, target]

    def _read_alike(self, requests: list[Request], tags: LineTags) -> list[Line]:
        first = requests[0].seed
        texts, marked = [request.text for request in requests], dict[int, MarkedLine]()
        starts = [request.sentence_starts for request in requests]
        check_lines(texts, first_line=first)
        if not self.config.data.source_language:  # a language model, whose texts may begin with prefixes
            return [self._make_line(request, [SourcePart(0, 0, "")], tags) for request in requests]
        for number, request in enumerate(requests):
            self._check(request)
            if request.annotations.markup:
                marked[number] = take_out(request.text)
                texts[number] = marked[number].text
                starts[number] = marked[number].find_sentences(tags.source_language)
        parts = read_sources(
            texts,
            vocab=self.vocabs.source,
            longest=self.config.data.max_source_length,
            long_lines=self._long_lines,
            sentences=self.apart,
            starts=starts,
            language=tags.source_language,
            tags=tags.find(texts, first_line=first),
            letter_case=LetterCase(self._changed_cases, self.vocabs.source, tags.source_language),
            # Their translations have text as it is given.
            unchanged=[
                number
                for number, one in enumerate(requests)
                if one.prefix.strip() or one.phrases or (one.glossary and one.glossary.find(texts[number]))
            ],
        )
        of_lines: list[list[SourcePart]] = [[] for _ in requests]
        for part in parts:
            of_lines[part.line].append(part)
        return [
            self._make_line(request, self._add_context(request, own, tags), tags, marked.get(number))
            for number, (request, own) in enumerate(zip(requests, of_lines, strict=True))
        ]

    def _add_context(self, request: Request, parts: list[SourcePart], tags: LineTags) -> list[SourcePart]:
        """Put the lines before a line before its parts; where they are split into sentences, its own too."""
        context = Context.of(self.config.data)
        if context is None or request.context is None:
            return parts
        read = (lambda text: take_out(text).text) if request.annotations.markup else str
        find = (lambda line: "") if tags.added else find_language_tags
        texts, own = [read(line)[len(find(line)) :] for line in request.context], list[str]()
        if self.apart:
            texts = [one for text in texts for one in split_sentences(text, language=tags.source_language)]
            own = [part.content for part in parts[:-1]]
        before = tokenize_before(self.vocabs.source, [text.strip() for text in [*texts, *own]])
        added = []
        for number, part in enumerate(parts):
            last = len(texts) + (number if own else 0)
            chosen = context.choose(len(part.ids), before[:last])
            ids = np.concatenate([*chosen, part.ids], dtype=np.int32)
            size = part.added_pieces + len(ids) - len(part.ids)
            added.append(part._replace(ids=ids, added_pieces=size))
        return added

    def _make_line(
        self, request: Request, parts: list[SourcePart], tags: LineTags, marked: MarkedLine | None = None
    ) -> Line:
        sentences, phrases = make_sentences(request, parts, vocab=self.vocabs.target, tags=tags)
        annotations = request.annotations
        if annotations.markup:
            annotations = annotations._replace(markup=False, for_markup=True, alignments="words")
        if self.arriving:
            check_size(f"line {request.seed}", len(phrases))
        if request.prefix or phrases or any(sentence.required for sentence in sentences):
            self._check_sentences(request, sentences)
        line = Line(request, annotations, parts, sentences, [None] * len(parts), marked, phrases)
        line.num_missing = len(parts)
        return line

    def _check(self, request: Request) -> None:
        if request.n_best != 1:
            check_n_best(self.config.search, request.n_best)
        if request.phrases or request.glossary is not None:
            check_constraints(self.config.search)
        if request.context:
            check_context(self.config.data, "a context")

    def _read_pairs(self, requests: list[Request], tags: LineTags) -> list[Line]:
        """Read requests of the same languages with given targets."""
        first, cut = requests[0].seed, collections.defaultdict[int, list[str]](list)
        sources = [request.text for request in requests]
        texts = {"target": [f"{tags.lead}{request.target}" for request in requests]}
        if self.config.data.source_language:
            added = tags.find(sources, first_line=first) or [""] * len(sources)
            texts["source"] = [tag + line for tag, line in zip(added, sources, strict=True)]
        ids: dict[str, list[Any]] = {"source": [()] * len(requests)}
        for side, lines in texts.items():
            vocab, longest = getattr(self.vocabs, side), find_longest(self.config)[side == "target"]
            ids[side] = vocab.tokenize_all(lines)
            long = [index for index, tokens in enumerate(ids[side]) if len(tokens) > longest]
            if long and self._long_lines != "cut":
                numbers = [first + index for index in long]
                remedy = " (the command score has --long_lines=cut for its beginning)"
                raise UserError(too_long(side, numbers, longest) + remedy)
            for index in long:  # a source ends in eos; a cut target has not ended, so it is scored without
                cut[index].append(side)
                beginning = ids[side][index][: longest - (side == "source")]
                ids[side][index] = np.append(beginning, vocab.eos_id) if side == "source" else beginning
        pairs = map(Pair, ids["source"], ids["target"])
        return [
            Line(request, request.annotations, [], [], [], pair=pair, cut=cut[index])
            for index, (request, pair) in enumerate(zip(requests, pairs, strict=True))
        ]

    def enter(self, lines: list[Line]) -> None:
        waiting: dict[int, dict[Part, Sentence]] = {}
        for line in lines:
            self._lines[line.request.id] = line
            if not line.parts:
                if line.pair is None:
                    self._finished.append((line, None))
                else:
                    self._unannotated.append(line)
                for side in line.cut:
                    self._named[side].add(line.request.seed)
                self._count(1, 0)
                continue
            own = waiting.setdefault(line.request.n_best, {})
            for number, sentence in enumerate(line.sentences):
                own[line, number, False] = sentence
            self.num_recased += sum(part.case != "" for part in line.parts)
            if len(line.parts) > 1 or line.parts[0].cut:
                for name, what in (("split", "continues"), ("cut", "cut")):
                    if any(getattr(part, what) for part in line.parts):
                        self._named[name].add(line.request.seed)
        for sentences in waiting.values():
            self._search(self._share(sentences) if self._shares else sentences)

    def _search(self, sentences: Mapping[Part, Sentence]) -> None:
        """Search sentences of requests of one n_best."""
        options, n_best = self.config.search, max((part[0].request.n_best for part in sentences), default=1)
        # Where requests arrive, two kinds of programs: for the best hypothesis, and for all of them.
        searched = self.most_hypotheses if self.arriving and n_best > 1 else count_candidates(options, n_best)
        self._searches.submit(sentences, n_best=searched)

    def cancel(self, name: Hashable) -> None:
        line = self._lines.pop(name, None)
        if line is None:
            return
        for number in range(len(line.parts)):
            self._searches.cancel((line, number, False))
            self._searches.cancel((line, number, True))

    def __len__(self) -> int:
        return len(self._lines)

    # ---- answers out ----

    def step(self, *, more: bool = False) -> list[Answer]:
        answers: list[Answer] = []
        found = []
        steps = _STEPS if self.arriving else None
        for part, result in self._searches.step(steps, more=more):
            if isinstance(result, Exception):
                self.cancel(part[0].request.id)
                answers.append((part[0].request.id, result))
            else:
                found.append((part, result))
        if len(found) < _MANY or self.arriving:
            self._take(self._read(found))
        else:
            self._reading.append(self._start(self._read, found))
        self._collect(more=more)
        while self._finished:
            line, error = self._finished.popleft()
            if self._lines.pop(line.request.id, None) is line:
                if self.arriving and any(map(_has_failed, line.translations)):
                    error = error or UserError(f"{_NOT_NUMBERS}; try an earlier checkpoint")
                answers.append((line.request.id, error or self._join(line)))
        return answers

    def _start(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self._threads is None:
            # Where requests arrive, some of them work while others compile.
            self._threads = ThreadPoolExecutor(4 if self.arriving else 1, thread_name_prefix="results")
        return self._threads.submit(function, *arguments)

    def _collect(self, *, more: bool) -> None:
        """Take what other threads have read, and begin what has to wait for it."""
        while self._reading and (self._reading[0].done() or not (more or len(self._searches))):
            self._take(self._reading.popleft().result())
        if self.arriving:
            if self._unannotated:  # the program may have to be compiled: the search goes on meanwhile
                self._annotating.add(self._start(self._annotate_each, self._unannotated))
                self._unannotated = []
            if self._annotating:
                timeout = 0 if len(self._searches) else PATIENCE
                done, self._annotating = wait(self._annotating, timeout=timeout)
                for future in done:
                    self._finished += future.result()
        elif not (more or len(self._searches) or self._reading):
            self._exchange()
            if self._unannotated and not len(self._searches):
                lines, self._unannotated = self._unannotated, []
                self._annotate_or_score(lines)
                self._finished += ((line, None) for line in lines)

    def _annotate_each(self, lines: list[Line]) -> list[tuple[Line, Exception | None]]:
        try:
            self._annotate_or_score(lines)
        except Exception as error:  # of these lines alone
            return [(line, error) for line in lines]
        return [(line, None) for line in lines]

    def _annotate_or_score(self, lines: list[Line]) -> None:
        if given := [line for line in lines if line.pair is not None]:
            self._score(given)
        if found := [line for line in lines if line.pair is None and not line.is_annotated]:
            self._annotate([(line, number, False) for line in found for number in range(len(line.parts))])

    def _take(self, found: list[tuple[Part, Translation]]) -> None:
        """Store the translations of parts."""
        for (line, number, is_trial), translation in found:
            (line.trial[1] if is_trial and line.trial else line.translations)[number] = translation
            line.num_missing -= 1
            self._count(int(line.num_missing == 0 and not is_trial), len(translation.tokens))
            if line.num_missing == 0:
                self._complete(line)

    def _complete(self, line: Line) -> None:
        """Go on with a line whose parts are all translated."""
        if line.trial is not None:
            _keep_best_trial(line)
        if line.phrases:
            texts = "\n".join(spell(translation.text) for translation in line.translations)
            line.phrases = [one for one in line.phrases if spell(one) not in texts]
        if line.phrases:  # which part it belongs to is found by searching each part with it
            name = f"line {line.request.seed}"
            phrase, line.phrases = line.phrases[:1], line.phrases[1:]
            vocab, lead = self.vocabs.target, self._choose_tags(*_kind_of(line.request)[:2]).lead
            try:
                tried = [require(one, phrase, vocab=vocab, lead=lead, name=name) for one in line.sentences]
                self._check_sentences(line.request, tried)
            except UserError as error:  # of this line alone
                self._finished.append((line, error))
                return
            line.trial, line.num_missing = (tried, [None] * len(tried)), len(tried)
            self._search({(line, number, True): one for number, one in enumerate(tried)})
        elif line.annotations.needs_reading and not line.is_annotated:
            self._unannotated.append(line)
        else:
            self._finished.append((line, None))

    def _join(self, line: Line) -> Translation:
        """Return the translation of a line from those of its parts."""
        request = line.request
        if line.pair is not None:
            return line.translations[0]
        text = request.text if line.marked is None else line.marked.text
        if any(map(_has_failed, line.translations)):
            self._named["failed"].add(request.seed)
        parts, translations, how = line.parts, line.translations, dict[str, Any]()
        if any(part.case for part in parts):
            how = {"language": self._choose_tags(*_kind_of(request)[:2]).target_language}
            translations = [
                change_texts(one, functools.partial(put_back, case=part.case, source=part.content, **how))
                for part, one in zip(parts, translations, strict=True)
            ]
        if len(parts) == 1 and parts[0].content == text and not parts[0].cut:
            joined: Translation = translations[0]
        else:
            how = {"n_best": request.n_best, "eos_id": self.vocabs.target.eos_id}
            joined = join_parts(text, parts, translations, annotations=line.annotations, **how)
        if len(parts) != 1:  # no search knows all phrases
            phrases = request.phrases
            if request.glossary is not None:
                phrases += dict.fromkeys(term.target for term in request.glossary.find(text))
            joined = check_phrases(joined, phrases) if phrases else joined
        if not joined.satisfied:
            self._named["unsatisfied"].add(request.seed)
        if request.annotations.attention and len(parts) == 1:
            ids = parts[0].ids[parts[0].added_pieces : -1]
            joined = dataclasses.replace(joined, source_pieces=tuple(self.vocabs.source.pieces(ids)))
        if line.marked is not None:
            keep = request.annotations.alignments is not None
            joined = put_back_all(line.marked, joined, keep_alignment=keep)
        return joined

    def _share(self, sentences: dict[Part, Sentence]) -> dict[Part, Sentence]:
        """Of three processes, the second has sentences 1, 4, 7, ...; searched together, all have all."""
        first, count = len(self._shared), process_count()
        self._shared += sentences
        mine = itertools.islice(sentences.items(), (process_index() - first) % count, None, count)
        return dict(mine)

    def _exchange(self) -> None:
        """Take over what other processes have found."""
        if not self._shared:
            return
        shared, self._shared = self._shared, []
        own = shared[process_index() :: process_count()]
        if shared[0][0].annotations.needs_reading:
            self._annotate(own)
        gathered = gather_translations([line.translations[number] for line, number, _ in own])
        for line, _, _ in shared:
            line.is_annotated = True
        mine = set(own)
        others = [pair for pair in zip(shared, gathered, strict=True) if pair[0] not in mine]
        self._take(others)

    def _count(self, lines: int, tokens: int) -> None:
        if self.on_progress is not None:
            self.on_progress(lines=lines, tokens=tokens)

    def take_warnings(self) -> list[str]:
        longest = f"longer than data.max_source_length {self.config.data.max_source_length} tokens, so"
        messages = {
            "split": f"{{}}: {longest} translated in parts, which are joined again",
            "cut": f"{{}}: {longest} only the beginning was translated; split long lines into sentences",
            "failed": f"{{}}: {_NOT_NUMBERS}, so the translation is empty; try an earlier checkpoint",
            "unsatisfied": "{}: the translation lacks some of the required phrases; require fewer phrases, "
            "or allow longer translations or a larger beam",
        }
        for side, most in zip(("source", "target"), find_longest(self.config), strict=True):
            messages[side] = f"{side} {{}}: longer than {most} tokens; only the beginning is scored"
        named, self._named = self._named, collections.defaultdict(set)
        return [
            message.format(format_line_numbers(sorted(named[name])))
            for name, message in messages.items()
            if named[name]
        ]

    def target_pieces(self, translation: Translation) -> list[str]:
        """Return the pieces of a translation, without eos."""
        vocab = self.vocabs.target
        return vocab.pieces([token for token in translation.tokens if token != vocab.eos_id])


def _has_failed(translation: Translation) -> bool:
    return translation.score == -math.inf and not translation.tokens


def _kind_of(request: Request) -> tuple[str | None, str | None, bool]:
    return request.source_language, request.target_language, request.target is not None


def _keep_best_trial(line: Line) -> None:
    """Keep the search with a phrase of the part whose score falls least, if one of them has it."""
    assert line.trial is not None
    tried, results = line.trial
    line.trial = None
    satisfied = [number for number, result in enumerate(results) if result.satisfied]
    if satisfied:
        best = max(satisfied, key=lambda n: results[n].score - line.translations[n].score)
        line.translations[best], line.sentences[best] = results[best], tried[best]


class JaxEngine(LineEngine):
    """Translates with one model, or an ensemble, by this package's own search."""

    def __init__(
        self,
        search: SearchEngine,
        scorer: TokenScorer,
        params: tuple[Any, ...],
        config: Config,
        *,
        describe: Callable[[], dict[str, Any]],
        **options: Any,
    ) -> None:
        """Start without requests; `params` are those of each model, `options` those of `LineEngine`."""
        super().__init__(config, scorer.vocabs, Scheduler(search, params), **options)
        self._engine, self._scorer, self._params, self._describe = search, scorer, params, describe

    def describe(self) -> dict[str, Any]:
        return {
            **self._describe(),
            # Devices share batches, so that another number of devices rounds differently.
            "devices": [process_count(), local_device_count()],
            "device_kind": default_device_kind(),
            # Other versions may compute, round or split lines otherwise.
            "versions": {"flaxformer_mt": flaxformer_mt.__version__, "jax": jax.__version__},
        }

    def warm_up(self) -> Iterator[object]:
        """Compile the programs that most lines need, and those of alignments of all their hypotheses.

        Yields now and then, so that lines can be translated in between.
        """
        for n_best in dict.fromkeys((1, self.most_hypotheses)):
            yield from self._engine.warm_up(self._params, n_best=n_best)
        watched = choose_watched(Annotations(attention=True), self._scorer.models)
        scored = self._start(lambda: self._scorer.warm_up(params=self._params, watched=watched))
        while wait([scored], PATIENCE).not_done:
            yield 0
        scored.result()

    def compile(self) -> None:
        """Compile the programs that search the requests so far."""
        self._searches.compile()

    def _check(self, request: Request) -> None:
        super()._check(request)
        if request.annotations != NO_ANNOTATIONS:
            check_annotations(request.annotations, self._scorer.models)

    def _check_sentences(self, request: Request, sentences: Sequence[Sentence]) -> None:
        for sentence in sentences:
            if self.arriving:
                longest = max(map(len, sentence.required), default=0)
                check_size(f"line {request.seed}", len(sentence.required), longest)
            self._engine.check(sentence, f"line {request.seed}")

    def _read(self, found: list[tuple[Part, SearchResult]]) -> list[tuple[Part, Translation]]:
        translations = read_results([result for _, result in found], self.vocabs.target)
        ranked = rank_candidates(
            [
                (line.parts[number].content, one, line.request.n_best)
                for ((line, number, _), _), one in zip(found, translations, strict=True)
            ],
            self.config.search,
        )
        return [(part, one) for (part, _), one in zip(found, ranked, strict=True)]

    def _annotate(self, parts: list[Part]) -> None:
        groups: dict[Annotations, list[Part]] = {}
        for part in parts:
            groups.setdefault(part[0].annotations, []).append(part)
        for annotations, group in groups.items():
            found = annotate(
                [line.parts[number] for line, number, _ in group],
                [line.translations[number] for line, number, _ in group],
                annotations,
                scorer=self._scorer,
                params=self._params,
            )
            for (line, number, _), translation in zip(group, found, strict=True):
                line.translations[number] = translation

    def _score(self, lines: list[Line]) -> None:
        pairs = [line.pair for line in lines if line.pair is not None]
        scores = self._scorer.score_all(pairs, params=self._params)
        for line, score in zip(lines, scores, strict=True):
            text, truncated = str(line.request.target), bool(line.cut)
            line.translations = [Translation(text=text, truncated=truncated, **score._asdict())]


def gather_translations(share: Sequence[Translation]) -> list[Translation]:
    """Return the translations of all sentences, in order, given those of this process.

    All processes call it together: with [a, c] in one process and [b] in the other, both get [a, b, c].
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
    """Convert lists to tuples: JSON has lists only."""
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def find_longest(config: Config) -> tuple[int, int]:
    """Return the maximum source and target length, in tokens with eos, for the scores of a run's model.

    Sources have the limit of translation. Targets may be as long as those of a search or of training. The
    text of a language model is limited by the model's positions alone.
    """
    source, bound = config.data.max_source_length, config.model.longest_input or UNBOUNDED
    if not config.data.source_language:
        return 0, bound
    if config.model.architecture == "decoder_only":  # source and target share the positions
        bound = max(1, bound - source)
    searched = int(config.search.max_length_ratio * source + config.search.max_length_offset)
    return source, min(bound, max(searched, config.data.max_target_length, 1))


def too_long(side: str, numbers: Sequence[int], longest: int) -> str:
    """Say that lines of a side are too long to be scored."""
    return f"{side} {format_line_numbers(numbers)} is longer than {longest} tokens; split it into sentences"
