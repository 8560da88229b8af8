"""The launcher: `python train.py [flags]` is `python -m flaxformer_mt train [flags]`."""

import sys

from flaxformer_mt.commands.huge_pages import use_huge_pages
from flaxformer_mt.commands.main import main

if __name__ == "__main__":
    use_huge_pages()
    sys.exit(main(["train", *sys.argv[1:]]))
