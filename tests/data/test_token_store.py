"""Token stores: what is in them, when they are built, and that nobody ever sees half of one."""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import numpy as np
import pytest

from flaxformer_mt.config import NoiseConfig, VocabConfig
from flaxformer_mt.corpus.documents import Context
from flaxformer_mt.corpus.pairs import Pair, Pairs, Part, RawSplit, RowSet
from flaxformer_mt.data import token_store as store_module
from flaxformer_mt.data.epoch_stores import EpochStores
from flaxformer_mt.data.text_noise import TextNoise
from flaxformer_mt.data.token_store import BuildStopped, TokenStore
from flaxformer_mt.data.tokenization import NOTHING, Drawing, TokenizeChunks, step_seed
from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.vocab import Vocabs, make_vocabs
from flaxformer_mt.vocab.pretrained_vocab import PretrainedMetadata, PretrainedVocab
from flaxformer_mt.workers.worker_pool import PoolOptions


class FakePairs(list):
    has_source = True
    columns, context = {}, None
    kept = (None,)
    target_tags = ("",)
    languages = (("de", "en"),)

    def __init__(self, pairs, fingerprint: str = "toy") -> None:
        super().__init__(pairs)
        self.fingerprint = fingerprint
        self.parts = (Part("toy", len(self), 1.0),)

    def locate(self, numbers):
        return np.zeros(len(numbers), int), numbers


class Unreadable(FakePairs):
    """Pairs that fail after some have been read."""

    good = 0

    def __iter__(self):
        for index, pair in enumerate(super().__iter__()):
            if index == self.good:
                raise UserError("train.de line 31 is not UTF-8")
            yield pair


class FakeVocab(NamedTuple):
    """Ids are code points."""

    size: int
    fingerprint: str = "fake"
    pad_id: int = 0

    def tokenize_all(self, texts, *, sampling=0.0, seed=None, threads=-1):
        return [np.array([*map(ord, text), 2], np.int32) for text in texts]


def make_pairs(number: int = 100, **options) -> FakePairs:
    pairs = [Pair(f"der hund sieht {i} häuser", f"the dog sees {i} houses") for i in range(number)]
    return FakePairs(pairs, **options)


@pytest.fixture(scope="module")
def vocabs(tmp_path_factory) -> Vocabs:
    folder = tmp_path_factory.mktemp("vocab")
    return make_vocabs(VocabConfig(size=320, joint=False), make_pairs(), folder)


def ids_of(store: TokenStore) -> list[tuple[list[int], list[int]]]:
    return [(source.tolist(), target.tolist()) for source, target in (store[i] for i in range(len(store)))]


def test_a_store_holds_the_ids_of_every_pair(vocabs, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "CHUNK", 7)  # 100 pairs are then 15 chunks, the last of two
    pairs = make_pairs()
    store = TokenStore.build(pairs, vocabs, tmp_path)
    expected = [(vocabs.source.tokenize(pair.source), vocabs.target.tokenize(pair.target)) for pair in pairs]
    assert ids_of(store) == expected
    assert len(store) == 100 and store.parts == pairs.parts
    assert store.source_lengths.tolist() == [len(source) for source, _ in expected]
    assert store.target_lengths.tolist() == [len(target) for _, target in expected]
    assert store.source_lengths.dtype == store.target_lengths.dtype == np.int32
    assert store.source.tokens.dtype == np.uint16 and store.source.offsets.dtype == np.int64
    with pytest.raises(IndexError):
        store[100]


def test_large_vocabularies_take_wider_ids(tmp_path):
    store = TokenStore.build(
        FakePairs([Pair("\U0001f44d", "a")]),
        Vocabs(FakeVocab(0x110000), FakeVocab(1 << 16), joint=False),
        tmp_path,
    )
    assert ids_of(store) == [([0x1F44D, 2], [97, 2])]
    assert (store.source.tokens.dtype, store.target.tokens.dtype) == (np.int32, np.uint16)


def test_each_input_has_its_own_store(vocabs, tmp_path):
    other_vocabs = make_vocabs(VocabConfig(size=310), make_pairs(), tmp_path / "vocab")
    builds = [
        TokenStore.build(make_pairs(), vocabs, tmp_path),
        TokenStore.build(make_pairs(fingerprint="other"), vocabs, tmp_path),
        TokenStore.build(make_pairs(), other_vocabs, tmp_path),
        TokenStore.build(make_pairs(), Vocabs(vocabs.source, other_vocabs.target, False), tmp_path),
        TokenStore.build(make_pairs(), vocabs, tmp_path, Drawing(0.1, 1)),
        TokenStore.build(make_pairs(), vocabs, tmp_path, Drawing(0.2, 1)),
        TokenStore.build(make_pairs(), vocabs, tmp_path, Drawing(0.1, 2)),
    ]
    assert len({store.folder for store in builds}) == len(builds)
    assert TokenStore.build(make_pairs(), vocabs, tmp_path, Drawing(seed=5)).folder == builds[0].folder


def test_weights_are_those_of_the_pairs_at_hand(vocabs, tmp_path):
    TokenStore.build(make_pairs(), vocabs, tmp_path)
    pairs = make_pairs()
    pairs.parts = (Part("toy", 100, 2.5),)
    assert TokenStore.build(pairs, vocabs, tmp_path).parts == pairs.parts


def test_a_build_that_fails_leaves_nothing_and_can_be_repeated(vocabs, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "CHUNK", 7)
    broken = Unreadable(make_pairs())
    broken.good = 30
    with pytest.raises(UserError, match="^train.de line 31 is not UTF-8$"):
        TokenStore.build(broken, vocabs, tmp_path)
    assert not list(tmp_path.iterdir())
    assert len(TokenStore.build(make_pairs(), vocabs, tmp_path)) == 100


def test_of_two_builds_at_once_one_waits_for_the_other(vocabs, tmp_path):
    reading, read = threading.Event(), []

    class Slow(FakePairs):
        def __iter__(self):
            read.append(threading.get_ident())
            reading.set()
            time.sleep(0.5)  # the other one arrives
            return super().__iter__()

    stores: list[TokenStore] = []
    threads = [
        threading.Thread(target=lambda: stores.append(TokenStore.build(Slow(make_pairs()), vocabs, tmp_path)))
        for _ in range(2)
    ]
    threads[0].start()
    assert reading.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert len(stores) == 2 and stores[0].folder == stores[1].folder and len(read) == 1
    assert ids_of(stores[0]) == ids_of(stores[1])
    assert list(tmp_path.iterdir()) == [stores[0].folder]


KILLED = """
import json, os, signal, sys, time
from flaxformer_mt.data import token_store
from flaxformer_mt.data.tokenization import Drawing, TokenizeChunks, step_seed
from flaxformer_mt.vocab import load_vocabs
from test_token_store import make_pairs

def write(path, record, original=token_store.write_atomically):
    original(path, record)
    if json.loads(record)[0] == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

token_store.CHUNK, token_store._SAVE_SECONDS, token_store.write_atomically = 7, 0, write
token_store.TokenStore.build(make_pairs(), load_vocabs(sys.argv[1]), sys.argv[2], Drawing(0.1, 1))
"""


@pytest.mark.parametrize("chunks", [1, 8, 15])
def test_a_killed_build_goes_on_where_it_was(vocabs, tmp_path, monkeypatch, chunks):
    monkeypatch.setattr(store_module, "CHUNK", 7)
    whole = TokenStore.build(make_pairs(), vocabs, tmp_path / "whole", Drawing(0.1, 1))
    vocabs.save(tmp_path / "vocab")
    path = os.pathsep.join([os.getcwd(), os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    arguments = [sys.executable, "-c", KILLED, tmp_path / "vocab", tmp_path / "killed", str(chunks)]
    assert subprocess.run(arguments, env=os.environ | {"PYTHONPATH": path}).returncode == -signal.SIGKILL
    (partial,) = (tmp_path / "killed").iterdir()
    # the next chunk was being written, and a file was about to be renamed
    with (partial / "source.values").open("ab") as file:
        file.write(b"half a chunk")
    (partial / "progress.jsonabcdefgh").write_text("half")
    counted: list[int] = []
    store = TokenStore.build(make_pairs(), vocabs, tmp_path / "killed", Drawing(0.1, 1), count=counted.append)
    assert counted[0] == min(7 * chunks, 100) and sum(counted) == 100
    assert list((tmp_path / "killed").iterdir()) == [store.folder]
    names = sorted(path.name for path in whole.folder.iterdir())
    assert names == sorted(path.name for path in store.folder.iterdir())
    for name in names:
        assert (store.folder / name).read_bytes() == (whole.folder / name).read_bytes()


class Rows(list):
    def read(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("workers", [None, 2])
def test_each_target_begins_with_the_tag_of_its_language(tmp_path, monkeypatch, workers):
    """The tag is one id, in front of the text and of its noise, also where a chunk has two languages."""
    monkeypatch.setattr(store_module, "CHUNK", 7)
    monkeypatch.setattr(store_module, "_FEW_CHUNKS", 0)
    tags = {"eng_Latn": 259, "fra_Latn": 260}
    facts = PretrainedMetadata("bytes", 261, 0, 1, 1, 2, tags=tags, target_tags=True)
    vocab = PretrainedVocab(facts, {})
    assert vocab.tokenize("eng_Latn yes") == [259, *(byte + 3 for byte in b"yes"), 1]
    splits, expected = [], []
    for language, tag, size in (("en", "eng_Latn", 10), ("fr", "fra_Latn", 11)):
        rows = Rows((b"a %d" % number, b"%s %d" % (language.encode(), number)) for number in range(size))
        sides = ("x.de", f"x.{language}")
        splits.append(RawSplit(language, language, rows, ("de", language), sides, "line", target_tag=tag))
        expected += [[tags[tag], *(byte + 3 for byte in target.upper()), 1] for _, target in rows]
    pairs = Pairs([RowSet(split, None, NOTHING, 1.0) for split in splits], fingerprint="x", report={})
    noise = TextNoise(NoiseConfig(upper_case=1.0), ())
    vocabs, pool = Vocabs(vocab, vocab, joint=True), PoolOptions(workers)
    store = TokenStore.build(pairs, vocabs, tmp_path, Drawing(noise=noise), pool=pool)
    assert [target for _, target in ids_of(store)] == expected


def test_a_damaged_store_is_built_again(vocabs, tmp_path):
    first = TokenStore.build(make_pairs(), vocabs, tmp_path)
    expected = ids_of(first)
    for name in ("source.values", "target.offsets", "manifest.json"):
        content = (first.folder / name).read_bytes()
        (first.folder / name).write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        with pytest.warns(FlaxformerWarning, match=rf"{first.folder} is damaged: .*built again"):
            assert ids_of(TokenStore.build(make_pairs(), vocabs, tmp_path)) == expected
        assert list(tmp_path.iterdir()) == [first.folder]
    TokenStore.build(Unreadable(make_pairs()), vocabs, tmp_path)  # whole: opened, not built


def test_a_place_that_cannot_be_written_and_no_pairs_are_refused(vocabs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written.*set data\.cache_dir"):
        TokenStore.build(make_pairs(), vocabs, tmp_path / "file")
    with pytest.raises(UserError, match="no sentence pairs"):
        TokenStore.build(FakePairs([]), vocabs, tmp_path)


def test_without_sampling_all_epochs_have_one_store(vocabs, tmp_path):
    stores = EpochStores(make_pairs(), vocabs, tmp_path, Drawing(0.0, 1))
    assert stores.store(0) is stores.store(7) is stores.base
    stores.close()
    assert [*tmp_path.iterdir()] == [stores.base.folder]


def test_with_sampling_an_epoch_is_a_function_of_seed_and_epoch(vocabs, tmp_path):
    pairs = make_pairs(30)
    stores = EpochStores(pairs, vocabs, tmp_path / "one", Drawing(0.3, 1))
    ids = [ids_of(stores.store(epoch)) for epoch in range(4)]
    assert stores.store(0) is stores.base
    assert all(ids[a] != ids[b] for a in range(4) for b in range(a))
    for source, target in ids[3]:
        assert vocabs.source.detokenize(source).startswith("der hund sieht")
        assert vocabs.target.detokenize(target).startswith("the dog sees")
    resumed = EpochStores(pairs, vocabs, tmp_path / "two", Drawing(0.3, 1))
    assert ids_of(resumed.store(3)) == ids[3]
    assert ids_of(EpochStores(pairs, vocabs, tmp_path / "two", Drawing(0.3, -2)).store(3)) != ids[3]


def test_source_and_target_and_chunks_are_sampled_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "CHUNK", 10)
    pairs = FakePairs([Pair("hund katze haus", "hund katze haus")] * 20)
    joint = make_vocabs(VocabConfig(size=320), make_pairs(), tmp_path / "vocab")
    ids = ids_of(TokenStore.build(pairs, joint, tmp_path, Drawing(0.5, 1)))
    assert [source for source, _ in ids] != [target for _, target in ids]
    assert ids[:10] != ids[10:]


def test_no_two_steps_draw_the_same_numbers(vocabs):
    noise = TextNoise(NoiseConfig(typos=0.1, random_text=0.1))
    facts = (True, (("de", "en"),), ("<2en>",), Context(2, 100))
    steps = TokenizeChunks(vocabs, Drawing(0.1, 1, noise), 1, *facts).steps()
    assert [*steps] == ["noise", "random words", "target tags", "source", "target", "context"]
    seeds = {step_seed(1, chunk, name) for chunk in range(50) for name in steps}
    assert len(seeds) == 50 * len(steps)


def test_old_epochs_are_removed_but_stay_readable(vocabs, tmp_path):
    stores = EpochStores(make_pairs(20), vocabs, tmp_path, Drawing(0.3, 1))
    opened = [stores.store(epoch) for epoch in range(5)]
    expected = ids_of(EpochStores(make_pairs(20), vocabs, tmp_path / "other", Drawing(0.3, 1)).store(1))
    kept = {opened[epoch].folder for epoch in (0, 3, 4)}
    assert {path for path in tmp_path.iterdir() if path.name != "other"} == kept
    assert ids_of(opened[1]) == expected  # a batch in the making goes on
    assert ids_of(stores.store(1)) == expected  # and who asks again gets it again
    stores.close()
    assert {path for path in tmp_path.iterdir() if path.name != "other"} == {opened[0].folder}


def test_closing_ends_a_build(vocabs, tmp_path):
    reading, outcome = threading.Event(), []

    class Slow(FakePairs):
        slow = False

        def __iter__(self):
            for pair in super().__iter__():
                if self.slow:
                    reading.set()
                    time.sleep(0.05)
                yield pair

    pairs = Slow(make_pairs(1000))
    stores = EpochStores(pairs, vocabs, tmp_path, Drawing(0.3, 1))
    pairs.slow = True

    def build() -> None:
        try:
            stores.store(1)
        except BuildStopped as stopped:
            outcome.append(stopped)

    thread = threading.Thread(target=build)
    thread.start()
    assert reading.wait(10)
    stores.close()
    thread.join(5)
    assert len(outcome) == 1
    assert [*tmp_path.iterdir()] == [stores.base.folder]


def test_tokens_are_counted_by_side(vocabs, tmp_path, monkeypatch):
    """In bounded memory: a few tokens at a time."""
    monkeypatch.setattr(store_module, "_COUNTED", 3)
    store = TokenStore.build(make_pairs(9), vocabs, tmp_path)
    source, target = store.count_tokens(source_size=vocabs.source.size, target_size=vocabs.target.size + 2)
    wanted = [np.zeros(vocabs.source.size), np.zeros(vocabs.target.size + 2)]
    for index in range(len(store)):
        for side, counts in zip(store[index], wanted, strict=True):
            for token in side:
                counts[token] += 1
    np.testing.assert_array_equal(source, wanted[0])
    np.testing.assert_array_equal(target, wanted[1])
    assert source.sum() > 3 and target[-1] == 0
