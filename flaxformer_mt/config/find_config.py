"""Which config a command uses: resolves the values of `--config` and `--run`.

A config file is found by its path, in configs/ of the working directory, or among the recipes, which are the
config files that come with the package.
"""

import difflib
from pathlib import Path

from flaxformer_mt.config import Config, files
from flaxformer_mt.errors import UserError, local_path

DEFAULT_CONFIG = "toy_de_en"
PACKAGE = Path(__file__).resolve().parents[1]


def list_recipes() -> dict[str, Path]:
    """Return the config files that come with the package, by name."""
    # An installed wheel has configs/ inside the package, a checkout has it next to the package.
    installed, checkout = PACKAGE / "configs", PACKAGE.parent / "configs"
    folder = installed if installed.is_dir() else checkout
    return {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem != "__init__"}


def find_config(name: str) -> Path:
    """Find a config file: a path as given, else configs/NAME.py in the working directory, else recipe NAME.

    Raises:
      UserError: `name` is none of the three; the message suggests the most similar recipe.
    """
    given, recipes = Path(name).expanduser(), list_recipes()
    if given.is_file() or (given / "config.json").is_file() or given.parent != Path("."):
        return given  # files.load_config reports a missing file, and a run directory
    local = Path("configs") / f"{given.stem}.py"
    if given.suffix in ("", ".py") and local.is_file():
        return local
    if given.suffix in ("", ".py") and given.stem in recipes:
        return recipes[given.stem]
    near = difflib.get_close_matches(given.stem, recipes, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known recipes: {', '.join(recipes)}"
    raise UserError(f"config {name} is neither a file nor a recipe; {hint}")


def load_config(name: str | Path) -> Config:
    """Load a config file, given by its path or as the name of a recipe: `load_config("toy_de_en")`.

    Raises:
      UserError: there is no such file or recipe, or the file is invalid.
    """
    return files.load_config(find_config(str(name)))


def split_checkpoint(name: str) -> tuple[str, str | None]:
    """Return the run and the checkpoint that RUN or RUN@CHECKPOINT names; None: without a checkpoint."""
    run, _, checkpoint = name.rpartition("@")
    if not run or "/" in checkpoint or Path(name).expanduser().is_dir():  # the name of a folder may contain @
        return name, None
    return run, checkpoint


def choose_config(name: str | None, run: str | None, base: Path | None = None) -> tuple[Config, Path]:
    """Return the config that `--config` and `--run` select, and its run directory.

    Without `name`, an existing run directory provides its own config.json, else the run `base`, from which it
    is to start, does, else the default recipe is used.
    Without `run`, the directory is runs/NAME: (None, None) -> (toy_de_en, runs/toy_de_en);
    ("ted_pt_en", None) -> (ted_pt_en, runs/ted_pt_en).

    Raises:
      UserError: the config file is missing or invalid, or the run directory is a file.
    """
    run_dir = local_path(run) if run else None
    if run_dir is not None and run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run} is a file, not a directory; give another --run=DIR")
    if name is None and run_dir is not None:
        for folder in (run_dir, base):
            if folder is not None and (folder / "config.json").is_file():
                return files.read_config(folder / "config.json"), run_dir
    path = find_config(name or DEFAULT_CONFIG)
    return files.load_config(path), run_dir or Path("runs") / path.stem
