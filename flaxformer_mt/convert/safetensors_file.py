"""Writing of .safetensors files, with the access rights of any other file.

The library creates its files readable by their owner alone, whatever the user's umask is.
"""

from pathlib import Path

from safetensors.numpy import save_file

from flaxformer_mt.convert.name_table import Tensors


def save_safetensors(tensors: Tensors, path: Path) -> None:
    """Write arrays by name, as PyTorch's tools write them."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)
