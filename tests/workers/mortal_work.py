"""A function of blocks for the tests of workers, which ends its worker where a test wants it to."""

import functools
import os
import signal
import time
from pathlib import Path

from flaxformer_mt.errors import UserError, warn_user


def make_mortal_work(folder, *, kills=None, dies_at_start=False, awaited=None):
    """A function that squares numbers, and writes into a folder which block was begun in which process.

    Block 0 takes until the block `awaited` has begun.
    """
    warn_user("loaded")
    if dies_at_start:
        _note(folder, "start")
        os.kill(os.getpid(), signal.SIGKILL)
    return functools.partial(_square, folder, kills or {}, awaited)


def _square(folder, kills, awaited, block):
    _note(folder, f"block{block}")
    if len(begun(folder, block)) <= kills.get(block, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    if block == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
        return "went on"
    if block == 0:
        time.sleep(0.5)  # the others are done before
        while awaited and not begun(folder, awaited):
            time.sleep(0.02)
    if block == 2:
        warn_user("block 2 is odd")
    if block == "wrong":
        raise UserError("the block is wrong; give a number")
    return block**2


def _note(folder, what):
    Path(folder, f"{what}.{time.monotonic_ns()}.{os.getpid()}").touch()


def begun(folder, block):
    """The processes that have begun a block, in order."""
    names = [path.name.split(".") for path in Path(folder).glob(f"block{block}.*")]
    return [int(process) for _, _, process in sorted(names, key=lambda parts: int(parts[1]))]
