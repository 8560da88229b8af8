"""Memory for computations on a CPU: huge pages, which training keeps from one update to the next.

Contains settings of the GNU C library. A training step allocates hundreds of megabytes and touches them at
once; with pages of 4 KiB, a fifth of its time is spent on mapping them. Pages that are given back after each
step are zeroed by the kernel before the next one, which takes some 3% of an update on two cores.
"""

import os
import sys

from flaxformer_mt.processor import core_count

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


def use_huge_pages(*, keep: bool) -> None:
    """Restart this program once, with the GNU C library set to request huge pages.

    The restart is needed because the library reads the settings only when a process starts. The function
    returns without a restart if the user has set GLIBC_TUNABLES, and on any system but Linux with the GNU C
    library. Call it before standard input is read.

    Args:
      keep: whether the process keeps the pages that it no longer uses, if the machine has few cores.
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
    """Return the value of GLIBC_TUNABLES for a process; `keep` as in `use_huge_pages`."""
    kept = keep and core_count() <= _CORES_OF_A_HEAP
    return ":".join([_HUGE_PAGES, *(_KEPT_PAGES if kept else ())])
