"""The exceptions and the warning class for users, and helpers that write the texts of messages.

Library functions raise and warn; only the commands print and choose an exit status. A command that a message
suggests can be run as printed, in the current folder and with the current Python.
"""

import contextlib
import difflib
import errno
import importlib.metadata
import os
import re
import shlex
import shutil
import signal
import sys
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_DISTRIBUTION = "flaxformer-mt"
_ROOT = Path(__file__).resolve().parents[1]
# Errors of a write when the disk, the quota, the inodes or the process's file-size limit is exhausted.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """A user error, such as an invalid config: commands print `error: MESSAGE` and exit with status 2.

    The message has one line per problem, which names the field or file, its value, the expected value, and
    the fix.
    """

    def __init__(self, message: str) -> None:
        super().__init__(name_urls(message))


class TrainingInterrupted(Exception):
    """Training was stopped by SIGTERM or SIGINT; a checkpoint has been saved, from which it can resume."""

    def __init__(self, step: int, exit_status: int) -> None:
        super().__init__(f"training was interrupted at step {step}, which is saved; train again to resume")
        self.step = step
        # The exit status that shells expect after a signal: 128 + the number of the signal.
        self.exit_status = exit_status


class FlaxformerWarning(UserWarning):
    """A warning about a problem that does not stop the work; commands print `warning: MESSAGE`."""


@contextlib.contextmanager
def name_full_disk(path: str | Path) -> Iterator[None]:
    """Add `path` to full-disk errors in the body, which have no path if the file was already open.

    safetensors, PyTorch and ArrayRecord report a full disk only in the text of their own exceptions; these
    become an OSError.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        texts = f"{error} {error.__context__}"
        code = next((code for code in DISK_FULL if os.strerror(code) in texts), None)
        if code is not None and not isinstance(error, OSError):
            raise OSError(code, os.strerror(code), str(path)) from error
        if isinstance(error, OSError) and error.filename is None and error.errno in DISK_FULL:
            error.filename = str(path)
        raise


def find_url(path: str | Path) -> str:
    """Return the object-store URL that a path denotes, such as gs://bucket/run; "" for a file-system path.

    A `Path` turns the URL into gs:/bucket/run, which is recognized too unless it exists on the file system.
    """
    match = re.match(r"([a-z][a-z0-9+.-]+):/+", str(path))
    if match is None or Path(path).exists():
        return ""
    return f"{match[1]}://{'/' * (match[1] == 'file')}{str(path)[match.end() :].rstrip('/')}"


def find_cloud_path(path: str | Path) -> str:
    """Return an error message if a cache path is in an object store, such as gs://bucket/cache; else ""."""
    if not (url := find_url(path)):
        return ""
    return (
        f"{url} is in an object store, which has neither the renames nor the locks that keep a cache intact; "
        "give a folder of a local or shared file system (runs, text and exports may be in an object store)"
    )


def local_path(path: str | Path) -> Path:
    if problem := find_cloud_path(path):
        raise UserError(problem)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: {error} Give the path without ~") from error


def folder_of_arrays(path: str | Path) -> Path:
    """Return the local path of a run or cache; raise UserError if it is not UTF-8, as array files require."""
    folder = local_path(path)
    name = os.fsencode(folder.absolute())
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        shown = name.decode("utf-8", "backslashreplace")
        raise UserError(f"the name of {shown} is not UTF-8; rename it, or give another folder") from None
    return folder


# Local folder -> the URL of the object store whose files it holds.
_shown: dict[str, str] = {}


def show_as(folder: Path, url: str) -> None:
    """Make all later messages name `url` instead of `folder`, which has a local copy of the URL's files."""
    _shown[str(folder)] = url


def name_urls(text: str) -> str:
    """Return the text with each local folder that was passed to `show_as` replaced by its URL."""
    for folder, url in _shown.items():
        text = text.replace(folder, url)
    return text


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, cut at 300 characters."""
    return str(error).strip().partition("\n")[0][:300]


def describe_error(error: BaseException) -> str:
    """Return the type and the first line of an error, as in "ValueError: bad magic number"."""
    return f"{type(error).__name__}: {first_line(error)}"


def name_signal(number: int) -> str:
    """Return the name of a signal, such as SIGKILL for 9; "signal N" if Python has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def warn_user(message: str) -> None:
    """Issue a `FlaxformerWarning` that points to the caller of the function that calls `warn_user`."""
    warnings.warn(name_urls(message), FlaxformerWarning, stacklevel=3)


def suggest(name: str, known: Iterable[str], *, prefix: str = "", otherwise: str = "") -> str:
    """Return "; did you mean NAME?" for the most similar known name; if there is none, "; OTHERWISE"."""
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {prefix}{near[0]}?" if near else otherwise
    return hint and f"; {hint}"


def suggest_sibling(path: Path, *, holds: str = "") -> str:
    """Return "; did you mean PATH?" if the folder of `path` has an entry with a similar name; else "".

    With `holds`, only folders that contain a file of this name are suggested.
    """
    files = path.parent.glob(f"*/{holds}" if holds else "*")
    names = [file.parent.name if holds else file.name for file in files]
    return suggest(path.name, names, prefix=str(path.parent / "x")[:-1])


def command_line(*arguments: object) -> str:
    """Return the shell command that runs this package, as in `PYTHON -m flaxformer_mt prepare ...`."""
    words = name_urls(shlex.join(map(str, arguments)))
    script = Path(sys.argv[0])
    if script.name == _DISTRIBUTION and script.is_file():  # the installed program
        program = shutil.which(_DISTRIBUTION)
        same = program is not None and Path(program).resolve() == script.resolve()
        return f"{_DISTRIBUTION if same else shlex.quote(str(script.resolve()))} {words}"
    # Python finds a checkout from its own folder only, unless it is on the path.
    found_anywhere = any(path and Path(path).resolve() == _ROOT for path in sys.path[1:])
    prefix = "" if found_anywhere or Path.cwd() == _ROOT else f"PYTHONPATH={shlex.quote(str(_ROOT))} "
    return f"{prefix}{shlex.quote(sys.executable)} -m flaxformer_mt {words}"


def install_command(*packages: str, extra: str = "") -> str:
    """Return the pip command that installs packages, and the requirements of an extra, for this Python.

    The versions for an extra are those that a checkout pins for its tests, or else the package's
    requirements.
    """
    wanted = [*packages, *(_requirements_of(extra) if extra else [])]
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.join(wanted)}"


@contextlib.contextmanager
def importing(extra: str, *, what: str) -> Iterator[None]:
    """Turn an ImportError in the body into a UserError "WHAT needs ...", which says how to get `extra`."""
    try:
        yield
    except ImportError as error:
        if error.name is None:  # the package is there, and broken
            raise
        raise UserError(
            f"{what} needs the package {error.name}, which is not installed; install it with "
            f"{install_command(extra=extra)}"
        ) from error


def _requirements_of(extra: str) -> list[str]:
    """Return the packages of an extra with their versions, so that pip need not find this package itself."""
    if not (_ROOT / "pyproject.toml").is_file():
        lines = [line.partition(";") for line in importlib.metadata.requires(_DISTRIBUTION) or []]
        mark = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")
        return [requirement.strip() for requirement, _, condition in lines if mark.search(condition)]
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins: dict[str, str] = {}
    if (path := _ROOT / "requirements-test.txt").is_file():
        lines_of_pins = path.read_text(encoding="utf-8").split("\n")
        pins = {line.partition("==")[0]: line for line in lines_of_pins if re.fullmatch(r"[\w-]+==\S+", line)}
    return [pins.get(re.split(r"[<>=]", line)[0], line) for line in project["optional-dependencies"][extra]]


def program_line(arguments: Sequence[str]) -> str:
    """Return the command line as a user would type it; `arguments` is sys.argv, with the script first."""
    script = Path(arguments[0]).name
    start = ["python", "-m", "flaxformer_mt"] if script == "__main__.py" else [script]
    return shlex.join([*start, *arguments[1:]])
