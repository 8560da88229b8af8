"""Configs on disk: Python config files and recipes, the config.json of a run, and the user's cache folder."""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import importlib.util
import json
import os
import stat
import tempfile
import typing
from pathlib import Path
from typing import Any

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.config import Config
from flaxformer_mt.config.field_values import make_section, show_value
from flaxformer_mt.config.removed import take_out
from flaxformer_mt.errors import (
    UserError,
    describe_error,
    folder_of_arrays,
    local_path,
    suggest,
    suggest_sibling,
    warn_user,
)

# Larger files are not read as JSON.
_JSON_BYTES = 1 << 26

# The entry of config.json with the digest of all others.
_DIGEST = "blake2b"

# The entry with our config that config.json has in the folders that `export` writes.
_EXPORTED = "flaxformer_mt"

DEFAULT_CONFIG = "toy_de_en"
PACKAGE = Path(__file__).resolve().parents[1]


def _load_config_file(path: str | Path) -> Config:
    path = Path(path)
    if (path / "config.json").is_file():
        raise UserError(f"{path} is a run directory, not a config file; give --run={path}")
    if path.is_dir():
        raise UserError(
            f"config {path} is a folder, not a config file; give the path of a Python file, such as the one "
            "that `new` writes for files of text"
        )
    if not path.is_file():
        raise UserError(f"config file {path} does not exist{suggest_sibling(path)}")
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"config file {path} is not a Python file; it should define get_config() -> Config")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not callable(getattr(module, "get_config", None)):
            raise UserError(f"config file {path} defines no get_config() -> Config; add that function")
        config = module.get_config()
    except UserError:
        raise
    except Exception as error:  # any exception in the user's file is a user error: one line, no traceback
        raise UserError(f"config file {path} fails: {describe_error(error)}") from error
    if not isinstance(config, Config):
        raise UserError(
            f"get_config() of {path} returns {type(config).__name__}, not flaxformer_mt.config.Config"
        )
    try:
        return from_dict(to_dict(config))  # dataclasses take values of any type
    except UserError as error:
        raise UserError(f"config file {path}: {error}") from None


def to_dict(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], origin: str = "this config") -> Config:
    """Make a config from JSON values; warn of removed fields; raise UserError if the run needs one."""
    rest, changed = take_out(values)
    for name, removed in changed.items():
        if removed.needed:
            raise UserError(f"{removed.describe(name)}; use version 0.2 for this run")
        _warn_once(f"{origin}: {removed.describe(name)}; it has no effect")
    return make_section(Config, rest, "config")


_warn_once = functools.cache(warn_user)  # a command reads the config of a run several times


def save_config(config: Config, path: Path) -> None:
    """Write a config atomically as JSON, with a digest that reveals whether its values were changed later."""
    values = to_dict(config)
    text = json.dumps(values | {_DIGEST: _digest_of(values)}, indent=2)
    write_atomically(path, f"{text}\n".encode(), sync=True)


def _digest_of(values: dict[str, Any]) -> str:
    # By way of JSON, so that tuples and lists, and the numbers as they are written, count alike.
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def read_config(path: Path) -> Config:
    """Read a config that `save_config` wrote; verify its digest if it has one (early versions wrote none)."""
    try:
        values = read_json_object(local_path(path))
        digest = values.pop(_DIGEST, None)
        if _EXPORTED in values:
            raise UserError(
                f"{path.parent} is an exported model, not a run directory; give the run that it was exported "
                "from, or make one of it with `import`"
            )
        try:
            config = from_dict(values, str(path))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        if digest is not None and digest != _digest_of(values):
            raise UserError(
                f"{path} has changed since it was written (its digest differs); restore the file, or, if it "
                f"was changed on purpose, remove its entry {_DIGEST}"
            )
        return config
    except FileNotFoundError:
        run, checkpoint = split_checkpoint(str(path.parent))
        takes_none = checkpoint is not None and (Path(run) / path.name).is_file()
        hint = f"; {run} is one, of which no checkpoint can be given here" if takes_none else ""
        hint = hint or suggest_sibling(path.parent, holds=path.name)
        raise UserError(f"{path.parent} is not a run directory: it has no {path.name}{hint}") from None
    except NotADirectoryError:
        raise UserError(f"{path.parent} is no folder, so no run directory; give another --run=DIR") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged; restore the file: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    content = read_file(path)
    try:
        value = json.loads(content)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start})") from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:  # also a number of more digits than Python reads
        raise ValueError(f"it is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"it must contain a JSON object, not {show_value(value)}")
    return value


def read_file(path: str | Path, *, most: int = _JSON_BYTES) -> bytes:
    """Read a small file, such as JSON; pipes and devices, which may never end, are errors."""
    # A pipe that nobody writes to would keep an ordinary `open` waiting.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a file, but a pipe or a device")
        if status.st_size > most:
            raise ValueError(f"it has {status.st_size} bytes, more than the accepted {most}")
        return file.read()


def flatten(config: Config) -> dict[str, Any]:
    """Return the values of all fields by dotted name: {"data.clean.empty": "drop", ...}."""

    def walk(node: dict[str, Any], prefix: str) -> typing.Iterator[tuple[str, Any]]:
        for name, value in node.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield prefix + name, value

    return dict(walk(to_dict(config), ""))


def compare_configs(old: Config, new: Config) -> list[str]:
    """List the fields that differ, one line each, old value first: `model.model_dim: 256 -> 512`."""
    before, after = flatten(old), flatten(new)
    return [f"{name}: {before[name]!r} -> {after[name]!r}" for name in before if before[name] != after[name]]


def list_recipes() -> dict[str, Path]:
    # An installed wheel has configs/ inside the package, a checkout has it next to the package.
    installed, checkout = PACKAGE / "configs", PACKAGE.parent / "configs"
    folder = installed if installed.is_dir() else checkout
    return {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem != "__init__"}


def find_config(name: str) -> Path:
    """Return the first of these files that exists: `name`, the recipe `name`, configs/NAME.py."""
    path, recipes = Path(name).expanduser(), list_recipes()
    if path.is_file() or (path / "config.json").is_file() or path.parent != Path("."):
        return path  # load_config reports a missing file, a run directory and a folder
    local = Path("configs") / f"{path.stem}.py"
    if path.suffix in ("", ".py") and path.stem in recipes:
        recipe = recipes[path.stem]
        if local.is_file() and not local.samefile(recipe):
            warn_user(f"{name} is the recipe {recipe}; for the file of this folder give --config={local}")
        return recipe
    if path.suffix in ("", ".py") and local.is_file():
        return local
    if path.is_dir():
        return path
    hint = suggest(path.stem, recipes, otherwise=f"known recipes: {', '.join(recipes)}")
    raise UserError(f"config {name} is neither a file nor a recipe{hint}")


def load_config(name: str | Path) -> Config:
    """Load a config file, given by its path or as the name of a recipe: `load_config("toy_de_en")`.

    Raises:
      UserError: there is no such file or recipe, or the file is invalid.
    """
    return _load_config_file(find_config(str(name)))


def split_checkpoint(name: str) -> tuple[str, str | None]:
    """Split RUN@CHECKPOINT into run and checkpoint; RUN alone gives (RUN, None)."""
    run, _, checkpoint = name.rpartition("@")
    if not run or "/" in checkpoint or Path(name).expanduser().is_dir():  # the name of a folder may contain @
        return name, None
    return run, checkpoint


def choose_config(name: str | None, run: str | None, base: Path | None = None) -> tuple[Config, Path]:
    """Return the config that `--config` and `--run` select, and its run directory.

    Without `name`, the config is the config.json of the run directory if it exists, else the config of
    `base`, the run to start from, else the default recipe. If the run has not started and `new` wrote a
    config file for it, `name` is required. Without `run`, the directory is runs/NAME: (None, None) ->
    (toy_de_en, runs/toy_de_en); ("ted_pt_en", None) -> (ted_pt_en, runs/ted_pt_en).
    """
    run_dir = local_path(run) if run else None
    if run_dir is not None and run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run} is a file, not a directory; give another --run=DIR")
    if name is None and run_dir is not None:
        for folder in (run_dir, base):
            if folder is not None and (folder / "config.json").is_file():
                return read_config(folder / "config.json"), run_dir
        if Path(f"{run_dir}.py").is_file():  # as `new` writes it
            raise UserError(f"{run} has not been started; give its config: --config={run}.py")
        if not run_dir.exists() and (hint := suggest_sibling(run_dir, holds="config.json")):
            warn_user(f"{run} does not exist: a new run of the recipe {DEFAULT_CONFIG}{hint}")
    path = find_config(name or DEFAULT_CONFIG)
    return _load_config_file(path), run_dir or Path("runs") / path.stem


def user_cache_dir() -> Path:
    """Return $FLAXFORMER_MT_CACHE, else ~/.cache/flaxformer_mt, else a temporary folder of this user."""
    if given := os.environ.get("FLAXFORMER_MT_CACHE", ""):
        folder = folder_of_arrays(given)
    elif home := _find_home():
        folder = home / ".cache" / "flaxformer_mt"
    else:
        return _temporary_cache()
    with contextlib.suppress(OSError):  # who writes to it reports it
        folder.mkdir(mode=0o700, parents=True)
    return folder


@functools.cache  # one warning
def is_private(folder: Path) -> bool:
    """Create a folder if it is absent; return whether only this user can write to it, and warn if not."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    if _is_own(folder.stat()):
        return True
    warn_user(
        f"{folder} is not a folder of user {os.getuid()} that nobody else can write to: compiled programs, "
        "which are executed, are neither read from it nor kept there; if only you have written to it, run "
        f"`chmod -R go-w {folder}`, or set another cache folder with FLAXFORMER_MT_CACHE"
    )
    return False


def _is_own(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _find_home() -> Path | None:
    """Return the home folder, or None if this user cannot create a cache in it."""
    try:
        home = Path.home()
    except RuntimeError:  # neither $HOME nor an entry in the table of users
        return None
    cache = home / ".cache" / "flaxformer_mt"
    nearest = next(path for path in (cache, *cache.parents) if path.exists())
    return home if cache.exists() or os.access(nearest, os.W_OK | os.X_OK) else None


@functools.cache  # one warning
def _temporary_cache() -> Path:
    folder = Path(tempfile.gettempdir()) / f"flaxformer_mt-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    problem = f"user {os.getuid()} has no home folder to write to"
    remedy = "set another cache folder with FLAXFORMER_MT_CACHE"
    # Programs that are kept in a cache are executed: nobody else may have put them there.
    if not _is_own(status):
        raise UserError(f"{problem}, and {folder} is not a folder of this user alone; {remedy}")
    warn_user(f"{problem}: prepared data and compiled programs are kept in {folder}; {remedy}")
    return folder
