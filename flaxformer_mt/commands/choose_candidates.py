"""Chooses one translation of each source, from the hypotheses of a run or the candidates of any system.

For each source, DIR/choices.jsonl has all translations with scores and problems, and the number of the chosen
one. A command with --resume continues this file; pairs, report and HTML page are made from it.
"""

import array
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.atomic_folder import digest_file
from flaxformer_mt.commands.options import DistilOptions
from flaxformer_mt.config.directions import Direction
from flaxformer_mt.errors import name_full_disk
from flaxformer_mt.scoring.metrics import find_metric, score_sentences
from flaxformer_mt.text_io.candidates import PHRASES, AnswerChecks, read_candidates
from flaxformer_mt.text_io.lines import count_lines, open_lines
from flaxformer_mt.text_io.pair_table import PairRules
from flaxformer_mt.text_io.resumable_output import ResumableOutput
from flaxformer_mt.tracking.progress_display import WorkProgress
from flaxformer_mt.unicode_text import is_blank

CHOICES = "choices.jsonl"
# Sources whose candidates are scored at a time, and which show what the sides of the file are like.
_WINDOW = 2048
# Of each problem, the examples in the report, and the characters of each.
_EXAMPLES, _SHOWN = 5, 200


class Group(NamedTuple):
    """A source, its candidate translations, the problem of each ("": none), and the reference or None."""

    source: str
    texts: Sequence[str]
    problems: Sequence[str]
    reference: str | None = None


def choose(
    groups: Sequence[Group], options: DistilOptions, direction: Direction
) -> Iterator[tuple[int | None, list[float]]]:
    """For each group, yield the index of the chosen text (None if all texts have problems) and all scores."""
    for group, scores in zip(groups, _score(groups, options, direction), strict=True):
        numbers = [number for number, problem in enumerate(group.problems) if not problem]
        yield max(numbers, key=scores.__getitem__, default=None), scores  # of equal ones the first


def _score(groups: Sequence[Group], options: DistilOptions, direction: Direction) -> Iterator[list[float]]:
    targets, metric = options.targets, options.metric or ""
    if targets == "best":
        yield from ([0.0] * len(group.texts) for group in groups)
        return
    outside = find_metric(metric, "--metric").scorer is not None
    if targets == "mbr":
        from flaxformer_mt.translation.minimum_bayes_risk import MOST_REFERENCES, compare_texts

        # The texts without problems are references; for a scorer from outside, which is slow, some of them.
        most = MOST_REFERENCES if outside else None
        compared = []
        for source, texts, problems, _ in groups:
            references = [text for text, problem in zip(texts, problems, strict=True) if not problem]
            compared.append((source, texts, references[:most]))
        for matrix in compare_texts(compared, metric):
            yield (matrix.sum(axis=1) / max(1, matrix.shape[1])).tolist()
        return
    # A scorer from outside is asked for many lines at once; BLEU's tokenizer fits the script of one line.
    size = len(groups) if outside else 1
    for start in range(0, len(groups), max(1, size)):
        part = groups[start : start + size]
        rows = [(group.source, text, group.reference or "") for group in part for text in group.texts]
        sources, texts, references = ([row[column] for row in rows] for column in range(3))
        known = references if targets == "nbest" else None
        scores = iter(score_sentences(metric, sources, texts, known, direction=direction))
        yield from ([next(scores) for _ in group.texts] for group in part)


def write_choices(options: DistilOptions, candidates: str, direction: Direction) -> None:
    """Check and score all candidates; write the choices to DIR/choices.jsonl, or continue it (--resume)."""
    names = [field.name for field in dataclasses.fields(PairRules) if field.name != "clean_scores"]
    names += ["targets", "metric", "invalid_utf8", "source_language", "target_language"]
    origin = {name: getattr(options, name) for name in names} | {"phrases": digest_file(PHRASES)}
    if options.metric is not None and (scorer := find_metric(options.metric, "--metric").scorer):
        origin["scorer"] = scorer.definition
    window, path = options.window or _WINDOW, options.output / CHOICES
    resumed: Any = {"resume": options.resume, "overwrite": options.overwrite, "keep": True}
    with ExitStack() as files:

        def read(file: str, what: str) -> Iterator[str]:
            return files.enter_context(open_lines(file, what, invalid_utf8=options.invalid_utf8)).lines

        sample = read_candidates(read(candidates, "candidates"), candidates)
        checks = AnswerChecks(itertools.islice(sample, _WINDOW), options)
        files.enter_context(name_full_disk(path))
        output = files.enter_context(ResumableOutput(str(path), origin=origin, step=window, **resumed))
        lines = output.read("candidates", read(candidates, "candidates"))
        rows = read_candidates(lines, candidates, first_line=output.done + 1)
        references: Iterator[str | None] = itertools.repeat(None)
        if options.reference is not None:
            references = output.read("reference", read(options.reference, "reference"))
        progress = WorkProgress(sys.stderr).part("choosing", total=count_lines(candidates), unit="lines")
        count = files.enter_context(progress)
        count(output.done)
        while part := list(itertools.islice(rows, window)):
            groups = [
                Group(row.source, *checks.clean_all(*row), reference)
                for row, reference in zip(part, references, strict=False)
            ]
            choices = choose(groups, options, direction)
            for row, group, (number, scores) in zip(part, groups, choices, strict=True):
                mended = number is not None and row.texts[number].strip() != group.texts[number]
                choice = group._asdict() | {"number": number, "mended": mended, "scores": scores}
                output.write([json.dumps(choice, ensure_ascii=False)])
            count(len(part))


class CandidateReport:
    """Collects counts, problems and scores of all candidates while `read_pairs` is iterated."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {"candidates": 0, "mended": 0, "without_translation": 0, "problems": {}}
        self._scores = {kind: array.array("f") for kind in ("chosen", "not chosen", "no translation")}

    def read_pairs(self, options: DistilOptions) -> Iterator[tuple[str, str]]:
        """Yield each source with its chosen translation, or "" if there is none."""
        with open_lines(str(options.output / CHOICES), invalid_utf8="refuse") as choices:
            for line, choice in enumerate(map(json.loads, choices.lines), start=1):
                source, texts, number = choice["source"], choice["texts"], choice["number"]
                self.facts["candidates"] += len(texts)
                self.facts["mended"] += choice["mended"]
                self.facts["without_translation"] += number is None and not is_blank(source)
                scored = zip(texts, choice["problems"], choice["scores"], strict=True)
                for place, (text, name, score) in enumerate(scored):
                    kind = "chosen" if place == number else "not chosen"
                    self._scores["no translation" if name else kind].append(score)
                    if name:
                        problem = self.facts["problems"].setdefault(name, {"count": 0, "examples": []})
                        problem["count"] += 1
                        example = {"line": line, "candidate": place + 1, "source": source[:_SHOWN]}
                        example["text"] = text[:_SHOWN]
                        problem["examples"] += [example][: _EXAMPLES - len(problem["examples"])]
                yield source, "" if number is None else texts[number]

    def write_page(self, options: DistilOptions, report: dict[str, Any]) -> None:
        """Write DIR/report.html with counts, histograms of scores, and the first examples of each problem."""
        from flaxformer_mt.evaluation.plots import chart_histograms
        from flaxformer_mt.evaluation.run_report.page import make_page
        from flaxformer_mt.evaluation.tables import Table

        names = ("lines", "pairs", "candidates", "mended", "without_translation")
        counts = [[name.replace("_", " "), f"{report[name]:,}"] for name in names]
        title = f"Scores by {options.targets} ({options.metric}), percent of each kind"
        scores = {} if options.targets == "best" else self._scores
        charts = chart_histograms(scores, title=title, x_name="score")
        examples = [
            [name, f"{problem['count']:,}", f"{example['line']:,}", example["source"], example["text"]]
            for name, problem in report["problems"].items()
            for example in problem["examples"]
        ]
        heading, caption = ["problem", "candidates", "line", "source", "answer"], "The first of each problem"
        parts: dict[str, Any] = {
            "Candidates": [Table(["", "number"], counts, "What was read and written", (1,)), charts],
            "No translations": [Table(heading, examples, caption, (1, 2))],
        }
        page = make_page(f"Candidates of {options.candidates}", parts, [options.output])
        write_atomically(options.output / "report.html", page.encode("utf-8", errors="replace"))
