"""The format of a foreign model, found from its config.json, or from the names in its checkpoint."""

import re
from pathlib import Path

from flaxformer_mt.convert.format_interface import OUR_KEY, read_config_json
from flaxformer_mt.convert.format_registry import EXTRAS, NAMES
from flaxformer_mt.errors import UserError, install_command

# model_type of config.json, as transformers writes it -> format.
_MODEL_TYPES = {
    "marian": "marian",
    "pegasus": "hf-pre-norm",
    **dict.fromkeys(("bart", "mbart", "m2m_100", "t5", "mt5"), "hf"),
}
# Format -> pattern of names that only its tensors have.
_TENSOR_NAMES = {
    "torch": r"(en|de)coder\.layers\.0\.(self_attention\.query|recurrence\.forget)\.weight",
    "torch-nn": r"transformer\.encoder\.layers\.0\.self_attn\.in_proj_weight",
    "handbuilt": r"encoder\.layers\.0\.enc_self_attn\.W_Q\.weight",
    "kokoyi": r".*\.Wq",
    "decoder-only": r"blocks\.0\.attention\.heads\.0\..*",
    "aiayn": r"encoder\.layer_stack\.0\.slf_attn\.w_qs\.weight",
}
# Format -> names that are all in the file of its checkpoint, beside those of tensors.
_CHECKPOINT_NAMES = {
    "fairseq": ({"model", "args"}, {"model", "cfg"}),
    "opennmt-py": ({"opt", "vocab"},),
    "joeynmt": ({"model_state"},),
}
# Files with tensors.
_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt")


def find_format_name(path: Path) -> str:
    """Return the name of the format of a model's folder or of its weights file.

    Raises:
      UserError: the files do not say it; the message asks for --format.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; give the folder of the model as --input=PATH")
    folder = path if path.is_dir() else path.parent
    facts = read_config_json(folder)
    ours = facts.get(OUR_KEY)
    if isinstance(ours, dict) and ours.get("format") in NAMES:
        return str(ours["format"])
    if (kind := facts.get("model_type")) is not None:
        if kind in _MODEL_TYPES:
            return _MODEL_TYPES[kind]
        raise _refuse(path, f"its config.json has model_type {kind}; known: {', '.join(_MODEL_TYPES)}")
    if isinstance(facts.get("model"), dict) and "decoder" in facts["model"]:
        return "eole"
    if path.suffix == ".chkpt":
        return "aiayn"
    if path.suffix == ".npz" or (path.is_dir() and any(path.glob("*.npz"))):
        return "marian-npz"
    files = [path] if path.is_file() else sorted(folder.iterdir())
    names = [_read_names(file) for file in files if file.suffix in _SUFFIXES]
    found = [
        name for name in (*_TENSOR_NAMES, *_CHECKPOINT_NAMES) if any(_has_names(name, one) for one in names)
    ]
    if len(found) != 1:
        reason = (
            f"the tensors are those of {' and '.join(found)}"
            if found
            else "no format is known that has its tensors"
        )
        raise _refuse(path, reason if any(names) else "its files have no tensors that can be read")
    return found[0]


def _has_names(format_name: str, names: list[str]) -> bool:
    if format_name in _CHECKPOINT_NAMES:
        return any(wanted <= set(names) for wanted in _CHECKPOINT_NAMES[format_name])
    return any(re.fullmatch(_TENSOR_NAMES[format_name], name) for name in names)


def _refuse(path: Path, reason: str) -> UserError:
    return UserError(
        f"the files of {path} do not say their format ({reason}); give --format={'|'.join(NAMES)}"
    )


def _read_names(file: Path) -> list[str]:
    """Return the names of the tensors of a file, or of the parts of a checkpoint."""
    try:
        if file.suffix == ".safetensors":
            from safetensors import SafetensorError, safe_open

            try:
                with safe_open(file, "numpy") as tensors:
                    return list(tensors.keys())
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file} cannot be read as safetensors: {error}") from error
        from flaxformer_mt.convert.toolkits.pickled_checkpoint import load_checkpoint
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        needed = install_command(extra=EXTRAS[package])
        raise UserError(
            f"{file} needs {package}, which is not installed; install it with: {needed}"
        ) from error
    return list(load_checkpoint(file))
