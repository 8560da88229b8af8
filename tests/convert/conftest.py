"""Vocabularies that tests of several formats share."""

import pytest

from flaxformer_mt.config import VocabConfig
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.vocab import Vocabs, make_vocabs


@pytest.fixture(scope="session")
def vocabs(tmp_path_factory) -> dict[bool, Vocabs]:
    """By whether they are joint; two that are not have different sizes."""
    pairs = [Pair(f"ab{c} {c}de fa", f"g{c}h ih {c}{c}") for c in "abcdefgh"] * 4
    made = [
        make_vocabs(VocabConfig(size=size, byte_fallback=False), pairs, tmp_path_factory.mktemp("vocab"))
        for size in (20, 23)
    ]
    return {True: made[1], False: Vocabs(made[0].source, made[1].target, joint=False)}
