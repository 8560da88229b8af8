"""Compares a run with other systems by paired significance tests on translations of the same set."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flaxformer_mt.config import Config, SearchConfig
from flaxformer_mt.config.directions import find_directions, refuse_language_model
from flaxformer_mt.config.files import read_config, split_checkpoint
from flaxformer_mt.config.load_options import LoadOptions
from flaxformer_mt.errors import UserError, find_url
from flaxformer_mt.evaluation.evaluation_set import (
    ScoredSet,
    Translations,
    check_same_set,
    read_sentences,
    save_differences,
)
from flaxformer_mt.evaluation.score_breakdowns import find_metrics, title_of
from flaxformer_mt.evaluation.tables import Table, write_score
from flaxformer_mt.object_store.remote_runs import open_copy
from flaxformer_mt.runs.checkpoint_index import CheckpointIndex
from flaxformer_mt.scoring.metrics import METRICS, QUICK, score_sentences
from flaxformer_mt.scoring.significance import ResamplingOptions, resample_scores
from flaxformer_mt.translation.translator import Translator

# The largest number of sentences per compared system in the file of differences.
_SHOWN_DIFFERENCES = 100
_HEADING = (
    "against",
    "line",
    "chrF",
    "chrF against",
    "source",
    "reference",
    "translation",
    "translation against",
)


@dataclass(frozen=True)
class ComparedSystem:
    """A system that a run is compared with: another run, or a file of translations."""

    # The name as given to --against.
    name: str
    # The run directory; None for a file.
    run: Path | None
    # The checkpoint of the run: best, last, average or a step. None: as its config says.
    checkpoint: str | None = None
    # Search options of the run. None: the options of its config.
    search: SearchConfig | None = None


def parse_compared_system(name: str | Path | ComparedSystem) -> ComparedSystem:
    """Parse RUN, RUN@CHECKPOINT or FILE; a `ComparedSystem` is returned unchanged."""
    if isinstance(name, ComparedSystem):
        return name
    name = str(name)
    path = find_url(name) or Path(name).expanduser()
    if isinstance(path, Path) and path.is_file():
        return ComparedSystem(name, None)
    run, checkpoint = split_checkpoint(str(path))
    folder = open_copy(run)
    if not folder.is_dir():
        raise UserError(
            f"--against={name} is neither a run directory nor a file of translations; give RUN, "
            "RUN@CHECKPOINT or FILE"
        )
    reason = " and translates nothing; compare runs that translate, or files of translations"
    config = read_config(folder / "config.json")
    refuse_language_model(config.data, f"--against={name}", reason)
    CheckpointIndex(folder, best_metric=config.train.metrics[0]).resolve(checkpoint or "last")
    return ComparedSystem(name, folder, checkpoint)


def make_resampling_options(
    bootstrap: int | None,
    paired: Literal["bootstrap", "approximate"] | None,
    trials: int | None,
    *,
    compared: Sequence[str],
) -> ResamplingOptions:
    """Return resampling options; None means the defaults: 1000 samples, paired bootstrap, 10000 trials."""
    if paired is not None and not compared:
        raise UserError(f"--paired={paired} has no effect without --against=RUN; give one or leave it out")
    if trials is not None and paired != "approximate":
        raise UserError(
            f"--trials={trials} has no effect without --against=RUN --paired=approximate; leave it out"
        )
    if twice := [name for name in compared if compared.count(name) > 1]:
        raise UserError(f"--against names {twice[0]} twice; name it once")
    resampling = ResamplingOptions(
        1000 if bootstrap is None else bootstrap, paired or "bootstrap", 10_000 if trials is None else trials
    )
    if compared and resampling.paired == "bootstrap" and not resampling.samples:
        raise UserError(
            "--bootstrap is 0, but comparing by paired bootstrap needs samples; give --bootstrap=1000 or "
            "--paired=approximate"
        )
    return resampling


def read_compared_files(
    systems: Sequence[ComparedSystem],
    evaluated: tuple[Path, Config, ScoredSet],
    *,
    split: Literal["test", "valid"] | None,
) -> dict[str, tuple[str, ...]]:
    """Check all compared systems; return the translations of systems that are files, by name.

    `split` is None for a user's files; the data sets of runs are then not compared.
    """
    scored, translations = evaluated[2], {}
    for system in systems:
        if system.run is not None:
            if split is not None:
                check_same_set(split, evaluated, (system.run, read_config(system.run / "config.json")))
            continue
        lines = read_sentences(system.name)
        count = len(scored.sources)
        if len(lines) != count:
            raise UserError(
                f"{system.name} has {len(lines)} lines, but {scored.name} has {count} sentences; line N must "
                "be the translation of sentence N"
            )
        translations[system.name] = tuple(lines)
    return translations


class Rival(NamedTuple):
    """The translations of a compared system, and its description (name, checkpoint, search) as JSON."""

    description: dict[str, Any]
    hypotheses: tuple[str, ...]


def translate_compared_systems(
    systems: Sequence[ComparedSystem],
    scored: ScoredSet,
    from_files: Mapping[str, tuple[str, ...]],
    loading: LoadOptions,
) -> list[Rival]:
    """Return the translations of all compared systems, in order; their models are loaded one at a time."""
    rivals, direction = [], scored.direction
    shared: dict[str, Any] = {
        name: getattr(loading, name) for name in ("dtype", "allow_nonfinite", "split_sentences")
    }
    for system in systems:
        if system.run is None:
            rivals.append(Rival({"name": system.name}, from_files[system.name]))
            continue
        options = LoadOptions(checkpoint=system.checkpoint, search=system.search, **shared)
        translator = Translator.load(system.run, options)
        languages: dict[str, Any] = {"source_language": direction.source, "target_language": direction.target}
        several = len(find_directions(translator.config.data)) > 1
        how = scored.find_documents(translator.config.data)
        translated = translator.translate(scored.sources, **how, **(languages if several else {}))
        description = {"name": system.name, "checkpoint": translator.checkpoint, "step": translator.step}
        description |= describe_search(translator.config.search)
        rivals.append(Rival(description, tuple(translation.text for translation in translated)))
    return rivals


def describe_search(search: SearchConfig) -> dict[str, Any]:
    return {
        "method": search.method,
        "beam_size": 1 if search.method == "greedy" else search.beam_size,
        "length_penalty": search.length_penalty,
        **({"mbr": search.mbr} if search.mbr else {}),
    }


def find_largest_differences(
    left: Sequence[str],
    right: Sequence[str],
    references: Sequence[str],
    *,
    most: int,
    lowercase: bool = False,
) -> list[tuple[int, float, float]]:
    """Return (index, left chrF, right chrF) of the `most` sentences whose two chrF scores differ most."""
    unlike = [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b]
    ours, theirs = (
        score_sentences(
            "chrf", (), [texts[i] for i in unlike], [references[i] for i in unlike], lowercase=lowercase
        )
        for texts in (left, right)
    )
    rows = zip(unlike, ours, theirs, strict=True)
    return sorted(rows, key=lambda row: -abs(row[1] - row[2]))[:most]


def save_largest_differences(
    run_dir: Path, name: str, ours: Translations, rivals: Sequence[Rival], *, lowercase: bool
) -> None:
    """Write the sentences whose chrF differs most between the run and each system, at most 100 per system."""
    rows = []
    for description, hypotheses in rivals:
        for i, our, their in find_largest_differences(
            ours.hypotheses, hypotheses, ours.references, most=_SHOWN_DIFFERENCES, lowercase=lowercase
        ):
            texts = ours.sources[i], ours.references[i], ours.hypotheses[i], hypotheses[i]
            rows.append((description["name"], str(i + 1), f"{our:.2f}", f"{their:.2f}", *texts))
    save_differences(run_dir, name, _HEADING, rows)


def compare(
    ours: Translations,
    rivals: Sequence[Rival],
    resampling: ResamplingOptions,
    *,
    scorers: Sequence[str] = (),
    **score_options: Any,
) -> dict[str, Any]:
    """Compute TER, the scores by `scorers`, confidence intervals and significance tests, as JSON values."""
    references = ours.references or None
    asked = [name for name in dict.fromkeys(scorers) if name not in METRICS]
    resampled = resample_scores(
        # The evaluated run gets the empty name, which no compared run or file can have.
        {"": ours.hypotheses} | {description["name"]: hypotheses for description, hypotheses in rivals},
        references,
        resampling,
        sources=ours.sources,
        only=[*(METRICS if references is not None else ()), *asked],
        **score_options,
    )
    first, *others = resampled.systems
    result: dict[str, Any] = {"scorers": asked} if asked else {}
    for metric in first.keys() - QUICK:
        result |= {metric: first[metric].score, f"{metric}_signature": resampled.plain_signatures[metric]}
    if resampling.samples:
        result["confidence"] = {"level": 95, "samples": resampling.samples} | {
            metric: {"mean": score.mean, "ci": score.ci, "signature": resampled.signatures[metric]}
            for metric, score in first.items()
        }
    if rivals:
        result["paired"] = {"test": resampling.paired, "signatures": resampled.signatures}
        result["against"] = [
            {
                **description,
                "differing": sum(a != b for a, b in zip(ours.hypotheses, hypotheses, strict=True)),
                **{metric: score._asdict() for metric, score in scores.items()},
            }
            for (description, hypotheses), scores in zip(rivals, others, strict=True)
        ]
    return result


def describe_scores(name: str, result: Mapping[str, Any]) -> Table:
    """Return a table of the scores of a run and the compared systems, with intervals and p-values.

                    BLEU                    chrF                     TER
    runs/a  37.10 ± 1.05            58.20 ± 0.80            45.12 ± 0.90
    runs/b  35.00 ± 1.10  p=0.0020  56.90 ± 0.80  p=0.0310  46.95 ± 1.04  p=0.0040
    """
    confidence = result.get("confidence", {})
    metrics = find_metrics(result)
    scores = {metric: {"score": result[metric], **confidence.get(metric, {})} for metric in metrics}
    rows = [[name, *_write_scores(scores)]]
    others = result.get("against", [])
    rows += [[_name_system(one), *_write_scores({name: one[name] for name in metrics})] for one in others]
    return Table(["", *(cell for metric in metrics for cell in (title_of(metric), ""))], rows)


def _name_system(system: Mapping[str, Any]) -> str:
    step, name = system.get("step"), system["name"]
    return name if step is None or name.endswith(f"@{step}") else f"{name} (step {step:,})"


def _write_scores(scores: Mapping[str, Any]) -> Iterator[str]:
    for score in scores.values():
        yield write_score(score["score"], score.get("ci"))
        yield "" if score.get("p_value") is None else f"p={score['p_value']:.4f}"
