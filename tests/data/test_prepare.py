"""Preparation: the parts of the work, and what the training set shares with held-out data."""

import contextlib
import dataclasses
import functools
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from mortal_preparation import MortalCheckBlocks, MortalTokenizeChunks

from flaxformer_mt.config import CleanConfig
from flaxformer_mt.corpus import cleaning
from flaxformer_mt.corpus.pair_checks import CheckBlocks
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.data import prepare as preparing
from flaxformer_mt.data import token_store
from flaxformer_mt.data.corpus_diagnostics import describe_overlap, find_overlap
from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.tracking.progress_display import WorkProgress
from flaxformer_mt.workers.worker_pool import PoolOptions


def test_each_part_that_takes_long_is_shown(tiny_config, tmp_path):
    parts = []

    class Progress(WorkProgress):
        @contextlib.contextmanager
        def part(self, name, **options):
            counts = []
            yield counts.append
            parts.append((name, options.get("total"), sum(counts)))

    data = dataclasses.replace(tiny_config.data, cache_dir=str(tmp_path))  # nothing is prepared there
    preparing.prepare(dataclasses.replace(tiny_config, data=data), progress=Progress(None))
    assert parts == [
        ("reading parallel_text", None, 0),
        ("checking parallel_text", 64, 64),
        ("training the vocabulary (bpe, 40 subwords)", None, 0),
        ("tokenizing", 64, 64),
    ]


def test_vocabularies_of_which_a_killed_process_wrote_one_are_written_again(tiny_config, tmp_path):
    """Those of a run with updates are missed, since others might have other pieces."""
    vocab = dataclasses.replace(tiny_config.vocab, joint=False)
    config = dataclasses.replace(tiny_config, vocab=vocab)
    preparing.prepare(config, tmp_path)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "vocab").iterdir()}
    assert sorted(whole) == ["manifest.json", "source.model", "target.model"]
    for lost in (["target.model"], ["source.model", "target.model"]):
        for name in ["manifest.json", *lost]:
            (tmp_path / "vocab" / name).unlink()
        preparing.prepare(config, tmp_path)
        assert whole == {path.name: path.read_bytes() for path in (tmp_path / "vocab").iterdir()}
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    for name in ("manifest.json", "target.model"):
        (tmp_path / "vocab" / name).unlink()
    with pytest.raises(UserError, match="holds no vocabulary"):
        preparing.prepare(config, tmp_path)


@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_what_workers_prepare_is_the_same_whichever_of_them_die(tiny_config, tmp_path, monkeypatch, engine):
    """One of two dies while it checks, and one while it tokenizes."""
    if engine == "ray":
        pytest.importorskip("ray")
        here = Path(__file__).parent
        monkeypatch.setenv("PYTHONPATH", f"{here}:{here.parents[1]}")  # for the workers of the cluster
    for module, size, few in ((cleaning, "BLOCK", "_FEW_BLOCKS"), (token_store, "CHUNK", "_FEW_CHUNKS")):
        monkeypatch.setattr(module, size, 8)
        monkeypatch.setattr(module, few, 0)

    def prepare(name, **options):
        data = dataclasses.replace(tiny_config.data, cache_dir=str(tmp_path / name))
        preparing.prepare(dataclasses.replace(tiny_config, data=data), **options)
        files = [*(tmp_path / name).glob("cleaned/*/*"), *(tmp_path / name).glob("tokens/*/*")]
        return {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files}

    alone = prepare("alone")
    folder = {"folder": str(tmp_path)}
    monkeypatch.setattr(cleaning, "CheckBlocks", functools.partial(MortalCheckBlocks, **folder))
    monkeypatch.setattr(token_store, "TokenizeChunks", functools.partial(MortalTokenizeChunks, **folder))
    with pytest.warns(FlaxformerWarning, match="will be done by another one"):
        shared = prepare("shared", pool=PoolOptions(2, "local" if engine == "ray" else None))
    assert (tmp_path / "checking").exists() and (tmp_path / "tokenizing").exists()
    assert shared == alone and len(alone) > 5


# ---- overlap ----
class Split(list):
    """Pairs with the hashes that cleaning finds, and tags."""

    tags = ()

    def read_hashes(self):
        sides = [[blake2b(text.encode(), digest_size=8).digest() for text in pair] for pair in self]
        yield self.tags, np.frombuffer(b"".join(sum(sides, [])), "<u8").reshape(-1, 2)


def test_hashes_are_those_of_cleaning():
    pairs = [(b"a", b"bc"), (b"", b"x")]
    actions = dict.fromkeys(("invalid_utf8", "empty", "too_long", "length_ratio"), "keep")
    actions |= {"numbers": "off", "script": "off", "language": "off"}
    found = CheckBlocks(CleanConfig(), actions, ("de", "en"))(pairs).hashes
    ((_, expected),) = Split([Pair("a", "bc"), Pair("", "x")]).read_hashes()
    np.testing.assert_array_equal(found, expected)


def test_shared_pairs_and_sources_are_counted_and_warned_of():
    train = Split([Pair("a", "x"), Pair("b", "y"), Pair("ab", "c"), Pair("b", "y"), Pair("", "z")])
    test = Split([Pair("a", "x"), Pair("a", "x"), Pair("b", "other"), Pair("a", "bc"), Pair("", "new")])
    held_out = {"valid": Split([Pair("new", "x")]), "test": test}
    found = find_overlap(train, held_out)
    assert found == {
        "valid": {"of": 1, "pairs": 0, "sources": 0},
        "test": {"of": 5, "pairs": 2, "sources": 4},
    }
    (warning,) = describe_overlap(found)
    assert warning.startswith("2 of the 5 pairs of the test set (40.0%) also occur in the training set")
    test.tags = (">>fr<<",)  # the sources begin with other words
    assert find_overlap(train, held_out)["test"] == {"of": 5, "pairs": 0, "sources": 0}
