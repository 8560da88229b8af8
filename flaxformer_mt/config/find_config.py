"""Where config files are found: as paths, in the working directory's configs/, or among those of the package.

Owns what `--config=NAME` and a run directory without `--config` mean. Knows nothing of flags.
"""

import difflib
from pathlib import Path

from flaxformer_mt.config import Config
from flaxformer_mt.config.files import load_config, read_config
from flaxformer_mt.errors import UserError

DEFAULT_CONFIG = "toy_de_en"
PACKAGE = Path(__file__).resolve().parents[1]


def list_recipes() -> dict[str, Path]:
    """The config files that come with the package, by name."""
    # A wheel holds configs/ inside the package; a checkout beside it.
    installed, checkout = PACKAGE / "configs", PACKAGE.parent / "configs"
    folder = installed if installed.is_dir() else checkout
    return {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem != "__init__"}


def find_config(name: str) -> Path:
    """A path as it is given, else configs/NAME.py in the working directory, else the recipe of that name.

    Raises:
      UserError: it is none of the three; the nearest recipe is named.
    """
    given, recipes = Path(name).expanduser(), list_recipes()
    if given.is_file() or given.parent != Path("."):
        return given  # load_config says what is wrong with it
    local = Path("configs") / f"{given.stem}.py"
    if given.suffix in ("", ".py") and local.is_file():
        return local
    if given.suffix in ("", ".py") and given.stem in recipes:
        return recipes[given.stem]
    near = difflib.get_close_matches(given.stem, recipes, n=1)
    hint = f"did you mean {near[0]}?" if near else f"recipes: {', '.join(recipes)}"
    raise UserError(f"config {name} is neither a file nor a recipe; {hint}")


def choose_config(name: str | None, run: str | None) -> tuple[Config, Path]:
    """The config that `--config` and `--run` ask for, and its run directory.

    A run directory that exists gives its own config unless another is named; without both it is the default
    recipe's. (None, None) -> (toy_de_en, runs/toy_de_en); ("ted_pt_en", None) -> (ted_pt_en, runs/ted_pt_en).

    Raises:
      UserError: the config cannot be found or read.
    """
    run_dir = Path(run).expanduser() if run else None
    if name is None and run_dir is not None and (run_dir / "config.json").is_file():
        return read_config(run_dir / "config.json"), run_dir
    path = find_config(name or DEFAULT_CONFIG)
    return load_config(path), run_dir or Path("runs") / path.stem
