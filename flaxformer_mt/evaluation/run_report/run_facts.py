"""What a run directory tells about its run: config, metrics, report and translations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flaxformer_mt.config import Config
from flaxformer_mt.config.directions import Direction, find_directions
from flaxformer_mt.config.files import read_config
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.translation_files import Translations, load_translations
from flaxformer_mt.runs.run_directory import read_report
from flaxformer_mt.tracking import read_metrics

# The color scheme has as many colors.
MOST_RUNS = 6


@dataclass(frozen=True)
class RunFacts:
    """One run, as far as it has been trained and evaluated."""

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


def gather_facts(run_dirs: Sequence[Path], name: str) -> list[RunFacts]:
    """Read the files of all runs.

    Args:
      name: of the set of translations, RUN/translations/NAME.hypothesis.

    Raises:
      UserError: a run is absent or named twice, a file of it is damaged, or there are too many.
    """
    if not 1 <= len(run_dirs) <= MOST_RUNS:
        raise UserError(f"a page shows 1 to {MOST_RUNS} runs, but {len(run_dirs)} are given; leave some out")
    places = [run_dir.resolve() for run_dir in run_dirs]
    if twice := [str(run_dirs[i]) for i, place in enumerate(places) if place in places[:i]]:
        raise UserError(f"{twice[0]} is given twice; name each run once")
    names = name_apart(places)
    return [_read(*facts, name) for facts in zip(range(len(names)), names, run_dirs, strict=True)]


def name_apart(places: Sequence[Path]) -> list[str]:
    """Return the ends of different paths, as short as tells them apart: a/x and b/y are x and y."""
    length = 1
    while len({place.parts[-length:] for place in places}) < len(places):
        length += 1
    return ["/".join(place.parts[-length:]) for place in places]


def _read(number: int, own_name: str, run_dir: Path, name: str) -> RunFacts:
    config = read_config(run_dir / "config.json")
    has_metrics = (run_dir / "metrics.jsonl").is_file()
    directions = find_directions(config.data)
    own = [direction for direction in directions if name.endswith(f".{direction.name}")]
    return RunFacts(
        number=number,
        name=own_name,
        run_dir=run_dir,
        config=config,
        report=read_report(run_dir) or {},
        metrics=read_metrics(run_dir) if has_metrics else [],
        translations=_find_translations(run_dir, name),
        language=own[0].target if own else config.data.target_language,
        by_direction={
            direction: found
            for direction in (directions if len(directions) > 1 else [])
            if (found := _find_translations(run_dir, f"{name}.{direction.name}")).sources
        },
    )


def _find_translations(run_dir: Path, name: str) -> Translations:
    translated = (run_dir / "translations" / f"{name}.hypothesis").is_file()
    return load_translations(run_dir, name) if translated else Translations((), (), ())


def share_a_set(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """Return the runs whose translations are of the sentences of the first run that has any."""
    sets = [(run.translations.sources, run.translations.references) for run in runs]
    first = next((found for found in sets if found[0]), None)
    return [run for run, found in zip(runs, sets, strict=True) if found == first]
