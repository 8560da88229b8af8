"""README.md and the pages of docs/: the blocks of commands and of Python that they show.

Contains the rules of a page: commands stand in `sh` blocks, Python in `python` blocks, and a block that
cannot be run here begins with a comment that says what it needs.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
README = "README.md"

# The first line of a block that `run_pages.py` leaves out: # Needs another machine: a cluster with Slurm
_NEEDS = re.compile(r"# Needs (another machine|a network|data of others): \S.*")
# What begins a line of shell, wherever it stands in a page.
_COMMAND = re.compile(
    r"(?:\$ |[A-Z_]+=\S+ )*(?:\S*/)?"
    r"(?:python[\d.]*|pip|flaxformer-mt|tensorboard|srun|echo|cat|cd|bash|\.ci/\w+) (?=\S)"
)
_KINDS = ("sh", "python", "")  # no kind: what a program prints, or a drawing


class Block(NamedTuple):
    """A fenced block. `line` is the number of its first line in the page; without `needs`, it runs here."""

    page: str
    line: int
    kind: str
    text: str
    needs: str


class Command(NamedTuple):
    """One command of an `sh` block, with the lines that continue it after a backslash."""

    page: str
    line: int
    text: str


def find_pages() -> list[str]:
    """README.md, whose commands make the environment and the run that others use, and all other pages."""
    pages = [
        page for folder in ("docs", "benchmarks", "recipes", "tests") for page in (ROOT / folder).glob("*.md")
    ]
    return [README, *sorted(path.relative_to(ROOT).as_posix() for path in pages)]


def read_blocks(page: str, root: Path = ROOT) -> list[Block]:
    """The fenced blocks of a page, in order.

    Raises:
      ValueError: a block of an unknown kind, or that does not end.
    """
    text = (root / page).read_text(encoding="utf-8")
    lines = text.split("\n")
    blocks: list[Block] = []
    start: int | None = None
    for number, line in enumerate(lines, start=1):
        if not line.startswith("```"):
            continue
        if start is None:
            start, kind = number, line[3:]
            if kind not in _KINDS:
                raise ValueError(
                    f"{page}:{number}: a block of {kind}; write sh, python, or nothing for output"
                )
            continue
        body = lines[start : number - 1]
        needs = body[0].removeprefix("# ") if body and _NEEDS.fullmatch(body[0]) else ""
        blocks.append(Block(page, start + 1, kind, "\n".join(body) + "\n", needs))
        start = None
    if start is not None:
        raise ValueError(f"{page}:{start}: a block without end")
    return blocks


def split_commands(block: Block) -> list[Command]:
    """The commands of an `sh` block: its lines, except comments, joined where a backslash ends one."""
    commands, begun = [], None
    for number, line in enumerate(block.text.rstrip("\n").split("\n"), start=block.line):
        if begun is None and (not line.strip() or line.startswith("#")):
            continue
        begun = (
            Command(block.page, number, line)
            if begun is None
            else begun._replace(text=f"{begun.text}\n{line}")
        )
        if not line.endswith("\\"):
            commands.append(begun)
            begun = None
    assert begun is None, f"{block.page}:{block.line}: the block ends in a backslash"
    return commands


def find_hidden_commands(page: str, root: Path = ROOT) -> Iterator[str]:
    """`page:line: text` of each command where nobody runs it: indented, or in a block of output."""
    lines = (root / page).read_text(encoding="utf-8").split("\n")
    inside: dict[int, Block] = {}
    for block in read_blocks(page, root):
        inside |= {block.line + offset: block for offset in range(-1, block.text.count("\n") + 1)}
    for number, line in enumerate(lines, start=1):
        block = inside.get(number)
        shown = line.startswith("    ") if block is None else not block.kind
        if shown and _COMMAND.match(line.strip()):
            yield f"{page}:{number}: {line.strip()}"
