"""What each command takes: one dataclass a command, whose docstring and comments are its `--help`.

Owns names, types and defaults of flags, and how a flag's text becomes a value. Knows neither who splits the
command line nor what the commands do.
"""

import difflib
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from flaxformer_mt.config import Config

# What a flag means that may stand without a value, and does.
BARE_FLAGS = {"--alignments": "words"}

_TRUTH = {"true": True, "false": False}
_NOUNS = {int: "whole number", float: "number"}


@dataclass(frozen=True)
class ExperimentOptions:
    """What the commands share that start from a config."""

    # Run directory. Without --config, one that exists gives its own config.
    run: Path
    # The experiment.
    config: Config = field(default_factory=Config)


@dataclass(frozen=True)
class ProcessOptions:
    """What the commands share that several processes can work on together, each started with these flags."""

    # Several processes: HOST:PORT at which number 0 can be reached by all.
    coordinator: str | None = None
    # Several processes: how many there are.
    processes: int | None = None
    # Several processes: which one this is, from 0.
    process: int | None = None
    # Several processes, as Slurm, GKE, a TPU pod or Open MPI describe them; instead of the three above.
    distributed: bool = False


@dataclass(frozen=True)
class TrainOptions(ProcessOptions, ExperimentOptions):
    """Trains the model that a config describes, or carries on where a run's last checkpoint is."""

    # Record a trace of so many updates in RUN/profile, for TensorBoard and Perfetto. None: no trace.
    profile: int | None = None


@dataclass(frozen=True)
class ShowOptions(ExperimentOptions):
    """Shows the resolved config, the parameters, and the FLOPs, memory and batch shapes of a step."""


@dataclass(frozen=True)
class PrepareOptions(ExperimentOptions):
    """Prepares data set, vocabulary and token store, and reports on the data."""


@dataclass(frozen=True)
class SearchOptions:
    """What the commands share that search for translations."""

    # Run directory of a trained model.
    run: Path
    # Which checkpoint: best, last, average, or a step. None: as the run's config says.
    checkpoint: str | None = None
    # Beam search, always the most probable token, or tokens drawn at random. None, here and below: as the
    # run's config says.
    method: Literal["beam", "greedy", "sample"] | None = None
    # beam: hypotheses that are kept.
    beam_size: int | None = None
    # Exponent of the length penalty; 0: none.
    length_penalty: float | None = None
    # gnmt: ((5 + length) / 6) ** A; length: length ** A.
    length_penalty_kind: Literal["gnmt", "length"] | None = None
    # beam: weight of the coverage penalty; 0: none.
    coverage_penalty: float | None = None
    # Decoder layer whose mean cross-attention is coverage, from 0; -1: the last.
    coverage_layer: int | None = None
    # beam: go on while a better hypothesis is possible, or only until patience * beam_size have ended.
    stopping: Literal["exact", "inexact"] | None = None
    # See stopping.
    patience: float | None = None
    # beam: groups of beams that are kept apart; 1: plain search.
    diversity_groups: int | None = None
    # How much a token loses for each beam of an earlier group that has it in the same place.
    diversity_strength: float | None = None
    # sample: above 1 flattens the distribution, below 1 sharpens it.
    temperature: float | None = None
    # sample: only the so many likeliest tokens; 0: all.
    top_k: int | None = None
    # sample: only the fewest likeliest tokens whose probabilities add up to this; 1: all.
    top_p: float | None = None
    # sample: only tokens of at least this times the probability of the likeliest; 0: all.
    min_p: float | None = None
    # sample: another seed, another sample; the same seed and line give the same one.
    seed: int | None = None
    # No sequence of so many tokens occurs twice in a translation; 0: any may.
    no_repeat_ngram: int | None = None
    # Pieces, or ids, that never occur in a translation, with commas between (a comma itself by its id).
    suppress: tuple[str, ...] | None = None
    # Whether translations may contain the symbol for what has no piece.
    allow_unknown: bool | None = None
    # The shortest translation in tokens: this times the source's, plus min_length_offset.
    min_length_ratio: float | None = None
    # See min_length_ratio.
    min_length_offset: int | None = None
    # The longest translation in tokens: this times the source's, plus max_length_offset.
    max_length_ratio: float | None = None
    # See max_length_ratio.
    max_length_offset: int | None = None
    # Source and beam tokens that are searched together.
    batch_tokens: int | None = None


@dataclass(frozen=True)
class EvaluateOptions(ProcessOptions, SearchOptions):
    """Translates a split, or a file, and scores it against its references."""

    # Which split of the run's data set. None: test, unless a file is given.
    split: Literal["test", "valid"] | None = None
    # Instead of a split: a file of sentences.
    source: str | None = None
    # The file of their translations, one line for each line of the source. Of a language model: the text to
    # score, alone.
    reference: str | None = None
    # Score without regard to case. None: as the run's config says.
    lowercase: bool | None = None
    # Samples of the bootstrap, for 95% confidence intervals and paired tests; 0: no intervals. None: 1000.
    bootstrap: int | None = None
    # Runs (RUN or RUN@CHECKPOINT), or files of translations of the same sentences, with commas between: what
    # the run is tested against.
    against: tuple[str, ...] = ()
    # The test: paired bootstrap resampling, or approximate randomization. None: bootstrap.
    paired: Literal["bootstrap", "approximate"] | None = None
    # paired=approximate: how often sentences change sides at random. None: 10000.
    trials: int | None = None


@dataclass(frozen=True)
class TranslateOptions(ProcessOptions, SearchOptions):
    """Translates text, one sentence a line: one line out for each line in, in the same order."""

    # File to read; -: standard input.
    input: str = "-"
    # File to write, called FILE.partial until it is whole; -: standard output.
    output: str = "-"
    # A file with what each line's translation starts with, a line for each line; an empty one: anything.
    prefix: str | None = None
    # A file with the phrases that each line's translation contains, tabs between them; an empty line: none.
    required: str | None = None
    # Further runs that translate together with this one: RUN or RUN@CHECKPOINT, with commas between.
    ensemble: tuple[str, ...] = ()
    # The mean of an ensemble's log-probabilities or of its probabilities. None: as the run's config says.
    ensemble_mean: Literal["log_probs", "probs"] | None = None
    # Write so many translations of a line as `i ||| text ||| score`, i counting lines from 0. None: the best.
    n_best: int | None = None
    # Write `score<TAB>text`. A score is a log-probability over its length penalty.
    scores: bool = False
    # Write `score<TAB>log-probability<TAB>those of the tokens<TAB>text`.
    token_scores: bool = False
    # Write which source position each target position looked at, as `i-j`, before the text: of words, or of
    # pieces. --alignments alone: words.
    alignments: Literal["words", "pieces"] | None = None
    # Decoder layer whose attention aligns, from 0; -1: the last. None: the last but one.
    alignment_layer: int | None = None
    # Head of that layer. None: the mean of all.
    alignment_head: int | None = None
    # Write a JSON object a line with all of this, and the pieces.
    json: bool = False
    # Lines longer than data.max_source_length: translate them in parts and join these, or only the beginning.
    long_lines: Literal["split", "cut"] = "split"
    # Go on with FILE.partial where an interrupted run of the same command had got to.
    resume: bool = False
    # Lines that are not UTF-8: end with an error, or replace what cannot be read by U+FFFD.
    invalid_utf8: Literal["refuse", "replace"] = "refuse"


@dataclass(frozen=True)
class ScoreOptions:
    """Scores given translations, a line for each line, as the search would rank them."""

    # Run directory of a trained model.
    run: Path
    # File of their translations; -: standard input. Of a language model: the text to score, alone.
    target: str
    # File of sentences; -: standard input. None: the run is a language model.
    source: str | None = None
    # File to write, called FILE.partial until it is whole; -: standard output.
    output: str = "-"
    # Which checkpoint: best, last, average, or a step. None: as the run's config says.
    checkpoint: str | None = None
    # Write `score<TAB>log-probability<TAB>those of the tokens` instead of the score alone.
    tokens: bool = False
    # Write a JSON object a line with all of this, and the pieces.
    json: bool = False
    # Exponent of the length penalty; 0: none. None, here and below: as the run's config says.
    length_penalty: float | None = None
    # gnmt: ((5 + length) / 6) ** A; length: length ** A.
    length_penalty_kind: Literal["gnmt", "length"] | None = None
    # Weight of the coverage penalty; 0: none.
    coverage_penalty: float | None = None
    # Decoder layer whose mean cross-attention is coverage, from 0; -1: the last.
    coverage_layer: int | None = None
    # Source and target tokens that are scored together.
    batch_tokens: int | None = None
    # Lines that are too long: end with an error, or score only the beginning, with a warning.
    long_lines: Literal["refuse", "cut"] = "refuse"
    # Lines that are not UTF-8: end with an error, or replace what cannot be read by U+FFFD.
    invalid_utf8: Literal["refuse", "replace"] = "refuse"


@dataclass(frozen=True)
class AverageOptions:
    """Averages the parameters of the last checkpoints into checkpoints/average."""

    # Run directory of a trained model.
    run: Path
    # How many checkpoints, counted from the newest.
    last: int


@dataclass(frozen=True)
class ExportOptions:
    """Writes a trained model as another system reads it, and checks that it computes the same."""

    # Run directory of a trained model.
    run: Path
    # torch, torch-nn, handbuilt, kokoyi, decoder-only, aiayn, marian, hf-pre-norm, or ctranslate2.
    format: str
    # Folder for the files; it must not exist, or be empty.
    output: Path
    # Which checkpoint: best, last, average, or a step. None: as the run's config says.
    checkpoint: str | None = None
    # ctranslate2: int8, int8_float16, int8_float32, int8_bfloat16, int16, float16, bfloat16. none: float32.
    quantization: str = "none"
    # The largest difference of a logit or log-probability that counts as equal.
    tolerance: float = 1e-4


@dataclass(frozen=True)
class ImportOptions:
    """Makes a run directory of a model of another system: to translate, to score, to train further."""

    # torch, torch-nn, handbuilt, kokoyi, decoder-only, aiayn, marian, or hf-pre-norm.
    format: str
    # The model's folder, or the state dict in it.
    input: Path
    # Run directory to make; it must not exist, or be empty.
    run: Path
    # A config file or recipe that describes the model, where its folder does not tell.
    config: str | None = None
    # A folder with joint.model, or source.model and target.model, where the model's own has no vocabulary.
    vocab: Path | None = None
    # The largest difference of a logit from the other system's that counts as equal.
    tolerance: float = 1e-4


@dataclass(frozen=True)
class PlotOptions:
    """Draws positions and metrics of a run, and the attention over a sentence, as PNG files."""

    # Run directory.
    run: Path
    # A sentence to translate; its attention is drawn. Empty: none.
    source: str = ""
    # Folder for the files. None: plots in the run directory.
    output: Path | None = None
    # Which checkpoint: best, last, average, or a step. None: as the run's config says.
    checkpoint: str | None = None


@dataclass(frozen=True)
class DoctorOptions:
    """Tells versions and devices, what is missing, and how to get it."""


def read_value(text: str, kind: Any) -> Any:
    """What a flag's text means for a field of a type: "1,2" for tuple[float, ...] is (1.0, 2.0).

    Raises:
      ValueError: it means nothing; the message says what would.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        wanted = next(argument for argument in arguments if argument is not types.NoneType)
        return None if text.lower() == "none" else read_value(text, wanted)
    if origin is Literal:
        return text if text in arguments else _refuse_choice(text, arguments)
    if origin is tuple:
        return tuple(read_value(part, arguments[0]) for part in text.split(",") if part.strip())
    if kind is bool:
        return _refuse_choice(text, ("True", "False")) if text.lower() not in _TRUTH else _TRUTH[text.lower()]
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"is {text!r}, which is no {_NOUNS[kind]}") from None
    if kind is float and not math.isfinite(value):
        raise ValueError(f"is {text!r}, which is no {_NOUNS[kind]}")
    return value


def _refuse_choice(text: str, choices: Sequence[str]) -> NoReturn:
    near = difflib.get_close_matches(text.lower(), choices, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"is {text!r}{hint} (allowed: {', '.join(choices)})")


def describe_type(kind: Any) -> str:
    """How `--help` writes a type: INT, {bucket,pack}, FLOAT|none."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return "|".join(
            "none" if argument is types.NoneType else describe_type(argument) for argument in arguments
        )
    if origin is Literal:
        return "{" + ",".join(arguments) + "}"
    if origin is tuple:
        return f"{describe_type(arguments[0])},..."
    return "{True,False}" if kind is bool else str(kind.__name__).upper()
