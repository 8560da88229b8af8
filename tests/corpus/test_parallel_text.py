"""A user's own files: their formats, what is wrong with them, and what is prepared from them."""

import errno
import gzip
import json
import os
import resource
import subprocess
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tiny_experiment import text_data

from flaxformer_mt.config import CleanConfig
from flaxformer_mt.corpus import Pair, cleaning, has_split, read_pairs, text_files
from flaxformer_mt.corpus.cleaning import clean, load_or_clean
from flaxformer_mt.corpus.pairs import RawSplit
from flaxformer_mt.corpus.reader import open_train_set
from flaxformer_mt.corpus.text_files import open_unpacked, read_lines, read_stamp, scan
from flaxformer_mt.errors import UserError

GERMAN = ["Guten Tag.", "Wie geht es dir?", "Bis morgen!"]
ENGLISH = ["Good day.", "How are you?", "See you tomorrow!"]


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    return text_data(folder, cache_dir=str(tmp_path / "cache"))


def write(config, **files):
    """write(config, train_de=lines or bytes, ...) writes train.de; train_de_gz writes train.de.gz."""
    for name, content in files.items():
        path = os.path.join(config.text_dir, name.replace("_", "."))
        if isinstance(content, pyarrow.Table):
            parquet.write_table(content, path, row_group_size=7)
            continue
        data = content if isinstance(content, bytes) else "".join(f"{line}\n" for line in content).encode()
        data = gzip.compress(data) if name.endswith("gz") else data
        with pyarrow.output_stream(path, compression="zstd" if name.endswith("zst") else None) as file:
            file.write(data)


def make_rows(german, english, nested):
    rows = [{"de": a, "en": b} for a, b in zip(german, english, strict=True)]
    return [{"id": 1, "translation": row} for row in rows] if nested else rows


def table(german, english, *, nested=False):
    return pyarrow.Table.from_pylist(make_rows(german, english, nested))


def rows_of_json(german, english, *, nested=False):
    return [json.dumps(row) for row in make_rows(german, english, nested)]


def with_rules(config, **rules):
    return replace(config, clean=CleanConfig(**rules))


TABLE = [f"{a}\t{b}" for a, b in zip(GERMAN, ENGLISH, strict=True)]
FORMATS = (
    {"plain": {"train_de": GERMAN, "train_en": ENGLISH}, "gz": {"train_de_gz": GERMAN, "train_en": ENGLISH}}
    | {"zst and gz": {"train_de_zst": GERMAN, "train_en_gz": ENGLISH}}
    | {name.replace("_", "."): {f"train_{name}": TABLE} for name in ("tsv", "tsv_gz", "tsv_zst")}
    | {"parquet": {"train_parquet": table(GERMAN, ENGLISH)}}
    | {"parquet of translations": {"train_parquet": table(GERMAN, ENGLISH, nested=True)}}
    | {"jsonl": {"train_jsonl": rows_of_json(GERMAN, ENGLISH)}}
    | {"jsonl.gz": {"train_jsonl_gz": rows_of_json(GERMAN, ENGLISH, nested=True)}}
)
FORMATS["crlf and bom"] = {
    "train_de": "\r\n".join(GERMAN).encode(),
    "train_en": b"\xef\xbb\xbf" + "\n".join(ENGLISH).encode(),
}


@pytest.mark.parametrize("files", FORMATS.values(), ids=FORMATS)
def test_every_format_holds_the_same_pairs_in_order(config, files):
    write(config, **files)
    pairs = read_pairs(config, "train")
    expected = [Pair(*pair) for pair in zip(GERMAN, ENGLISH, strict=True)]
    assert list(pairs) == expected
    assert [pairs[i] for i in range(3)] == expected
    assert pairs[-1] == expected[-1]
    assert pairs.parts == (("parallel_text", 3, 1.0),)
    with pytest.raises(IndexError):
        pairs[3]


NULLS = ["a", None, "c", "d"], ["a", "b", None, "d"]
TRANSLATIONS = rows_of_json(*NULLS, nested=True)
TRANSLATIONS[1] = '{"translation":null}'


@pytest.mark.parametrize(
    "files",
    [
        {"train_parquet": table(*NULLS)},
        {"train_parquet": table(*NULLS, nested=True)},
        {"train_jsonl": rows_of_json(*NULLS)},
        {"train_jsonl": TRANSLATIONS},
        {"train_de": ["a", "", "c", "d"], "train_en": ["a", "b", "", "d"]},
    ],
    ids=["parquet", "parquet of translations", "jsonl", "jsonl of translations", "lines"],
)
def test_a_null_is_an_empty_text_which_is_dropped(config, files):
    write(config, **files)
    pairs = read_pairs(config, "train")
    assert list(pairs) == [Pair("a", "a"), Pair("d", "d")]
    (part,) = pairs.report["parts"]
    assert (part["problems"]["empty"]["count"], part["problems"]["empty"]["action"]) == (2, "drop")


def test_crlf_and_bom_are_reported(config):
    write(config, train_de=b"\xef\xbb\xbfa\r\nb\r\nc\n", train_en=b"a\nb\nc")
    (part,) = read_pairs(config, "train").report["parts"]
    assert part["files"] == [
        {"file": "train.de", "lines": 3, "crlf_lines": 2, "bom": True},
        {"file": "train.en", "lines": 3, "crlf_lines": 0, "bom": False},
    ]


def test_only_a_line_feed_ends_a_line(tmp_path):
    inside = "a\u0085b\u2028c\x0bd\x0ce\x1cf\rg"
    (tmp_path / "x").write_bytes(f"{inside}\nnext\r\n\n".encode())
    assert list(read_lines(tmp_path / "x")) == [inside.encode(), b"next", b""]
    assert scan(tmp_path / "x").lines == 3


def test_unequal_counts_name_both_files_and_counts(config):
    write(config, train_de=GERMAN, train_en=ENGLISH[:2])
    with pytest.raises(UserError, match=r"train\.de has 3 lines, but .*train\.en has 2.*unequal_lines=drop"):
        read_pairs(config, "train")
    pairs = read_pairs(with_rules(config, unequal_lines="drop"), "train")
    assert [pair.source for pair in pairs] == GERMAN[:2]
    assert pairs.report["parts"][0]["surplus_lines"] == 1


@pytest.mark.parametrize("split", ["valid", "test"])
def test_held_out_sets_are_never_shortened(config, split):
    rules = {rule: "drop" for rule in ("unequal_lines", "invalid_utf8", "empty", "too_long", "duplicates")}
    config = with_rules(config, **rules, max_characters=5)
    write(config, **{f"{split}_de": ["", "too long to drop", "x", "x"], f"{split}_en": ["a", "b", "x", "x"]})
    pairs = read_pairs(config, split)
    assert [pair.source for pair in pairs] == ["", "too long to drop", "x", "x"]
    problems = pairs.report["parts"][0]["problems"]
    assert {name: facts["count"] for name, facts in problems.items()} == {
        "empty": 1,
        "too_long": 1,
        "length_ratio": 1,
        "duplicates": 1,
    }
    write(config, **{f"{split}_de": GERMAN[:1]})
    with pytest.raises(UserError, match="never dropped"):
        read_pairs(config, split)
    write(config, **{f"{split}_de": b"a\nb\nc\n\xff\n"})
    with pytest.raises(UserError, match=rf"{split}\.de line 4\).*never dropped"):
        read_pairs(config, split)


BAD = (
    {"invalid_utf8": (b"\xff\xfe", b"b"), "empty": (b" \t", b"b")}
    | {"too_long": (b"a" * 21, b"b" * 20), "length_ratio": (b"abc", b"b" * 10)}
    | {"duplicates": (b"good", b"good")}
)
RULES = {"max_characters": 20, "max_length_ratio": 3.0}


class Rows(list):
    def read(self, indices):
        return [self[index] for index in indices]


def raw(rows, name="set"):
    return RawSplit(name, "identity", Rows(rows), ("de", "en"), ("x.de", "x.en"), "line")


@pytest.mark.parametrize(
    ("rule", "action"),
    # Bytes that are no text cannot be kept.
    [(r, a) for r in BAD for a in ("drop", "keep", "refuse") if (r, a) != ("invalid_utf8", "keep")],
)
def test_each_rule_drops_keeps_or_refuses(rule, action):
    split = raw([(b"good", b"good"), BAD[rule], (b"better", b"best")])
    rules = CleanConfig(**{"duplicates": "drop", "invalid_utf8": "drop"} | RULES | {rule: action})
    if action == "refuse":
        with pytest.raises(UserError, match=rf"1 pair is refused.*x\.(de|en) line 2.*clean\.{rule}=drop"):
            clean(split, rules, may_drop=True)
        return
    kept, _, report, _ = clean(split, rules, may_drop=True)
    assert report["problems"][rule]["count"] == 1
    assert report["problems"][rule]["examples"][0]["where"].endswith("line 2")
    if action == "drop":
        assert kept.tolist() == [0, 2]
    else:
        assert kept is None
    assert report["pairs"] == (2 if action == "drop" else 3)


def test_all_refusals_are_reported_together_with_counts():
    split = raw([(b"", b"x"), (b"a", b"b"), (b"x", b""), (b"a", b"b"), (b"a", b"b")])
    with pytest.raises(UserError) as error:
        clean(split, CleanConfig(empty="refuse", duplicates="refuse"), may_drop=True)
    empty, duplicates = str(error.value).split("\n")
    assert "2 pairs are refused: empty or blank side (x.de line 1, x.en line 3)" in empty
    assert "2 pairs are refused: exact duplicates (x.de line 4, x.de line 5)" in duplicates


def test_boundaries_of_the_length_rules():
    rules = CleanConfig(**RULES)
    rows = [
        (b"a" * 20, b"b" * 20),
        (b"a" * 21, b"b" * 21),
        (b"abc", b"b" * 9),
        (b"abc", b"b" * 10),
        (b"ab" * 3, b"a"),
    ]
    kept, *_ = clean(raw(rows), rules, may_drop=True)
    assert kept.tolist() == [0, 2]
    # Characters count, not bytes: ten letters of two bytes each are as long as ten of one.
    kept, *_ = clean(raw([(("ä" * 20).encode(), b"b" * 20)]), rules, may_drop=True)
    assert kept is None


def test_duplicates_are_told_apart_by_where_the_source_ends():
    rules = CleanConfig(duplicates="drop")
    kept, _, report, _ = clean(raw([(b"a", b"bc"), (b"ab", b"c")]), rules, may_drop=True)
    assert kept is None and report["problems"] == {}


class Numbers:
    """Pairs of numbers as text, made when they are read; every thousandth is the first one again."""

    def __len__(self):
        return 24_000

    def read(self, rows):
        numbers = [0 if row % 1000 == 999 else row if row < 20_000 else 100 * row for row in rows]
        return [(b"%d" % number, b"%d" % number) for number in numbers]


def test_finding_duplicates_takes_a_few_numbers_a_pair(monkeypatch):
    """Whatever becomes of them; pairs that another rule drops are none."""
    monkeypatch.setattr(cleaning, "BLOCK", 1000)
    split = RawSplit("x", "x", Numbers(), ("x", "y"), ("x.x", "x.y"), "line")
    tracemalloc.start()
    kept, _, report, _ = clean(split, CleanConfig(max_characters=5), may_drop=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(kept) == 20_004
    assert peak < 110 * len(split)  # of it about 50 for the pairs being read
    dropping = CleanConfig(max_characters=5, duplicates="drop")
    fewer, _, dropped, _ = clean(split, dropping, may_drop=True)
    assert sorted(set(kept) - set(fewer)) == [*range(999, 24_000, 1000)]
    for found, action in ((report, "keep"), (dropped, "drop")):
        found = found["problems"]["duplicates"]
        assert (found["count"], found["action"]) == (24, action)
        assert [example["where"] for example in found["examples"]][:2] == ["x.x line 1000", "x.x line 2000"]
        assert found["examples"][0]["target"] == "0"


def test_verdicts_are_remembered_until_rules_change(tmp_path):
    split = raw([(b"a", b"b"), (b"", b"b")])
    first, _, report, _ = load_or_clean(split, CleanConfig(), may_drop=True, folder=tmp_path)
    empty = RawSplit(**{**vars(split), "rows": None})  # would fail if it were read
    again, _, same_report, _ = load_or_clean(empty, CleanConfig(), may_drop=True, folder=tmp_path)
    assert first.tolist() == again.tolist() == [0] and report == same_report
    kept, *_ = load_or_clean(split, CleanConfig(empty="keep"), may_drop=True, folder=tmp_path)
    assert kept is None
    with pytest.raises(TypeError):  # it has to be read
        load_or_clean(empty, CleanConfig(max_characters=1), may_drop=True, folder=tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"has no train\.de \(or train\.de\.gz or \.zst, or train\.tsv .*it is empty"),
        ({"trian_de": GERMAN, "train_en": ENGLISH}, r"has no train\.de .*it has trian\.de"),
        ({"train_de": GERMAN}, r"has no train\.en "),
        ({"train_de": b"", "train_en": b""}, r"train\.de is empty"),
        ({"train_de": GERMAN, "train_de_gz": GERMAN}, r"both train\.de and train\.de\.gz"),
        ({"train_de": GERMAN, "train_tsv": b"a\tb\n"}, r"both train\.tsv and train\.de"),
        ({"train_tsv": b"a\tb\na b\n"}, r"train\.tsv line 2 has 1 columns; a \.tsv line has 2"),
        ({"train_tsv": b"a\tb\tc\td\n"}, r"train\.tsv line 1 has 4 columns"),
        ({"train_tsv": b"a\tb\tc\n"}, r"train\.tsv line 1 has the weight 'c'"),
        ({"train_de": GERMAN, "train_jsonl": b"{}"}, r"both train\.jsonl and train\.de"),
        ({"train_tsv": b"a\tb\n", "train_parquet": b""}, r"both train\.tsv and train\.parquet"),
        ({"train_jsonl": ['{"de": "a", "en": "b"}', "{]"]}, r"train\.jsonl line 2 is no JSON object of"),
        ({"train_jsonl": ['{"de": "a"}']}, r"line 1 .* such as \{\"de\": .*: it has no 'en'"),
        ({"train_jsonl": ['{"de": "a", "en": 3}']}, r"line 1 is no JSON object .*: a text is int"),
        ({"train_de": ["", " "], "train_en": ["", ""]}, r"0 of 2 are left \(empty 2\)"),
        ({"train_de": b"a\n\xe4\n", "train_en": b"a\nb\n"}, r"\(train\.de line 2\).*invalid_utf8=drop"),
    ],
)
def test_mistakes_are_named_with_the_remedy(config, files, message):
    write(config, **files)
    with pytest.raises(UserError, match=message):
        read_pairs(config, "train")


@pytest.mark.parametrize("name", ["text", "text.gz", "text.zst"])
def test_a_file_has_no_bytes_after_its_last(name, tmp_path):
    with pyarrow.output_stream(tmp_path / name) as file:  # packed as the name says
        file.write(b"ein Hund\n")
    for start, rest in ((4, b"Hund\n"), (9, b""), (10**7, b"")):
        with open_unpacked(tmp_path / name, start=start) as file:
            assert file.read() == rest


@pytest.mark.parametrize(("packing", "name"), [("gzip", "gz"), ("Zstandard", "zst")])
def test_a_damaged_packed_file_is_named(config, packing, name):
    write(config, train_en=ENGLISH, **{f"train_de_{name}": GERMAN})
    path = Path(config.text_dir) / f"train.de.{name}"
    whole = path.read_bytes()
    for damaged in (b"not packed", whole[:-9], whole + b"more"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"train\.de\.{name} is not a complete {packing} file"):
            read_pairs(config, "train")
    path.write_bytes(whole + whole)  # as `cat a b > c` joins packed files
    write(config, train_en=ENGLISH * 2)
    assert [pair.source for pair in read_pairs(config, "train")] == GERMAN * 2


def test_a_damaged_parquet_file_is_named(config):
    write(config, train_parquet=table(GERMAN, ENGLISH))
    path = Path(config.text_dir) / "train.parquet"
    for damaged in (b"", b"no parquet file", path.read_bytes()[:-9]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"train\.parquet is no complete parquet file"):
            read_pairs(config, "train")


def test_folders_that_are_not_there(config, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("text")
    with pytest.raises(UserError, match=r"/file is a file, not a folder; set --config\.data\.text_dir"):
        read_pairs(replace(config, text_dir=str(tmp_path / "file")), "train")
    with pytest.raises(UserError, match="text_dir is empty"):
        read_pairs(replace(config, text_dir=""), "train")
    with pytest.raises(UserError, match=r"absent does not exist; set --config\.data\.text_dir"):
        read_pairs(replace(config, text_dir=str(tmp_path / "absent")), "train")
    monkeypatch.chdir(tmp_path)  # the folder of a run that was trained elsewhere
    with pytest.raises(UserError, match=rf"{tmp_path}/absent does not exist; .* where the run was trained"):
        read_pairs(replace(config, text_dir="absent"), "train")
    with pytest.raises(UserError, match="absent does not exist"):
        has_split(replace(config, text_dir=str(tmp_path / "absent")), "test")
    assert not has_split(config, "test")
    write(config, test_en=ENGLISH)  # one side is a mistake to be told when it is read
    assert has_split(config, "test")


def test_edited_files_are_prepared_anew_and_unchanged_ones_reused(config, monkeypatch):
    write(config, train_de=GERMAN, train_en=ENGLISH)
    before = read_pairs(config, "train")
    past = os.stat(os.path.join(config.text_dir, "train.de")).st_mtime - 60
    for name in ("train.de", "train.en"):
        os.utime(os.path.join(config.text_dir, name), (past, past))
    assert read_pairs(config, "train").fingerprint == before.fingerprint
    with monkeypatch.context() as patch:  # settled files are not even read
        patch.setattr(text_files, "scan", None)
        assert list(read_pairs(config, "train")) == list(before)
    write(config, train_en=[*ENGLISH[:2], "Until tomorrow!!!"])  # as long as before
    after = read_pairs(config, "train")
    assert after[2].target == "Until tomorrow!!!"
    assert after.fingerprint != before.fingerprint
    assert list(before)[2].target == ENGLISH[2]  # its block of lines is in memory


def test_a_file_that_looks_the_same_is_read_again(config, tmp_path):
    """`cp -p` onto a file keeps its inode, and brings size and time of modification along."""
    write(config, train_de=GERMAN, train_en=ENGLISH)
    other = tmp_path / "other.en"
    other.write_text("\n".join([*ENGLISH[:2], "Until tomorrow!!!"]) + "\n")
    path = os.path.join(config.text_dir, "train.en")
    for name in (path, other):
        os.utime(name, (1e9, 1e9))
    before = read_stamp(Path(path))
    assert list(read_pairs(config, "train"))[2].target == ENGLISH[2]
    subprocess.run(["cp", "-p", other, path], check=True)
    after = read_stamp(Path(path))
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, True, False, True]
    assert list(read_pairs(config, "train"))[2].target == "Until tomorrow!!!"


def test_a_file_just_written_is_not_remembered(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"a\n")
    text_files.load_or_scan(path, columns=1, folder=tmp_path / "scans")
    assert not (tmp_path / "scans").exists()
    os.utime(path, (1e9, 1e9))
    first = text_files.load_or_scan(path, columns=1, folder=tmp_path / "scans")
    assert first.lines == 1
    scan, scanned = text_files.scan, []
    monkeypatch.setattr(text_files, "scan", lambda *a, **k: scanned.append(1) or scan(*a, **k))
    assert text_files.load_or_scan(path, columns=1, folder=tmp_path / "scans") == first and not scanned
    os.utime(path, (1e9 + 5, 1e9 + 5))
    assert text_files.load_or_scan(path, columns=1, folder=tmp_path / "scans") == first and scanned


@pytest.mark.parametrize("suffix", ["de", "de_gz", "de_zst", "parquet"])
def test_text_of_several_blocks_is_read_in_any_order(config, monkeypatch, suffix):
    monkeypatch.setattr(text_files, "BLOCK", 8)
    numbers = [f"{number:03d}" for number in range(100)]
    if suffix == "parquet":
        write(config, train_parquet=table(numbers, numbers, nested=True))
    else:
        write(config, **{f"train_{suffix}": numbers, "train_en": [f"{one}\r" for one in numbers]})
    pairs = read_pairs(config, "train")
    assert [pair.source for pair in pairs] == numbers == [pair.target for pair in pairs]
    order = np.random.default_rng(0).permutation(100)
    assert [pairs[i].source for i in order] == [numbers[i] for i in order]
    assert [pair.source for pair in pairs.select(np.array([3, 3, 40, 99]))] == ["003", "003", "040", "099"]


@pytest.mark.parametrize(("suffix", "times"), [("", 3), ("_gz", 1)])
def test_a_packed_file_is_unpacked_once_for_ascending_rows(config, monkeypatch, suffix, times):
    monkeypatch.setattr(text_files, "BLOCK", 8)
    numbers = [f"{number:03d}" for number in range(100)]
    write(config, **{f"train_de{suffix}": numbers, "train_en": numbers})
    pairs, opened = read_pairs(config, "train"), []

    def read_blocks(path, starts, original=text_files.read_blocks, **number):
        opened.append(path.name.removesuffix(".gz"))
        return original(path, starts, **number)

    monkeypatch.setattr(text_files, "read_blocks", read_blocks)
    assert [pairs[i].source for i in (9, 15, 16, 50, 99)] == ["009", "015", "016", "050", "099"]
    assert opened == ["train.de", "train.en"] * times
    assert pairs[2].source == "002" and len(opened) == 2 * times + 2


def test_rows_are_read_again_after_an_error(config, monkeypatch):
    monkeypatch.setattr(text_files, "BLOCK", 2)
    write(config, train_jsonl=['{"de": "a", "en": "b"}'] * 3 + ["{}"] + ['{"de": "c", "en": "d"}'])
    split = open_train_set(config)
    for _ in range(2):
        assert split.read([0]) == [(b"a", b"b")]
        with pytest.raises(UserError, match="train.jsonl line 4 is no JSON object"):
            split.read([2])
        with pytest.raises(UserError, match="train.jsonl line 4 is no JSON object"):
            split.read([2])
        assert split.read([4]) == [(b"c", b"d")]


def test_lines_of_json_in_several_blocks_and_both_directions(config, monkeypatch):
    monkeypatch.setattr(text_files, "BLOCK", 2)
    rows = [{"de": f"{number}\ufffd", "en": f"two\nlines {number}"} for number in range(5)]
    write(config, train_jsonl=[*map(json.dumps, rows)])
    pairs = read_pairs(replace(config, source_language="en", target_language="de"), "train")
    assert list(pairs) == [Pair(f"two lines {number}", f"{number}\ufffd") for number in range(5)]
    both = replace(config, dataset="parallel_text:de-en,parallel_text:en-de", target_tags="never")
    assert len(read_pairs(both, "train")) == 10  # the columns have names
    alone = read_pairs(replace(config, source_language="", target_language="de"), "train")
    assert [tuple(pair) for pair in alone] == [("", f"{number}\ufffd") for number in range(5)]
    write(config, train_jsonl=[*map(json.dumps, rows), "[]"])
    with pytest.raises(UserError, match=r"train\.jsonl line 6 is no JSON object"):
        read_pairs(config, "train")


def test_a_blank_last_line_of_json_is_left_out(config, monkeypatch):
    row = '{"de": "a", "en": "b"}'
    for block in (2, 3, 4):
        monkeypatch.setattr(text_files, "BLOCK", block)
        write(config, train_jsonl=f"{row}\r\n{row}\n{row}\n\r\n".encode())
        assert list(read_pairs(config, "train")) == [Pair("a", "b")] * 3
    write(config, train_jsonl=f"{row}\n\n{row}\n".encode())
    with pytest.raises(UserError, match=r"train\.jsonl line 2 is no JSON object"):
        read_pairs(config, "train")


@pytest.mark.parametrize("suffix", ["de", "de_gz", "de_zst"])
def test_a_line_of_a_gigabyte_is_not_read(config, suffix, monkeypatch):
    monkeypatch.setattr(text_files, "_LONGEST_LINE", 1 << 16)
    line = "a" * ((1 << 16) - 2)
    write(config, **{f"train_{suffix}": ["a", line, line * 400], "train_en": ["b"] * 3})
    tracemalloc.start()
    with pytest.raises(UserError, match=r"train\.de\S* line 3 has 16 MB or more; a line is a sentence"):
        read_pairs(config, "train")
    assert tracemalloc.get_traced_memory()[1] < 100 << 16
    tracemalloc.stop()


@pytest.mark.parametrize("suffix", ["de", "de_gz", "parquet"])
def test_a_block_of_long_lines_is_not_read(config, suffix, monkeypatch):
    """A file of a kilobyte may have gigabytes in lines of which none is too long."""
    monkeypatch.setattr(text_files, "BLOCK", 64)
    monkeypatch.setattr(text_files, "_LARGEST_BLOCK", 1 << 14)
    for length, refused in [(40, False), (400, True)]:
        texts = ["a" * length] * 640  # of all blocks together, the first have more bytes as well
        if suffix == "parquet":
            write(config, train_parquet=table(texts, texts))
        else:
            write(config, **{f"train_{suffix}": texts, "train_en": texts})
        with pytest.raises(UserError, match="256 MB or more in 64 lines") if refused else nullcontext():
            pairs = read_pairs(config, "train")
            assert pairs[600] == pairs[0] == Pair(texts[0], texts[0])


def test_columns_of_parquet_have_names(config):
    texts = table(["a", None], ["two\nlines", "d"])
    write(config, train_parquet=texts.set_column(1, "en", texts["en"].cast(pyarrow.large_string())))
    back = replace(config, source_language="en", target_language="de", clean=CleanConfig(empty="keep"))
    assert list(read_pairs(back, "train")) == [Pair("two lines", "a"), Pair("d", "")]
    alone = replace(config, source_language="")
    assert [tuple(pair) for pair in read_pairs(alone, "train")] == [("", "two lines"), ("", "d")]
    with pytest.raises(UserError, match=r"train\.parquet has no language fr; it has de, en"):
        read_pairs(replace(config, source_language="fr"), "train")
    numbers = texts.append_column("fr", pyarrow.array([1, 2]))
    write(config, train_parquet=numbers)
    with pytest.raises(UserError, match=r"has no language fr; it has de, en"):
        read_pairs(replace(config, source_language="fr"), "train")


def test_a_file_that_changes_while_it_is_read_is_refused(config, monkeypatch):
    write(config, train_de=GERMAN, train_en=ENGLISH)
    read_blocks = text_files.read_blocks

    def read_and_touch(path, starts, **number):
        os.utime(path, (1e9, 1e9))
        return read_blocks(path, starts, **number)

    monkeypatch.setattr(text_files, "read_blocks", read_and_touch)
    with pytest.raises(UserError, match=r"train\.de changed while it was being read"):
        read_pairs(config, "train")
    monkeypatch.undo()
    assert len(read_pairs(config, "train")) == 3  # nothing half-made was left in the way


def test_a_full_disk_is_said_with_the_folder_and_leaves_nothing(config):
    texts = [f"{n * 7919 % 10007} {n * 104729 % 99991}" for n in range(2000)]
    write(config, train_de=texts, train_en=texts[::-1])
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            read_pairs(config, "train")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert caught.value.errno == errno.EFBIG and caught.value.filename.startswith(config.cache_dir)
    assert len(read_pairs(config, "train")) == 2000
