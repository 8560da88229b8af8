"""Preparation: the parts of the work, as they are shown."""

import contextlib
import dataclasses
import functools
from pathlib import Path

import pytest
from mortal_preparation import MortalCheckBlocks, MortalTokenizeChunks

from flaxformer_mt.corpus import cleaning
from flaxformer_mt.data import prepare as preparing
from flaxformer_mt.data import token_store
from flaxformer_mt.errors import FlaxformerWarning
from flaxformer_mt.tracking.progress_display import WorkProgress
from flaxformer_mt.workers.worker_pool import Hands


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
        ("training the vocabulary (bpe, 40 pieces)", None, 0),
        ("tokenizing", 64, 64),
    ]


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
        files = [*(tmp_path / name).glob("cleaned/*"), *(tmp_path / name).glob("tokens/*/*")]
        return {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files}

    alone = prepare("alone")
    folder = {"folder": str(tmp_path)}
    monkeypatch.setattr(cleaning, "CheckBlocks", functools.partial(MortalCheckBlocks, **folder))
    monkeypatch.setattr(token_store, "TokenizeChunks", functools.partial(MortalTokenizeChunks, **folder))
    with pytest.warns(FlaxformerWarning, match="will be done by another one"):
        shared = prepare("shared", hands=Hands(2, "local" if engine == "ray" else None))
    assert (tmp_path / "checking").exists() and (tmp_path / "tokenizing").exists()
    assert shared == alone and len(alone) > 5
