"""Downloads models from the Hugging Face Hub and uploads exports; they are named hf:OWNER/NAME[@REVISION]."""

from pathlib import Path
from types import ModuleType
from typing import Any

from flaxformer_mt.errors import UserError, first_line, importing

PREFIX = "hf:"
# The files that an import reads, and the files with weights, of which the first existing kind is downloaded.
_FILES = ("*.json", "*.model", "*.spm", "merges.txt")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


def find_hub_name(path: str | Path) -> str | None:
    """Return OWNER/NAME or OWNER/NAME@REVISION if the path names a model on the Hub, otherwise None."""
    text = str(path)
    return text.removeprefix(PREFIX) if text.startswith(PREFIX) else None


def fetch_model(name: str) -> Path:
    """Download the files of a model that are not cached yet; return the model's folder in the Hub's cache."""
    hub = _import_hub(f"--input={PREFIX}{name}")
    repository, _, revision = name.partition("@")
    options: dict[str, Any] = {"repo_id": repository, "revision": revision or None}
    try:
        try:
            stored = hub.HfApi().list_repo_files(repository, revision=revision or None)
        except Exception as error:
            if not _is_offline(error):
                raise
            return Path(hub.snapshot_download(**options, local_files_only=True))
        safe = any(file.endswith(".safetensors") and "/" not in file for file in stored)
        patterns = [*_FILES, _WEIGHTS[0] if safe else _WEIGHTS[1]]
        return Path(hub.snapshot_download(**options, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except Exception as error:  # the network, the Hub or the disk can fail
        raise UserError(_explain(error, name, "downloaded")) from error


def push_model(folder: Path, name: str) -> str:
    hub = _import_hub(f"--push={PREFIX}{name}")
    try:
        api = hub.HfApi()
        api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Export of flaxformer_mt")
    except Exception as error:
        raise UserError(_explain(error, name, "uploaded")) from error
    return f"https://huggingface.co/{name}"


def _import_hub(what: str) -> ModuleType:
    with importing("huggingface", what=what):
        import huggingface_hub
    return huggingface_hub


def _is_offline(error: Exception) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"ConnectError", "ConnectionError", "OfflineModeIsEnabled", "ConnectTimeout"})


def _explain(error: Exception, name: str, done: str) -> str:
    names = {kind.__name__ for kind in type(error).__mro__}
    reason = first_line(error)
    if "GatedRepoError" in names:
        remedy = "accept its terms on its page, and log in with `hf auth login`"
    elif names & {"RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError"}:
        remedy = (
            "correct the name, which is OWNER/NAME or OWNER/NAME@REVISION, or log in with `hf auth login`"
        )
    elif _is_offline(error) or "LocalEntryNotFoundError" in names:
        reason = reason.partition(" To enable")[0]  # which names an argument that is no flag here
        remedy = "check the network, or download the model elsewhere and give its folder"
    elif "403" in reason or "401" in reason:
        remedy = "log in with `hf auth login`, with a token that may do this"
    elif "home directory" in reason:  # huggingface_hub looks for its settings there
        remedy = "set HOME to a folder of your own"
    else:
        remedy = "see the reason"
    return f"{PREFIX}{name} cannot be {done}: {type(error).__name__}: {reason}; {remedy}"
