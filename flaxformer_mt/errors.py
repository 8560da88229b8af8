"""The exceptions and the warning that the package raises for users, and the commands that their texts name.

Library functions raise and warn; only the commands print and choose an exit status. A command in a message
works where it is printed: with this Python, from this folder, whether the package is installed or a checkout.
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
# What a write meets when a disk, a quota, the inodes, or the largest file of the process is exceeded.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """A user error, such as an invalid config: commands print `error: MESSAGE` and exit with status 2.

    The message names, in one line, the field or file, the given and the expected value, and the fix. Several
    problems have one line each.
    """

    def __init__(self, message: str) -> None:
        super().__init__(name_urls(message))


class TrainingInterrupted(Exception):
    """SIGTERM or SIGINT stopped training after a checkpoint was saved; training resumes from there."""

    def __init__(self, step: int, exit_status: int) -> None:
        super().__init__(f"training was interrupted at step {step}, which is saved; train again to resume")
        self.step = step
        # The exit status that shells expect after a signal: 128 + the number of the signal.
        self.exit_status = exit_status


class FlaxformerWarning(UserWarning):
    """A problem that a user should know about while work continues; commands print `warning: MESSAGE`."""


@contextlib.contextmanager
def name_full_disk(path: str | Path) -> Iterator[None]:
    """Add the path to the error of a full disk, which lacks it if an open file was written.

    What safetensors, PyTorch and ArrayRecord tell only in the text of an error of theirs becomes an OSError.
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
    """Return the URL of an object store that a path spells, such as gs://bucket/run; "" for a path of a file
    system.

    As a Path, it is gs:/bucket/run, which would be a local folder called `gs:`.
    """
    match = re.match(r"([a-z][a-z0-9+.-]+):/+", str(path))
    if match is None or Path(path).exists():
        return ""
    return f"{match[1]}://{'/' * (match[1] == 'file')}{str(path)[match.end() :].rstrip('/')}"


def find_cloud_path(path: str | Path) -> str:
    """Return what is wrong with a path such as gs://bucket/cache; "" if it is one of a file system."""
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
    """Return the path of a run or a cache: the libraries that store arrays need UTF-8."""
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
    """From now on messages name the URL instead of this local folder, which holds its files."""
    _shown[str(folder)] = url


def name_urls(text: str) -> str:
    """Return the text, with URLs instead of the local folders that hold their files."""
    for folder, url in _shown.items():
        text = text.replace(folder, url)
    return text


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error, at most 300 characters of it."""
    return str(error).strip().partition("\n")[0][:300]


def describe_error(error: BaseException) -> str:
    """Return the type of an error with its first line, as in "ValueError: bad magic number"."""
    return f"{type(error).__name__}: {first_line(error)}"


def name_signal(number: int) -> str:
    """Return SIGKILL for 9; Python has no names for most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def warn_user(message: str) -> None:
    """Issue a `FlaxformerWarning` that points to the library call that caused it."""
    warnings.warn(name_urls(message), FlaxformerWarning, stacklevel=3)


def suggest(name: str, known: Iterable[str], *, prefix: str = "", otherwise: str = "") -> str:
    """Return "; did you mean NAME?" with the known name that is most similar, or else "; OTHERWISE"."""
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {prefix}{near[0]}?" if near else otherwise
    return hint and f"; {hint}"


def suggest_sibling(path: Path, *, holds: str = "") -> str:
    """Return "; did you mean PATH?" if something beside a path, which `holds` a file, has a similar name."""
    files = path.parent.glob(f"*/{holds}" if holds else "*")
    names = [file.parent.name if holds else file.name for file in files]
    return suggest(path.name, names, prefix=str(path.parent / "x")[:-1])


def command_line(*arguments: object) -> str:
    """Return the command line that runs a command of this package: `PYTHON -m flaxformer_mt prepare ...`."""
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
    """Return the command that installs packages, or those of one of this package's extras, for this Python.

    The versions are those that the checkout pins for its tests, or those that the package requires.
    """
    wanted = [*packages, *(_requirements_of(extra) if extra else [])]
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.join(wanted)}"


@contextlib.contextmanager
def importing(extra: str, *, what: str) -> Iterator[None]:
    """Import in the body: a missing package is a UserError that says how to install it."""
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
    """Return the requirements of an extra, which need no index that has this package itself."""
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
    """Return what a person types to start the program with these arguments, its script first."""
    script = Path(arguments[0]).name
    start = ["python", "-m", "flaxformer_mt"] if script == "__main__.py" else [script]
    return shlex.join([*start, *arguments[1:]])
