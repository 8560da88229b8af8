"""Format torch: a safetensors file and one Python file that needs only PyTorch; supports every model.

The network is in modeling.py, which is copied into each exported folder, and whose docstring lists the names.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.config.files import to_dict
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.foreign_files import check_equal, check_network, check_tensors
from flaxformer_mt.convert.formats import Format, ImportOverrides, Outputs, Weights
from flaxformer_mt.convert.name_table import (
    NORM,
    SAME,
    TRANSPOSED,
    Rule,
    Table,
    Tensors,
    attention_rules,
    feedforward_rules,
    linear_layout,
    rules_for,
)
from flaxformer_mt.convert.stored_tensors import save_safetensors
from flaxformer_mt.convert.torch import modeling
from flaxformer_mt.errors import UserError
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

TENSORS_NAME = "model.safetensors"
MODELING_NAME = "modeling.py"

_TABLE = [Rule("/embedding", ".weight"), Rule("/bias", ".bias")]
_ATTENTION = attention_rules(("query", "key", "value"), "output")
_RECURRENCE = [
    Rule("/input/kernel", ".input.weight", TRANSPOSED),
    Rule("/forget/kernel", ".forget.weight", TRANSPOSED),
    Rule("/forget/bias", ".forget.bias"),
]


def make_table(config: Config, vocabs: Vocabs) -> Table:
    model = config.model
    shapes = formats.shapes_of(model, source_size=vocabs.source.size, target_size=vocabs.target.size)
    feedforward = feedforward_rules(
        {name: name for name in ("input", "gate", "output")}, linear_layout(model)
    )
    layers = [("encoder/layers_{n}/", "encoder.layers.{n}."), ("decoder/layers_{n}/", "decoder.layers.{n}.")]
    rules = _embedding_rules(model)
    for stack in ("encoder", "decoder"):
        rules += rules_for([(f"{stack}/positions", f"{stack}.positions")], _TABLE)
        for norm in ("embedding_norm", "final_norm"):
            rules += rules_for([(f"{stack}/{norm}", f"{stack}.{norm}")], NORM)
    for flax, foreign in layers:
        for attention in ("self_attention", "cross_attention"):
            rules += rules_for([(flax + attention, foreign + attention)], _ATTENTION)
        rules += rules_for([(f"{flax}feedforward", f"{foreign}feedforward")], feedforward)
        rules += rules_for([(f"{flax}recurrence", f"{foreign}recurrence")], _RECURRENCE)
        for sublayer in ("self_attention", "recurrence", "cross_attention", "feedforward"):
            rules += rules_for([(f"{flax}{sublayer}_residual/norm", f"{foreign}{sublayer}_norm")], NORM)
    return Table(shapes, rules, what=FORMAT.name)


def _embedding_rules(model: ModelConfig) -> list[Rule]:
    target = {"all": "shared_embedding", "embeddings": "shared_embedding"}.get(
        model.tying, "target_embedding"
    )
    source = target if target == "shared_embedding" else "source_embedding"
    if model.architecture == "decoder_only":
        source = target = "token_embedding"
    rules = rules_for([(target, "target_embedding")], _TABLE)
    if model.architecture != "decoder_only":
        rules += rules_for([(source, "source_embedding")], _TABLE)
    if "output.weight" in _tied_names(model):
        rules.append(Rule(f"{target}/embedding", "output.weight", SAME))
    return [*rules, Rule("output_kernel", "output.weight", TRANSPOSED), Rule("output_bias", "output.bias")]


def _tied_names(model: ModelConfig) -> list[str]:
    """Return the names that the file omits: each is tied to a tensor of target_embedding."""
    names = []
    decoder_only = model.architecture == "decoder_only"
    if model.tying in ("all", "embeddings") and not decoder_only:
        names += ["source_embedding.weight", "source_embedding.bias"]
    if model.tying in ("all", "target_output") or (decoder_only and model.tying != "none"):
        names.append("output.weight")
    return names


def _write(weights: Weights, folder: Path, quantization: str) -> None:
    model, vocabs = weights.config.model, weights.vocabs
    tensors = make_table(weights.config, vocabs).to_foreign(weights.leaves)
    stored = {name: tensor for name, tensor in tensors.items() if name not in _tied_names(model)}
    save_safetensors(stored, folder / TENSORS_NAME)
    vocabs.save(folder / formats.VOCAB_NAME)
    formats.write_config_json(weights, folder, FORMAT.name, _class_arguments(vocabs))
    (folder / MODELING_NAME).write_bytes(Path(modeling.__file__).read_bytes())


def _class_arguments(vocabs: Vocabs) -> dict[str, Any]:
    return {
        "sizes": {"source": vocabs.source.size, "target": vocabs.target.size},
        "special_ids": {
            "pad": vocabs.target.pad_id,
            "bos": vocabs.target.bos_id,
            "eos": vocabs.target.eos_id,
        },
    }


def _open(path: Path, overrides: ImportOverrides | None = None) -> Outputs:
    if path.is_dir() and overrides in (None, ImportOverrides()):
        check_equal(
            formats.read_config_json(path),
            _class_arguments(formats.find_vocabs(path, ImportOverrides())),
            path / formats.CONFIG_NAME,
        )
        module = modeling.Transformer.load(path)
    else:
        module = _load_with_overrides(path, overrides or ImportOverrides())

    def outputs(batch: Batch) -> np.ndarray:
        arrays = [batch.source, batch.target_in, batch.source_mask, batch.target_mask]
        with torch.no_grad():
            return module(*(torch.from_numpy(np.array(array)) for array in arrays)).numpy()

    return outputs


def _load_with_overrides(path: Path, overrides: ImportOverrides) -> modeling.Transformer:
    folder = path if path.is_dir() else path.parent
    config, vocabs = formats.find_config(folder, overrides), formats.find_vocabs(folder, overrides)
    module = modeling.Transformer(to_dict(config)["model"], **_class_arguments(vocabs))
    tensors = modeling.read_safetensors(folder / TENSORS_NAME if path.is_dir() else path)
    tensors |= {name: tensors[stored] for name, stored in module.ties.items() if stored in tensors}
    module.load_state_dict(tensors, strict=True)
    return module.eval()


def _read(path: Path, overrides: ImportOverrides) -> Weights:
    folder = path if path.is_dir() else path.parent
    config, vocabs = formats.find_config(folder, overrides), formats.find_vocabs(folder, overrides)
    check_network(config, folder)
    tensors = load_tensors(folder / TENSORS_NAME if path.is_dir() else path)
    leaves = make_table(config, vocabs).to_flax(
        tensors, tied=_tied_names(config.model), origin=str(path), sizes=formats.size_fields(config, vocabs)
    )
    return Weights(config, vocabs, leaves)


def load_tensors(path: Path) -> Tensors:
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the folder of {TENSORS_NAME} or the file itself")
    try:
        tensors = load_file(path)
    except Exception as error:  # a damaged header raises errors of many types
        raise UserError(f"{path} cannot be read as safetensors: {type(error).__name__}: {error}") from error
    check_tensors(tensors, path)
    return {name: tensor.to(torch.float32).numpy() for name, tensor in tensors.items()}


# modeling.py supports every value of every ModelConfig field, but for what imported models alone have.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "model.positions": ("sinusoidal", "learned", "rotary", "one_vector"),
    "model.activation": ("relu", "gelu", "gelu_tanh", "silu", "swiglu"),
    "model.source_end": (True, False),
}
FORMAT = Format("torch", lambda config: formats.unsupported_fields(config, _ALLOWED), _write, _open, _read)
