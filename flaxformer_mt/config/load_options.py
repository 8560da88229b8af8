"""How a run's model is loaded: options of the commands and of the API, which workers get by pickle."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flaxformer_mt.config.schema import Dtype, Quantization, SearchConfig


@dataclass(frozen=True)
class LoadOptions:
    """How `Translator.load` loads the model of a run directory.

    Attributes:
      checkpoint: best, last, average or a step. None: that of `train.final_checkpoint`.
      search: search options that replace those of the run's config.
      ensemble: further runs that form an ensemble with this one, as RUN or RUN@CHECKPOINT.
      long_lines: split: what has more than data.max_source_length tokens is translated in parts; cut: only
        its beginning is translated.
      split_sentences: always: each sentence of a line is translated apart; never: the line as a whole; auto:
        apart, unless the model was trained on lines of several sentences.
      spread: whether to use all devices, each for a part of each batch, or, if the model is too large for one
        of them, together for each sentence. The first four cores of a CPU become devices, unless JAX has
        computed before. All callers share the programs compiled so.
      dtype: data type of activations and products, of the whole ensemble. None: that of the training, or
        float32 on a CPU without instructions for bfloat16.
      allow_nonfinite: whether parameters may be NaN or infinite.
      shortlist: file of the pieces that may translate each source piece, as `prepare` writes it.
      quantization: int8 multiplies matrices of 8-bit integers, of the whole ensemble.
    """

    checkpoint: str | None = None
    search: SearchConfig | None = None
    ensemble: tuple[str, ...] = ()
    long_lines: Literal["split", "cut"] = "split"
    split_sentences: Literal["auto", "always", "never"] = "auto"
    spread: bool = True
    dtype: Dtype | None = None
    allow_nonfinite: bool = False
    shortlist: str | Path | None = None
    quantization: Quantization | None = None
