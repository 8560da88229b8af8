"""The command `evaluate`: passes its flags to `evaluate_run`."""

import dataclasses
import sys
from typing import Any

from flaxformer_mt.commands.options import EvaluateOptions, ProcessOptions, read_glossary, read_languages
from flaxformer_mt.commands.terminal_tables import summarize_values
from flaxformer_mt.commands.translate import choose_search
from flaxformer_mt.config.directions import refuse_language_model
from flaxformer_mt.config.files import read_config
from flaxformer_mt.config.load_options import LoadOptions
from flaxformer_mt.errors import UserError, name_urls
from flaxformer_mt.evaluation.tables import write_text

# The options that have an effect on a language model, or are refused where it is evaluated.
_FOR_TEXT = {
    *("run", "checkpoint", "split", "source", "reference", "dtype", "allow_nonfinite"),
    *(field.name for field in dataclasses.fields(ProcessOptions)),
}


def evaluate(options: EvaluateOptions) -> object:
    from flaxformer_mt.evaluation.evaluate import describe_evaluation, evaluate_run
    from flaxformer_mt.translation.define_scorer import define_scorers

    data = read_config(options.run / "config.json").data
    language_model = not data.source_language
    for_translations = [
        f"--{field.name}"
        for field in dataclasses.fields(options)
        if field.name not in _FOR_TEXT and getattr(options, field.name) != field.default
    ]
    if for_translations:
        leave_out = f"leave out {' and '.join(for_translations)}"
        reason = f", which is evaluated by loss and perplexity only; {leave_out}"
        refuse_language_model(data, options.run, reason)
    search = None if language_model else choose_search(options)
    file = options.reference if options.source is None else options.source
    if file is not None and options.split is not None:
        flag = "--reference" if options.source is None else "--source"
        raise UserError(f"--split={options.split} and {flag}={file} exclude each other; leave one out")
    result = evaluate_run(
        options.run,
        LoadOptions.of(options, search),
        split=options.split or "test",
        source=options.source,
        reference=options.reference,
        lowercase=options.lowercase,
        tokenize=options.bleu_tokenize,
        glossary=read_glossary(options),
        scorers=define_scorers(options.scorer, timeout=options.scorer_timeout),
        tune_rerank=options.tune_rerank,
        progress=sys.stderr,
        **({} if language_model else _comparison(options) | read_languages(options)),
    )
    if tables := describe_evaluation(result, name=name_urls(str(options.run))):
        print(write_text(tables, indent=""), file=sys.stderr)
    return result


def _comparison(options: EvaluateOptions) -> dict[str, Any]:
    """Return the arguments for `evaluate_run` that set confidence intervals and significance tests."""
    from flaxformer_mt.evaluation.comparison import make_resampling_options, parse_compared_system

    resampling = make_resampling_options(
        options.bootstrap, options.paired, options.trials, compared=options.against
    )
    systems = [parse_compared_system(name) for name in options.against]
    # Search flags apply to every compared run; options without a flag are those of that run's config.
    against = [
        dataclasses.replace(system, search=choose_search(dataclasses.replace(options, run=system.run)))
        if system.run
        else system
        for system in systems
    ]
    return {"against": against, "resampling": resampling}


def summarize_scores(result: dict[str, Any]) -> str:
    if "by_length" in result or "directions" in result:
        return ""  # the tables on standard error have said it
    return summarize_values(result)
