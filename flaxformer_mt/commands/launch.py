"""Starts the command line with huge pages of memory, or says in one line why this Python cannot run it.

Imports nothing before it has checked the version, and is written so that Python 3.8 can read it.
"""

import os
import sys

from flaxformer_mt.cpu import core_count

_HUGE_PAGES = "glibc.malloc.hugetlb=1"

# All threads share one heap, and the library gives back nothing but arrays of over 2 GB, and what is free
# beyond 8 GB.
_KEPT_PAGES = (
    "glibc.malloc.arena_max=1",
    "glibc.malloc.mmap_threshold=2000000000",
    "glibc.malloc.trim_threshold=8000000000",
)

# Maximum number of cores whose threads share one heap: more may wait for each other.
_CORES_OF_A_HEAP = 4


_OLDEST = (3, 11)
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def use_huge_pages(*, keep: bool) -> None:
    """Restart this program once, with the GNU C library set to request huge pages.

    The restart is needed because the library reads the settings only when a process starts. The function
    returns without a restart if the user has set GLIBC_TUNABLES, and on any system but Linux with the GNU C
    library. Call it before standard input is read.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ:
        return
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):  # the name exists only in the GNU C library
        library = ""
    if not library.startswith("glibc"):
        return
    command = [sys.executable, *sys.orig_argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, {**os.environ, "GLIBC_TUNABLES": choose_tunables(keep=keep)})


def choose_tunables(*, keep: bool) -> str:
    keeps = keep and core_count() <= _CORES_OF_A_HEAP
    return ":".join([_HUGE_PAGES, *(_KEPT_PAGES if keeps else ())])


def launch(arguments=None):  # type: ignore[no-untyped-def]
    """Run a command and end the process with its status; 2 if this Python is too old or lacks a package."""
    if sys.version_info < _OLDEST:
        number = ".".join(map(str, sys.version_info[:2]))
        _refuse(f"flaxformer_mt needs Python 3.11 or newer, but this is Python {number}")
    _open_closed_streams()

    words = sys.argv[1:] if arguments is None else arguments
    use_huge_pages(keep=words[:1] == ["train"])  # starts this program again, so before slow imports
    try:
        from flaxformer_mt.commands.main import main

        status = main(arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _required_modules():
            raise
        _refuse(f"this Python lacks the package {package}")
    sys.exit(status)


def _open_closed_streams():  # type: ignore[no-untyped-def]
    """Refuse a closed standard output (`>&-`); let closed standard input and standard error be empty.

    A stream that stays closed would give its number to the next file that is opened, and output to that file.
    """
    refused = sys.stdout is None
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            os.set_inheritable(descriptor, True)  # this program starts itself again
            setattr(sys, name, open(descriptor, "r" if number == 0 else "w"))
    if refused:
        sys.stderr.write("error: standard output is closed; redirect it to a file, or to /dev/null\n")
        sys.exit(2)


def _required_modules():  # type: ignore[no-untyped-def]
    from flaxformer_mt.commands.doctor import REQUIRED

    return {module.partition(".")[0] for module in REQUIRED.values()}


def _refuse(reason):  # type: ignore[no-untyped-def]
    remedies = []
    environment = os.path.join(_ROOT, ".venv", "bin", "python")
    if os.path.exists(environment) and environment != sys.executable:
        remedies.append(f"use {environment}")
    requirements = os.path.join(_ROOT, "requirements.txt")
    if sys.version_info >= _OLDEST:
        wanted = f"-r {requirements}" if os.path.exists(requirements) else "--force-reinstall flaxformer-mt"
        remedies.append(f"install what is missing: {sys.executable} -m pip install {wanted}")
    elif not remedies:
        remedies.append("start a newer one, or the one of the environment where the package is installed")
    sys.stderr.write(f"error: {reason} ({sys.executable}); {', or '.join(remedies)}\n")
    sys.exit(2)
