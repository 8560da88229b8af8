"""Answers requests for translations: sends lines to models and builds the JSON of the answer."""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException

from flaxformer_mt.commands.server.html_documents import Line, Template, read_html, read_text
from flaxformer_mt.commands.server.languages import AUTO, Pair, find_models
from flaxformer_mt.commands.server.model_thread import ModelThread
from flaxformer_mt.commands.server.request_fields import TextRequest
from flaxformer_mt.config import DataConfig
from flaxformer_mt.config.directions import Direction, find_directions
from flaxformer_mt.corpus.documents import Documents
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.translation.pivot import PivotLine
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import Annotations, Translation


class DirectedModel(NamedTuple):
    """A model for one language pair, or a chain of two models with a pivot language."""

    thread: ModelThread
    source_language: str | None = None
    target_language: str | None = None
    # What names the model to its readers, such as its run and checkpoint.
    title: str = ""
    # Number of lines that it reads before a line, at most.
    context: int = 0
    # The model that translates on, if the target is another language than this model's.
    then: "DirectedModel | None" = None

    @property
    def most_hypotheses(self) -> int:
        most = self.thread.engine.backend.most_hypotheses
        return most if self.then is None else min(most, self.then.most_hypotheses)

    async def translate(self, request: Request) -> Translation:
        """Return the translation of a line from this model's source language into its target language."""
        request = dataclasses.replace(
            request, source_language=self.source_language, target_language=self.target_language
        )
        if self.then is None:
            return await asyncio.wrap_future(self.thread.submit(request))
        directions = [Direction(*map(str, one[1:3])) for one in (self, self.then)]
        pivot = PivotLine(request, (directions[0], directions[1]), apart=self.thread.engine.apart)
        first = await asyncio.wrap_future(self.thread.submit(pivot.first))
        second = map(self.then.thread.submit, pivot.follow(first))
        answers = await asyncio.gather(*map(asyncio.wrap_future, second))
        return await asyncio.to_thread(pivot.join, first, answers)


def direct(thread: ModelThread, data: DataConfig, *, title: str = "") -> dict[Pair, DirectedModel]:
    """Return a `DirectedModel` for each direction of a model, by language pair."""
    return {pair: DirectedModel(thread, *pair, title, data.context) for pair in find_directions(data)}


def add_pivots(models: dict[Pair, DirectedModel]) -> dict[Pair, DirectedModel]:
    """Return `models` plus, for each pair without a model, the first two models that form a chain."""
    every = dict(models)
    for (source, pivot), one in models.items():
        for (between, target), two in models.items():
            if between == pivot and source != target:
                title = f"{one.title}; then {two.title}"
                every.setdefault((source, target), one._replace(title=title, context=0, then=two))
    return every


# Characters of a text from which its language is found, if several are possible.
_SAMPLE = 200


class Translations:
    """Translates the texts of requests, and counts the lines whose translations are not finished."""

    def __init__(self, models: Mapping[Pair, DirectedModel], *, most_waiting: int) -> None:
        """Refuse requests that would raise the number of unanswered lines above `most_waiting`."""
        self._models, self._most_waiting = models, most_waiting
        self.num_waiting = 0

    async def translate(self, request: TextRequest) -> dict[str, Any]:
        """Return the fields of the answer; cancelling the coroutine removes the lines from the search.

        Raises HTTPException if no model has these languages or features, or if too many lines wait.
        """
        choices = find_models(self._models, request.source, request.target)
        _check(request, choices.values())
        options = _make_options(request)
        # What grows with a text runs in a thread: this one answers all clients.
        read = read_html if request.format == "html" else read_text
        templates = [await asyncio.to_thread(read, text) for text in request.texts]

        async def translate_text(text: str, template: Template) -> dict[str, Any]:
            most_likely, *_ = await _detect(text, choices)
            model = choices[most_likely["language"]]
            answers = await _translate_lines(model, template.lines, options, documents=request.documents)
            fields = await asyncio.to_thread(_answer_text, model, template, answers, request)
            return fields | ({"detectedLanguage": most_likely} if request.source == AUTO else {})

        async with self._reserve(sum(len(template.lines) for template in templates)):
            try:
                filled = await asyncio.gather(*map(translate_text, request.texts, templates))
            except UserError as error:
                if request.glossary is None:
                    raise
                raise HTTPException(400, f"the glossary cannot be used: {error}") from error
        if isinstance(request.q, str):
            return filled[0]
        names = filled[0] if filled else ("translatedText",)
        return {name: [fields[name] for fields in filled] for name in names}

    async def detect(self, texts: Sequence[str]) -> list[list[dict[str, Any]]]:
        """Return the languages that each text may be in, the most likely first."""
        choices: dict[str, DirectedModel] = {}
        for (source, _), model in self._models.items():
            choices.setdefault(source, model)
        async with self._reserve(len(texts) * len(choices)):
            return [await _detect(text, choices) for text in texts]

    @contextlib.asynccontextmanager
    async def _reserve(self, lines: int) -> AsyncIterator[None]:
        """Count lines as waiting, or refuse the request."""
        most, waiting = self._most_waiting, self.num_waiting
        if lines > most:
            raise HTTPException(413, f"q has {lines} lines; this server takes {most}; send several requests")
        if waiting + lines > most:
            message = f"{waiting} lines wait, and this server lets {most} wait; try again in a moment"
            raise HTTPException(429, message, {"Retry-After": "1"})
        self.num_waiting += lines
        try:
            yield
        finally:
            self.num_waiting -= lines


def _check(request: TextRequest, models: Collection[DirectedModel]) -> None:
    """Refuse a request that needs a feature which one of the possible models lacks."""
    if request.alignments == "pieces" and request.format == "html":
        raise HTTPException(400, "the field alignments is pieces; with format html it must be words")
    if request.alignments == "pieces" and any(model.then for model in models):
        raise HTTPException(400, "the field alignments is pieces; through a pivot language it must be words")
    most = min(model.most_hypotheses for model in models)
    for name, asked, largest in (
        ("alternatives", request.alternatives, most - 1),
        ("n_best", request.n_best or 1, most),
    ):
        if asked > largest:
            raise HTTPException(400, f"the field {name} is {asked}; the search keeps enough for {largest}")
    if request.documents and not all(model.context for model in models):
        raise HTTPException(400, "the field documents is true, but a model reads each line alone")


def _make_options(request: TextRequest) -> Request:
    """Return the request options that apply to each line."""
    glossary = None
    if request.glossary is not None:
        try:
            glossary = Glossary.read(request.glossary.split("\n"), "the field glossary")
        except UserError as error:
            raise HTTPException(400, str(error)) from error
    annotations = Annotations(alignments=request.alignments, attention=request.attention)
    n_best = max(request.alternatives + 1, request.n_best or 1)
    return Request("", n_best=n_best, annotations=annotations, glossary=glossary)


async def _translate_lines(
    model: DirectedModel, lines: Sequence[Line], options: Request, *, documents: bool | None = False
) -> list[Translation]:
    """Translate lines together as requests with these options; cancelling the coroutine cancels them."""
    context = model.context if documents is not False else 0
    texts = Documents([line.text for line in lines], context)
    language = model.source_language or ""
    starts = await asyncio.to_thread(lambda: [line.find_sentences(language) for line in lines])
    for_markup = options.annotations._replace(alignments="words", for_markup=True)
    requests = [
        dataclasses.replace(
            options,
            text=line.text,
            annotations=for_markup if line.needs_alignment else options.annotations,
            sentence_starts=start,
            context=texts.before if context else None,
        )
        for line, start, _ in zip(lines, starts, texts, strict=True)
    ]
    return await asyncio.gather(*map(model.translate, requests))


async def _detect(text: str, choices: Mapping[str, DirectedModel]) -> list[dict[str, Any]]:
    """Return the languages that a text may be in, the most likely first, with confidences in percent.

    The most likely language is the one whose model is most certain of its translation. A confidence is the
    geometric mean of the translation's token probabilities, divided by the sum over all languages. As in
    LibreTranslate, confidences are 0 if there is only one language or if the text has no letters.
    """
    if len(choices) == 1 or not any(map(str.isalpha, text)):
        return [{"confidence": 0.0, "language": language} for language in choices]
    sample = Line(" ".join(text.split())[:_SAMPLE])
    models = (model._replace(then=None) for model in choices.values())
    answers = await asyncio.gather(*(_translate_lines(model, [sample], Request("")) for model in models))
    means = [math.exp(answer.log_prob / max(1, len(answer.tokens))) for (answer,) in answers]
    guesses = [
        {"confidence": round(100 * mean / sum(means), 1), "language": language}
        for language, mean in zip(choices, means, strict=True)
    ]
    return sorted(guesses, key=lambda one: -one["confidence"])


def _answer_text(
    model: DirectedModel, template: Template, answers: Sequence[Translation], request: TextRequest
) -> dict[str, Any]:
    fields: dict[str, Any] = {"translatedText": template.fill(answers)}
    if request.alternatives:
        # Each alternative of the text has the alternatives of its lines, and the best where a line has fewer.
        count = max((len(one.alternatives) for one in answers), default=0)
        fields["alternatives"] = [
            template.fill([one.n_best[rank] if rank < len(one.n_best) else one for one in answers])
            for rank in range(1, min(count, request.alternatives) + 1)
        ]
    if request.n_best is not None or request.scores or request.attention or request.alignments is not None:
        fields["hypotheses"] = [_describe_line(model, one, request) for one in answers]
    return fields


def _describe_line(model: DirectedModel, answer: Translation, request: TextRequest) -> list[dict[str, Any]]:
    described = []
    for hypothesis in answer.n_best:
        fields: dict[str, Any] = {"text": hypothesis.text}
        if request.scores:
            fields |= {"score": _number(hypothesis.score), "log_prob": _number(hypothesis.log_prob)}
        if request.alignments is not None:
            fields["alignment"] = hypothesis.alignment or ()
        if request.attention:
            weights, model = hypothesis.attention, model.then or model
            pieces = model.thread.engine.target_pieces(hypothesis)
            fields |= {"source_pieces": answer.source_pieces, "pieces": pieces}
            fields["attention"] = weights and [[round(weight, 4) for weight in row] for row in weights]
        described.append(fields)
    return described


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
