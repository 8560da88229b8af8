"""The vocabularies of a run or of the cache, with digests: another piece for an id would go unnoticed.

A manifest lists the files, as in a checkpoint. Folders of earlier versions have none, and are not verified.
"""

from pathlib import Path

from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic_folder
from flaxformer_mt.vocab import Vocabs, load_vocabs


def seal_vocabs(folder: Path) -> None:
    """Writes the manifest of the vocabularies in `folder`, unless it has one."""
    if not (folder / atomic_folder.MANIFEST_NAME).exists():
        # Another process may be writing the same files under hidden names.
        atomic_folder.seal_folder(folder, {}, wanted=lambda name: name.endswith(".model") and name[0] != ".")


def find_vocab_damage(folder: Path) -> str:
    """What differs from the manifest, as text; "" if nothing differs, or if there is no manifest."""
    if not (folder / atomic_folder.MANIFEST_NAME).exists():
        return ""
    return atomic_folder.find_damage(folder)


def load_sealed_vocabs(folder: Path) -> Vocabs:
    """Loads the vocabularies of a run.

    Raises:
      UserError: the vocabularies are absent or damaged.
    """
    if damage := find_vocab_damage(folder):
        raise UserError(
            f"the vocabulary {folder} is damaged: {damage}; restore its files from a copy of the run, or "
            "from the folder vocabularies of data.cache_dir"
        )
    return load_vocabs(folder)
