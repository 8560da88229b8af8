"""Evaluates a run on a split of its data or on a user's files, and formats the results."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TextIO, TypedDict, cast

import numpy as np

from flaxformer_mt.config import Config, TrainConfig
from flaxformer_mt.config.files import read_config
from flaxformer_mt.config.load_options import LoadOptions
from flaxformer_mt.corpus.reader import read_pairs
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.evaluation.comparison import (
    ComparedSystem,
    compare,
    describe_scores,
    describe_search,
    parse_compared_system,
    read_compared_files,
    save_largest_differences,
    translate_compared_systems,
)
from flaxformer_mt.evaluation.evaluation_set import (
    ScoredSet,
    Translations,
    check_split,
    name_of_file,
    read_sentences,
    read_sets,
    save_translations,
)
from flaxformer_mt.evaluation.perplexity import Likelihood
from flaxformer_mt.evaluation.score_breakdowns import (
    describe_by_length,
    describe_directions,
    find_metrics,
    join_reports,
    score_by_length,
    score_terms,
)
from flaxformer_mt.evaluation.tables import Table
from flaxformer_mt.object_store.remote_runs import open_copy
from flaxformer_mt.parallel import use_cpu_cores_as_devices
from flaxformer_mt.parallel.processes import decide_once
from flaxformer_mt.runs.load_run import name_checkpoint
from flaxformer_mt.scoring.metrics import (
    choose_score_options,
    find_metric,
    score_sentences,
    score_translations,
    try_scorers,
)
from flaxformer_mt.scoring.significance import ResamplingOptions
from flaxformer_mt.text_io.throughput import Throughput
from flaxformer_mt.tracking.progress_display import WorkProgress
from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.translation.scorer import Scorer
from flaxformer_mt.translation.translator import Translator
from flaxformer_mt.vocab.pretrained_vocab import read_tags


def _describe_system(translator: Translator) -> str:
    search = translator.config.search
    beam = f", beam {search.beam_size}" if search.method == "beam" else ""
    chosen = f", minimum Bayes risk with {search.mbr}" if search.mbr else ""
    checkpoint = name_checkpoint(translator.checkpoint, translator.step)
    return f"checkpoint {checkpoint} ({search.method} search{beam}{chosen})"


@contextlib.contextmanager
def _show_progress(doing: str, total: int, system: str, stream: TextIO | None) -> Iterator[Throughput]:
    if stream is not None:
        noun = "sentence" if total == 1 else "sentences"
        print(f"{doing} {total:,} {noun} with {system}", file=stream, flush=True)
    with Throughput(total=total, stream=stream, quiet=stream is None) as throughput:
        yield throughput


class EvaluationResult(TypedDict, total=False):
    """The result of `evaluate_run`, which `evaluate` prints; each name in `scorers` is also a key."""

    # Name of the split or of the source file; the files in RUN/translations/ have this name.
    name: str
    # Checkpoint that was evaluated; `step` is its training step.
    checkpoint: str
    step: int
    # BLEU and chrF, as the config (train.lowercase, train.bleu_tokenize) or the arguments define them.
    bleu: float
    chrf: float
    # TER: edits per 100 words of the references, without case; lower is better. With the tokenizers zh,
    # ja-mecab and char, Chinese and Japanese characters count instead of words.
    ter: float
    # sacreBLEU's signatures of BLEU, chrF and TER.
    signature: str
    chrf_signature: str
    ter_signature: str
    # sacreBLEU's line with n-gram precisions and brevity penalty.
    bleu_detail: str
    # BLEU and its signature, with case (`cased`) and without (`lowercased`).
    cased: dict[str, Any]
    lowercased: dict[str, Any]
    # Names of further scorers. Each name is also a key, whose value is the scorer's mean score.
    scorers: list[str]
    # `mean` and `ci` of each score over bootstrap samples; 95% of the samples are within about `mean` ± `ci`.
    confidence: dict[str, Any]
    # BLEU, chrF and mean lengths, for groups of source lengths in words; `to` of the last group is None.
    by_length: list[dict[str, Any]]
    # For each compared system its `name`, the number of `differing` translations, and for each metric its
    # `score`, `mean`, `ci` and `p_value`.
    against: list[dict[str, Any]]
    # With `against`: the `test` (bootstrap or approximate) and sacreBLEU's `signatures`.
    paired: dict[str, Any]
    # For a multilingual model, the results of each direction; the scores above are then their means.
    directions: dict[str, "EvaluationResult"]
    # With a glossary: the number of terms (`count`), and the share of them that was `used`.
    terms: dict[str, Any]
    # Numbers of sentences and of lines that were cut (`truncated`), duration, and search options.
    sentences: int
    truncated: int
    seconds: float
    method: str
    beam_size: int
    length_penalty: float
    # With minimum Bayes risk: its utility.
    mbr: str
    # For a language model: nats per token; `perplexity` is the exponential of this loss.
    loss: float
    perplexity: float


@dataclass(frozen=True)
class EvaluationOptions:
    """The sentences that `evaluate_run` evaluates, and the scores that it computes."""

    # Split of the run's data set to score, unless files are given.
    split: Literal["test", "valid"] = "test"
    # File of source sentences; - is standard input. With `scorers`, no reference is needed.
    source: str | Path | None = None
    # File of the reference translations; for a language model, the text to score.
    reference: str | Path | None = None
    # Source and target language of the directions or files to evaluate. None: all.
    source_language: str | None = None
    target_language: str | None = None
    # Whether BLEU and chrF ignore case, and sacreBLEU's tokenizer for BLEU. None: as in the run's config.
    lowercase: bool | None = None
    tokenize: str | None = None
    # Systems to compare with: other runs, or files of translations of the same sentences.
    against: Sequence[ComparedSystem | str | Path] = ()
    # Bootstrap samples for confidence intervals and significance tests. None: 1000 samples with `against`,
    # else none.
    resampling: ResamplingOptions | None = None
    # Names of further metrics, which `define_scorer` returns.
    scorers: Sequence[str] = ()
    # Metric by which to find the best search.rerank_weight on these sentences. None: evaluate.
    tune_rerank: str | None = None
    # Glossary for the translations, see `Translator.translate`; the result then has the key `terms`.
    glossary: Glossary | Mapping[str, str] | str | Path | None = None


def evaluate_run(
    run_dir: str | Path,
    loading: LoadOptions | None = None,
    options: EvaluationOptions | None = None,
    *,
    progress: TextIO | None = None,
    **changes: Any,
) -> EvaluationResult:
    """Evaluate a run, write its translations to RUN/translations/, and return the results as JSON values.

    The result contains BLEU and chrF as configured, TER, cased and lowercased BLEU, each with its signature,
    and scores by source length. `resampling` adds confidence intervals, and `against` adds paired tests. For
    several directions, the result contains mean scores, and the results of each direction in `directions`.
    For a language model, it contains loss (nats per token) and perplexity. Without references, it contains
    only the scores of `scorers`. With `tune_rerank`, it contains the best `rerank_weight` instead, and in
    `scores` the metric's score with each weight that was tried.

    Args:
      loading: see `Translator.load`; `dtype`, `split_sentences` and `allow_nonfinite` also apply to the runs
        in `against`.
      progress: the stream on which progress is shown, such as sys.stderr; None: nothing is shown.
      changes: fields of `EvaluationOptions` and of `LoadOptions`, as in evaluate_run(run, split="valid",
        checkpoint="last"), that override `options` and `loading`.

    Raises:
      UserError: a named run, checkpoint, file or scorer does not exist, lines or splits do not correspond, or
        an option has no effect.
    """
    names = {field.name for field in fields(EvaluationOptions)}
    options = replace(
        options or EvaluationOptions(), **{name: changes.pop(name) for name in names & changes.keys()}
    )
    run_dir, loading = open_copy(run_dir), replace(loading or LoadOptions(), **changes)
    config = read_config(run_dir / "config.json")
    report: Mapping[str, Any]
    if not config.data.source_language:
        _check_text_alone(run_dir, config, options)
        report = _evaluate_language_model(run_dir, config, options, loading, progress)
    else:
        report = _evaluate_translations(run_dir, config, options, loading, progress)
    return cast(EvaluationResult, report)


def _evaluate_translations(
    run_dir: Path,
    config: Config,
    options: EvaluationOptions,
    loading: LoadOptions,
    progress: TextIO | None,
) -> dict[str, Any]:
    """Evaluate each direction, or with `tune_rerank` find the best weight of the scorer that reranks."""
    compared = [*map(parse_compared_system, options.against)]
    scoring: dict[str, Any] = {"lowercase": options.lowercase, "bleu_tokenize": options.tokenize}
    train = replace(config.train, **{name: value for name, value in scoring.items() if value is not None})
    terms = {} if options.glossary is None else {"glossary": Glossary.make(options.glossary)}
    sets = _read_sets(run_dir, config, options)
    if loading.use_all_devices:
        use_cpu_cores_as_devices()  # before the number of processes is asked for, which starts JAX
    with_references = bool(sets[0].references)
    asked: dict[str, Any] = {"with_references": with_references, "direction": sets[0].direction}
    decide_once(lambda: try_scorers(options.scorers, "--scorer", **asked))
    if options.tune_rerank is not None:
        return _tune_rerank(run_dir, loading, sets, options.tune_rerank, train)
    resampling = options.resampling or ResamplingOptions(1000 if compared else 0)
    reports = {}
    for scored in sets:
        references = scored.references
        scoring = choose_score_options(train, scored.direction.target, references, warn=warn_user)
        split = None if options.source else options.split
        from_files = read_compared_files(compared, (run_dir, config, scored), split=split)
        with_terms = replace(scored, languages=scored.languages | terms)
        report, translations = _evaluate_set(run_dir, loading, with_terms, scoring, progress)
        if terms and references:
            report["terms"] = score_terms(translations, terms["glossary"])
        rivals = translate_compared_systems(compared, scored, from_files, loading)
        if compared and references:
            lower = scoring["lowercase"]
            _keep(save_largest_differences, run_dir, scored.name, translations, rivals, lowercase=lower)
        asked = {"scorers": options.scorers, "direction": scored.direction}
        score = functools.partial(compare, translations, rivals, resampling, **asked, **scoring)
        with WorkProgress(progress).part("scoring the translations"):
            report |= decide_once(score)
        report |= {"by_length": score_by_length(translations, **scoring)} if references else {}
        reports[scored.direction.name] = report
    return next(iter(reports.values())) if len(reports) == 1 else join_reports(options.split, reports)


def _read_sets(run_dir: Path, config: Config, options: EvaluationOptions) -> list[ScoredSet]:
    files = {"source": options.source, "reference": options.reference}
    return read_sets(
        config,
        options.split,
        **{name: None if file is None else str(file) for name, file in files.items()},
        languages={"source_language": options.source_language, "target_language": options.target_language},
        vocab_tags=read_tags(run_dir / "vocab"),
        alone=bool(options.scorers),
    )


def _keep(save: Callable[..., object], *what: Any, **how: Any) -> None:
    try:
        save(*what, **how)
    except OSError as error:  # the run of others, or a full disk: the scores are what was asked for
        warn_user(f"the translations are not kept in the run: {error.strerror}")


def _evaluate_set(
    run_dir: Path, loading: LoadOptions, scored: ScoredSet, scoring: dict[str, Any], progress: TextIO | None
) -> tuple[dict[str, Any], Translations]:
    """Translate and score one set, and save the translations; the model is no longer in memory afterwards."""
    translator, count = Translator.load(run_dir, loading), len(scored.sources)
    system, start = _describe_system(translator), time.monotonic()
    with _show_progress("translating", count, system, progress) as throughput:
        documents = scored.find_documents(translator.config.data)
        translated = translator.translate(
            scored.sources, on_progress=throughput.add, **scored.languages, **documents
        )
    seconds = time.monotonic() - start
    translations = Translations(scored.sources, scored.references, tuple(one.text for one in translated))
    scores = _report_scores(translations, **scoring) if scored.references or not count else {}
    _keep(save_translations, run_dir, scored.name, translations, system)
    report = {"name": scored.name, "checkpoint": translator.checkpoint, "step": translator.step}
    report |= {"sentences": count, **scores, **describe_search(translator.config.search)}
    truncated = sum(one.truncated for one in translated)
    return report | {"truncated": truncated, "seconds": round(seconds, 1)}, translations


def _report_scores(translations: Translations, *, lowercase: bool, tokenize: str) -> dict[str, Any]:
    """Return the metrics that are quick to compute, and BLEU with and without case."""
    cased, lowercased = (
        score_translations(
            translations.hypotheses, translations.references, lowercase=lower, tokenize=tokenize
        )
        for lower in (False, True)
    )
    scores = lowercased if lowercase else cased
    both = {
        name: {"bleu": one["bleu"], "signature": one.signatures["bleu"]}
        for name, one in (("cased", cased), ("lowercased", lowercased))
    }
    return {
        **scores,
        **{
            "signature" if name == "bleu" else f"{name}_signature": text
            for name, text in scores.signatures.items()
        },
        "bleu_detail": scores.bleu_detail,
        **both,
    }


def _tune_rerank(
    run_dir: Path, loading: LoadOptions, sets: Sequence[ScoredSet], metric: str, train: TrainConfig
) -> dict[str, Any]:
    """Find the search.rerank_weight whose translations have the best score of a metric.

    Tries 0 (the model alone), multiples of the ratio of the standard deviations of model scores and scorer
    scores, and none (the scorer alone).
    """
    (scored, *others), search = sets, loading.search
    if search is None or not search.rerank or search.rerank_weight is not None:
        raise UserError("--tune_rerank needs --rerank=SCORER, and finds --rerank_weight: leave this out")
    if others or not scored.references:
        raise UserError("--tune_rerank needs references of one direction; give --target_language or files")
    sign = -1 if find_metric(metric, "--tune_rerank").lower_is_better else 1
    translator = Translator.load(run_dir, replace(loading, search=replace(search, rerank="")))
    how: dict[str, Any] = {**scored.languages, **scored.find_documents(translator.config.data)}
    found = translator.translate(scored.sources, n_best=search.beam_size, **how)
    sources = [source for source, best in zip(scored.sources, found, strict=True) for _ in best.n_best]
    texts = [one.text for best in found for one in best.n_best]
    scores = iter(score_sentences(search.rerank, sources, texts, None, direction=scored.direction))
    judged = [np.array([next(scores) for _ in best.n_best]) for best in found]
    model = [np.array([one.score for one in best.n_best]) for best in found]
    spreads = [np.nanmean([own.std() for own in lists]) for lists in (model, judged)]
    unit = float(spreads[0] / spreads[1]) if spreads[1] > 0 else 1.0
    options = choose_score_options(train, scored.direction.target, scored.references, warn=warn_user)
    tried: dict[str, float] = {}
    pairs = list(zip(model, judged, strict=True))
    for weight in ("0", *(f"{unit * 2.0**power:.3g}" for power in range(-5, 6)), "none"):
        totals = judged if weight == "none" else [one + float(weight) * other for one, other in pairs]
        hypotheses = [best.n_best[int(np.argmax(own))].text for best, own in zip(found, totals, strict=True)]
        how = options | {"sources": scored.sources, "only": [metric], "direction": scored.direction}
        tried[weight] = score_translations(hypotheses, scored.references, **how)[metric]
    best_weight = max(tried, key=lambda weight: sign * tried[weight])
    facts = {"name": scored.name, "rerank": search.rerank, "metric": metric, "sentences": len(found)}
    return {**facts, "scores": tried, "rerank_weight": best_weight}


def describe_evaluation(result: Mapping[str, Any], *, name: str) -> list[str | Table]:
    """Format a result of `evaluate_run` as tables (none for language models); `name`: the run's name."""
    if "directions" in result:
        parts: list[str | Table] = []
        for direction, report in result["directions"].items():
            parts += [direction, *describe_evaluation(report, name=name), ""]
        return [*parts, describe_directions(result)]
    if not find_metrics(result):
        return []
    scores = describe_scores(f"{name}@{name_checkpoint(result['checkpoint'], result.get('step'))}", result)
    return [scores, "", describe_by_length(result["by_length"])] if "by_length" in result else [scores]


def _check_text_alone(run_dir: Path, config: Config, options: EvaluationOptions) -> None:
    what = (
        f"{run_dir} is a language model of {config.data.target_language} (its data.source_language is empty)"
    )
    if options.source is not None:
        raise UserError(
            f"{what}: it takes no source {options.source}, only the text to score; give --reference=FILE "
            "alone"
        )
    if options.against:
        raise UserError(
            f"{what}: it has no translations to compare with those of "
            f"{parse_compared_system(options.against[0]).name}; compare the "
            "perplexities of language models"
        )


def _evaluate_language_model(
    run_dir: Path,
    config: Config,
    options: EvaluationOptions,
    loading: LoadOptions,
    progress: TextIO | None,
) -> dict[str, Any]:
    reference, split = options.reference, options.split
    if reference is None:
        check_split(config, split, files="--reference=FILE")
        sentences = [pair.target for pair in read_pairs(config.data, split)]
    else:
        sentences = read_sentences(str(reference))
    if not sentences:
        raise UserError("there is no text to score (0 lines); give at least one line")
    scorer = Scorer.load(run_dir, loading)
    total, tokens = 0.0, 0
    system = f"checkpoint {name_checkpoint(scorer.checkpoint, scorer.step)}"
    with _show_progress("scoring", len(sentences), system, progress) as throughput:
        for score in scorer.score_stream(None, sentences):
            total, tokens = total - score.log_prob, tokens + len(score.tokens)
            throughput.add(tokens=len(score.tokens))
    likelihood = Likelihood(tokens, total / tokens, math.nan)
    return {
        "name": split if reference is None else name_of_file(str(reference)),
        "checkpoint": scorer.checkpoint,
        "step": scorer.step,
        "sentences": len(sentences),
        "tokens": tokens,
        "loss": likelihood.loss,
        "perplexity": likelihood.perplexity,
    }
