"""User-defined symbols are one piece in every kind of vocabulary, and given models must have them."""

import dataclasses
import json
import re
from typing import NamedTuple

import pyarrow
import pytest
from pyarrow import parquet

from flaxformer_mt.config import Config, DataConfig, VocabConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.data.prepare import prepare
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import make_vocabs
from flaxformer_mt.vocab.symbols import is_one_piece


class Pair(NamedTuple):
    source: str
    target: str


PAIRS = [Pair(f"der hund sieht {i} bäume", f"the dog sees {i} trees") for i in range(60)]
SIZES = {"bpe": 330, "unigram": 290, "char": 0, "word": 0}


def test_symbols_are_one_piece_in_both_directions_and_with_sampling(tmp_path):
    for kind, size in SIZES.items():
        config = VocabConfig(kind=kind, size=size, symbols=("<BT>", ">>fr<<"))
        vocab = make_vocabs(config, PAIRS, tmp_path / kind).source
        for symbol in config.symbols:
            assert is_one_piece(vocab, symbol), (kind, symbol)
            assert vocab.detokenize(vocab.tokenize(f"{symbol} der hund")) == f"{symbol} der hund"
        assert not is_one_piece(vocab, "<XY>")
        if kind in ("bpe", "unigram"):
            sampled = vocab.tokenize_all(["<BT> der hund"] * 4, sampling=0.5, seed=1)
            assert all("<BT>" in vocab.pieces(ids) for ids in sampled)


def test_a_given_model_must_have_the_symbols(tmp_path):
    make_vocabs(VocabConfig(size=330), PAIRS, tmp_path / "without")
    given = str(tmp_path / "without" / "source.model")
    with pytest.raises(UserError, match=r"vocab.symbols has <BT>, but .*source.model splits it"):
        make_vocabs(VocabConfig(source_model=given, symbols=("<BT>",)), PAIRS, tmp_path / "given")
    make_vocabs(VocabConfig(size=331, symbols=("<BT>",)), PAIRS, tmp_path / "with")
    given = str(tmp_path / "with" / "source.model")
    assert make_vocabs(VocabConfig(source_model=given, symbols=("<BT>",)), PAIRS, tmp_path / "ok").joint


@pytest.mark.parametrize(
    "form",
    [
        "train.tsv",
        "train.tsv.gz",
        "train.tsv.zst",
        "train.jsonl",
        "train.jsonl.gz",
        "train.parquet",
        "train.de",
    ],
)
def test_a_tag_that_the_vocabulary_splits_is_refused_before_training(tmp_path, form):
    """Whatever became of the table that `backtranslate` has written."""
    rows = [{"de": f"<BT> {a}", "en": b} for a, b in PAIRS]
    text = {
        "tsv": "".join(f"{row['de']}\t{row['en']}\n" for row in rows),
        "jsonl": "".join(f"{json.dumps(row)}\n" for row in rows),
        "de": "".join(f"{row['de']}\n" for row in rows),
    }
    if form == "train.parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / form)
    else:
        packing = {"gz": "gzip", "zst": "zstd"}.get(form.rpartition(".")[2])
        with pyarrow.output_stream(str(tmp_path / form), compression=packing) as file:
            file.write(text[form.split(".")[1]].encode())
    if form == "train.de":
        (tmp_path / "train.en").write_text("".join(f"{b}\n" for _, b in PAIRS), encoding="utf-8")
    (tmp_path / "report.json").write_text('{"tag": "<BT>", "dropped": {}}')
    data = DataConfig(
        dataset=f"parallel_text@{tmp_path}", cache_dir=str(tmp_path / "cache"), max_source_length=16
    )
    config = Config(data=data, vocab=VocabConfig(size=330))
    with pytest.raises(UserError, match="begin with the tag <BT>, .* --config.vocab.symbols=<BT>"):
        prepare(config)
    prepared = prepare(dataclasses.replace(config, vocab=VocabConfig(size=330, symbols=("<BT>",))))
    assert "<BT>" in prepared.vocabs.source.pieces(prepared.train.base[0][0])


def test_senseless_symbols_are_refused_by_name():
    for symbols in (("",), ("<a b>",), ("<BT>", "<BT>"), ("<s>",), ("<0x0A>",)):
        with pytest.raises(UserError, match=f"vocab.symbols has .*{re.escape(symbols[0])}"):
            validate(Config(vocab=VocabConfig(symbols=symbols)))
