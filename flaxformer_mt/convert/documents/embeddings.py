"""Format embeddings: the PyTorch classes of document 004, scaled embeddings and a table of positions."""

import functools
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from flaxformer_mt.convert import formats
from flaxformer_mt.convert.formats import Format, Outputs, Weights
from flaxformer_mt.convert.network_fields import EVERY_FIELD, find_problems, value_of
from flaxformer_mt.convert.torch.state_dicts import save_tensors, tensor_of
from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.shapes import Batch


class Embeddings(nn.Module):
    """A table of vectors, multiplied by the square root of their width."""

    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)
        self.d_model = d_model

    def forward(self, x: Tensor) -> Tensor:
        """Return vectors [B, T, D] of ids [B, T]."""
        return self.lut(x) * math.sqrt(self.d_model)


class PositionalEncoding(nn.Module):
    """Adds a table of positions, which is in the state dict, and drops out of the sum."""

    pe: Tensor

    def __init__(self, d_model: int, dropout: float, max_len: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        self.register_buffer("pe", torch.zeros(1, max_len, d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Return vectors [B, T, D] with their positions."""
        return self.dropout(x + self.pe[:, : x.shape[1]])


_SIDES = ("source", "target")
_FIELDS = tuple(
    field
    for field in EVERY_FIELD
    if field.ours
    not in (
        "architecture",
        "positions",
        "first_position",
        "embedding_scale",
        "embedding_bias",
        "embedding_norm",
    )
)


def _write(weights: Weights, folder: Path, quantization: str) -> None:
    model, vocabs = weights.config.model, weights.vocabs
    rows = model.longest_input
    assert rows is not None, "sinusoidal positions are a table of finite length"
    table = sinusoidal_table(rows, model.model_dim)[None]
    for side in _SIDES:
        shared = "shared_embedding/embedding"
        path = shared if shared in weights.leaves else f"{side}_embedding/embedding"
        save_tensors({"lut.weight": weights.leaves[path], "pe": table}, folder / f"{side}.pt")
    (folder / formats.VOCAB_NAME).mkdir()
    vocabs.save(folder / formats.VOCAB_NAME)
    sizes = {"source": vocabs.source.size, "target": vocabs.target.size}
    arguments = {
        "d_model": model.model_dim,
        "vocab": sizes,
        "dropout": value_of(model, "embedding_dropout_rate"),
        "max_len": rows,
    }
    formats.write_config_json(weights, folder, FORMAT.name, {"arguments": arguments})


def _open(folder: Path) -> Outputs:
    arguments = formats.read_config_json(folder)["arguments"]
    state = torch.load(folder / "target.pt", weights_only=True)
    words = Embeddings(arguments["d_model"], arguments["vocab"]["target"])
    places = PositionalEncoding(arguments["d_model"], arguments["dropout"], arguments["max_len"]).eval()
    words.load_state_dict({"lut.weight": state["lut.weight"]})
    places.load_state_dict({"pe": state["pe"]})

    def outputs(batch: Batch) -> np.ndarray:
        with torch.no_grad():
            return places(words(tensor_of(batch.target_in))).numpy()

    return outputs


FORMAT = Format(
    name="embeddings",
    problems=functools.partial(find_problems, _FIELDS),
    write=_write,
    open=_open,
    read=None,
    quantity="target vectors",
    lost_options=lambda search: [],
)
