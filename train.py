"""The launcher: `python train.py [flags]` is `python -m flaxformer_mt train [flags]`."""

import sys

from flaxformer_mt.cli import main
from flaxformer_mt.memory import use_large_pages

if __name__ == "__main__":
    use_large_pages()
    sys.exit(main(["train", *sys.argv[1:]]))
