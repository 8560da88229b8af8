"""Huge memory pages for computations on a CPU.

Contains one setting of the GNU C library. A training step allocates hundreds of megabytes and touches them at
once; with pages of 4 KiB, a fifth of its time is spent on mapping them.
"""

import os
import sys

_TUNABLE = "glibc.malloc.hugetlb=1"


def use_huge_pages() -> None:
    """Restarts this program once, with the GNU C library set to request huge pages.

    The restart is needed because the library reads the setting only when a process starts. The function
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
    os.execve(sys.executable, command, {**os.environ, "GLIBC_TUNABLES": _TUNABLE})
