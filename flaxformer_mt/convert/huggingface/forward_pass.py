"""The forward pass of a Hugging Face folder by transformers, for the parity check."""

import importlib.util
from pathlib import Path

import numpy as np

from flaxformer_mt.convert.format_interface import Given, Outputs
from flaxformer_mt.errors import UserError
from flaxformer_mt.shapes import Batch

# Importing transformers takes seconds, so `open_model` imports it. A missing package is reported here.
for _package in ("torch", "transformers"):
    if importlib.util.find_spec(_package) is None:
        raise ModuleNotFoundError(f"No module named {_package!r}", name=_package)


def open_model(path: Path, given: Given | None = None) -> Outputs:
    """Load a folder with transformers; return the function from batches to float32 logits [B, T, V].

    Raises:
      UserError: arrays of the files are missing, or superfluous.
    """
    import torch
    from transformers import AutoModelForSeq2SeqLM

    folder = path if path.is_dir() else path.parent
    # Whatever kernels config.json asks for: they differ in rounding, and may not be installed.
    model, report = AutoModelForSeq2SeqLM.from_pretrained(
        folder,
        output_loading_info=True,
        dtype=torch.float32,
        local_files_only=True,
        attn_implementation="eager",
    )
    if mismatches := {kind: sorted(map(str, names)) for kind, names in report.items() if names}:
        raise UserError(f"{folder}: transformers reports missing or unexpected arrays: {mismatches}")
    model.eval()

    def outputs(batch: Batch) -> np.ndarray:
        with torch.no_grad():
            return model(
                input_ids=torch.from_numpy(np.asarray(batch.source, np.int64)),
                attention_mask=torch.from_numpy(np.asarray(batch.source_mask, np.int64)),
                decoder_input_ids=torch.from_numpy(np.asarray(batch.target_in, np.int64)),
            ).logits.numpy()

    return outputs
