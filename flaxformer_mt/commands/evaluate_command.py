"""The command `evaluate`: its flags become the arguments of `evaluate_run`.

Contains the rules for flags that exclude each other. Heavy modules are imported when the command runs.
"""

import dataclasses
import sys
from typing import Any

from flaxformer_mt.commands.experiment_options import ProcessOptions
from flaxformer_mt.commands.language_flags import read_languages
from flaxformer_mt.commands.options import EvaluateOptions
from flaxformer_mt.commands.translate_and_score import choose_search
from flaxformer_mt.config.files import read_config
from flaxformer_mt.errors import UserError, name_urls

# The options that have an effect on a language model, or are refused where it is evaluated.
_FOR_TEXT = {
    *("run", "checkpoint", "split", "source", "reference", "dtype", "allow_nonfinite"),
    *(field.name for field in dataclasses.fields(ProcessOptions)),
}


def evaluate(options: EvaluateOptions) -> object:
    """Score translations of a test set, or the loss of a language model; return the scores."""
    from flaxformer_mt.evaluation.evaluate import describe_evaluation, evaluate_run

    language_model = not read_config(options.run / "config.json").data.source_language
    if language_model:
        _check_text_options(options)
    search = None if language_model else choose_search(options)
    if not language_model and (options.source is None) != (options.reference is None):
        missing = "--reference" if options.reference is None else "--source"
        raise UserError(
            f"{missing} is missing; to evaluate on files, give both --source=FILE and --reference=FILE"
        )
    file = options.reference if options.source is None else options.source
    if file is not None and options.split is not None:
        flag = "--reference" if options.source is None else "--source"
        raise UserError(f"--split={options.split} and {flag}={file} exclude each other; leave one out")
    result = evaluate_run(
        options.run,
        split=options.split or "test",
        source=options.source,
        reference=options.reference,
        checkpoint=options.checkpoint,
        lowercase=options.lowercase,
        tokenize=options.bleu_tokenize,
        search=search,
        comet=options.comet,
        dtype=options.dtype,
        allow_nonfinite=options.allow_nonfinite,
        shortlist=options.shortlist,
        quantization=options.quantization,
        split_sentences=options.split_sentences,
        progress=sys.stderr,
        **({} if language_model else _comparison(options) | read_languages(options)),
    )
    if table := describe_evaluation(result, name=name_urls(str(options.run))):
        print(table, file=sys.stderr)
    return result


def _comparison(options: EvaluateOptions) -> dict[str, Any]:
    """Return the arguments of `evaluate_run` for confidence intervals and for significance tests against
    others.
    """
    from flaxformer_mt.evaluation.comparison import make_resampling_options, parse_compared_system

    resamples = make_resampling_options(
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
    return {"against": against, "resamples": resamples}


def _check_text_options(options: EvaluateOptions) -> None:
    """Raise UserError for flags that have no effect on the evaluation of a language model."""
    given = [
        f"--{field.name}"
        for field in dataclasses.fields(options)
        if field.name not in _FOR_TEXT and getattr(options, field.name) != field.default
    ]
    if given:
        raise UserError(
            f"{options.run} is a language model (its data.source_language is empty), which is evaluated by "
            f"loss and perplexity only; leave out {' and '.join(given)}"
        )
