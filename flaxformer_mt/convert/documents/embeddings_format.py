"""Format embeddings: the input layers of document 004, for the source and for the target; export only.

Files: source.pt and target.pt, each with the arrays of the classes Embeddings (`lut.weight`) and
PositionalEncoding (`pe`), which the parity check loads for the target; config.json with the arguments of the
classes under `arguments`; vocab/ as in every format. The classes are in embeddings_module.py.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from flaxformer_mt.config import Config
from flaxformer_mt.convert.documents.embeddings_module import Embeddings, PositionalEncoding
from flaxformer_mt.convert.format_interface import (
    VOCAB_NAME,
    Format,
    Outputs,
    Weights,
    read_config_json,
    unsupported_fields,
    write_config_json,
)
from flaxformer_mt.convert.torch.state_dicts import save_tensors, tensor_of
from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.shapes import Batch

_SIDES = ("source", "target")
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "model.architecture": ("encoder_decoder",),
    "model.positions": ("sinusoidal",),
    "model.first_position": (0,),
    "model.embedding_scale": (True,),
    "model.embedding_bias": (False,),
    "model.embedding_norm": (False,),
}


def _problems(config: Config) -> list[str]:
    return unsupported_fields(config, _ALLOWED)


def _write(weights: Weights, folder: Path, quantization: str) -> None:
    model, vocabs = weights.config.model, weights.vocabs
    rows = model.longest_input
    assert rows is not None, "sinusoidal positions are a table of finite length"
    table = sinusoidal_table(rows, model.model_dim)[None]
    for side in _SIDES:
        shared = "shared_embedding/embedding"
        path = shared if shared in weights.leaves else f"{side}_embedding/embedding"
        save_tensors({"lut.weight": weights.leaves[path], "pe": table}, folder / f"{side}.pt")
    (folder / VOCAB_NAME).mkdir()
    vocabs.save(folder / VOCAB_NAME)
    sizes = {"source": vocabs.source.size, "target": vocabs.target.size}
    rate = model.embedding_dropout_rate
    arguments = {
        "d_model": model.model_dim,
        "vocab": sizes,
        "dropout": model.dropout_rate if rate is None else rate,
        "max_len": rows,
    }
    write_config_json(weights, folder, FORMAT.name, {"arguments": arguments})


def _open(folder: Path) -> Outputs:
    facts = read_config_json(folder)["arguments"]
    state = torch.load(folder / "target.pt", weights_only=True)
    words = Embeddings(facts["d_model"], facts["vocab"]["target"])
    places = PositionalEncoding(facts["d_model"], facts["dropout"], facts["max_len"]).eval()
    words.load_state_dict({"lut.weight": state["lut.weight"]})
    places.load_state_dict({"pe": state["pe"]})

    def outputs(batch: Batch) -> np.ndarray:
        with torch.no_grad():
            return places(words(tensor_of(batch.target_in))).numpy()

    return outputs


FORMAT = Format(
    name="embeddings",
    problems=_problems,
    write=_write,
    open=_open,
    read=None,
    quantity="target vectors",
    lost_options=lambda search: [],
)
