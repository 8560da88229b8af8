"""Subword sampling: a function of the seed in every process, with SentencePiece's segmentations and odds."""

import collections
import io
import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from flaxformer_mt.vocab import Vocab
from flaxformer_mt.vocab.subword_sampling import make_sampler

ROOT = Path(__file__).resolve().parents[2]
SYLLABLES = ("ka", "lo", "min", "te", "ru", "abe", "of", "cig", "hid", "jo")
WORDS = ["".join(pair) for pair in itertools.product(SYLLABLES, repeat=2)][::2]
TEXT = [" ".join(np.random.default_rng(seed).choice(WORDS, 6)) for seed in range(200)]
ODD_TEXTS = [
    "",
    "  two  spaces ",
    "日本語 unknown ✓✓",
    "a\u2581b",
    "x" * 300,
    "<s> tag end",
    "ﬁne \u0085 text",
]
ODD_TEXTS += ["a bc", "tag a b", "tagtag"]
# Trainer settings that change how text is divided or what is unknown.
SETTINGS = {
    "plain": {},
    "bytes": {"byte_fallback": True, "vocab_size": 330},
    "symbols": {"user_defined_symbols": ["tag", "a b"]},
    "crossing": {"split_by_whitespace": False},
    "suffix": {"treat_whitespace_as_suffix": True},
    "spaces": {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"},
}


def train(kind: str, **settings) -> Vocab:
    model = io.BytesIO()
    special = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "minloglevel": 3}
    options = {"model_type": kind, "vocab_size": 70} | special | settings
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT), model_writer=model, **options)
    return Vocab(model.getvalue())


@pytest.fixture(scope="module")
def vocabs() -> dict[str, Vocab]:
    return {kind: train(kind) for kind in ("bpe", "unigram")}


def pieces_of(vocab: Vocab, texts: list[str], **options) -> list[tuple[str, ...]]:
    return [tuple(vocab.pieces(ids)) for ids in vocab.tokenize_all(texts, **options)]


IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
from flaxformer_mt.vocab import Vocab
vocab = Vocab(Path(sys.argv[1]).read_bytes())
texts = Path(sys.argv[2]).read_text(encoding="utf-8").split("\\n")
print([ids.tolist() for ids in vocab.tokenize_all(texts, sampling=0.2, seed=5)])
"""


def test_samples_are_the_same_in_every_process(vocabs, tmp_path):
    text = tmp_path / "text"
    text.write_text("\n".join(TEXT), encoding="utf-8")
    for kind, vocab in vocabs.items():
        vocab.save(tmp_path / kind)
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path / kind), str(text)]
        elsewhere = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        here = vocab.tokenize_all(TEXT, sampling=0.2, seed=5)
        assert elsewhere == f"{[ids.tolist() for ids in here]}\n"
        assert [ids.tolist() for ids in here] != [ids.tolist() for ids in vocab.tokenize_all(TEXT)]


def test_without_chance_the_segmentation_is_that_of_sentencepiece():
    """A dropout rate near 0, and an exponent that leaves the most probable segmentation alone."""
    texts = [*TEXT[:60], *ODD_TEXTS]
    for kind, rate in (("bpe", 1e-15), ("unigram", 300.0)):
        for name, settings in SETTINGS.items():
            vocab = train(kind, **settings)
            expected = [ids.tolist() for ids in vocab.tokenize_all(texts)]
            sampled = [ids.tolist() for ids in vocab.tokenize_all(texts, sampling=rate, seed=1)]
            assert sampled == expected, (kind, name)
            for ids in vocab.tokenize_all(TEXT[:20], sampling=0.3, seed=1):  # others spell the text as well
                assert vocab.detokenize(ids).strip() in TEXT


def segmentations(vocab: Vocab, word: str) -> dict[tuple[str, ...], float]:
    """All segmentations of a word by its characters, with the sums of their scores."""
    processor, spelled, scores = vocab._processor, "\u2581" + word, {}
    for cuts in itertools.product((False, True), repeat=len(spelled) - 1):
        ends = [position + 1 for position, cut in enumerate(cuts) if cut] + [len(spelled)]
        pieces = [spelled[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        if all(processor.id_to_piece(processor.piece_to_id(piece)) == piece for piece in pieces):
            scores[tuple(pieces)] = sum(processor.get_score(processor.piece_to_id(p)) for p in pieces)
    return scores


def test_unigram_samples_have_the_probabilities_of_their_pieces(vocabs):
    """Over all segmentations of a word: the product of the pieces' probabilities to the power alpha."""
    vocab, alpha, count = vocabs["unigram"], 0.3, 20_000
    word = max(WORDS, key=lambda word: len(segmentations(vocab, word)))
    scores = segmentations(vocab, word)
    weights = {pieces: math.exp(alpha * score) for pieces, score in scores.items()}
    total = sum(weights.values())
    drawn = collections.Counter(
        tuple(pieces[:-1]) for pieces in pieces_of(vocab, [word] * count, sampling=alpha, seed=1)
    )
    assert len(weights) > 3 and drawn.keys() <= weights.keys()
    for pieces, weight in weights.items():
        share = weight / total
        assert abs(drawn[pieces] / count - share) < 5 * math.sqrt(share * (1 - share) / count)


def test_bpe_dropout_has_the_odds_of_sentencepiece(vocabs):
    """The share of each segmentation of a word, against SentencePiece's own samples."""
    vocab, rate, count = vocabs["bpe"], 0.3, 20_000
    word = "minlo"
    ours = collections.Counter(pieces_of(vocab, [word] * count, sampling=rate, seed=1))
    sampling = {"enable_sampling": True, "nbest_size": -1, "alpha": rate, "add_eos": True}
    ids = vocab._processor.encode([word] * count, **sampling, return_type=int)
    theirs = collections.Counter(tuple(vocab.pieces(row)) for row in ids)
    assert len(ours) > 3
    for pieces in ours.keys() | theirs.keys():
        share = (ours[pieces] + theirs[pieces]) / (2 * count)
        difference = abs(ours[pieces] - theirs[pieces]) / count
        assert difference < 6 * math.sqrt(2 * share * (1 - share) / count)


def test_unused_pieces_are_taken_apart_again(vocabs):
    """A merge may pass through a piece that is marked as unused, which is not part of the result."""
    from flaxformer_mt.vocab.model_file import NORMAL, UNKNOWN, UNUSED, Piece
    from flaxformer_mt.vocab.subword_sampling import BpeDropout

    pieces = [Piece("?", 0, UNKNOWN), *(Piece(letter, 0, NORMAL) for letter in "abc")]
    pieces += [Piece("ab", -1, UNUSED), Piece("abc", -2, NORMAL)]
    ids = BpeDropout(pieces, 1e-15).sample(["abc", "abx", "xy"], seed=np.random.SeedSequence(1), end=9)
    assert [row.tolist() for row in ids] == [[5, 9], [1, 2, 0, 9], [0, 9]]


def test_models_of_characters_and_words_have_no_sampler():
    assert make_sampler(train("char", vocab_size=24)._model, 0.1) is None
