"""The file model.chkpt of attention-is-all-you-need-pytorch, which its training script writes.

Contains the settings of that script and the model that they describe. The project's translate script builds
the class from a few of them and then applies `trg_word_prj` itself, without the scale that `forward` applies.
So an exported file stores the projection on its own, with all scales multiplied into the matrices: without a
shared projection the class ignores its scales, and both ways of computing logits give this model's.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.convert.foreign_limits import check_tensors
from flaxformer_mt.convert.name_table import Tensors
from flaxformer_mt.convert.torch.state_dicts import load_safely, save_tensors, to_arrays
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.positions import sinusoidal_table

CHECKPOINT_NAME = "model.chkpt"
TABLES = ("encoder.position_enc.pos_table", "decoder.position_enc.pos_table")
_EMBEDDINGS = ("encoder.src_word_emb.weight", "decoder.trg_word_emb.weight")
_PROJECTION = "trg_word_prj.weight"
# The size of the tables in the class that the translate script builds.
_SCRIPT_POSITIONS = 200
# Options of the training script -> arguments of the class; others have the same name in both.
_OPTIONS = {
    "src_vocab_size": "n_src_vocab",
    "trg_vocab_size": "n_trg_vocab",
    "d_inner_hid": "d_inner",
    "proj_share_weight": "trg_emb_prj_weight_sharing",
    "embs_share_weight": "emb_src_trg_weight_sharing",
}
_SAME = (
    "src_pad_idx",
    "trg_pad_idx",
    "d_word_vec",
    "d_model",
    "n_layers",
    "n_head",
    "d_k",
    "d_v",
    "dropout",
    "scale_emb_or_prj",
)
# proj_share_weight, embs_share_weight -> model.tying.
_TYING: dict[tuple[bool, bool], Literal["all", "target_output", "embeddings", "none"]] = {
    (True, True): "all",
    (True, False): "target_output",
    (False, True): "embeddings",
    (False, False): "none",
}


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is such a file, by its name."""
    return path.suffix == ".chkpt" and path.is_file()


def write_checkpoint(tensors: Tensors, arguments: dict[str, Any], path: Path) -> None:
    """Write the file that the translate script loads.

    Args:
      tensors: the state dict of the class.
      arguments: those of the class.
    """
    table = sinusoidal_table(_SCRIPT_POSITIONS, arguments["d_model"])[None]
    state = dict(tensors) | dict.fromkeys(TABLES, table)
    if arguments["trg_emb_prj_weight_sharing"]:
        root = np.float32(np.sqrt(arguments["d_model"]))
        if arguments["scale_emb_or_prj"] == "emb":
            scaled = {id(state[name]): state[name] * root for name in _EMBEDDINGS}
            state |= {name: scaled[id(state[name])] for name in _EMBEDDINGS}
        elif arguments["scale_emb_or_prj"] == "prj":
            state[_PROJECTION] = state[_PROJECTION] / root
        arguments = arguments | {"trg_emb_prj_weight_sharing": False, "scale_emb_or_prj": "none"}
    save_tensors(state, path)
    # The project counts epochs, this package steps; config.json has the step.
    options = {name: arguments[name] for name in _SAME} | {
        option: arguments[name] for option, name in _OPTIONS.items()
    }
    checkpoint = {
        "epoch": 0,
        "settings": argparse.Namespace(**options),
        "model": torch.load(path, weights_only=True),
    }
    torch.save(checkpoint, path)


def read_checkpoint(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Read the tensors and the settings of a file; of code, it can contain only the name of the namespace.

    Raises:
      UserError: the file is damaged, or contains anything but tensors, plain values and the settings.
    """
    checkpoint = load_safely(path, what="a checkpoint", classes=[argparse.Namespace])
    state = checkpoint.get("model") if isinstance(checkpoint, dict) else None
    settings = checkpoint.get("settings") if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict) or not isinstance(settings, argparse.Namespace):
        raise UserError(f"{path} is not a checkpoint of that project: it must have `model` and `settings`")
    if not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise UserError(f"{path} is not a checkpoint of that project: `model` must contain named tensors")
    check_tensors(state, path)
    return to_arrays(state), vars(settings)


def make_model_config(
    base: ModelConfig, settings: dict[str, Any], tensors: Tensors, path: Path
) -> ModelConfig:
    """Return the model of a file: sizes and switches of its settings, number of positions of its tables.

    Raises:
      UserError: a setting is missing or has a value of another type.
    """

    def setting(name: str, kind: type, default: Any = None) -> Any:
        value = settings.get(name, default)
        if type(value) is not kind:  # True is an int
            plain = value is None or isinstance(value, str | float | bool)
            shown = repr(value)[:80] if plain else f"a {type(value).__name__}"
            raise UserError(f"{path}: settings have {name} {shown}; it must be of type {kind.__name__}")
        return value

    shares = setting("proj_share_weight", bool, False)
    # Versions of the project without this option scale the embeddings of no model, and every projection.
    scale = setting("scale_emb_or_prj", str, "prj") if shares else "none"
    tables = [tensors[name] for name in TABLES if name in tensors and tensors[name].ndim == 3]
    width, inner, layers, heads = (
        setting(name, int) for name in ("d_model", "d_inner_hid", "n_layers", "n_head")
    )
    return dataclasses.replace(
        base,
        architecture="encoder_decoder",
        num_encoder_layers=layers,
        num_decoder_layers=layers,
        model_dim=width,
        num_heads=heads,
        key_dim=setting("d_k", int),
        value_dim=setting("d_v", int),
        ffn_dim=inner,
        activation="relu",
        norm_position="post",
        norm="layer",
        norm_epsilon=1e-6,
        norm_affine=True,
        final_norm=None,
        embedding_norm=True,
        positions="sinusoidal",
        first_position=0,
        max_positions=tables[0].shape[1] if tables else _SCRIPT_POSITIONS,
        embedding_scale=scale == "emb",
        logit_scale=scale == "prj",
        embedding_bias=False,
        tying=_TYING[shares, setting("embs_share_weight", bool, False)],
        padding_mask="both",
        attention_bias=False,
        ffn_bias=True,
        output_bias=False,
        dropout_rate=setting("dropout", float, 0.1),
    )
