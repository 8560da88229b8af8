"""Options of the commands: a dataclass for each command, whose docstring and comments are its `--help` text.

Options that several commands have are in shared_options.py, those of the commands that start from a config in
experiment_options.py, those of `export` and `import` in conversion_options.py.

The command line is split in flags.py, and the text of a flag is converted to a typed value in flag_values.py.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from flaxformer_mt.commands.experiment_options import ProcessOptions, WorkerOptions
from flaxformer_mt.commands.section_flags import make_flags
from flaxformer_mt.commands.shared_options import (
    CheckpointOptions,
    DtypeOptions,
    EncodingOptions,
    EnsembleOptions,
    LanguageOptions,
    NonfiniteOptions,
    SearchModelOptions,
    ShortlistOptions,
)
from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.bounds import at_least

# Values of the flags that may be given without a value.
BARE_FLAGS = {"--alignments": "words"}


# Declared in SearchConfig; Any, because type checkers do not know the fields of classes made at run time.
_SearchFlags: Any = make_flags(
    SearchConfig, *(field.name for field in fields(SearchConfig) if field.name != "ensemble_mean")
)
_ScoreFlags: Any = make_flags(
    SearchConfig, "length_penalty", "length_penalty_kind", "coverage_penalty", "coverage_layer"
)
_GenerateFlags: Any = make_flags(
    SearchConfig, "beam_size", "temperature", "top_k", "top_p", "seed", "no_repeat_ngram"
)


@dataclass(frozen=True)
class SearchOptions(CheckpointOptions, _SearchFlags):
    """Options of all commands that search for translations."""

    # Run directory of a trained model, or its URL (gs://, s3://).
    run: Path


@dataclass(frozen=True)
class EvaluateOptions(ProcessOptions, SearchOptions, SearchModelOptions, ShortlistOptions, NonfiniteOptions):
    """Translates a split or a file and scores the translations against references (BLEU, chrF, TER)."""

    # ---- sentences to score ----

    # Split of the run's data set to evaluate. None: test, unless --reference names a file.
    split: Literal["test", "valid"] | None = None
    # File of source sentences to evaluate on, one a line; needs --reference. None: a split.
    source: str | None = None
    # File of reference translations, one line for each line of --source; for a language model, the text to
    # score. None: a split.
    reference: str | None = None
    # Evaluate only translations into this language, of a model of several. None: all; with --source and
    # --reference, the one that the model has.
    target_language: str | None = None
    # Evaluate only translations from this language. None: all.
    source_language: str | None = None
    # ---- scores and significance tests ----

    # Whether to ignore case in the scores. None: as in the run's config.
    lowercase: bool | None = None
    # sacreBLEU's tokenizer for BLEU. auto: the one for the target language. None: as in the run's config.
    bleu_tokenize: Literal["auto", "13a", "intl", "char", "zh", "ja-mecab", "ko-mecab", "none"] | None = None
    # Bootstrap samples for 95% confidence intervals and paired bootstrap tests. 0: no intervals. None: 1000.
    bootstrap: int | None = None
    # Systems to compare the run with in paired significance tests, separated by commas: RUN, RUN@CHECKPOINT,
    # or a file of translations of the same sentences. Empty: no comparison.
    against: tuple[str, ...] = ()
    # Test with --against: paired bootstrap resampling, or approximate randomization. None: bootstrap.
    paired: Literal["bootstrap", "approximate"] | None = None
    # Number of random trials of the test with --paired=approximate. None: 10000.
    trials: int | None = None
    # Checkpoint (.ckpt) of a COMET model, for this learned metric too; needs the program comet-score. None:
    # no COMET.
    comet: str | None = None


@dataclass(frozen=True)
class TranslateOptions(
    WorkerOptions,
    SearchOptions,
    SearchModelOptions,
    ShortlistOptions,
    NonfiniteOptions,
    EnsembleOptions,
    EncodingOptions,
    LanguageOptions,
):
    """Translates text line by line, and writes one line for each input line in the same order."""

    # ---- input and output ----

    # UTF-8 text file to translate. `-`: standard input.
    input: str = "-"
    # File for the translations, named FILE.partial until it is complete. `-`: standard output.
    output: str = "-"
    # ---- requirements on translations ----

    # File with the beginning of each line's translation, one line for each input line; an empty line sets no
    # prefix. None: no prefixes.
    prefix: str | None = None
    # File with phrases that each line's translation must contain, separated by tabs, one line for each input
    # line; an empty line requires nothing. None: no required phrases.
    required: str | None = None
    # ---- what is written ----

    # Write the n best translations of each line as `i ||| text ||| score`, where i counts lines from 0. None:
    # only the best, as text alone.
    n_best: int | None = None
    # With --n_best: leave out translations with the text of a better one, so that there may be fewer than n.
    unique: bool = False
    # Write `score<TAB>text`; the score is the log-probability divided by the length penalty.
    scores: bool = False
    # Write `score<TAB>log-probability<TAB>log-probabilities of the tokens<TAB>text`.
    token_scores: bool = False
    # Write the word or piece alignment before the text, as pairs `i-j` of source and target positions from 0,
    # found by attention. --alignments without a value: words. None: no alignment.
    alignments: Literal["words", "pieces"] | None = None
    # Decoder layer whose attention gives the alignment. 0: first layer; -1: last. None: that of the head that
    # has learned alignments (model.alignment), or the last but one.
    alignment_layer: int | None = None
    # Attention head, from 0, that gives the alignment. None: the head that has learned alignments, or the
    # mean of all heads.
    alignment_head: int | None = None
    # Write one JSON object a line: text, score, token log-probabilities, alignment, pieces and more.
    json: bool = False
    # Take tags (<b>, <br/>) and placeholders ({0}, %s, {{name}}) out of each line, and put them back around
    # and beside the words of the translation that the alignment finds.
    markup: bool = False
    # ---- lines and interruptions ----

    # Number of lines that are read before the first is written; these lines share batches. A pipe's window
    # closes early when the input pauses for half a second, unless --output names a file. None: 2048, or 1 if
    # the input is a terminal.
    window: Annotated[int | None, at_least(1)] = None
    # What is longer than data.max_source_length tokens: split translates it in parts and joins the results,
    # cut translates only the beginning.
    long_lines: Literal["split", "cut"] = "split"
    # First prepare the programs for few sentences, and keep them for later commands: these then start faster.
    warm_up: bool = False
    # Resume an interrupted `translate` command with the same flags from its FILE.partial.
    resume: bool = False
    # Discard the FILE.partial of an interrupted command and start over. Without --resume or --overwrite, an
    # existing FILE.partial is kept, and the command ends with an error.
    overwrite: bool = False


@dataclass(frozen=True)
class ScoreOptions(
    CheckpointOptions, _ScoreFlags, DtypeOptions, NonfiniteOptions, EncodingOptions, LanguageOptions
):
    """Scores given translations line by line, with the score by which the search ranks hypotheses."""

    # Run directory of a trained model, or its URL (gs://, s3://).
    run: Path
    # File of the translations to score, one a line (for a language model, the text). `-`: standard input.
    target: str
    # File of the source sentences, one line for each line of --target. `-`: standard input. None: for a
    # language model, which has no source.
    source: str | None = None
    # File for the scores, named FILE.partial until it is complete. `-`: standard output.
    output: str = "-"
    # ---- what is written ----

    # Write `score<TAB>log-probability<TAB>log-probabilities of the tokens` instead of the score alone.
    tokens: bool = False
    # Write one JSON object a line: source, target, score, token log-probabilities, pieces and more.
    json: bool = False
    # ---- lines and memory ----

    # Maximum number of source and target tokens scored at a time, padding included. Halved automatically if
    # the device runs out of memory. None: as in the run's config.
    batch_tokens: int | None = None
    # Lines with too many tokens for the model: refuse (error), or cut off and score only the beginning.
    long_lines: Literal["refuse", "cut"] = "refuse"


@dataclass(frozen=True)
class GenerateOptions(CheckpointOptions, _GenerateFlags):
    """Writes texts by a language model (a run without data.source_language), one a line."""

    # Run directory of a trained language model.
    run: Path
    # Beginning of every text. Empty: texts from their beginning.
    prompt: str = ""
    # Number of texts: samples, or the best of a beam search.
    n_best: int = 1
    # Maximum tokens of a text, with prompt and end symbol. None: data.max_target_length of the run's config.
    length: int | None = None
    # Random sampling, greedy search or beam search.
    method: Literal["sample", "greedy", "beam"] = "sample"


@dataclass(frozen=True)
class AverageOptions(NonfiniteOptions):
    """Averages the parameters of the last checkpoints and writes them to RUN/checkpoints/average."""

    # Run directory of a trained model, or its URL (gs://, s3://).
    run: Path
    # Number of newest checkpoints to average.
    last: int


@dataclass(frozen=True)
class PlotOptions(CheckpointOptions):
    """Plots position encodings and metrics of a run, and attention weights of a sentence, as PNG files."""

    # Run directory to plot.
    run: Path | None = None
    # Width of a sinusoidal position encoding to plot without a run.
    positions: int | None = None
    # Source sentence to translate and plot the attention of. Empty: no attention plots.
    source: str = ""
    # Folder for the PNG files. None: RUN/plots, or plots.
    output: Path | None = None


@dataclass(frozen=True)
class DoctorOptions:
    """Reports versions, devices and missing packages, with the command that installs each."""

    # Run directory of a translation model: also list the programs that translate and serve compile for it.
    run: Path | None = None
