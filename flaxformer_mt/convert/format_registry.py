"""The foreign formats by name. Each is imported when it is used, with what it needs.

Owns the list, and what is said when a package that a format needs is not installed.
"""

import difflib
import importlib

from flaxformer_mt.convert.format_interface import Format
from flaxformer_mt.errors import UserError

# Name -> the module that has FORMAT.
_MODULES = {
    "torch": "torch.standalone_format",
    "torch-nn": "torch.nn_transformer_format",
    "handbuilt": "documents.handbuilt_format",
    "kokoyi": "documents.kokoyi_format",
    "decoder-only": "documents.decoder_only_format",
    "aiayn": "documents.aiayn_format",
    "marian": "huggingface.marian",
    "hf-pre-norm": "huggingface.pegasus",
    "ctranslate2": "ctranslate2.model_folder",
}
NAMES = tuple(_MODULES)
# Package -> the extra of ours that installs it.
_EXTRAS = {"torch": "torch", "transformers": "torch", "safetensors": "torch", "ctranslate2": "ctranslate2"}


def find_format(name: str) -> Format:
    """The format of a name.

    Raises:
      UserError: there is none (the near one is named), or a package that it needs is not installed.
    """
    if name not in _MODULES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(NAMES)}"
        raise UserError(f"there is no format {name}; {hint}")
    try:
        return importlib.import_module(f"flaxformer_mt.convert.{_MODULES[name]}").FORMAT
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise UserError(
            f"format {name} needs {package}, which is not installed; get it with: "
            f"pip install 'flaxformer-mt[{_EXTRAS[package]}]'"
        ) from error
