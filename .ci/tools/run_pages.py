"""Runs every command and every example of README.md and of docs/, literally, as a reader would.

    .ci/docs [--work=DIR] [--list] [--site] [PAGE ...]

The pages are read from a fresh copy of the files that git knows. README.md comes first: its own commands make
the environment, with the Python that is called python3, and train the run that the other pages use. Those run
with that environment activated, and so does README.md after its command that activates it. A block that a
page marks as needing another machine, a network or data of others is left out; GIVEN makes what a page takes
as given, and ADDED shortens what would take long. It fails with the page, the line, the command and its
output if a command ends with a status other than 0 or prints a traceback. tests/README.md has the commands
that build the site and execute the notebook; --site only builds.
"""

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tools.pages import README, ROOT, Block, Command, find_pages, read_blocks, split_commands

_FLAXFORMER = "python -m flaxformer_mt"
_FEW_UPDATES = "--config.train.steps=4"
# A model after a few updates translates to the length limit: at this one, sooner.
_SHORT = "--config.search.max_length_ratio=1 --config.search.max_length_offset=4"

# A model that is trained quickly.
_SMALL = (
    "--config.model.num_encoder_layers=1 --config.model.num_decoder_layers=1 --config.model.model_dim=16 "
    "--config.model.num_heads=2 --config.model.ffn_dim=16 --config.data.num_shapes=2"
)

# A model with the norms of Marian.
_POST = (
    "python train.py --config=toy_de_en --config.model.norm_position=post --run=runs/post "
    f"{_FEW_UPDATES} {_SHORT}"
)

# Page -> the commands that make what it takes as given, and remove what other pages left there.
GIVEN = {
    README: ["python -m tools.write_words my_data --languages=cs,en"],
    "docs/index.md": [
        "python -m tools.write_words my_data --languages=cs,en",
        "rm -rf exported/cs_en runs/cs_en runs/cs_en.py",
    ],
    "docs/api.md": ["rm -rf exported/api runs/en runs/from_api"],
    "docs/data.md": ["python -m tools.write_words my_data --languages=cs,en"],
    "docs/evaluation.md": [
        _POST,
        f"{_FLAXFORMER} average --run=runs/toy_de_en --last=2",
        "cp runs/toy_de_en/translations/test.hypothesis other.txt",
    ],
    "docs/export.md": [
        "rm -rf exported opus-mt-de-en runs/opus runs/handbuilt_again runs/theirs",
        f"python train.py --config=handbuilt --run=runs/handbuilt {_FEW_UPDATES} {_SHORT}",
        "cp configs/handbuilt.py my_config.py",
        "python -m tools.write_words my_data --languages=de,en",
        _POST,
        f"{_FLAXFORMER} export --run=runs/post --format=marian --output=opus-mt-de-en",
    ],
    "docs/documents.md": [
        "cp runs/toy_de_en/translations/test.source test.de && rm -rf documents.en runs/toy_documents"
    ],
    # docs/api.md starts a run of this name.
    "docs/pretrained.md": ["rm -rf runs/tuned runs/adapted"],
    "docs/parallel.md": ["cp runs/toy_de_en/translations/test.source test.de && rm -f test.en"],
    "docs/translating.md": [
        "cp runs/toy_de_en/translations/test.source test.de",
        "rm -f test.en big.en && for i in 1 2 3 4 5; do cat test.de; done > big.de",
    ],
    "docs/serving.md": ["pip install '.[serve]'"],
    "docs/tutorial.md": [
        "rm -rf exported/captions runs/captions runs/captions.py",
        "python -m tools.write_words captions --languages=de,en --jsonl",
    ],
}

# The page with the commands that build the site, and a pattern of these.
SITE = ("tests/README.md", r"requirements-docs\.txt|mkdocs build")

# Pages whose Python blocks are one program. Elsewhere each block is one of its own.
ONE_PROGRAM = frozenset({"docs/api.md", "docs/translating.md"})


class Added(NamedTuple):
    """What is added to the end of the commands of a page that match a pattern, and why."""

    page: str
    command: str
    words: str

    def matches(self, page: str, text: str) -> bool:
        return page == self.page and re.search(self.command, text) is not None


ADDED = [
    # The tests run in .ci/run, with this very command.
    Added(README, r"-m pytest -q$", "--collect-only"),
    # The large size takes 20 minutes; the small one is a part of .ci/run.
    Added("tests/README.md", r"FLAXFORMER_MT_FUZZ=", "--collect-only"),
    # Trainings whose result no other command needs.
    Added("docs/documents.md", r"train toy_documents", f"{_FEW_UPDATES} {_SHORT}"),
    Added(README, r"train runs/cs_en\.py", f"{_FEW_UPDATES} {_SHORT}"),
    Added("docs/index.md", r"train runs/cs_en\.py", f"{_FEW_UPDATES} {_SHORT}"),
    Added("docs/export.md", r"train --run=runs/opus", f"{_FEW_UPDATES} {_SHORT}"),
    Added("docs/pretrained.md", r"--run=runs/(tuned|adapted)", _FEW_UPDATES),
    Added("docs/training.md", r"--run=runs/guided", f"{_FEW_UPDATES} {_SHORT}"),
    # A checkpoint of step 1,000, which the page compares with the best one, is needed.
    Added(
        "docs/tutorial.md",
        r"train runs/captions\.py",
        "--config.train.steps=1002 --config.train.evaluate_every=1000 --config.train.checkpoint_every=1000 "
        f"{_SHORT} {_SMALL}",
    ),
    # Benchmarks, which take an hour.
    Added("benchmarks/README.md", r"benchmarks/(data|scaling)\.py", "--tiny"),
    Added("docs/serving.md", r"benchmarks/serve\.py", "--requests=200 --clients=8"),
    # Each cell of the table is minutes of compiling.
    Added("benchmarks/README.md", r"benchmarks/targets\.py", "--recipes=toy_de_en --targets=v5e:1x1"),
]


class PageError(Exception):
    """A command of a page that does not do what the page says."""


class Tree:
    """A fresh copy of the files that git knows, and the environment in which its commands run."""

    def __init__(self, work: Path, *, python: str) -> None:
        self.folder = work / "tree"
        self._work = work
        self._activated = False
        for name in ("tree", "bin", "home"):
            (work / name).mkdir(parents=True, exist_ok=True)
        launcher = work / "bin" / "python3"
        launcher.write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
        launcher.chmod(0o755)

    def copy_files(self) -> None:
        """Copies the files that git knows, as they are now; files of earlier commands stay."""
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).exists():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)

    def run(self, command: Command, *, given: str = "", program: str = "") -> str:
        """Runs one command and returns its output.

        Args:
          given: what runs instead of the text: the text with what is added.
          program: Python to give to the command as its standard input.

        Raises:
          PageError: its status is not 0, or it prints a traceback.
        """
        self._activated |= command.page != README or command.text == "source .venv/bin/activate"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", given or command.text],
            cwd=self.folder,
            env=self._environment(),
            input=program.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output = done.stdout.decode(errors="replace")
        problem = f"status {done.returncode}" if done.returncode else ""
        if not problem and "Traceback (most recent call last)" in output:
            problem = "a traceback"
        if problem:
            text = given or command.text
            raise PageError(f"{command.page}:{command.line}: {problem}\n    {text}\n{output[-6000:]}")
        return output

    def _environment(self) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        home = self._work / "home"
        path = [str(self._work / "bin"), kept.get("PATH", "")]
        if self._activated:
            path.insert(0, str(self.folder / ".venv" / "bin"))
        return kept | {
            "PATH": os.pathsep.join(path),
            "FLAXFORMER_MT_CACHE": str(home / "cache"),
            "TFDS_DATA_DIR": str(home / "tfds"),
        }


class Step(NamedTuple):
    """A command to run: `given` is what runs, `left_out` why it is not run, `program` its standard input."""

    command: Command
    given: str
    left_out: str = ""
    program: str = ""

    def describe(self) -> str:
        place = f"{self.command.page}:{self.command.line}"
        lines = [f"{place} not run: {self.left_out}" if self.left_out else place, f"    {self.command.text}"]
        if self.given != self.command.text:
            lines.append(f"    as {self.given}")
        return "\n".join(lines)


def plan(page: str) -> Iterator[Step]:
    """The commands of a page in order; Python blocks that are one program run at the end of the page."""
    program: list[Block] = []
    for block in read_blocks(page):
        if block.kind == "sh":
            for command in split_commands(block):
                given = add_words(
                    command.text, [rule.words for rule in ADDED if rule.matches(page, command.text)]
                )
                yield Step(command, given, block.needs)
        elif block.kind == "python" and page in ONE_PROGRAM:
            program.append(block)
        elif block.kind == "python":
            yield _run_python(page, [block])
    if program:
        yield _run_python(page, program)


def add_words(text: str, words: list[str]) -> str:
    """The command with the words at its end, before a comment: `a # b` and `--c` are `a --c # b`."""
    comment = re.search(r"\s+#[^\n]*$|$", text)
    end = comment.start() if comment else len(text)
    return " ".join([text[:end], *words]) + text[end:]


def _run_python(page: str, blocks: list[Block]) -> Step:
    """A program of the blocks; a block that begins with the name of a file, `# configs/NAME.py`, is it."""
    text = "\n".join(block.text for block in blocks)
    named = re.match(r"# (\S+\.py)\n", text)
    command = f"cat > {named[1]}" if named else "python3 -"
    return Step(Command(page, blocks[0].line, command), command, blocks[0].needs, text)


def plan_site() -> list[Step]:
    page, pattern = SITE
    return [step for step in plan(page) if re.search(pattern, step.command.text)]


def run_page(page: str, steps: Iterable[Step], tree: Tree) -> None:
    """Runs commands of a page after those that make what it takes as given; says which it runs."""
    say = functools.partial(print, flush=True)
    activate = 'export PATH="$PWD/.venv/bin:$PATH" PYTHONPATH=.ci:. &&'
    made = [Command(page, 0, text) for text in GIVEN.get(page, [])]
    waiting = made
    for step in steps:
        # README.md makes the environment with its first command.
        if (tree.folder / ".venv").exists():
            for command in waiting:
                say(f"{page} takes as given\n    {command.text}")
                tree.run(command, given=f"{activate} {command.text}")
            waiting = []
        say(step.describe())
        if not step.left_out:
            start = time.monotonic()
            tree.run(step.command, given=step.given, program=step.program)
            say(f"    {time.monotonic() - start:.0f} s")


def main() -> int:
    """Runs the pages, or lists their commands; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="default: README.md and docs/*.md")
    parser.add_argument(
        "--work", type=Path, help="folder for the copy of the tree, kept; default: a temporary one"
    )
    parser.add_argument("--list", action="store_true", help="print the commands and do not run them")
    parser.add_argument("--site", action="store_true", help="only build the site")
    options = parser.parse_args()
    if options.site and options.pages:
        parser.error("--site builds the site and runs no pages; leave one of them out")
    plans = {SITE[0]: plan_site()} if options.site else {p: plan(p) for p in options.pages or find_pages()}
    if options.list:
        for steps in plans.values():
            print("\n".join(step.describe() for step in steps))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        tree = Tree((options.work or Path(temporary)).resolve(), python=sys.executable)
        tree.copy_files()
        try:
            for page, steps in plans.items():
                run_page(page, steps, tree)
        except PageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(f"{len(plans)} pages: every command ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
