"""The foreign formats by name; the module of a format and its dependencies are imported on first use.

Contains the list of formats and the error message for a dependency that is not installed.
"""

import difflib
import importlib

from flaxformer_mt.convert.format_interface import Format
from flaxformer_mt.errors import UserError, install_command

# Name -> module under flaxformer_mt.convert that defines FORMAT.
_MODULES = {
    "torch": "torch.standalone_format",
    "torch-nn": "torch.nn_transformer_format",
    "handbuilt": "documents.handbuilt_format",
    "kokoyi": "documents.kokoyi_format",
    "decoder-only": "documents.decoder_only_format",
    "aiayn": "documents.aiayn_format",
    "embeddings": "documents.embeddings_format",
    "hf": "huggingface.hub_models",
    "marian": "huggingface.marian",
    "hf-pre-norm": "huggingface.pegasus",
    "ctranslate2": "ctranslate2.model_folder",
    "fairseq": "toolkits.fairseq",
    "opennmt-py": "toolkits.opennmt_py",
    "eole": "toolkits.eole",
    "marian-npz": "toolkits.marian_npz",
    "joeynmt": "toolkits.joeynmt",
}
NAMES = tuple(_MODULES)
# Names that people try -> the format.
_OTHER_NAMES = {
    **dict.fromkeys(("huggingface", "transformers", "hugging_face", "hub"), "hf"),
    **dict.fromkeys(("pytorch", "pt", "safetensors"), "torch"),
    **dict.fromkeys(("ct2", "opennmt"), "ctranslate2"),
    **dict.fromkeys(("opus", "opus-mt", "marianmt"), "marian"),
    "pegasus": "hf-pre-norm",
}
# Package of others -> optional dependency group (extra) of flaxformer-mt that installs it.
EXTRAS = {
    "torch": "torch",
    "transformers": "torch",
    "safetensors": "torch",
    "ctranslate2": "ctranslate2",
    "tokenizers": "huggingface",
    "huggingface_hub": "huggingface",
}


def find_format(name: str) -> Format:
    """Return the format of a name.

    Raises:
      UserError: the name is unknown (the message suggests the closest one), or a package that the format
        needs is not installed.
    """
    if name not in _MODULES:
        near = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known formats: {', '.join(NAMES)}"
        raise UserError(f"unknown format {name}; {hint}")
    try:
        return importlib.import_module(f"flaxformer_mt.convert.{_MODULES[name]}").FORMAT
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise UserError(
            f"format {name} needs {package}, which is not installed; install it with: "
            f"{install_command(extra=EXTRAS[package])}"
        ) from error
