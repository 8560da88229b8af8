"""Options that several commands have; see options.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flaxformer_mt.commands.section_flags import make_flags
from flaxformer_mt.config import SearchConfig

# Declared in SearchConfig; Any, because type checkers do not know the fields of classes made at run time.
_EnsembleFlags: Any = make_flags(SearchConfig, "ensemble_mean")


@dataclass(frozen=True)
class GeneralOptions:
    """Flags of all commands, which flags.py and main.py obey."""

    # Show this help.
    help: bool = False
    # Say nothing but warnings and errors.
    quiet: bool = False
    # Say everything, warnings and errors, or errors alone.
    log_level: Literal["info", "warning", "error"] = "info"


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The checkpoint of a run."""

    # Checkpoint: best, last, average or a step number. None: train.final_checkpoint of the run's config.
    checkpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class NonfiniteOptions:
    """What is refused of checkpoints."""

    # ---- model ----

    # Use checkpoints although parameters of them are NaN or infinite.
    allow_nonfinite: bool = False


@dataclass(frozen=True, kw_only=True)
class DtypeOptions:
    """How a model computes."""

    # ---- model ----

    # Data type of activations and products. None: as trained, but float32 on a CPU without bfloat16.
    dtype: Literal["float32", "bfloat16"] | None = None


@dataclass(frozen=True, kw_only=True)
class SearchModelOptions(DtypeOptions):
    """How a model that searches computes, and what it takes for a sentence."""

    # ---- model ----

    # int8: store and multiply matrices as 8-bit integers, which can be faster on CPUs. None: not so.
    quantization: Literal["int8"] | None = None
    # Lines of several sentences: always translates each sentence apart and joins the results, never the line
    # as a whole; auto: apart, unless 10% of the training lines had several sentences.
    split_sentences: Literal["auto", "always", "never"] = "auto"


@dataclass(frozen=True, kw_only=True)
class ShortlistOptions:
    """The target pieces that are considered."""

    # ---- model ----

    # File of the target pieces that may translate each source piece, as prepare --shortlist=FILE or
    # CTranslate2's vmap has it: faster on CPUs. Other pieces are not considered. None: all pieces.
    shortlist: Path | None = None


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions(_EnsembleFlags):
    """Several models that search together."""

    # ---- ensemble ----

    # Further models, as an ensemble: RUN or RUN@CHECKPOINT, separated by commas. Empty: none.
    ensemble: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LanguageOptions:
    """The languages of lines, for models of several."""

    # ---- languages ----

    # Language to translate into, of a model of several. None: the one that the model has, or that the tag of
    # each line names.
    target_language: str | None = None
    # Language of the lines, of a model with data.source_tags. None: the one that the model has.
    source_language: str | None = None


@dataclass(frozen=True, kw_only=True)
class EncodingOptions:
    """What becomes of lines that are no text."""

    # ---- lines and interruptions ----

    # Lines that are not valid UTF-8: refuse (error), or replace invalid bytes by U+FFFD.
    invalid_utf8: Literal["refuse", "replace"] = "refuse"


@dataclass(frozen=True, kw_only=True)
class JsonOptions:
    """How the result is printed."""

    # Write JSON on a terminal too. Elsewhere, as into a file or a pipe, the output is always JSON.
    json: bool = False
