"""The launcher: `python train.py [flags]` is `python -m flaxformer_mt train [flags]`."""

import sys

from flaxformer_mt.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
