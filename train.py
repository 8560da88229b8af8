"""The launcher: `python train.py [flags]` is `python -m flaxformer_mt train [flags]`."""

import sys

from flaxformer_mt.commands.launch import launch

if __name__ == "__main__":
    launch(["train"] + sys.argv[1:])
