"""`report`: one page about one or several runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ReportOptions:
    """Writes a page about runs: curves, scores, differing sentences, configs and data, in one HTML file."""

    # Run directories, separated by commas or each with a --run of its own; the others are compared with the
    # first one.
    run: tuple[str, ...]
    # The HTML file.
    output: Path = Path("report.html")
    # Name of the translations to compare: RUN/translations/NAME.hypothesis, which `evaluate` writes.
    name: str = "test"
    # Numbers of the sentences, from 1, whose attention is shown, such as 1,17; this loads the model of the
    # first run and translates them. Empty: none.
    attention: tuple[int, ...] = ()


def report(options: ReportOptions) -> dict[str, Any]:
    """Run the command `report`."""
    from flaxformer_mt.evaluation.run_report.page import report_runs

    return report_runs(options.run, options.output, name=options.name, attention=options.attention)
