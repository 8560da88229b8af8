"""The sections of the page, as HTML, each from the facts of the runs; "" where there is nothing to show."""

import difflib
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flaxformer_mt.config.files import flatten
from flaxformer_mt.evaluation.length_breakdown import group_by_length
from flaxformer_mt.evaluation.metrics import choose_tokenizer, score_sentences_chrf, score_with_intervals
from flaxformer_mt.evaluation.run_report.charts import Bar, Line, draw_bars, draw_lines
from flaxformer_mt.evaluation.run_report.run_facts import RunFacts
from flaxformer_mt.evaluation.translation_files import Translations

_PANELS = {"loss": "Loss", "bleu": "BLEU of the validation set", "learning_rate": "Learning rate"}
# Of each set, the most sentences that are shown.
_SENTENCES = 12
_PROBLEMS = {
    "invalid_utf8": "not UTF-8",
    "empty": "empty or blank side",
    "too_long": "too many characters",
    "length_ratio": "lengths differ too much",
    "duplicates": "exact duplicates",
}
_ACTIONS = {"drop": "left out", "keep": "kept", "refuse": "refused"}


def escape(value: object) -> str:
    """Returns a value as the text of an element."""
    return html.escape(str(value))


def make_table(
    heading: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, numbers: Sequence[int] = ()
) -> str:
    """Returns a table of cells that are HTML; the first cell of a row is its heading.

    Args:
      caption: what the table shows, as text.
      numbers: the columns that are aligned on the right.
    """

    def cell(tag: str, column: int, content: str, scope: str = "") -> str:
        kind = ' class="number"' if column in numbers else (' class="value"' if tag == "td" else "")
        return f"<{tag}{kind}{scope}>{content}</{tag}>"

    head = "".join(cell("th", i, content, ' scope="col"') for i, content in enumerate(heading))
    body = "".join(
        "<tr>"
        + cell("th", 0, row[0], ' scope="row"')
        + "".join(cell("td", i, content) for i, content in enumerate(row) if i)
        + "</tr>"
        for row in rows
    )
    label = html.escape(caption, quote=True)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{label}"><table><caption>{escape(caption)}'
        f"</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def name_run(number: int, run: RunFacts) -> str:
    """Returns a run's name with its color."""
    return f'<span class="swatch run{number}" aria-hidden="true"></span>{escape(run.name)}'


def make_summary(runs: Sequence[RunFacts], scores: Mapping[str, Mapping[str, Bar]]) -> str:
    """The scores of the compared set with 95% intervals, and what training took."""
    rows = []
    for number, run in enumerate(runs):
        report, found = run.report, scores.get(run.name, {})
        seconds = report.get("train_seconds")
        rows.append(
            [
                name_run(number, run),
                *(write_bar(found.get(metric)) for metric in ("bleu", "chrf")),
                _number(report.get("parameters")),
                _number(report.get("step", max((r["step"] for r in run.metrics), default=None))),
                _number(report.get("target_tokens")),
                "–" if seconds is None else _time(seconds),
                escape(report.get("hardware", "–")),
            ]
        )
    heading = ["run", "BLEU", "chrF", "parameters", "updates", "target tokens", "time", "hardware"]
    caption = "Scores with 95% intervals (bootstrap), and what training took; – stands for unknown"
    return make_table(heading, rows, caption=caption, numbers=range(1, 7))


def write_bar(bar: Bar | None) -> str:
    """Returns a score with its interval, such as 37.10 ± 1.05."""
    if bar is None:
        return "–"
    return f"{bar.value:.2f}" + ("" if bar.interval is None else f" ± {bar.interval:.2f}")


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:,}"


def _time(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes // 60}:{minutes % 60:02} h"


def make_curves(runs: Sequence[RunFacts]) -> str:
    """Losses, BLEU and learning rate over updates; dashed: of the validation set beside that of training."""
    charts = []
    for field, title in _PANELS.items():
        lines = []
        for number, run in enumerate(runs):
            for split, dashed in (("train", False), ("valid", field == "loss")):
                points = {
                    record["step"]: record[field]
                    for record in run.metrics
                    if record.get("split") == split and isinstance(record.get(field), int | float)
                }
                name = run.name if field != "loss" else f"{run.name}, {'valid' if dashed else 'training'}"
                lines.append(Line(number, name, sorted(points.items()), dashed))
        charts.append(draw_lines(lines, title=title, x_name="updates"))
    drawn = "".join(charts)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def score_groups(runs: Sequence[RunFacts], samples: int) -> dict[str, dict[str, dict[str, Bar]]]:
    """Scores all sentences ("all") and those of each range of source lengths, by group, run and metric."""
    first = runs[0].translations
    assert first is not None
    groups = {"all": list(range(len(first.sources))), **group_by_length(first.sources)}
    scored: dict[str, dict[str, dict[str, Bar]]] = {}
    for label, indices in groups.items():
        scored[label] = {}
        for run in runs:
            assert run.translations is not None
            scored[label][run.name] = _score(run, run.translations, indices, run.language, samples)
    return scored


def _score(
    run: RunFacts, translations: Translations, indices: Sequence[int], language: str, samples: int
) -> dict[str, Bar]:
    """Scores some sentences, whose references are in a language, as the run's config says."""
    train, references = run.config.train, translations.references
    found = score_with_intervals(
        [translations.hypotheses[i] for i in indices],
        [references[i] for i in indices],
        samples=samples,
        lowercase=train.lowercase,
        tokenize=choose_tokenizer(
            language, train.bleu_tokenize, references=references, warn=lambda message: None
        ),
    )
    return {metric: Bar(*pair) for metric, pair in found.items()}


def make_length_scores(
    runs: Sequence[RunFacts],
    scored: Mapping[str, Mapping[str, Mapping[str, Bar]]],
    sizes: Mapping[str, int],
    numbers: Mapping[str, int],
) -> str:
    """Charts and a table of the scores by source length.

    Args:
      sizes: number of sentences of each range of lengths.
      numbers: number of the color of each run, by name.
    """
    charts, rows = [], []
    for metric, title in (("bleu", "BLEU by source length"), ("chrf", "chrF by source length")):
        groups = {
            label: [(numbers[run.name], scored[label][run.name][metric]) for run in runs] for label in sizes
        }
        charts.append(draw_bars(groups, title=title, x_name="words of the source"))
    for label, size in sizes.items():
        for run in runs:
            found = scored[label][run.name]
            cells = [name_run(numbers[run.name], run), write_bar(found["bleu"]), write_bar(found["chrf"])]
            rows.append([label, f"{size:,}", *cells])
    table = make_table(
        ["words", "sentences", "run", "BLEU", "chrF"],
        rows,
        caption="Scores with 95% intervals by the number of words of the source",
        numbers=(1, 3, 4),
    )
    return f'<div class="charts">{"".join(charts)}</div>{table}'


def make_directions(runs: Sequence[RunFacts], name: str, samples: int) -> str:
    """A chart and a table of the scores of each direction, of runs of several.

    They have intervals if the run has translations of the direction; without them, those of the test set are
    the scores of its report.

    Args:
      name: of the set.
    """
    rows, bars = [], dict[str, list[tuple[int, Bar]]]()
    for number, run in enumerate(runs):
        test = run.report.get("test") or {}
        found = {
            direction: (
                report.get("sentences"),
                {metric: Bar(report[metric], None) for metric in ("bleu", "chrf") if metric in report},
            )
            for direction, report in (test.get("directions") or {} if name == "test" else {}).items()
        }
        for direction, own in run.by_direction.items():
            size = len(own.sources)
            found[direction.name] = size, _score(run, own, range(size), direction.target, samples)
        for direction_name, (size, scores) in found.items():
            cells = [write_bar(scores.get(metric)) for metric in ("bleu", "chrf")]
            rows.append([escape(direction_name), name_run(number, run), _number(size), *cells])
            if "bleu" in scores:
                bars.setdefault(direction_name, []).append((number, scores["bleu"]))
    if not rows:
        return ""
    order = {direction: place for place, direction in enumerate(dict.fromkeys(row[0] for row in rows))}
    rows.sort(key=lambda row: order[row[0]])  # the runs of a direction below each other
    heading = ["direction", "run", "sentences", "BLEU", "chrF"]
    caption = "Scores by direction, with 95% intervals where there are translations"
    chart = draw_bars(bars, title="BLEU by direction", x_name="direction")
    return f'<div class="charts">{chart}</div>{make_table(heading, rows, caption=caption, numbers=(2, 3, 4))}'


def mark_words(old: str, new: str) -> str:
    """Returns the words of both texts as HTML: `del` around those of the old one, `ins` of the new."""
    before, after = old.split(), new.split()
    parts = []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            parts.append(escape(" ".join(before[i:j])))
            continue
        for tag, words in (("del", before[i:j]), ("ins", after[k:m])):
            if words:
                parts.append(f"<{tag}>{escape(' '.join(words))}</{tag}>")
    return " ".join(parts)


def make_sentences(runs: Sequence[RunFacts]) -> str:
    """The sentences whose chrF differs most between the first run and each other one, with words marked.

    Of a single run: those with the lowest chrF, compared with their references.
    """
    first = runs[0].translations
    assert first is not None
    own = score_sentences_chrf(first.hypotheses, first.references)
    if len(runs) == 1:
        worst = sorted(range(len(own)), key=lambda i: own[i])[:_SENTENCES]
        rows = [
            _list_sentence(
                f"Sentence {i + 1}, chrF {own[i]:.1f}",
                [
                    ("source", escape(first.sources[i])),
                    ("translation", escape(first.hypotheses[i])),
                    ("against the reference", mark_words(first.hypotheses[i], first.references[i])),
                ],
            )
            for i in worst
        ]
        return "<h3>The lowest chrF</h3>" + "".join(rows)
    parts = []
    for other in runs[1:]:
        assert other.translations is not None
        theirs = score_sentences_chrf(other.translations.hypotheses, first.references)
        pairs = list(zip(first.hypotheses, other.translations.hypotheses, strict=True))
        unlike = [i for i, (one, two) in enumerate(pairs) if one != two]
        chosen = sorted(unlike, key=lambda i: -abs(own[i] - theirs[i]))[:_SENTENCES]
        parts.append(f"<h3>{escape(runs[0].name)} and {escape(other.name)}</h3>")
        parts.append(f"<p>{len(unlike):,} of {len(own):,} translations differ.</p>")
        parts += [
            _list_sentence(
                f"Sentence {i + 1}, chrF {own[i]:.1f} and {theirs[i]:.1f}",
                [
                    ("source", escape(first.sources[i])),
                    ("reference", escape(first.references[i])),
                    (f"{runs[0].name} → {other.name}", mark_words(*pairs[i])),
                ],
            )
            for i in chosen
        ]
    return "".join(parts)


def _list_sentence(title: str, rows: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{content}</dd>" for name, content in rows)
    return f'<div class="sentence"><p class="soft">{escape(title)}</p><dl>{items}</dl></div>'


def make_config_differences(runs: Sequence[RunFacts]) -> str:
    """The fields of the configs that differ between the runs, or of one run from the default."""
    tables = [flatten(run.config) for run in runs]
    if len(runs) == 1:
        defaults = flatten(type(runs[0].config)())
        changed = [name for name in defaults if tables[0][name] != defaults[name]]
        rows = [[escape(n), escape(repr(defaults[n])), escape(repr(tables[0][n]))] for n in changed]
        return make_table(["field", "default", "value"], rows, caption="Fields that are not the default")
    unlike = [name for name in tables[0] if any(table[name] != tables[0][name] for table in tables)]
    if not unlike:
        return "<p>The configs are equal.</p>"
    rows = [[escape(name), *(escape(repr(table[name])) for table in tables)] for name in unlike]
    names = [name_run(number, run) for number, run in enumerate(runs)]
    return make_table(["field", *names], rows, caption="Fields that are not the same in all runs")


def make_data(runs: Sequence[RunFacts]) -> str:
    """What became of the pairs of each data set."""
    rows = []
    for number, run in enumerate(runs):
        for split, found in run.report.get("data", {}).items():
            for part in (found or {}).get("parts", []):
                problems = [
                    f"{_PROBLEMS.get(name, escape(name))}: {one['count']:,} {_ACTIONS.get(one['action'], '')}"
                    for name, one in part["problems"].items()
                ]
                cells = [escape(split), escape(part["name"]), f"{part['read']:,}", f"{part['pairs']:,}"]
                rows.append([name_run(number, run), *cells, "<br>".join(problems) or "none"])
    if not rows:
        return "<p>The runs were trained by a version that did not record it; see <code>prepare</code>.</p>"
    heading = ["run", "split", "data set", "read", "kept", "problems"]
    return make_table(heading, rows, caption="Pairs that were read and kept", numbers=(3, 4))
