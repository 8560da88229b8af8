"""Executes a notebook in its own folder and stores it with its outputs.

python .ci/tools/execute_notebook.py docs/notebook.ipynb

Needs the extra `docs`. Lines that a cell prints are one output, and no times are stored, so that little
changes from one execution to the next.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def main() -> None:
    """Executes the notebook that the command line names; an error in a cell ends the program with it."""
    path = Path(sys.argv[1])
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        resources={"metadata": {"path": str(path.parent)}},
        coalesce_streams=True,
        record_timing=False,
    )
    client.execute()
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
