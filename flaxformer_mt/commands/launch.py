"""Starts the command line, or prints one line that says why this Python cannot run it.

Imports only modules that Python 3.8 can read until the Python version has been checked.
"""

import ctypes
import os
import select
import signal
import sys
import threading

from flaxformer_mt.processor import core_count

_OLDEST = (3, 11)
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# Parameters of mallopt in the GNU C library (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
# Maximum number of cores whose threads share one heap: more may wait for each other.
_CORES_OF_A_HEAP = 4


def keep_memory():  # type: ignore[no-untyped-def]
    """Let the GNU C library keep up to 2 GiB of freed memory in one heap that all threads share.

    Each training step allocates the arrays that the previous step freed. On two cores, the toy model trains a
    third faster than if pages are returned to the system and cleared at each step. If the environment sets
    GLIBC_TUNABLES, nothing is changed.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ or core_count() > _CORES_OF_A_HEAP:
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_MAX, 0)  # arrays come from the heap, not from mappings of their own
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _watch_for_interrupts(grace):  # type: ignore[no-untyped-def]
    """End the process `grace` seconds (None: never) after Ctrl-C, and at once after a second Ctrl-C.

    Python raises KeyboardInterrupt only between bytecode instructions, so not while the main thread compiles.
    Returns a list that is no longer empty after Ctrl-C.
    """
    interrupts = []
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)

    def watch():  # type: ignore[no-untyped-def]
        for limit in (None, grace):
            while select.select([reading], [], [], limit)[0] and os.read(reading, 1)[0] != signal.SIGINT:
                pass
            interrupts.append(limit)
        os.write(2, b"interrupted\n")
        os._exit(130)

    threading.Thread(target=watch, name="interrupt", daemon=True).start()
    return interrupts


def launch(arguments=None):  # type: ignore[no-untyped-def]
    """Run a command and exit with its status, or with 2 if this Python is too old or lacks a package."""
    if sys.version_info < _OLDEST:
        number = ".".join(map(str, sys.version_info[:2]))
        _refuse(f"flaxformer_mt needs Python 3.11 or newer, but this is Python {number}")
    _open_closed_streams()

    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["train"]:
        keep_memory()
    # The command may follow flags. Training saves a checkpoint first, and a server answers what it was asked.
    trains, serves = "train" in words, "serve" in words
    interrupts = [] if trains else _watch_for_interrupts(None if serves else 1.5)
    try:
        from flaxformer_mt.commands.main import main

        status = main(arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _required_modules():
            raise
        _refuse(f"this Python lacks the package {package}")
    if serves or (status == 130 and not trains):
        os._exit(130 if interrupts else status)  # Python would wait for the threads that compile
    sys.exit(status)


def _open_closed_streams():  # type: ignore[no-untyped-def]
    """Exit if standard output is closed (`>&-`); replace closed standard input or error by /dev/null.

    Otherwise the next opened file would get the descriptor of the closed stream, and so its output.
    """
    refused = sys.stdout is None
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
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
