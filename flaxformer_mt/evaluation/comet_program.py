"""COMET, a learned metric, by the program `comet-score` of the package unbabel-comet.

That package needs older versions of NumPy than this one, so it is installed in an environment of its own.
"""

import json
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flaxformer_mt.errors import UserError

_PROGRAM = "comet-score"


def check_comet(model: str | Path) -> Path:
    path = Path(model).expanduser()
    if path.suffix != ".ckpt" or not path.is_file():
        what = "is not a .ckpt file" if path.exists() else "does not exist"
        raise UserError(
            f"COMET model {path} {what}; give the checkpoint of a downloaded model, such as "
            "wmt22-comet-da/checkpoints/model.ckpt"
        )
    if shutil.which(_PROGRAM) is None:
        raise UserError(
            f"COMET needs the program {_PROGRAM}, which is not installed; it requires numpy below 2, so "
            "install it in an environment of its own: pipx install unbabel-comet"
        )
    return path


def score_comet(
    model: Path, sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]
) -> float:
    """The mean over sentences; computed on the CPU.

    The model is loaded by PyTorch with pickle: use only one that you trust.
    """
    with tempfile.TemporaryDirectory(prefix="comet-") as folder:
        command = [_PROGRAM, "--model", str(model.resolve()), "--gpus", "0", "--only_system", "--quiet"]
        texts = {"-s": sources, "-t": hypotheses, "-r": references}
        for flag, lines in texts.items():
            file = Path(folder) / f"text{flag}"
            file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", errors="replace")
            command += [flag, str(file)]
        result = Path(folder) / "scores.json"
        done = subprocess.run([*command, "--to_json", str(result)], capture_output=True, text=True)
        if done.returncode or not result.is_file():
            last = (done.stderr.strip() or done.stdout.strip() or "no message").split("\n")[-1]
            raise UserError(f"{_PROGRAM} ends with status {done.returncode}: {last}")
        (segments,) = json.loads(result.read_text(encoding="utf-8")).values()
    return statistics.fmean(segment["COMET"] for segment in segments)
