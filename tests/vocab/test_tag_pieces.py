"""Language tags are single pieces of every kind of vocabulary, whatever is sampled."""

import pytest

from flaxformer_mt.config import VocabConfig
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import make_vocabs
from flaxformer_mt.vocab.symbols import check_language_tags

TAGS = (">>fr<<", ">>zh_Hant<<", "<from:de>")


class Tagged(list):
    """Pairs with tags."""

    tags = TAGS


def make_vocab(folder, tags=TAGS, **options):
    lines = [f"{'ab' * (i % 4)}c d{'ef' * (i % 3)} ga" for i in range(60)]
    pairs = Tagged(Pair(f">>fr<< <from:de> {line}", line) for line in lines)
    pairs.tags = tags
    settings = {"size": 40, "byte_fallback": False} | options
    return make_vocabs(VocabConfig(**settings), pairs, folder)


def test_a_tag_is_one_piece_and_counts_in_the_size(tmp_path):
    for kind, size in (("bpe", 40), ("unigram", 22), ("word", 0), ("char", 0)):
        vocab = make_vocab(tmp_path / kind, kind=kind, size=size).source
        check_language_tags(vocab, TAGS)
        assert size in (0, vocab.size)
        alone = vocab.pieces(vocab.tokenize("abc da"))
        for rate in [0.0, 0.9] if kind in ("bpe", "unigram") else [0.0]:
            for seed in range(5):
                (ids,) = vocab.tokenize_all([">>fr<< <from:de> abc da"], sampling=rate, seed=seed)
                pieces = vocab.pieces(ids)
                assert pieces[:2] == ["\u2581>>fr<<", "\u2581<from:de>"], (kind, pieces)
                assert rate or pieces[2:] == alone
    apart = make_vocab(tmp_path / "apart", joint=False, size=30)
    check_language_tags(apart.source, TAGS)
    with pytest.raises(UserError):
        check_language_tags(apart.target, TAGS)


def test_a_vocabulary_without_the_tag_is_refused(tmp_path):
    make_vocab(tmp_path / "given", tags=())
    given = make_vocab(tmp_path / "run", source_model=str(tmp_path / "given" / "source.model")).source
    with pytest.raises(UserError, match="no piece for the language tag >>fr<<, but spells it .*--new_vocab"):
        check_language_tags(given, TAGS)
    folded = make_vocab(tmp_path / "folded", normalization="nmt_nfkc_cf").source
    with pytest.raises(UserError, match="tag >>zh_Hant<<.*other than nmt_nfkc_cf"):
        check_language_tags(folded, TAGS)
