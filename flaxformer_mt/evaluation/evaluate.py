"""Scores of translations: of lines, of a split of a run's data, or of a user's files.

Owns what an evaluation reports, of a language model too. Knows nothing of training, nor of how translations
come about.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flaxformer_mt.config import Config, SearchConfig
from flaxformer_mt.config.files import read_config
from flaxformer_mt.corpus.reader import read_pairs
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.comparison import (
    Resamples,
    Rival,
    describe_scores,
    keep_differences,
    read_rivals,
    report_confidence,
    report_rivals,
    translate_rivals,
)
from flaxformer_mt.evaluation.evaluation_set import check_split, name_of_file, read_set
from flaxformer_mt.evaluation.length_breakdown import describe_by_length, score_by_length
from flaxformer_mt.evaluation.metrics import Scores, resample_scores, score_edits, score_translations
from flaxformer_mt.evaluation.perplexity import score_text
from flaxformer_mt.evaluation.translation_files import Translations, read_sentences, save_translations
from flaxformer_mt.translation.translator import Translator, warn_on_stderr


@dataclass(frozen=True)
class Evaluation(Translations):
    """Translations, what they score, and how they were searched."""

    scores: Scores
    # Of translating alone, compilation included.
    seconds: float
    # Sources that were cut because they were longer than data.max_source_length.
    truncated: int
    method: str
    beam_size: int
    length_penalty: float


def evaluate_lines(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool,
    tokenize: str,
    params: Any = None,
) -> Evaluation:
    """Translates sources and scores the result against one reference each.

    Args:
      lowercase: score without regard to case.
      tokenize: sacreBLEU's tokenizer for BLEU.
      params: parameters instead of the translator's own.

    Raises:
      UserError: the counts differ, or there is nothing to score.
    """
    if len(sources) != len(references):
        raise UserError(
            f"{len(sources)} sources cannot be scored against {len(references)} references; give one for each"
        )
    start = time.monotonic()
    translations = translator.translate(sources, params=params)
    seconds = time.monotonic() - start
    hypotheses = tuple(translation.text for translation in translations)
    search = translator.config.search
    return Evaluation(
        sources=tuple(sources),
        references=tuple(references),
        hypotheses=hypotheses,
        scores=score_translations(hypotheses, references, lowercase=lowercase, tokenize=tokenize),
        seconds=seconds,
        truncated=sum(translation.truncated for translation in translations),
        method=search.method,
        beam_size=1 if search.method == "greedy" else search.beam_size,
        length_penalty=search.length_penalty,
    )


def evaluate_run(
    run_dir: Path,
    *,
    split: Literal["test", "valid"] = "test",
    source: str | None = None,
    reference: str | None = None,
    checkpoint: str | None = None,
    lowercase: bool | None = None,
    search: SearchConfig | None = None,
    against: Sequence[Rival] = (),
    resamples: Resamples | None = None,
) -> dict[str, Any]:
    """Scores a run, keeps the translations in RUN/translations/, and returns what it found as JSON values.

    The result holds BLEU and chrF as configured, TER, cased and lower-cased BLEU, each with its signature
    (numbers of different papers are only comparable with the right one), and scores by length of the source;
    with `resamples` confidence intervals, and with `against` paired tests. Of a language model it holds,
    instead, loss (nats a token, end symbols included) and perplexity; nothing is kept.

    Args:
      split: of the run's data set, unless files are given.
      source: file of sentences, - for standard input; one a line, and `reference` with their translations.
        A language model scores the text of `reference` alone.
      checkpoint: best, last, average or a step. None: as the run's config says.
      lowercase: score translations without regard to case. None: as the run's config says.
      search: of translations, options instead of those of the run's config.
      against: other runs, or files of translations, of the same sentences.
      resamples: how intervals and tests are computed. None: no intervals, and tests as by default.

    Raises:
      UserError: no run, checkpoint, split or file of that name, unequal numbers of lines, a run that means
        another set by its split, or options that have no effect.
    """
    config = read_config(run_dir / "config.json")
    if not config.data.source_language:
        _check_text_alone(run_dir, config, source, against)
        return _evaluate_language_model(run_dir, config, split, reference, checkpoint)
    resamples = Resamples(1000 if against else 0) if resamples is None else resamples
    scored = read_set(config, split, source=source, reference=reference)
    from_files = read_rivals(against, (run_dir, config, scored), split=split if source is None else None)
    translator = Translator.load(run_dir, checkpoint=checkpoint, search=search, spread=True)
    lowercase = config.train.lowercase if lowercase is None else lowercase
    counting: dict[str, Any] = {"lowercase": lowercase, "tokenize": config.train.bleu_tokenize}
    evaluation = evaluate_lines(translator, scored.sources, scored.references, **counting)
    save_translations(run_dir, scored.name, evaluation)
    named = {"name": scored.name, "checkpoint": translator.checkpoint}
    del translator  # its parameters make room for those of the others
    others, described = translate_rivals(against, scored.sources, from_files)
    if against:
        keep_differences(run_dir, scored.name, evaluation, others, lowercase=lowercase)
    return (
        named
        | _report_scores(evaluation, **counting)
        | _resample(evaluation, others, described, resamples, **counting)
        | {"by_length": score_by_length(evaluation, **counting)}
    )


def _report_scores(evaluation: Evaluation, *, lowercase: bool, tokenize: str) -> dict[str, Any]:
    """What one system's translations score, without resampling and TER."""
    other = score_translations(
        evaluation.hypotheses, evaluation.references, lowercase=not lowercase, tokenize=tokenize
    )
    cased, lowercased = (other, evaluation.scores) if lowercase else (evaluation.scores, other)
    return {
        "sentences": len(evaluation.sources),
        "bleu": evaluation.scores.bleu,
        "chrf": evaluation.scores.chrf,
        "signature": evaluation.scores.bleu_signature,
        "chrf_signature": evaluation.scores.chrf_signature,
        "bleu_detail": evaluation.scores.bleu_detail,
        "cased": {"bleu": cased.bleu, "signature": cased.bleu_signature},
        "lowercased": {"bleu": lowercased.bleu, "signature": lowercased.bleu_signature},
        "method": evaluation.method,
        "beam_size": evaluation.beam_size,
        "length_penalty": evaluation.length_penalty,
        "truncated": evaluation.truncated,
        "seconds": round(evaluation.seconds, 1),
    }


def _resample(
    own: Translations,
    others: Mapping[str, Sequence[str]],
    described: Sequence[Mapping[str, Any]],
    resamples: Resamples,
    **counting: Any,
) -> dict[str, Any]:
    """TER, which takes the longest to compute, and all that needs it of several samples."""
    if not others and not resamples.samples:
        ter = score_edits(own.hypotheses, own.references)
        return {"ter": ter.score, "ter_signature": ter.signature}
    # A file could be called anything; nobody's name is empty.
    systems = {"": own.hypotheses, **others}
    found = resample_scores(
        systems,
        own.references,
        samples=resamples.samples,
        paired=resamples.paired if others else "bootstrap",
        trials=resamples.trials,
        **counting,
    )
    result: dict[str, Any] = {
        "ter": found.systems[0]["ter"].score,
        "ter_signature": found.plain_signatures["ter"],
    }
    if resamples.samples:
        result["confidence"] = report_confidence(found, samples=resamples.samples)
    if others:
        result["paired"] = {"test": resamples.paired, "signatures": found.signatures}
        result["against"] = report_rivals(found, described, own.hypotheses, others)
    return result


def describe_evaluation(result: Mapping[str, Any], *, name: str) -> str:
    """Tables for humans of what `evaluate_run` found: the scores of `name` and its rivals, and by length.

    Of a language model there are none: "".
    """
    if "by_length" not in result:
        return ""
    return "\n\n".join([describe_scores(name, result), describe_by_length(result["by_length"])])


def _check_text_alone(run_dir: Path, config: Config, source: str | None, against: Sequence[Rival]) -> None:
    what = (
        f"{run_dir} is a language model of {config.data.target_language} (its data.source_language is empty)"
    )
    if source is not None:
        raise UserError(
            f"{what}: it takes no source {source}, only the text to score; give --reference=FILE alone"
        )
    if against:
        raise UserError(
            f"{what}: it has no translations to compare with those of {against[0].name}; compare the "
            "perplexities of language models"
        )


def _evaluate_language_model(
    run_dir: Path,
    config: Config,
    split: Literal["test", "valid"],
    reference: str | None,
    checkpoint: str | None,
) -> dict[str, Any]:
    if reference is None:
        check_split(config, split, files="--reference=FILE")
        sentences = [pair.target for pair in read_pairs(config.data, split)]
    else:
        sentences = read_sentences(reference)
    scored = score_text(run_dir, sentences, checkpoint=checkpoint, warn=warn_on_stderr)
    return {
        "name": split if reference is None else name_of_file(reference),
        "checkpoint": scored.checkpoint,
        "sentences": len(sentences),
        "tokens": scored.likelihood.tokens,
        "loss": scored.likelihood.loss,
        "perplexity": scored.likelihood.perplexity,
    }
