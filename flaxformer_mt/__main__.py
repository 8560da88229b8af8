"""`python -m flaxformer_mt COMMAND ...`; owns nothing."""

import sys

from flaxformer_mt.commands.huge_pages import use_huge_pages
from flaxformer_mt.commands.main import main

if __name__ == "__main__":
    use_huge_pages()
    sys.exit(main())
