"""The command `score`: scores existing translations line by line."""

import contextlib
import itertools
from typing import Any

from flaxformer_mt.commands.options import ScoreOptions, read_languages
from flaxformer_mt.commands.translate import WINDOW, choose_search, is_on_screen
from flaxformer_mt.config.directions import refuse_language_model
from flaxformer_mt.config.files import read_config
from flaxformer_mt.config.load_options import LoadOptions
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.lines import STANDARD, check_output, count_lines, open_lines, open_output


def score_file(options: ScoreOptions) -> None:
    from flaxformer_mt.commands.output_formats import format_score
    from flaxformer_mt.text_io.throughput import Throughput
    from flaxformer_mt.translation.scorer import Scorer

    if options.source == options.target == STANDARD:
        raise UserError("only one of --source and --target can be standard input; give a file for the other")
    if options.output != STANDARD:
        check_output(options.output, inputs=(options.source, options.target))
    search = choose_search(options)
    data = read_config(options.run / "config.json").data
    language_model = not data.source_language
    if options.source is not None:
        refuse_language_model(
            data, options.run, ", which scores --target without a source; leave out --source"
        )
    if not language_model and options.source is None:
        raise UserError(
            "--source is missing; a translation model scores each line of --target given its source line"
        )
    languages = read_languages(options)
    with contextlib.ExitStack() as files:
        source = None
        if options.source is not None:
            source = files.enter_context(open_lines(options.source, invalid_utf8=options.invalid_utf8))
        target = files.enter_context(open_lines(options.target, invalid_utf8=options.invalid_utf8))
        long_lines = "cut" if options.long_lines == "cut" else "split"  # which Scorer refuses
        scorer = Scorer.load(options.run, LoadOptions.of(options, search), long_lines=long_lines)
        write = files.enter_context(open_output(options.output))
        quiet, total = is_on_screen(options.output), count_lines(options.target)
        progress = files.enter_context(Throughput(total=total, quiet=quiet))
        # Lines are read ahead of their scores; the second iterator keeps them for the output.
        sources, kept_sources = itertools.tee(source.lines) if source else (None, itertools.repeat(None))
        is_ready = (source and source.is_ready) or target.is_ready
        scores = scorer.score_stream(sources, target.lines, window=WINDOW, is_ready=is_ready, **languages)
        how: dict[str, Any] = {"tokens": options.tokens, "as_json": options.json}
        # Scores come first: at their end, no line has been taken for one more.
        for number, (score, line) in enumerate(zip(scores, kept_sources, strict=False)):
            write(format_score(score, number, line, scorer.vocabs.target.pieces, **how))
            progress.add(tokens=len(score.tokens))
