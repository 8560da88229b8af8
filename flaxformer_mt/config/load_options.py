"""Options that determine how a run's model is loaded, for commands and the API; workers get them by pickle.

The options class of a command inherits from the classes in this module whose options the command has.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flaxformer_mt.config.schema import Dtype, Quantization, SearchConfig


def take_values(options: Any, part: type) -> dict[str, Any]:
    """Return the values of the fields that `options` inherits from the class `part`."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(part)}


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    # Checkpoint: best, last, average or a step number. None: train.final_checkpoint of the run's config.
    checkpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions:
    # ---- ensemble ----

    # Further models of an ensemble: RUN or RUN@CHECKPOINT, separated by commas. Empty: none.
    ensemble: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LongLinesOptions:
    # ---- lines and interruptions ----

    # How to translate sentences of more than data.max_source_length tokens. split: translate them in parts
    # and join the results. cut: translate only the beginning.
    long_lines: Literal["split", "cut"] = "split"


@dataclass(frozen=True, kw_only=True)
class LetterCaseOptions:
    # ---- letter case ----

    # How to translate sentences in capitals, in title case or of a single word. always: translate them in
    # sentence case, then restore capitals or title case in the translation. never: translate them unchanged.
    # auto: like always, but only for each of these three kinds that is known to make up less than 0.5% of
    # the training lines.
    capitals: Literal["auto", "always", "never"] = "auto"


@dataclass(frozen=True, kw_only=True)
class DtypeOptions:
    # ---- model ----

    # Data type of activations and matrix products. None: as in training, but float32 on a CPU without
    # bfloat16.
    dtype: Dtype | None = None


@dataclass(frozen=True, kw_only=True)
class SearchModelOptions(DtypeOptions):
    # ---- model ----

    # int8: store and multiply matrices as 8-bit integers, which can be faster on CPUs. None: no quantization.
    quantization: Quantization | None = None
    # How to translate lines of several sentences. always: translate each sentence separately and join the
    # results. never: translate the line as a whole. auto: translate the line as a whole only if at least 10%
    # of the training lines had several sentences.
    split_sentences: Literal["auto", "always", "never"] = "auto"


@dataclass(frozen=True, kw_only=True)
class NonfiniteOptions:
    # ---- model ----

    # Use a checkpoint even if some of its parameters are NaN or infinite.
    allow_nonfinite: bool = False


@dataclass(frozen=True, kw_only=True)
class ShortlistOptions:
    # ---- model ----

    # Shortlist: file that lists, for each source subword, the target subwords that may translate it. Use a
    # file that prepare --shortlist=FILE wrote, or CTranslate2's vmap format. Other subwords are not
    # considered, which is faster on CPUs. None: all subwords.
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
    # How sentences in capitals, in title case or of a single word are translated; see `translate --capitals`.
    capitals: Literal["auto", "always", "never"] = "never"
    # Whether to split each batch over all devices. If the model is too large for one device, its parameters
    # are split over all devices instead. On a CPU, up to four cores become devices, unless this process has
    # already used JAX or the environment sets the number of devices.
    use_all_devices: bool = True

    @classmethod
    def of(cls, options: Any, search: SearchConfig | None) -> "LoadOptions":
        """Return the loading options among a command's options, combined with the search options `search`."""
        values: dict[str, Any] = {"search": search}
        for part in cls.__bases__:
            values |= take_values(options, part) if isinstance(options, part) else {}
        return cls(**values)
