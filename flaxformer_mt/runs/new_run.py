"""A run that starts with given parameters, as checkpoint 0, instead of random ones."""

from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.config import Config
from flaxformer_mt.errors import UserError
from flaxformer_mt.parallel.processes import decide_once
from flaxformer_mt.runs.checkpoint_folder import write_checkpoint
from flaxformer_mt.runs.run_directory import IMPORTED_STEP, open_run
from flaxformer_mt.runs.vocab_folder import seal_vocabs
from flaxformer_mt.trees import copy_to_host, flatten_tree
from flaxformer_mt.vocab import Vocabs


def write_new_run(
    run_dir: Path, config: Config, vocabs: Vocabs, params: Any, *, origin: dict[str, str]
) -> None:
    """Write config, vocabularies and checkpoint 0; with several processes, all of them call it together.

    Args:
      params: nested dicts of arrays, the same in all processes, of which the first writes them.
      origin: the `format` and the `path` that the parameters come from.

    Raises:
      UserError: the directory cannot be written to, or is a run with another config.
    """

    def write() -> None:
        open_run(run_dir, config)
        vocabs.save(run_dir / "vocab")
        seal_vocabs(run_dir / "vocab")
        progress = {"step": IMPORTED_STEP, "imported_from": origin}
        folder = run_dir.absolute() / "checkpoints" / str(IMPORTED_STEP)
        try:
            leaves = flatten_tree(params)
            copied = copy_to_host({p: leaf for p, leaf in leaves.items() if not isinstance(leaf, np.ndarray)})
            trees = {"params": {path: copied.get(path, leaf) for path, leaf in leaves.items()}}
            write_checkpoint(folder, trees, progress)
        except OSError as error:
            raise UserError(
                f"a checkpoint could not be written: {error}; free disk space or make the folder writable, "
                "and run the command again"
            ) from error

    decide_once(write)
