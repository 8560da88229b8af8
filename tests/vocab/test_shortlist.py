"""Shortlists: the file, which is CTranslate2's vocabulary map, and the candidates of a source."""

from types import SimpleNamespace

import numpy as np
import pytest

from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab.shortlist import Shortlist


class Pieces:
    """A vocabulary of given pieces."""

    eos_id, unk_id = 1, 2

    def __init__(self, *pieces):
        self._pieces = ["<pad>", "</s>", "<unk>", *pieces]
        self.size = len(self._pieces)

    def pieces(self, ids):
        return [self._pieces[number] for number in ids]


VOCABS = SimpleNamespace(
    source=Pieces("▁der", "▁Hund", "▁bellt"), target=Pieces("▁the", "▁dog", "▁a hound", "▁barks", "s")
)
TEXT = "\t▁the </s> <unk>\n▁Hund\t▁dog s\n▁Hund ▁bellt\t▁barks ▁the\n"


def test_a_file_of_a_vocabulary_map_is_read_and_written(tmp_path):
    path = tmp_path / "vmap.txt"
    path.write_text(TEXT, encoding="utf-8")
    shortlist = Shortlist.read(path, VOCABS)
    assert shortlist.common.tolist() == [1, 2, 3]
    # the first of each n-gram, then the second; those of "▁Hund ▁bellt" only side by side
    assert shortlist.find([4, 5, 1]).tolist() == [4, 6, 7, 3]
    assert shortlist.find(np.array([5, 4, 4, 1])).tolist() == [4, 7]
    assert shortlist.find([3, 1]).tolist() == []
    # eos and the unknown symbol are always candidates; a piece with a space is in no file
    rules = {(4,): np.array([4, 7]), (4, 5): np.array([6, 5, 3])}
    made = Shortlist(rules, [3], VOCABS)
    made.write(tmp_path / "made.txt")
    assert (tmp_path / "made.txt").read_text(encoding="utf-8") == TEXT.replace(
        "▁the </s> <unk>", "</s> <unk> ▁the"
    )
    again = Shortlist.read(tmp_path / "made.txt", VOCABS)
    assert again.fingerprint == made.fingerprint == shortlist.fingerprint
    assert Shortlist({}, [3], VOCABS).fingerprint != made.fingerprint
    assert sorted(file.name for file in tmp_path.iterdir()) == ["made.txt", "vmap.txt"]


def test_files_that_are_no_shortlists_of_the_run_are_named(tmp_path):
    path = tmp_path / "vmap.txt"
    for content, words in [
        (b"\t\xff\n", "vmap.txt cannot be read: .*utf-8"),
        (b"der the\n", "line 1, has 0 tabs; it must have"),
        ("▁der\t▁the\n\n▁der\t▁the\ts\n".encode(), "line 3, has 2 tabs"),
        (
            "▁der\t▁le\n".encode(),
            "line 1, has the piece '▁le', which the target vocabulary of 8 pieces lacks",
        ),
        ("▁le\t▁the\n".encode(), "'▁le', which the source vocabulary of 6 pieces lacks; give a shortlist"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=words):
            Shortlist.read(path, VOCABS)
    with pytest.raises(UserError, match="absent.txt cannot be read: No such file.*prepare --shortlist=FILE"):
        Shortlist.read(tmp_path / "absent.txt", VOCABS)
