"""The commands `train` and `prepare`."""

import sys

from flaxformer_mt.commands.options import PrepareOptions, TrainOptions
from flaxformer_mt.errors import UserError, name_urls, warn_user
from flaxformer_mt.processor import core_count
from flaxformer_mt.text_io.lines import check_output
from flaxformer_mt.tracking.progress_display import WorkProgress


def train(options: TrainOptions) -> object:
    from flaxformer_mt.evaluation.run_report.page import report_training
    from flaxformer_mt.training.final_report import describe_report
    from flaxformer_mt.training.initial_model import start_run
    from flaxformer_mt.training.loop import fit

    if options.new_vocab and options.init is None:
        raise UserError("--new_vocab needs the run that training starts from; give --init=RUN")
    config = options.config
    if options.init is not None:
        config = start_run(
            config, options.run, options.init, new_vocab=options.new_vocab, progress=sys.stderr
        )
    report = fit(
        config,
        options.run,
        profile=options.profile or 0,
        allow_changed_data=options.allow_changed_data,
        progress=sys.stderr,
        workers=core_count(),
        draw_report=report_training,
    )
    print(name_urls(describe_report(report, options.run)), file=sys.stderr)
    return report


def prepare(options: PrepareOptions) -> object:
    from flaxformer_mt.data import prepare as data_preparation
    from flaxformer_mt.data.corpus_diagnostics import describe_lost_text, describe_overlap
    from flaxformer_mt.data.learned_shortlist import ShortlistRequest
    from flaxformer_mt.workers.worker_pool import choose_pool

    shortlist = None
    if options.shortlist is not None:
        check_output(str(options.shortlist))
        shortlist = ShortlistRequest(
            options.shortlist, options.shortlist_candidates, options.shortlist_common
        )
    report = data_preparation.prepare(
        options.config,
        options.run,
        progress=WorkProgress(sys.stderr),
        overlap=True,
        shortlist=shortlist,
        pool=choose_pool(options.workers, options.ray),
    ).report
    for warning in (*describe_overlap(report["overlap"]), *describe_lost_text(report.get("lost_text"))):
        warn_user(warning)
    return report
