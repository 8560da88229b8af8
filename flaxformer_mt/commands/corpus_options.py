"""Options of the commands that make training data with a trained model; see options.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from flaxformer_mt.commands.experiment_options import WorkerOptions
from flaxformer_mt.commands.options import SearchOptions
from flaxformer_mt.commands.shared_options import (
    EncodingOptions,
    EnsembleOptions,
    NonfiniteOptions,
    SearchModelOptions,
)
from flaxformer_mt.config.bounds import LARGEST_WEIGHT, SMALLEST_WEIGHT, at_least, between
from flaxformer_mt.text_io.pair_table import PairRules


@dataclass(frozen=True, kw_only=True)
class CorpusOptions(
    PairRules,
    WorkerOptions,
    SearchOptions,
    SearchModelOptions,
    NonfiniteOptions,
    EnsembleOptions,
    EncodingOptions,
):
    """Options of all commands that make training data."""

    # ---- input and output ----

    # UTF-8 text file, one sentence a line.
    input: str
    # Folder for the pairs, train.tsv, which data.dataset=parallel_text@DIR reads.
    output: Path
    # Weight of each pair in the loss of training, as a third column. None: no such column.
    weight: Annotated[float | None, between(SMALLEST_WEIGHT, LARGEST_WEIGHT)] = None
    # ---- lines and interruptions ----

    # Number of lines that are translated at a time; these lines share batches. None: 2048.
    window: Annotated[int | None, at_least(1)] = None
    # Resume an interrupted command with the same flags; nothing is done twice.
    resume: bool = False
    # Discard the translations in DIR and start over. Without --resume or --overwrite, existing ones are kept,
    # and the command ends with an error.
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class BacktranslateOptions(CorpusOptions):
    """Makes training pairs of target-language text, whose sources are translations by the run --run."""

    # ---- back-translation ----

    # Symbol before each source, which tells the model that its source is a translation; training needs it in
    # vocab.symbols. Empty: none.
    tag: str = "<BT>"
    # System that searches: jax is this package. ctranslate2: --run is a folder that export
    # --format=ctranslate2 wrote (needs the extra ctranslate2), for beam and greedy search, and samples.
    backend: Literal["jax", "ctranslate2"] = "jax"


@dataclass(frozen=True, kw_only=True)
class DistilOptions(CorpusOptions):
    """Makes training pairs for a student: sources, and their translations by a teacher, the run --run."""

    # ---- distillation ----

    # File of the reference translations, one line for each line of --input, for --targets=nbest. None: no
    # references.
    reference: str | None = None
    # best: the best translation of each line. nbest: of the n best, the one closest to the reference (Kim and
    # Rush 2016).
    targets: Literal["best", "nbest"] = "best"
    # With --targets=nbest, number of translations to choose from. None: all hypotheses of the search.
    n_best: int | None = None
    # With --targets=nbest, the score of a sentence by which the closest translation is chosen.
    metric: Literal["bleu", "chrf"] = "bleu"
    # Write train.scores as well: for each token of the targets, the teacher's probabilities of the k most
    # probable tokens, for word-level distillation (data.teacher_scores); 8 is usual. None: no scores.
    teacher_scores: int | None = None
