"""Runs the command line: `python -m flaxformer_mt COMMAND ...`."""

from flaxformer_mt.commands.launch import launch

if __name__ == "__main__":
    launch()
