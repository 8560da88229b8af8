"""Models of other toolkits, and damage to their options, pieces and tensors."""

import argparse
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
from damage import VALUES, endless, mutate, mutate_json

# Format -> the file of its weights.
TOOLKITS = {
    "fairseq": "model.pt",
    "opennmt-py": "model_step_10.pt",
    "eole": "model.00.safetensors",
    "marian-npz": "model.npz",
    "joeynmt": "10.ckpt",
}
# Format -> keys of the tensors in its checkpoint.
_STATES = {"fairseq": "model", "opennmt-py": "model", "joeynmt": "model_state"}
_OF_PICKLES = [*VALUES, *(endless() for _ in range(5))]
_MARIAN_OPTIONS = "special:model.yml"


def make_toolkit(name: str, folder: Path) -> Path:
    from benchmarks.originals import tiny_toolkits as tiny

    if name == "fairseq":
        tiny.write_fairseq(folder, tiny.fairseq_args())
    elif name == "opennmt-py":
        tiny.write_onmt(folder, tiny.onmt_options())
    elif name == "eole":
        tiny.write_eole(folder, tiny.eole_model())
    elif name == "marian-npz":
        tiny.write_marian(folder, tiny.marian_options(), yml=True)
    else:
        tiny.write_joey(folder, tiny.joey_config())
        (folder / "best.ckpt").unlink()
    return folder


def mutate_options(name: str, folder: Path, draw: random.Random) -> str:
    """Mutates the options of a model, or the pieces of its vocabulary."""
    import torch
    import yaml

    path = folder / TOOLKITS[name]
    if name == "eole":
        return mutate_json(folder / draw.choice(["config.json", "vocab.json"]), draw)
    if name == "marian-npz":
        arrays = dict(np.load(path, allow_pickle=False))
        options = mutate(yaml.safe_load(arrays[_MARIAN_OPTIONS][:-1].tobytes()), draw)
        text = yaml.safe_dump(options).encode("utf-8", errors="surrogatepass")
        _save_arrays(arrays | {_MARIAN_OPTIONS: np.frombuffer(text + b"\0", np.int8)}, path)
        return f"{path.name}: options mutated"
    if name == "joeynmt":
        config = folder / "config.yaml"
        changed = yaml.safe_dump(mutate(yaml.safe_load(config.read_text()), draw))
        config.write_bytes(changed.encode("utf-8", errors="surrogatepass"))
        return "config.yaml: mutated"
    content = torch.load(path, weights_only=False)
    if name == "fairseq":
        content["cfg"]["model"] = argparse.Namespace(
            **mutate(vars(content["cfg"]["model"]), draw, _OF_PICKLES)
        )
    elif draw.random() < 0.5:
        content["opt"] = argparse.Namespace(**mutate(vars(content["opt"]), draw, _OF_PICKLES))
    else:
        content["vocab"] = mutate(content["vocab"], draw)
    torch.save(content, path)
    return f"{path.name}: options mutated"


def mutate_weights(name: str, folder: Path, draw: random.Random, changes: dict[str, Any]) -> str:
    import torch

    path = folder / TOOLKITS[name]
    if name == "marian-npz":
        arrays = dict(np.load(path, allow_pickle=False))
        chosen = draw.choice(sorted(arrays))
        kind = draw.choice(sorted(_ARRAYS))
        if kind == "missing":
            del arrays[chosen]
        else:
            arrays[chosen] = _ARRAYS[kind](arrays[chosen])
        _save_arrays(arrays, path)
        return f"{path.name}: {chosen} {kind}"
    content = torch.load(path, weights_only=False)
    state = content[_STATES[name]]
    chosen, kind = draw.choice(sorted(state)), draw.choice(sorted(changes))
    changed = changes[kind](state[chosen], path)
    torch.save(put_changed(content, state, chosen, kind, changed), path)
    return f"{path.name}: {chosen} {kind}"


def put_changed(content: Any, state: dict[Any, Any], name: str, kind: str, changed: Any) -> Any:
    """Puts a changed tensor into the state of a checkpoint; returns what the checkpoint is then."""
    if kind == "all of them":
        return changed
    if kind == "missing":
        del state[name]
    else:
        state[7 if kind == "number as name" else name] = changed
    return content


def _save_arrays(arrays: dict[str, Any], path: Path) -> None:
    written = io.BytesIO()
    np.savez(written, **arrays)
    path.write_bytes(written.getvalue())


_ARRAYS: dict[str, Any] = {
    "missing": None,
    "whole": lambda array: array.astype(np.int32),
    "complex": lambda array: array + 1j,
    "half": lambda array: array.astype(np.float16),
    "nan": lambda array: np.full(array.shape, np.nan, np.float32),
    "large": lambda array: np.full(array.shape, 3e38, np.float32),
    "scalar": lambda array: np.float32(1),
    "no elements": lambda array: array[:0],
    "transposed": lambda array: array.T if array.ndim == 2 else array[None],
    "one more": lambda array: np.concatenate([array, array[:1]]),
    "code": lambda array: np.array([{"a": 1}], object),
    "text": lambda array: np.array(["text"]),
}
