"""Small models of every importer's format, and damage to their configs, headers and tensors."""

import argparse
import json
import random
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from damage import Payload, damaged_copy, draw_for, mutate, mutate_json
from toolkit_files import TOOLKITS, make_toolkit, mutate_options, mutate_weights, put_changed

POST = {"norm_position": "post", "max_positions": 40}
UNTIED = POST | {"embedding_scale": False, "tying": "none"}
# What each format needs of a model -> the path in its folder that is imported.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "torch": ({}, ""),
    "torch-nn": ({"max_positions": 40}, ""),
    "handbuilt": (UNTIED | {"first_position": 1, "padding_mask": "both"}, ""),
    "kokoyi": (
        UNTIED
        | {"attention_bias": False, "padding_mask": "none", "ffn_layer": "convolution"}
        | {"key_dim": 16, "value_dim": 16},
        "",
    ),
    "decoder-only": (
        UNTIED
        | {"architecture": "decoder_only", "positions": "learned", "norm_affine": False, "norm_epsilon": 0.0}
        | {"activation": "gelu", "embedding_bias": True, "output_bias": True, "padding_mask": "source"},
        "",
    ),
    "aiayn": (
        POST
        | {"embedding_scale": False, "tying": "all", "logit_scale": True, "embedding_norm": True}
        | {"norm_epsilon": 1e-6, "attention_bias": False, "padding_mask": "both"},
        "",
    ),
    "aiayn checkpoint": ({}, "model.chkpt"),
    "hf": ({}, ""),
    **{f"hf {family}": ({}, "") for family in ("nllb", "mbart_50", "madlad")},
    "marian": (POST, ""),
    "hf-pre-norm": ({"max_positions": 40}, ""),
    "bergamot": (
        POST
        | {"positions": "sinusoidal_halves", "norm_epsilon": 1e-6, "target_start": "zeros"}
        | {"model_dim": 64, "ffn_dim": 64},
        "",
    ),
    **{name: ({}, "") for name in TOOLKITS},
}


def make_foreign_model(name: str, config: Any, vocabs: Any, folder: Path) -> Path:
    """Exports a random model in a format that can be imported; returns its folder."""
    from tiny_experiment import change, random_params

    from flaxformer_mt.convert.formats import NAMES, Weights, find_format
    from flaxformer_mt.model import make_model
    from flaxformer_mt.parameter_trees import flatten_tree

    assert {name.partition(" ")[0] for name in MODELS} == {name for name in NAMES if find_format(name).read}
    if MODELS[name][1]:  # a file in the folder of another one
        return make_foreign_model(name.partition(" ")[0], config, vocabs, folder)
    if name in TOOLKITS:
        return make_toolkit(name, folder / name)
    if name.startswith("hf") and name != "hf-pre-norm":
        return _make_pretrained(folder / name)
    own = change(config, model=MODELS[name][0])
    network = make_model(own.model, source_size=vocabs.source.size, target_size=vocabs.target.size)
    leaves = {p: np.asarray(leaf) for p, leaf in flatten_tree(random_params(network)).items()}
    assert not find_format(name).problems(own), find_format(name).problems(own)
    (folder / name).mkdir(parents=True)
    quantization = "int8_dynamic" if name == "bergamot" else "none"
    find_format(name).write(Weights(own, vocabs, leaves), folder / name, quantization)
    return folder / name


def _make_pretrained(folder: Path) -> Path:
    """A tiny model with its tokenizer, as transformers writes it: of the family in its name, or T5."""
    from benchmarks.originals.tiny_hub import MAKERS

    MAKERS[folder.name.partition(" ")[2] or "t5"](folder)
    return folder


def damaged_model(name: str, folder: Path, target: Path, number: int) -> str:
    """Makes `target` a damaged copy of a foreign model; returns what was done."""
    draw = draw_for(f"damage to {name}", number)
    checkpoint = MODELS[name][1]
    if number % 4 == 0:
        return damaged_copy(folder, target, name, number // 4, only=checkpoint if number % 8 else "")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    if name in TOOLKITS and number % 4 == 1:
        return mutate_options(name, target, draw)
    if name in TOOLKITS and name != "eole":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch, about its own kinds of tensors
            return mutate_weights(name, target, draw, TENSORS)
    configs = [path for path in sorted(target.glob("*.json")) if path.read_bytes().startswith(b"{")]
    if number % 4 == 1 and (checkpoint == "" or number % 8 == 1):
        own = draw.random() < 0.6
        path = target / "config.json" if own else draw.choice(configs)
        return mutate_json(path, draw)
    if number % 4 == 1:
        return _mutate_settings(target / checkpoint, draw)
    if name == "bergamot":
        return _mutate_binary(next(target.glob("model.*.bin")), draw)
    tensors = [target / checkpoint] if checkpoint else sorted(target.glob("*.safetensors"))
    tensors = tensors or [path for path in sorted(target.glob("*.pt"))]
    return mutate_tensors(draw.choice(tensors), draw)


def mutate_tensors(path: Path, draw: random.Random) -> str:
    if path.suffix == ".safetensors":
        return _mutate_safetensors(path, draw)
    import torch

    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path, weights_only=True)
    state = content["model"] if path.suffix == ".chkpt" else content
    name, kind = draw.choice(sorted(state)), draw.choice(sorted(TENSORS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about its own kinds of tensors
        changed = TENSORS[kind](state[name], path)
        torch.save(put_changed(content, state, name, kind, changed), path)
    return f"{path.name}: {name} {kind}"


def _mutate_settings(path: Path, draw: random.Random) -> str:
    import torch

    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path, weights_only=True)
    content["settings"] = argparse.Namespace(**mutate(vars(content["settings"]), draw))
    torch.save(content, path)
    return f"{path.name}: settings mutated"


def _huge(tensor: Any) -> Any:
    return tensor.new_zeros(1).expand(10**12)


def _quantized(tensor: Any) -> Any:
    import torch

    return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


def _nested(tensor: Any) -> Any:
    import torch

    return torch.nested.nested_tensor([tensor.flatten()[:2], tensor.flatten()[:1]])


def _filled(value: float) -> Callable[[Any, Path], Any]:
    return lambda tensor, path: tensor.new_full(tensor.shape, value)


# What becomes of a PyTorch tensor of a file.
TENSORS: dict[str, Callable[[Any, Path], Any]] = {
    "missing": lambda tensor, path: tensor, "number as name": lambda tensor, path: tensor,
    "all of them": lambda tensor, path: tensor, "sparse": lambda tensor, path: tensor.to_sparse(),
    "compressed": lambda tensor, path: tensor.reshape(1, -1).to_sparse_csr(),
    "quantized": lambda tensor, path: _quantized(tensor), "nested": lambda tensor, path: _nested(tensor),
    "meta": lambda tensor, path: tensor.to("meta"), "complex": lambda tensor, path: tensor + 1j,
    "whole": lambda tensor, path: tensor.long(), "bool": lambda tensor, path: tensor.bool(),
    "half": lambda tensor, path: tensor.half(), "double": lambda tensor, path: tensor.double(),
    "nan": _filled(float("nan")), "infinite": _filled(float("inf")), "large": _filled(3e38),
    "scalar": lambda tensor, path: tensor.new_zeros(()),
    "no elements": lambda tensor, path: tensor.new_zeros((0,)),
    "transposed": lambda tensor, path: tensor.T if tensor.ndim == 2 else tensor[None],
    "one more": lambda tensor, path: tensor.new_zeros((len(tensor) + 1, *tensor.shape[1:])),
    "a terabyte": lambda tensor, path: _huge(tensor), "text": lambda tensor, path: "text",
    "a list": lambda tensor, path: [tensor], "a dict": lambda tensor, path: {"a": tensor},
    "nothing": lambda tensor, path: None, "code": lambda tensor, path: Payload(path.parent.parent / "HARM"),
}  # fmt: skip

_HEADERS = [
    {"dtype": "I32"}, {"dtype": "U8"}, {"dtype": "BF16"}, {"dtype": "F64"}, {"dtype": "F8_E4M3"},
    {"dtype": "X9"}, {"dtype": 3}, {"shape": [10**12]}, {"shape": [0]}, {"shape": []}, {"shape": [-1, 16]},
    {"shape": [1 << 63, 1 << 63]}, {"shape": ["16"]}, {"shape": None}, {"data_offsets": [0, 1 << 62]},
    {"data_offsets": [64, 0]}, {"data_offsets": [-4, 4]}, {"data_offsets": [0]}, {"data_offsets": [0.5, 1]},
]  # fmt: skip


def _mutate_binary(path: Path, draw: random.Random) -> str:
    """Changes a number of the head, or one of the head of an array: of its name, type, shape or data."""
    content = bytearray(path.read_bytes())
    (count,) = struct.unpack("<Q", content[8:16])
    place = draw.choice([0, 8, *[16 + 32 * draw.randrange(count) + 8 * field for field in range(4)] * 3])
    number = draw.choice([0, 1, 2, 0x101, 0x404, 0x4101, 0x4102, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1])
    content[place : place + 8] = struct.pack("<Q", number)
    if draw.random() < 0.3:  # in shapes, or in data
        start = draw.randrange(len(content) - 4)
        content[start : start + 4] = struct.pack("<i", draw.choice([0, 1, -1, 1 << 30, 0x7F800000]))
    path.write_bytes(content)
    return f"{path.name}: {number} at {place}"


def _mutate_safetensors(path: Path, draw: random.Random) -> str:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    names = [name for name in sorted(header) if name != "__metadata__"]
    name, kind = draw.choice(names), draw.randrange(6)
    if kind == 0:
        header = mutate(header, draw)
    elif kind == 1:
        header[draw.choice(["x", "", "model.shared", name + ".1"])] = header.pop(name)
    elif kind == 2:
        start, stop = header[name]["data_offsets"]
        data = data[:start] + np.full((stop - start) // 4, np.nan, np.float32).tobytes() + data[stop:]
    elif kind == 3:
        del header[name]
    else:
        header[name] |= draw.choice(_HEADERS)
    text = json.dumps(header).encode("utf-8", errors="surrogatepass")
    length = draw.choice([len(text)] * 6 + [0, len(text) - 1, 1 << 40, (1 << 64) - 1])
    path.write_bytes(struct.pack("<Q", length) + text + data)
    return f"{path.name}: header {kind} of {name}, length {length}"
