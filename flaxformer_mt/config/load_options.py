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
    # Search options that override the run's config. None: no change.
    search: SearchConfig | None = None
    # ---- ensemble ----

    # Further models of an ensemble: RUN or RUN@CHECKPOINT, separated by commas. Empty: none.
    ensemble: tuple[str, ...] = ()
    # ---- lines and interruptions ----

    # Sentences of more than data.max_source_length tokens. split: they are translated in parts, and the
    # results are joined. cut: only the beginning is translated.
    long_lines: Literal["split", "cut"] = "split"
    # ---- model ----

    # Data type of activations and matrix products. None: as trained, but float32 on a CPU without bfloat16.
    dtype: Annotated[Dtype | None, DTYPE_NAMES] = None
    # int8: store and multiply matrices as 8-bit integers, which can be faster on CPUs. None: no quantization.
    quantization: Quantization | None = None
    # Lines of several sentences. always: each sentence is translated separately, and the results are joined.
    # never: the line is translated as a whole. auto: like never if at least 10% of the training lines had
    # several sentences, else like always.
    split_sentences: Literal["auto", "always", "never"] = "auto"
    # Sentences in capitals, in title case or of a single word. always: they are translated in sentence case,
    # and their translations get the capitals or title case back. auto: the same for the kinds that fewer than
    # 0.5% of the training lines had, if this is known. never: they are translated as they are.
    capitals: Literal["auto", "always", "never"] = "never"
    # Whether to use all devices, each for a part of each batch. If the model is too large for one device, all
    # devices share each sentence. On a CPU, up to four cores become devices, unless this process has already
    # used JAX or the environment sets the number of devices.
    use_all_devices: bool = True
    # Use a checkpoint even if some of its parameters are NaN or infinite.
    allow_nonfinite: bool = False
    # File of the target subwords that may translate each source subword (shortlist), written by prepare
    # --shortlist=FILE or as CTranslate2's vmap. Other subwords are not considered, which is faster on CPUs.
    # None: all subwords.
    shortlist: Path | str | None = None
