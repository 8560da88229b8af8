"""Alignments and weights stay with their pairs; mistakes are named by file and line."""

import gzip
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from pytest import raises
from tiny_experiment import text_data

from flaxformer_mt.commands.main import main
from flaxformer_mt.config import CleanConfig
from flaxformer_mt.corpus import Pair, read_pairs
from flaxformer_mt.corpus.pharaoh import format_points, parse_points
from flaxformer_mt.errors import FlaxformerWarning, UserError

SOURCE = ["a b c", "a b", "", "a b", "c c c c c c c c c c c c", "b c"]
TARGET = ["A B C", "A B", "X", "A B", "C", "B C"]
POINTS = ["0-0 2-1", "1-1 0-0 1-1", "", "0-1", "0-0", "1-0"]


@pytest.fixture
def config(tmp_path):
    for name, lines in (("train.xx", SOURCE), ("train.yy", TARGET), ("train.align", POINTS)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return text_data(tmp_path, "xx-yy", alignments=("train.align",), clean=CleanConfig(duplicates="drop"))


def links_of(config):
    pairs = read_pairs(config, "train")
    points = pairs.columns["alignment"].take(*pairs.locate(np.arange(len(pairs))))
    links = [list(map(list, one.tolist())) for one in points]
    return list(zip([pair.source for pair in pairs], links, strict=True))


def test_a_removed_pair_takes_its_alignment_with_it(config, tmp_path):
    expected = [("a b c", [[0, 0], [2, 1]]), ("a b", [[0, 0], [1, 1]]), ("b c", [[1, 0]])]
    assert links_of(config) == expected
    assert links_of(config) == expected  # from the cache
    cached = next((tmp_path / "cache" / "alignments").glob("*/points.npy"))
    cached.write_bytes(cached.read_bytes()[:-4])
    with pytest.warns(FlaxformerWarning, match="points.npy has .*; it is built again"):
        assert links_of(config) == expected
    packed = tmp_path / "train.align.gz"
    packed.write_bytes(gzip.compress((tmp_path / "train.align").read_bytes()))
    (tmp_path / "train.align").rename(tmp_path / "away")
    assert links_of(config) == expected
    (tmp_path / "away").rename(tmp_path / "train.align")
    mixture = replace(
        config,
        dataset=f"parallel_text@{tmp_path},parallel_text@{tmp_path}",
        alignments=("", str(tmp_path / "train.align")),
    )
    assert links_of(mixture) == [(source, []) for source, _ in expected] + expected
    plain, other = (read_pairs(c, "train") for c in (replace(config, alignments=()), config))
    assert plain.columns == {} and plain.fingerprint == other.fingerprint
    (tmp_path / "train.align").write_text("0-0\n" * 2 + "\n" + "0-0\n" * 3)
    assert read_pairs(config, "train").columns["alignment"].key != other.columns["alignment"].key


def test_wrong_files_are_refused_with_file_and_line(config, tmp_path, capsys):
    file = tmp_path / "train.align"
    for text, words in (
        ("0-0\n", [str(file), "1 lines", "6 training pairs", "train.xx and train.yy"]),
        ("\n\n\n\n\n0-2\n", [f"{file} line 6", "point 0-2", "2 source and 2 target words"]),
        ("\n3-0\n\n\n\n\n", [f"{file} line 2", "point 3-0"]),
        ("\n\n0-0\n\n\n\n", [f"{file} line 3", "0 source"]),
        ("0-0 1:1\n\n\n\n\n\n", [f"{file} line 1", "'1:1'", "0-0 1-2"]),
        ("\n0--1\n\n\n\n\n", [f"{file} line 2", "0--1"]),
        (f"\n{'9' * 9000}-0\n\n\n\n\n", [f"{file} line 2"]),
        ("\n\xff\n\n\n\n\n", [f"{file} line 2"]),
    ):
        file.write_text(text, encoding="latin-1")
        with raises(UserError) as caught:
            read_pairs(config, "train")
        assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)
    file.unlink()
    flags = {f"--config.data.{n}": getattr(config, n) for n in ("dataset", "text_dir", "cache_dir")}
    flags |= {"--config.data.source_language": "xx", "--config.data.target_language": "yy"}
    command = [f"{name}={value}" for name, value in flags.items()]
    command += ["--config.data.alignments=train.align", "--config.model.alignment.weight=0.1"]
    assert main(["prepare", f"--run={tmp_path / 'run'}", *command]) == 2
    error = capsys.readouterr().err.strip()
    assert str(file) in error and "align" in error and "\n" not in error
    # The command `align` writes the file that is missing.
    assert main(["align", *command]) == 0
    lines = file.read_text().splitlines()
    assert len(lines) == len(SOURCE) and lines[0] == "0-0 1-1 2-2" and lines[2] == ""
    assert main(["align", f"--output={tmp_path / 'no' / 'folder'}", *command]) == 2


def test_words_are_those_of_fast_align(config, tmp_path, capsys):
    """Between spaces and tabs: eflomal, which splits at no-break spaces, gives points that do not exist."""
    config = replace(config, alignments=())
    (tmp_path / "train.xx").write_text("100 km der\tHund\u3000schläft\n" * 4, encoding="utf-8")
    (tmp_path / "train.yy").write_text("100\u00a0km the dog\n" * 4, encoding="utf-8")
    names = ("dataset", "text_dir", "cache_dir", "source_language", "target_language")
    command = [f"--config.data.{name}={getattr(config, name)}" for name in names]
    assert main(["align", *command, f"--output={tmp_path / 'train.align'}"]) == 0
    assert json.loads(capsys.readouterr().out)["aligned_target_words"] == 1
    points = [map(int, point.split("-")) for point in (tmp_path / "train.align").read_text().split()]
    assert [max(side) for side in zip(*points, strict=True)] == [3, 2]
    (tmp_path / "train.align").write_text("0-0\n3-2\n4-3\n0-0\n")
    with pytest.raises(UserError, match="line 3: point 4-3 .* 4 source and 3 target words; .*no-break"):
        links_of(replace(config, alignments=("train.align",)))


def test_points_are_read_once_each_in_the_order_of_the_target():
    assert parse_points(b" 2-1\t0-0 1-0 2-1 ", (3, 2), where="") == [(0, 0), (1, 0), (2, 1)]
    assert format_points([(0, 0), (1, 0), (2, 1)]) == "0-0 1-0 2-1"


# ---- pair weights ----
WEIGHTS = ["1", "0.25", "0", "2e0"]


@pytest.fixture
def pair_weights_config(tmp_path):
    (tmp_path / "text").mkdir()
    return text_data(tmp_path / "text", cache_dir=str(tmp_path / "cache"))


def weights_of(pairs):
    return pairs.columns["target_weights"].open(pairs, {}).values


def write(folder, **files):
    for name, lines in files.items():
        text = "".join(f"{line}\n" for line in lines)
        with open(f"{folder}/{name.replace('_', '.')}", "w", encoding="utf-8") as file:
            file.write(text)


def test_a_third_column_and_a_file_of_weights_say_the_same(pair_weights_config, tmp_path):
    rows = [(f"s{n}", f"t{n}", weight) for n, weight in enumerate(WEIGHTS)]
    write(pair_weights_config.text_dir, train_tsv=map("\t".join, rows))
    other = replace(pair_weights_config, text_dir=str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    write(other.text_dir, train_de=[r[0] for r in rows], train_en=[r[1] for r in rows], train_weights=WEIGHTS)
    for own in (pair_weights_config, other, pair_weights_config, other):  # the second time from the cache
        pairs = read_pairs(own, "train")
        assert list(pairs) == [Pair("s0", "t0"), Pair("s1", "t1"), Pair("s3", "t3")]
        assert weights_of(pairs).tolist() == [1.0, 0.25, 2.0] and weights_of(pairs).dtype == np.float32
        (part,) = pairs.report["parts"]
        assert (part["read"], part["pairs"], pairs.report["pairs"]) == (4, 3, 3)
        problem = part["problems"]["weight_0"]
        assert (problem["count"], problem["action"], problem["examples"][0]["target"]) == (1, "drop", "t2")
    # Other weights are other data, and a mixture weighs pairs without weights 1.
    before = read_pairs(other, "train").fingerprint
    write(other.text_dir, train_weights=["1", "0.5", "0", "2"])
    changed = read_pairs(other, "train")
    assert changed.fingerprint != before and weights_of(changed).tolist() == [1.0, 0.5, 2.0]
    (tmp_path / "plain").mkdir()
    write(tmp_path / "plain", train_de=["a", "b"], train_en=["c", "d"], valid_tsv=["a\tb\tno number"])
    mixed = replace(pair_weights_config, dataset=f"parallel_text@{tmp_path / 'plain'},parallel_text")
    assert weights_of(read_pairs(mixed, "train")).tolist() == [1.0, 1.0, 1.0, 0.25, 2.0]
    plain = replace(mixed, dataset=f"parallel_text@{tmp_path / 'plain'}")
    assert read_pairs(plain, "train").columns == {}
    assert list(read_pairs(plain, "valid")) == [Pair("a", "b")]  # whose weights have no meaning


def test_wrong_weights_are_named_with_their_line(pair_weights_config):
    for wrong in ("-1", "nan", "inf", "x", "", "1e-9", "1e7"):
        write(pair_weights_config.text_dir, train_tsv=["a\tb\t1", f"c\td\t{wrong}"])
        with raises(UserError, match=rf"train.tsv line 2 has the weight '{re.escape(wrong)}'; a weight"):
            read_pairs(pair_weights_config, "train")
    write(pair_weights_config.text_dir, train_tsv=["a\tb\t1", "c\td"])
    with raises(UserError, match="train.tsv line 2 has 2 columns; a .tsv line has 3, as the first one"):
        read_pairs(pair_weights_config, "train")
    write(pair_weights_config.text_dir, train_tsv=["a\tb\t1"], train_weights=["1"])
    with raises(UserError, match="train.tsv has a column of weights, but there is .*train.weights too"):
        read_pairs(pair_weights_config, "train")
    write(pair_weights_config.text_dir, train_tsv=["a\tb"], train_weights=["1", "2"])
    with raises(UserError, match="train.weights has 2 lines for 1 pairs"):
        read_pairs(pair_weights_config, "train")
    write(pair_weights_config.text_dir, train_tsv=["a\tb"], train_weights=["0"])
    with raises(UserError, match=r"no train pairs after cleaning: 0 of 1 are left \(weight_0 1\)"):
        read_pairs(pair_weights_config, "train")
