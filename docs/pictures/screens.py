"""Makes pictures of what commands show, as a user sees them, in docs/images.

    python -m docs.pictures.screens RUN OTHER CAPTIONS        # needs Chromium

RUN is by `python train.py`, OTHER has `--config.train.steps=600`, and CAPTIONS is the run of the tutorial.
training.png is by `plot`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from docs.pictures.pages import ROOT
from docs.pictures.svg import MARGIN, Picture

_IMAGES = ROOT / "docs" / "images"
_CHARACTER, _LINE = 7.53, 18


def draw_screen(command: str, output: str) -> str:
    """Draw a command and what it printed."""
    lines = [f"$ {command}", *output.rstrip("\n").split("\n")]
    picture = Picture(f"What {command} prints", width=round(max(map(len, lines)) * _CHARACTER) + 2 * MARGIN)
    for number, line in enumerate(lines):
        picture.text(MARGIN, 30 + _LINE * number, line, "screen" if number else "code")
    return picture.finish(30 + _LINE * len(lines))


def save_report(run: str, output: Path) -> None:
    """Save the upper part of the report that `train` has written about a run."""
    flags = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--window-size=840,1140"]
    page = Path(run, "report.html").resolve().as_uri()
    subprocess.run(["chromium", *flags, f"--screenshot={output}", page], check=True)
    Image.open(output).quantize(256, method=Image.Quantize.FASTOCTREE).save(output, optimize=True)


def save_attention(run: str, source: str, output: Path) -> None:
    """Save the attention from the translation to the source."""
    with tempfile.TemporaryDirectory() as folder:
        plot = ["-m", "flaxformer_mt", "plot", run, f"--source={source}", f"--output={folder}"]
        subprocess.run([sys.executable, *plot], check=True, stdout=subprocess.DEVNULL)
        image = Image.open(Path(folder, "attention_cross.png")).convert("RGB")
    image.thumbnail((920, 920))
    image.quantize(64, method=Image.Quantize.FASTOCTREE).save(output, optimize=True)


if __name__ == "__main__":
    run, other, captions = sys.argv[1:]
    save_report(captions, _IMAGES / "report.png")
    save_attention(captions, "Zwei Hunde spielen im Schnee.", _IMAGES / "attention.png")
    command = ["evaluate", run, f"--against={other}"]
    program = subprocess.run(
        [sys.executable, "-m", "flaxformer_mt", *command], stderr=subprocess.PIPE, text=True, check=True
    )
    tables = program.stderr[program.stderr.index("   BLEU") :]
    start = program.stderr.rindex("\n", 0, program.stderr.index(tables)) + 1
    screen = draw_screen(" ".join(["flaxformer-mt", *command]), program.stderr[start:])
    (_IMAGES / "compare.svg").write_text(screen, encoding="utf-8")
