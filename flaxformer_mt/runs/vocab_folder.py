"""The vocabularies of a run or of the cache, with digests: another piece for an id would go unnoticed.

A manifest lists the files, as in a checkpoint. Folders of earlier versions have none, and are not verified.
"""

from pathlib import Path, PurePath

from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic_folder
from flaxformer_mt.vocab import Vocabs, load_vocabs
from flaxformer_mt.vocab.pretrained import FACTS_NAME, FILES_NAME


def seal_vocabs(folder: Path) -> None:
    """Write the manifest of the vocabularies in `folder`, unless it has one."""
    if not (folder / atomic_folder.MANIFEST_NAME).exists():
        atomic_folder.seal_folder(folder, {}, wanted=_is_vocabulary)


def _is_vocabulary(name: str) -> bool:
    """Tell whether a file is a vocabulary's; another process may be writing the same under hidden names."""
    path = PurePath(name)
    pretrained = name == FACTS_NAME or path.parent.name == FILES_NAME
    return (pretrained or name.endswith(".model")) and not path.name.startswith(".")


def find_vocab_damage(folder: Path) -> str:
    """Return what differs from the manifest, as text; "" if nothing differs, or if there is no manifest."""
    if not (folder / atomic_folder.MANIFEST_NAME).exists():
        return ""
    return atomic_folder.find_damage(folder)


def load_sealed_vocabs(folder: Path) -> Vocabs:
    """Load the vocabularies of a run.

    Raises:
      UserError: the vocabularies are absent or damaged.
    """
    if damage := find_vocab_damage(folder):
        raise UserError(
            f"the vocabulary {folder} is damaged: {damage}; restore its files from a copy of the run, or "
            "from the folder vocabularies of data.cache_dir"
        )
    return load_vocabs(folder)
