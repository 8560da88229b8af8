"""How a run's model is loaded: options of the commands and of the API, which workers get by pickle."""

from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Annotated, Literal

from flaxformer_mt.config.schema import DTYPE_NAMES, Dtype, Quantization, SearchConfig
from flaxformer_mt.errors import warn_user


@dataclass(frozen=True)
class LoadOptions:
    """How `Translator.load` loads the model of a run directory."""

    # Checkpoint: best, last, average or a step number. None: train.final_checkpoint of the run's config.
    checkpoint: str | None = None
    # Search options that override the run's config. None: no change.
    search: SearchConfig | None = None
    # ---- ensemble ----

    # Further models, as an ensemble: RUN or RUN@CHECKPOINT, separated by commas. Empty: none.
    ensemble: tuple[str, ...] = ()
    # ---- lines and interruptions ----

    # Sentences of more than data.max_source_length tokens: split translates them in parts and joins the
    # results, cut translates only the beginning.
    long_lines: Literal["split", "cut"] = "split"
    # ---- model ----

    # Data type of activations and matrix products. None: as trained, but float32 on a CPU without bfloat16.
    dtype: Annotated[Dtype | None, DTYPE_NAMES] = None
    # int8: store and multiply matrices as 8-bit integers, which can be faster on CPUs. None: no quantization.
    quantization: Quantization | None = None
    # Lines of several sentences: always translates each sentence separately and joins the results; never
    # translates the line as a whole; auto is always, unless 10% of the training lines had several sentences.
    split_sentences: Literal["auto", "always", "never"] = "auto"
    # Whether to translate sentences in capitals, in title case or of a single word in sentence case.
    capitals: Literal["auto", "always", "never"] = "never"
    # Whether a translation that repeats itself is searched again, or kept.
    repetitions: Literal["search_again", "keep"] = "keep"
    # Whether to use all devices, each for a part of each batch, or, if the model is too large for one of
    # them, together for each sentence. The first four cores of a CPU become devices, unless JAX has computed
    # before. All callers share the programs compiled so.
    use_all_devices: bool = True
    # Use a checkpoint even if some of its parameters are NaN or infinite.
    allow_nonfinite: bool = False
    # Shortlist: a file of the target subwords that may translate each source subword, written by prepare
    # --shortlist=FILE or as CTranslate2's vmap: faster on CPUs. Other subwords are not considered. None: all
    # subwords.
    shortlist: Path | str | None = None
    # Former name of use_all_devices.
    spread: InitVar[bool | None] = None

    def __post_init__(self, spread: bool | None) -> None:
        if spread is not None:
            warn_user("spread= is now called use_all_devices=; use the new name")
            object.__setattr__(self, "use_all_devices", spread)
