"""How a run's model is loaded: options of the commands and of the API, which workers get by pickle."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from flaxformer_mt.config.schema import DTYPE_NAMES, Dtype, Quantization, SearchConfig


@dataclass(frozen=True)
class LoadOptions:
    """How `Translator.load` loads the model of a run directory."""

    # Checkpoint: best, last, average or a step number. None: train.final_checkpoint of the run's config.
    checkpoint: str | None = None
    # Search options that replace those of the run's config. None: those of the config.
    search: SearchConfig | None = None
    # ---- ensemble ----

    # Further models, as an ensemble: RUN or RUN@CHECKPOINT, separated by commas. Empty: none.
    ensemble: tuple[str, ...] = ()
    # ---- lines and interruptions ----

    # What is longer than data.max_source_length tokens: split translates it in parts and joins the results,
    # cut translates only the beginning.
    long_lines: Literal["split", "cut"] = "split"
    # ---- model ----

    # Data type of activations and products. None: as trained, but float32 on a CPU without bfloat16.
    dtype: Annotated[Dtype | None, DTYPE_NAMES] = None
    # int8: store and multiply matrices as 8-bit integers, which can be faster on CPUs. None: not so.
    quantization: Quantization | None = None
    # Lines of several sentences: always translates each sentence apart and joins the results, never the line
    # as a whole; auto: apart, unless 10% of the training lines had several sentences.
    split_sentences: Literal["auto", "always", "never"] = "auto"
    # Whether to use all devices, each for a part of each batch, or, if the model is too large for one of
    # them, together for each sentence. The first four cores of a CPU become devices, unless JAX has computed
    # before. All callers share the programs compiled so.
    spread: bool = True
    # Use checkpoints although parameters of them are NaN or infinite.
    allow_nonfinite: bool = False
    # File of the target pieces that may translate each source piece, as prepare --shortlist=FILE or
    # CTranslate2's vmap has it: faster on CPUs. Other pieces are not considered. None: all pieces.
    shortlist: Path | str | None = None
