"""Makes the sections of the page as lists of blocks for its template; a section without content is []."""

import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flaxformer_mt.config import Config
from flaxformer_mt.config.directions import Direction, find_directions
from flaxformer_mt.config.files import flatten, read_config
from flaxformer_mt.corpus.cleaning import ACTION_WORDS, PROBLEM_WORDS
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.comparison import find_largest_differences
from flaxformer_mt.evaluation.evaluation_set import Translations, load_translations
from flaxformer_mt.evaluation.plots import Bar, Chart, Line, chart_bars, chart_lines, read_curve
from flaxformer_mt.evaluation.score_breakdowns import name_bucket, split_by_length
from flaxformer_mt.evaluation.tables import Table, write_score
from flaxformer_mt.runs.run_directory import read_report
from flaxformer_mt.scoring.metrics import METRICS, QUICK, choose_score_options, score_sentences
from flaxformer_mt.scoring.significance import ResamplingOptions, resample_scores
from flaxformer_mt.tracking import read_metrics

# The color scheme has as many colors.
MOST_RUNS = 6


@dataclass(frozen=True)
class ReportedRun:
    """The config, report, metrics and translations of one run, as far as they exist."""

    # Of the color that it has on the page.
    number: int
    # The last part of its path, or as many parts as tell it from the other runs.
    name: str
    run_dir: Path
    config: Config
    # report.json; empty before the end of training.
    report: Mapping[str, Any]
    # The records of metrics.jsonl.
    metrics: Sequence[Mapping[str, Any]]
    # The translations of the set that the page compares; without sentences if the run has none.
    translations: Translations
    # The language of their references.
    language: str
    # Those of each direction, of a model of several.
    by_direction: Mapping[Direction, Translations] = field(default_factory=dict)
    # The checkpoints and searches that they are of; empty for those of earlier versions.
    systems: tuple[str, ...] = ()


def read_runs(run_dirs: Sequence[Path], name: str) -> list[ReportedRun]:
    if not 1 <= len(run_dirs) <= MOST_RUNS:
        raise UserError(f"a page shows 1 to {MOST_RUNS} runs, but {len(run_dirs)} are given; leave some out")
    places = [run_dir.resolve() for run_dir in run_dirs]
    if twice := [str(run_dirs[i]) for i, place in enumerate(places) if place in places[:i]]:
        raise UserError(f"{twice[0]} is given twice; name each run once")
    names = name_apart(places)
    return [_read(*values, name) for values in zip(range(len(names)), names, run_dirs, strict=True)]


def name_apart(places: Sequence[Path]) -> list[str]:
    """Return the shortest endings that distinguish all paths: x and y for a/x and b/y."""
    length = 1
    while len({place.parts[-length:] for place in places}) < len(places):
        length += 1
    return ["/".join(place.parts[-length:]) for place in places]


def _read(number: int, own_name: str, run_dir: Path, name: str) -> ReportedRun:
    config = read_config(run_dir / "config.json")
    has_metrics = (run_dir / "metrics.jsonl").is_file()
    directions = find_directions(config.data)
    named = [direction for direction in directions if name.endswith(f".{direction.name}")]
    return ReportedRun(
        number=number,
        name=own_name,
        run_dir=run_dir,
        config=config,
        report=read_report(run_dir) or {},
        metrics=read_metrics(run_dir) if has_metrics else [],
        translations=_find_translations(run_dir, name),
        language=named[0].target if named else config.data.target_language,
        by_direction={
            direction: translations
            for direction in (directions if len(directions) > 1 else [])
            if (translations := _find_translations(run_dir, f"{name}.{direction.name}")).sources
        },
        systems=tuple(
            dict.fromkeys(
                file.read_text(encoding="utf-8").strip()
                for one in (name, *(f"{name}.{direction.name}" for direction in directions))
                if (file := run_dir / "translations" / f"{one}.system").is_file()
            )
        ),
    )


def _find_translations(run_dir: Path, name: str) -> Translations:
    translated = (run_dir / "translations" / f"{name}.hypothesis").is_file()
    return load_translations(run_dir, name) if translated else Translations((), (), ())


def share_a_set(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Return the runs that have translated the same sentences as the first run with translations."""
    sets = [(run.translations.sources, run.translations.references) for run in runs]
    first = next((comparable for comparable in sets if comparable[0]), None)
    return [run for run, comparable in zip(runs, sets, strict=True) if comparable == first]


_TITLES = [metric.title for metric in METRICS.values()]
# Of parts of a set there is no TER, which takes most time.
_QUICK_TITLES = [METRICS[metric].title for metric in QUICK]
_PANELS = {"loss": "Loss", "bleu": "BLEU of the validation set", "learning_rate": "Learning rate"}
# Of each set, the most sentences that are shown.
_SENTENCES = 12
# Of each sentence, the most words that are compared.
_COMPARED = 500


class Heading(NamedTuple):
    text: str


class Sentence(NamedTuple):
    """A sentence as table rows: each has a name and texts, each text marked as "ins", "del" or ""."""

    title: str
    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]]


class Attention(NamedTuple):
    """Attention weights [target subword][source subword] of one translation, without end symbols."""

    number: int
    source: Sequence[str]
    target: Sequence[str]
    weights: Sequence[Sequence[float]]


# What a section consists of: paragraphs, tables and others, which the template writes by their types.
Blocks = list[str | Table | list[Chart] | Heading | Sentence | Attention]


def _choose_score_options(run: ReportedRun, references: Sequence[str], language: str) -> dict[str, Any]:
    return choose_score_options(run.config.train, language, references, warn=lambda message: None)


def _score(
    translations: Translations,
    samples: int,
    options: Mapping[str, Any],
    *,
    signatures: set[str] | None = None,
) -> dict[str, Bar]:
    """Score translations by each metric, with intervals for two or more sentences; add to `signatures`."""
    samples = 0 if min(samples, len(translations.sources)) < 2 else samples
    systems = {"": translations.hypotheses}
    results = resample_scores(systems, translations.references, ResamplingOptions(samples), **options)
    if signatures is not None:
        signatures.add("; ".join(f"{METRICS[m].title} {text}" for m, text in results.signatures.items()))
    return {metric: Bar(score.score, score.ci) for metric, score in results.systems[0].items()}


def _choose_metrics(runs: Sequence[ReportedRun]) -> list[str]:
    """Return all metrics, without TER if a sentence is so long that TER would take minutes."""
    texts = (text for run in runs for text in run.translations.hypotheses + run.translations.references)
    return list(QUICK if any(len(text.split()) > _COMPARED for text in texts) else METRICS)


def make_summary(runs: Sequence[ReportedRun], compared: Sequence[ReportedRun], samples: int) -> Blocks:
    """Make a table of runs: scores with 95% intervals, training steps and time, number of parameters."""
    rows, signatures = [], set[str]()
    for run in runs:
        report, scores = run.report, dict[str, Bar]()
        if run in compared:
            options = _choose_score_options(run, run.translations.references, run.language)
            options["only"] = _choose_metrics([run])
            scores = _score(run.translations, samples, options, signatures=signatures)
        seconds = report.get("train_seconds")
        rows.append(
            [
                run,
                *(write_bar(scores.get(metric)) for metric in METRICS),
                _number(report.get("parameters")),
                _number(report.get("step", max((r["step"] for r in run.metrics), default=None))),
                _number(report.get("target_tokens")),
                "–" if seconds is None else _time(seconds),
                str(report.get("hardware", "–")),
                str(report.get("finished", "–"))[:16].replace("T", " "),
                str(report.get("version", "–")),
            ]
        )
    heading = ["run", *_TITLES, "parameters", "steps", "target tokens", "time", "hardware"]
    heading += ["finished", "version"]
    caption = "Scores with 95% intervals (bootstrap), and what training took; – stands for unknown"
    blocks: Blocks = [Table(heading, rows, caption, range(1, 8))]
    blocks += [f"Signatures: {text}" for text in sorted(signatures)]
    for run in runs:
        if state := _describe_state(run):
            blocks.append(f"{run.name}: {state}")
        if command := run.report.get("command"):
            blocks.append(f"{run.name} was trained by: {command}")
    return blocks


def _describe_state(run: ReportedRun) -> str:
    """Describe the best checkpoint, the systems scored, and whether training continued after the report."""
    step, newest = run.report.get("step"), max((record["step"] for record in run.metrics), default=0)
    best = (run.report.get("best") or {}).get("step")
    texts = [] if best is None else [f"the best checkpoint is step {best:,}."]
    texts += [f"The scores are of {' and '.join(run.systems)}."] if run.systems else []
    if step is not None and newest > step:
        texts.append(
            f"training went on to step {newest:,}; steps, time and best checkpoint are of step {step:,}."
        )
    return " ".join(texts)


def make_significance(runs: Sequence[ReportedRun], samples: int) -> Blocks:
    """Make a table of paired bootstrap tests of the first run against each other run; [] for one run."""
    if len(runs) < 2 or samples < 2:
        return []
    first = runs[0]
    references = first.translations.references
    systems = {run.name: run.translations.hypotheses for run in runs}
    options = _choose_score_options(first, references, first.language)
    options["only"] = metrics = _choose_metrics(runs)
    tests = resample_scores(systems, references, ResamplingOptions(samples), **options)
    rows = []
    for run, scores in zip(runs[1:], tests.systems[1:], strict=True):
        differences = [
            f"{scores[metric].score - tests.systems[0][metric].score:+.2f} (p = {scores[metric].p_value:.3f})"
            for metric in metrics
        ]
        rows.append([f"{run.name} against {first.name}", *differences])
    caption = (
        f"Differences of the scores, by paired bootstrap resampling with {samples:,} samples; p is the "
        "probability of such a difference between systems that are equally good"
    )
    return [Table(["runs", *(METRICS[metric].title for metric in metrics)], rows, caption, (1, 2, 3))]


def write_bar(bar: Bar | None) -> str:
    return "–" if bar is None else write_score(*bar)


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:,}"


def _time(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def make_curves(runs: Sequence[ReportedRun]) -> Blocks:
    """Draw losses, BLEU and learning rate over steps; the lines of validation losses are dashed."""
    charts: list[Chart] = []
    for panel, title in _PANELS.items():
        lines = []
        for run in runs:
            for split, dashed in (("train", False), ("valid", panel == "loss")):
                name = run.name if panel != "loss" else f"{run.name}, {'valid' if dashed else 'training'}"
                points = list(zip(*read_curve(run.metrics, split, panel), strict=True))
                lines.append(Line(run.number, name, points, dashed))
        charts += chart_lines(lines, title=title, x_name="steps")
    return [charts] if charts else []


def make_length_scores(runs: Sequence[ReportedRun], samples: int) -> Blocks:
    bars: dict[str, dict[str, list[tuple[int, Bar]]]] = {metric: {} for metric in QUICK}
    cells: dict[str, list[list[Any]]] = {}
    for run in runs:
        options = _choose_score_options(run, run.translations.references, run.language)
        for bucket, part in split_by_length(run.translations).items():
            label, scores = name_bucket(*bucket), _score(part, samples, options | {"only": QUICK})
            for metric in QUICK:
                bars[metric].setdefault(label, []).append((run.number, scores[metric]))
            written = [write_bar(scores[metric]) for metric in QUICK]
            cells.setdefault(label, []).append([label, f"{len(part.sources):,}", run, *written])
    if not runs:
        return []
    words = "words of the source"
    charts = [
        chart
        for metric in QUICK
        for chart in chart_bars(bars[metric], title=f"{METRICS[metric].title} by source length", x_name=words)
    ]
    caption = "Scores with 95% intervals by the number of words of the source"
    rows = [row for group in cells.values() for row in group]
    table = Table(["words", "sentences", "run", *_QUICK_TITLES], rows, caption, (1, 3, 4))
    return [charts, table]


def make_directions(runs: Sequence[ReportedRun], samples: int) -> Blocks:
    """Make a chart and a table of scores by direction, for multilingual runs with translations."""
    cells: dict[str, list[list[Any]]] = {}  # the runs of a direction below each other
    bars = dict[str, list[tuple[int, Bar]]]()
    for run in runs:
        for direction, translations in run.by_direction.items():
            options = _choose_score_options(run, translations.references, direction.target)
            scores = _score(translations, samples, options | {"only": QUICK})
            written = [write_bar(scores[metric]) for metric in QUICK]
            row = [direction.name, run, f"{len(translations.sources):,}", *written]
            cells.setdefault(direction.name, []).append(row)
            bars.setdefault(direction.name, []).append((run.number, scores["bleu"]))
    if not cells:
        return []
    heading, rows = ["direction", "run", "sentences", *_QUICK_TITLES], [*itertools.chain(*cells.values())]
    chart = chart_bars(bars, title="BLEU by direction", x_name="direction")
    return [chart, Table(heading, rows, "Scores by direction, with 95% intervals", (2, 3, 4))]


def mark_words(old: str, new: str) -> list[tuple[str, str]]:
    """Return the words of both texts, marked "del" if only in the old text, "ins" if only in the new one."""
    before, after = _first_words(old), _first_words(new)
    parts: list[tuple[str, str]] = []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            parts.append(("", " ".join(before[i:j])))
        else:
            parts += [
                (tag, " ".join(words)) for tag, words in (("del", before[i:j]), ("ins", after[k:m])) if words
            ]
    return parts


def _first_words(text: str) -> list[str]:
    """Return at most the first 500 words of a sentence; comparing more would take minutes."""
    words = text.split()
    return words if len(words) <= _COMPARED else [*words[:_COMPARED], "…"]


def make_sentences(runs: Sequence[ReportedRun]) -> Blocks:
    """List the sentences with the largest differences in chrF or, for a single run, with the lowest chrF."""
    if not runs:
        return []
    first, shown = runs[0].translations, Blocks()
    if len(runs) == 1:
        scores = score_sentences("chrf", first.sources, first.hypotheses, first.references)
        shown.append(Heading("The lowest chrF"))
        for i in sorted(range(len(scores)), key=lambda i: scores[i])[:_SENTENCES]:
            rows = [
                ("source", [("", first.sources[i])]),
                ("translation", [("", first.hypotheses[i])]),
                ("against the reference", mark_words(first.hypotheses[i], first.references[i])),
            ]
            shown.append(Sentence(f"Sentence {i + 1}, chrF {scores[i]:.1f}", rows))
    for other in runs[1:]:
        pairs = list(zip(first.hypotheses, other.translations.hypotheses, strict=True))
        differing = sum(ours != theirs for ours, theirs in pairs)
        shown.append(Heading(f"{runs[0].name} and {other.name}"))
        shown.append(f"{differing:,} of {len(pairs):,} translations differ.")
        for i, ours, theirs in find_largest_differences(
            first.hypotheses, other.translations.hypotheses, first.references, most=_SENTENCES
        ):
            rows = [
                ("source", [("", first.sources[i])]),
                ("reference", [("", first.references[i])]),
                (f"{runs[0].name} → {other.name}", mark_words(*pairs[i])),
            ]
            title = f"Sentence {i + 1}, chrF {ours:.1f} and {theirs:.1f}"
            shown.append(Sentence(title, rows))
    return shown


def make_config_differences(runs: Sequence[ReportedRun]) -> Blocks:
    """Make a table of the config fields that differ between runs or, for a single run, from the defaults."""
    tables = [flatten(run.config) for run in runs]
    if len(runs) == 1:
        defaults = flatten(type(runs[0].config)())
        changed = [name for name in defaults if tables[0][name] != defaults[name]]
        rows = [[n, repr(tables[0][n]), repr(defaults[n])] for n in changed]
        return [Table(["field", "value", "default"], rows, "Fields that are not the default")]
    unlike = [name for name in tables[0] if any(table[name] != tables[0][name] for table in tables)]
    if not unlike:
        return ["The configs are equal."]
    rows = [[name, *(repr(table[name]) for table in tables)] for name in unlike]
    return [Table(["field", *runs], rows, "Fields that are not the same in all runs")]


def make_data(runs: Sequence[ReportedRun]) -> Blocks:
    rows = []
    for run in runs:
        for split, data in run.report.get("data", {}).items():
            for part in (data or {}).get("parts", []):
                problems = [
                    f"{PROBLEM_WORDS.get(name, name)}: {row['count']:,} {ACTION_WORDS.get(row['action'], '')}"
                    for name, row in part["problems"].items()
                ]
                cells = [split, part["name"], f"{part['read']:,}", f"{part['pairs']:,}"]
                rows.append([run, *cells, problems or "none"])
    if not rows:
        return ["The runs were trained by a version that did not record it; see the command prepare."]
    heading = ["run", "split", "data set", "read", "kept", "problems"]
    return [Table(heading, rows, "Pairs that were read and kept", (3, 4))]
