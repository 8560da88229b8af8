"""Large memory pages for computations on a CPU.

Owns one setting of the C library. A training step touches hundreds of megabytes that it asked for a moment
ago; with pages of 4 KiB a fifth of its time goes into mapping them.
"""

import os
import sys

_TUNABLE = "glibc.malloc.hugetlb=1"


def use_large_pages() -> None:
    """Starts this program anew, once, with the GNU C library asking for large pages.

    The library reads the setting only when a process starts. Does nothing elsewhere than on Linux with that
    library, or where the user has set GLIBC_TUNABLES himself. Call it before standard input is read.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ:
        return
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):  # another C library knows no such name
        library = ""
    if not library.startswith("glibc"):
        return
    command = [sys.executable, *sys.orig_argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, {**os.environ, "GLIBC_TUNABLES": _TUNABLE})
