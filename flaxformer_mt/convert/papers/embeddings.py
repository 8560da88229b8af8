"""Format embeddings: scaled embeddings and positions, as in benchmarks/originals/embeddings.py."""

import functools
import math
from pathlib import Path

import torch

from flaxformer_mt.convert import formats
from flaxformer_mt.convert.formats import Format, Outputs, Weights
from flaxformer_mt.convert.network_fields import EVERY_FIELD, find_problems, value_of
from flaxformer_mt.convert.torch.state_dicts import save_tensors, tensor_of
from flaxformer_mt.model.positions import sinusoidal_table

_SIDES = ("source", "target")
_OF_INPUTS = ("architecture", "positions", "first_position", "embedding_scale", "embedding_bias")
_FIELDS = tuple(field for field in EVERY_FIELD if field.ours not in (*_OF_INPUTS, "embedding_norm"))


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
    table = state["lut.weight"] * math.sqrt(arguments["d_model"])
    return lambda batch: (
        table[tensor_of(batch.target_in)] + state["pe"][:, : batch.target_in.shape[1]]
    ).numpy()


FORMAT = Format(
    name="embeddings",
    problems=functools.partial(find_problems, _FIELDS),
    write=_write,
    open=_open,
    read=None,
    quantity="target vectors",
    lost_options=lambda search: [],
)
