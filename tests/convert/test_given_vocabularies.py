"""Lists of words as vocabularies: the ids are line numbers, in both directions."""

import pytest

from flaxformer_mt.convert.import_run import read_given_vocabs
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import load_vocabs

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", ".", "der", "Hund", "New York", "ﬁn", "weiß"]


def write(path, words):
    path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return path


def test_ids_are_line_numbers(tmp_path):
    vocabs = read_given_vocabs(write(tmp_path / "words.txt", WORDS))
    vocab = vocabs.source
    assert vocabs.joint and vocab.size == len(WORDS)
    assert (vocab.pad_id, vocab.bos_id, vocab.eos_id, vocab.unk_id) == (0, 1, 2, 3)
    # Words are what spaces separate, as they are written; others are unknown, and so are symbols in a text.
    # SentencePiece gives adjacent unknown words one id.
    assert vocab.tokenize("der Hund weiß .") == [5, 6, 9, 4, 2]
    assert vocab.tokenize("  ﬁn  fin . <eos> . der. Hund New York") == [8, 3, 4, 3, 4, 3, 6, 3, 2]
    assert vocab.detokenize([1, 5, 7, 4, 2, 6]) == "der New York ."


def test_symbols_may_have_other_places_and_spellings(tmp_path):
    words = ["</s>", "eins", "<unk>", "<blank>", "zwei", "<s>"]
    vocab = read_given_vocabs(write(tmp_path / "words.txt", words)).target
    assert (vocab.pad_id, vocab.bos_id, vocab.eos_id, vocab.unk_id) == (3, 5, 0, 2)
    assert vocab.tokenize("zwei eins") == [4, 1, 0]


def test_each_language_may_have_its_list(tmp_path):
    write(tmp_path / "source.txt", WORDS)
    write(tmp_path / "target.txt", [*WORDS[:4], "the", "dog"])
    vocabs = read_given_vocabs(tmp_path)
    assert not vocabs.joint and (vocabs.source.size, vocabs.target.size) == (10, 6)
    vocabs.save(tmp_path / "run")
    again = load_vocabs(tmp_path / "run")
    assert (again.source.fingerprint, again.target.fingerprint) == (
        vocabs.source.fingerprint,
        vocabs.target.fingerprint,
    )
    assert read_given_vocabs(tmp_path / "run").target.size == 6
    assert read_given_vocabs(tmp_path / "run" / "source.model").target.size == 10
    write(tmp_path / "joint.txt", WORDS)
    assert read_given_vocabs(tmp_path).joint


@pytest.mark.parametrize(
    ("words", "message"),
    [([*WORDS, "der"], "lines 6 and 11 of .* are both 'der'"), ([*WORDS, "", "x"], "line 11 of .* is empty"),
     ([*WORDS, "\u2581x"], "line 11 of .* contains '\u2581'"),
     (WORDS[2:], r"lacks pad \(<pad>, .*\) and bos \(<bos>, .*\); each special symbol needs a line")],
)  # fmt: skip
def test_lists_that_are_no_vocabulary_are_refused(tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        read_given_vocabs(write(tmp_path / "words.txt", words))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "words.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not a list of words that can be read"):
        read_given_vocabs(tmp_path / "words.txt")
