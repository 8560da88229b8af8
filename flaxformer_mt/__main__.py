"""`python -m flaxformer_mt COMMAND ...`; owns nothing."""

from flaxformer_mt.commands.launch import launch

if __name__ == "__main__":
    launch()
