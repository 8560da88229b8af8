"""Work for the tests of the block map, which ends its worker where a test wants it to."""

import os
import signal
import time
from pathlib import Path

from flaxformer_mt.errors import UserError


class MortalWork:
    """Squares numbers, and writes into a folder which block was begun in which process."""

    def __init__(self, warn, *, folder, kills=None, dies_at_start=False, differs=False):
        self._warn, self._folder, self._kills, self._differs = warn, Path(folder), kills or {}, differs
        warn("loaded")
        if dies_at_start:
            self._note("start")
            os.kill(os.getpid(), signal.SIGKILL)

    def describe(self):
        return {"precision": os.getpid() if self._differs else "float32"}

    def __call__(self, block):
        self._note(f"block{block}")
        if self._begun(block) <= self._kills.get(block, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        if block == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
            return "went on"
        if block == 0:
            time.sleep(0.5)  # the others are done before
        if block == 2:
            self._warn("block 2 is odd")
        if block == "wrong":
            raise UserError("the block is wrong; give a number")
        return block**2

    def _note(self, what):
        (self._folder / f"{what}.{time.monotonic_ns()}.{os.getpid()}").touch()

    def _begun(self, block):
        return len(begun(self._folder, block))


def begun(folder, block):
    """The processes that have begun a block, in order."""
    found = [path.name.split(".") for path in Path(folder).glob(f"block{block}.*")]
    return [int(process) for _, _, process in sorted(found, key=lambda parts: int(parts[1]))]
