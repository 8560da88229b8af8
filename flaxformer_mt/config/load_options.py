"""How a run's model is loaded: options of the commands and of the API, which workers get by pickle.

The options of a command inherit those of the parts here that the command has.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flaxformer_mt.config.schema import Dtype, Quantization, SearchConfig


def take_values(options: Any, part: type) -> dict[str, Any]:
    """Return the values that options have of the fields which they inherit from `part`."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(part)}


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The checkpoint of the run."""

    # Checkpoint: best, last, average or a step number. None: train.final_checkpoint of the run's config.
    checkpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions:
    """Models that translate together."""

    # ---- ensemble ----

    # Further models of an ensemble: RUN or RUN@CHECKPOINT, separated by commas. Empty: none.
    ensemble: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LongLinesOptions:
    """What becomes of lines that are longer than the model's maximum length."""

    # ---- lines and interruptions ----

    # Sentences of more than data.max_source_length tokens. split: they are translated in parts, and the
    # results are joined. cut: only the beginning is translated.
    long_lines: Literal["split", "cut"] = "split"


@dataclass(frozen=True, kw_only=True)
class LetterCaseOptions:
    """What becomes of text in letter cases that models translate badly."""

    # ---- letter case ----

    # Sentences in capitals, in title case or of a single word. always: they are translated in sentence case,
    # and their translations get the capitals or title case back. auto: the same for the kinds that fewer than
    # 0.5% of the training lines had, if this is known. never: they are translated as they are.
    capitals: Literal["auto", "always", "never"] = "auto"


@dataclass(frozen=True, kw_only=True)
class DtypeOptions:
    """The numbers that the model computes with."""

    # ---- model ----

    # Data type of activations and matrix products. None: as trained, but float32 on a CPU without bfloat16.
    dtype: Dtype | None = None


@dataclass(frozen=True, kw_only=True)
class SearchModelOptions(DtypeOptions):
    """How the model computes translations."""

    # ---- model ----

    # int8: store and multiply matrices as 8-bit integers, which can be faster on CPUs. None: no quantization.
    quantization: Quantization | None = None
    # Lines of several sentences. always: each sentence is translated separately, and the results are joined.
    # never: the line is translated as a whole. auto: like never if at least 10% of the training lines had
    # several sentences, else like always.
    split_sentences: Literal["auto", "always", "never"] = "auto"


@dataclass(frozen=True, kw_only=True)
class NonfiniteOptions:
    """Whether a damaged model may be used."""

    # ---- model ----

    # Use a checkpoint even if some of its parameters are NaN or infinite.
    allow_nonfinite: bool = False


@dataclass(frozen=True, kw_only=True)
class ShortlistOptions:
    """The subwords that translations are made of."""

    # ---- model ----

    # File of the target subwords that may translate each source subword (shortlist), written by prepare
    # --shortlist=FILE or as CTranslate2's vmap. Other subwords are not considered, which is faster on CPUs.
    # None: all subwords.
    shortlist: Path | str | None = None


@dataclass(frozen=True, kw_only=True)
class LoadOptions(
    ShortlistOptions,
    NonfiniteOptions,
    LetterCaseOptions,
    SearchModelOptions,
    DtypeOptions,
    LongLinesOptions,
    EnsembleOptions,
    CheckpointOptions,
):
    """How `Translator.load` loads the model of a run directory."""

    # Search options that override the run's config. None: no change.
    search: SearchConfig | None = None
    # Sentences in capitals, in title case or of a single word, as `translate --capitals` explains.
    capitals: Literal["auto", "always", "never"] = "never"
    # Whether to use all devices, each for a part of each batch. If the model is too large for one device, all
    # devices share each sentence. On a CPU, up to four cores become devices, unless this process has already
    # used JAX or the environment sets the number of devices.
    use_all_devices: bool = True

    @classmethod
    def of(cls, options: Any, search: SearchConfig | None) -> "LoadOptions":
        """Return the parts that the options of a command inherit, and these search options."""
        values: dict[str, Any] = {"search": search}
        for part in cls.__bases__:
            values |= take_values(options, part) if isinstance(options, part) else {}
        return cls(**values)
