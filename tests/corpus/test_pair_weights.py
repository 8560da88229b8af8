"""Weights of pairs: both forms of files, pairs of weight 0, mixtures, and what is refused."""

import dataclasses
import re

import numpy as np
import pytest

from flaxformer_mt.config import DataConfig
from flaxformer_mt.corpus import Pair, read_pairs
from flaxformer_mt.errors import UserError

WEIGHTS = ["1", "0.25", "0", "2e0"]


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    return DataConfig(dataset="parallel_text", text_dir=str(folder), cache_dir=str(tmp_path / "cache"))


def write(folder, **files):
    for name, lines in files.items():
        text = "".join(f"{line}\n" for line in lines)
        with open(f"{folder}/{name.replace('_', '.')}", "w", encoding="utf-8") as file:
            file.write(text)


def test_a_third_column_and_a_file_of_weights_say_the_same(config, tmp_path):
    rows = [(f"s{n}", f"t{n}", weight) for n, weight in enumerate(WEIGHTS)]
    write(config.text_dir, train_tsv=map("\t".join, rows))
    other = dataclasses.replace(config, text_dir=str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    write(other.text_dir, train_de=[r[0] for r in rows], train_en=[r[1] for r in rows], train_weights=WEIGHTS)
    for own in (config, other, config, other):  # the second time from the cache
        pairs = read_pairs(own, "train")
        assert list(pairs) == [Pair("s0", "t0"), Pair("s1", "t1"), Pair("s3", "t3")]
        assert pairs.weights.tolist() == [1.0, 0.25, 2.0] and pairs.weights.dtype == np.float32
        (part,) = pairs.report["parts"]
        assert (part["read"], part["pairs"], pairs.report["pairs"]) == (4, 3, 3)
        problem = part["problems"]["weight_0"]
        assert (problem["count"], problem["action"], problem["examples"][0]["target"]) == (1, "drop", "t2")
    # Other weights are other data, and a mixture weighs pairs without weights 1.
    before = read_pairs(other, "train").fingerprint
    write(other.text_dir, train_weights=["1", "0.5", "0", "2"])
    changed = read_pairs(other, "train")
    assert changed.fingerprint != before and changed.weights.tolist() == [1.0, 0.5, 2.0]
    (tmp_path / "plain").mkdir()
    write(tmp_path / "plain", train_de=["a", "b"], train_en=["c", "d"], valid_tsv=["a\tb\tno number"])
    mixed = dataclasses.replace(config, dataset=f"parallel_text@{tmp_path / 'plain'},parallel_text")
    assert read_pairs(mixed, "train").weights.tolist() == [1.0, 1.0, 1.0, 0.25, 2.0]
    plain = dataclasses.replace(mixed, dataset=f"parallel_text@{tmp_path / 'plain'}")
    assert read_pairs(plain, "train").weights is None
    assert list(read_pairs(plain, "valid")) == [Pair("a", "b")]  # whose weights have no meaning


def test_wrong_weights_are_named_with_their_line(config):
    for wrong in ("-1", "nan", "inf", "x", "", "1e-9", "1e7"):
        write(config.text_dir, train_tsv=["a\tb\t1", f"c\td\t{wrong}"])
        with pytest.raises(
            UserError, match=rf"train.tsv line 2 has the weight '{re.escape(wrong)}'; a weight"
        ):
            read_pairs(config, "train")
    write(config.text_dir, train_tsv=["a\tb\t1", "c\td"])
    with pytest.raises(
        UserError, match="train.tsv line 2 has 2 columns; a .tsv line has 3, as the first one"
    ):
        read_pairs(config, "train")
    write(config.text_dir, train_tsv=["a\tb\t1"], train_weights=["1"])
    with pytest.raises(
        UserError, match="train.tsv has a column of weights, but there is .*train.weights too"
    ):
        read_pairs(config, "train")
    write(config.text_dir, train_tsv=["a\tb"], train_weights=["1", "2"])
    with pytest.raises(UserError, match="train.weights has 2 lines for 1 pairs"):
        read_pairs(config, "train")
    write(config.text_dir, train_tsv=["a\tb"], train_weights=["0"])
    with pytest.raises(UserError, match=r"no train pairs after cleaning: 0 of 1 are left \(weight_0 1\)"):
        read_pairs(config, "train")
