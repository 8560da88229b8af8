"""A run that starts with given parameters, as checkpoint 0, instead of random ones."""

from pathlib import Path
from typing import Any

from flaxformer_mt.config import Config
from flaxformer_mt.parallel.processes import is_first, wait_for_all
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.run_directory import IMPORTED_STEP, open_run
from flaxformer_mt.runs.vocab_folder import seal_vocabs
from flaxformer_mt.vocab import Vocabs


def write_new_run(
    run_dir: Path, config: Config, vocabs: Vocabs, params: Any, *, origin: dict[str, str]
) -> None:
    """Writes config, vocabularies and checkpoint 0; with several processes, all of them call it together.

    Args:
      params: nested dicts of arrays, the same in all processes.
      origin: the `format` and the `path` that the parameters come from.

    Raises:
      UserError: the directory cannot be written to, or is a run with another config.
    """
    if is_first():
        open_run(run_dir, config)
        vocabs.save(run_dir / "vocab")
        seal_vocabs(run_dir / "vocab")
    wait_for_all("folder of a new run")
    checkpoints = Checkpoints(run_dir, best_metric=config.train.best_metric)
    checkpoints.save(IMPORTED_STEP, {"params": params}, {"step": IMPORTED_STEP, "imported_from": origin})
    checkpoints.wait()
