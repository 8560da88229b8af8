"""Writes the page as one self-contained HTML file, which makes no requests and needs no scripts."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flaxformer_mt
from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.errors import UserError, name_full_disk
from flaxformer_mt.evaluation.evaluation_set import Translations
from flaxformer_mt.evaluation.run_report import sections
from flaxformer_mt.evaluation.run_report.sections import Attention, ReportedRun, read_runs, share_a_set
from flaxformer_mt.object_store.remote_runs import open_copy
from flaxformer_mt.text_io.lines import check_writable, is_device
from flaxformer_mt.translation.result import Annotations
from flaxformer_mt.translation.translator import Translator


def find_attention(run_dir: Path, translations: Translations, numbers: Sequence[int]) -> list[Attention]:
    """Translate the sentences with these numbers (from 1); return the attention used for alignments."""
    count = len(translations.sources)
    for number in numbers:
        if not 1 <= number <= count:
            raise UserError(f"--attention names sentence {number}, but there are {count}; give 1 to {count}")
    translator = Translator.load(run_dir, long_lines="cut", split_sentences="never")
    lines = [translations.sources[number - 1] for number in numbers]
    shown = []
    translated = translator.translate(lines, annotations=Annotations(attention=True))
    for number, line, result in zip(numbers, lines, translated, strict=True):
        if result.attention is None:  # a blank line
            continue
        source = translator.vocabs.source.pieces(translator.vocabs.source.tokenize(line)[:-1])
        eos = translator.vocabs.target.eos_id
        target = translator.pieces([token for token in result.tokens if token != eos])
        shown.append(Attention(number, source[: len(result.attention[0])], target, result.attention))
    return shown


# Bootstrap samples of the intervals.
SAMPLES = 1000
_SAMPLES_IN_TRAINING = 200


def report_runs(
    run_dirs: Sequence[str | Path],
    output: str | Path,
    *,
    name: str = "test",
    attention: Sequence[int] = (),
    samples: int = SAMPLES,
) -> dict[str, Any]:
    """Write a page about runs from what training and `evaluate` wrote; return its path, runs and sections.

    `name`: the translations RUN/translations/NAME.hypothesis. `attention`: numbers, from 1, of sentences
    whose attention the first run with translations computes. `samples`: number of bootstrap samples.
    """
    output = Path(output).expanduser()
    if output.is_dir():
        raise UserError(f"output {output} is a folder, but the page is a file; give --output=FILE.html")
    if not is_device(str(output)):
        check_writable(output.parent)
    runs = read_runs([open_copy(run) for run in run_dirs], name)
    parts = make_parts(runs, name=name, attention=attention, samples=samples)
    output.parent.mkdir(parents=True, exist_ok=True)
    names, places = [run.name for run in runs], [run.run_dir for run in runs]
    page = make_page(" · ".join(names), parts, places).encode("utf-8", errors="replace")
    if is_device(str(output)):
        with name_full_disk(output):
            output.write_bytes(page)
    else:
        write_atomically(output, page)
    return {"output": str(output), "runs": names, "sections": list(parts)}


def report_training(run_dir: Path) -> Path:
    """Write RUN/report.html after training has written RUN/report.json; return the path of the page."""
    report_runs([run_dir], run_dir / "report.html", samples=_SAMPLES_IN_TRAINING)
    return run_dir / "report.html"


def make_parts(
    runs: Sequence[ReportedRun], *, name: str, attention: Sequence[int], samples: int
) -> dict[str, sections.Blocks]:
    compared = share_a_set(runs)
    if attention and not compared:
        raise UserError(
            f"no run has translations of {name}, whose attention is asked for; translate them with evaluate"
        )
    shown: sections.Blocks = []
    if attention:
        shown.append(f"Model: {compared[0].name}.")
        shown += find_attention(compared[0].run_dir, compared[0].translations, attention)
    left_out = [run.name for run in runs if run.translations.sources and run not in compared]
    note = f"Left out, because their sentences are not those of the first run: {', '.join(left_out)}."
    parts = {
        "Summary": sections.make_summary(runs, compared, samples)
        + sections.make_significance(compared, samples)
        + ([note] if left_out else []),
        "Training": sections.make_curves(runs),
        f"Scores by source length ({name})": sections.make_length_scores(compared, samples)
        or [_explain_absence(runs, name)],
        f"Scores by direction ({name})": sections.make_directions(runs, samples),
        f"Sentences ({name})": sections.make_sentences(compared),
        "Config": sections.make_config_differences(runs),
        "Data": sections.make_data(runs),
        "Attention": shown,
    }
    return {heading: content for heading, content in parts.items() if content}


def _explain_absence(runs: Sequence[ReportedRun], name: str) -> str:
    if directions := [direction for run in runs for direction in run.by_direction]:
        shown = f"{name}.{directions[0].name}"
        return f"Each direction has translations of its own, which report --name={shown} shows."
    return "No run has translations of this set; the command evaluate writes them to RUN/translations/."


def make_page(title: str, parts: Mapping[str, sections.Blocks], places: Sequence[Path]) -> str:
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return templates.get_template("page.html.jinja").render(
        title=title,
        sections=parts,
        places=places,
        made=f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M}",
        version=flaxformer_mt.__version__,
        zip=zip,
        kind=lambda block: type(block).__name__,
    )
