"""Pairs held out by digest: exact numbers, no sentence of theirs in the training set, the same each time."""

import dataclasses

import numpy as np
import pytest

from flaxformer_mt.config import CleanConfig, DataConfig
from flaxformer_mt.corpus import has_split, read_pairs
from flaxformer_mt.corpus.pair_checks import digest_sentence
from flaxformer_mt.data.prepare import find_overlap
from flaxformer_mt.errors import UserError

NUMBER = 400


def lines(language, number=NUMBER):
    return [f"{language} sentence {i % 300} of many" for i in range(number)]


@pytest.fixture
def config(tmp_path):
    write(tmp_path, de=lines("de"), en=[f"{line} {i // 350}" for i, line in enumerate(lines("en"))])
    return DataConfig(
        dataset="parallel_text",
        text_dir=str(tmp_path),
        cache_dir=str(tmp_path / "cache"),
        clean=CleanConfig(duplicates="drop"),
        valid_pairs=20,
        test_pairs=30,
    )


def write(folder, split="train", **sides):
    for language, text in sides.items():
        (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in text))


def sentences(pairs, side):
    return {digest_sentence(pair[side].encode()) for pair in pairs}


def test_numbers_are_exact_and_nothing_is_shared(config):
    train, valid, test = (list(read_pairs(config, split)) for split in ("train", "valid", "test"))
    assert (len(valid), len(test)) == (20, 30)
    for side in (0, 1):
        held = [sentences(pairs, side) for pairs in (valid, test)]
        assert not held[0] & held[1]
        assert not (held[0] | held[1]) & sentences(train, side)
    report = read_pairs(config, "train").report["parts"][0]
    kept = report["read"] - report["problems"]["duplicates"]["count"]
    assert report["held_out"]["valid"] == 20 and report["held_out"]["test"] == 30
    assert len(train) + 50 + report["held_out"]["aside"] == kept
    assert report["held_out"]["aside"] > 0  # of the sentences that occur twice, with two translations
    overlap = find_overlap(read_pairs(config, "train"), {"valid": read_pairs(config, "valid")})
    assert overlap == {"valid": {"of": 20, "pairs": 0, "sources": 0}}
    assert has_split(config, "valid") and has_split(config, "test")


def test_the_choice_is_of_the_text_and_no_other_order(config, tmp_path):
    before = {split: set(read_pairs(config, split)) for split in ("train", "valid", "test")}
    order = np.random.default_rng(0).permutation(300)
    for language in ("de", "en"):
        text = (tmp_path / f"train.{language}").read_text().split("\n")
        (tmp_path / f"train.{language}").write_text("".join(f"{text[i]}\n" for i in order))
    # Each of the first 300 sentences occurs once.
    assert sentences(read_pairs(config, "valid"), 1) == sentences(before["valid"], 1)
    assert sentences(read_pairs(config, "test"), 1) == sentences(before["test"], 1)
    # Stored digests are not used for other text, and damaged ones not at all.
    for file in (tmp_path / "cache" / "cleaned").glob("*.sentences.npy"):
        file.write_bytes(file.read_bytes()[:-3] + b"xyz")
    assert sentences(read_pairs(config, "valid"), 1) == sentences(before["valid"], 1)
    other = dataclasses.replace(config, valid_pairs=21)
    assert read_pairs(other, "train").fingerprint != read_pairs(config, "train").fingerprint
    assert sentences(read_pairs(other, "valid"), 1) > sentences(before["valid"], 1)


def test_sentences_differ_by_more_than_case_spaces_and_punctuation():
    def same(one, other):
        return digest_sentence(one.encode()) == digest_sentence(other.encode())

    assert same("Help me.", " help ME! ") and same("「東京」です。", "東京です") and same("Straße", "STRASSE")
    assert (
        not same("Help me.", "Help us.") and not same("กา", "กี") and not same("?", "!") and not same("a", "b")
    )


def test_both_directions_hold_out_the_same_pairs(config, tmp_path):
    both = dataclasses.replace(config, dataset="parallel_text:de-en,parallel_text:en-de")
    train, valid, test = (read_pairs(both, split, tagged=False) for split in ("train", "valid", "test"))
    assert [part.size for part in valid.parts] == [20, 20] and [part.size for part in test.parts] == [30, 30]
    pairs = list(valid)
    assert [(pair.target, pair.source) for pair in pairs[:20]] == [tuple(pair) for pair in pairs[20:]]
    texts = {text for pair in train for text in pair}
    assert not texts & {text for held in (valid, test) for pair in held for text in pair}


def test_other_sets_of_a_mixture_lack_the_held_out_sentences(config, tmp_path):
    more = tmp_path / "more"
    more.mkdir()
    valid = list(read_pairs(config, "valid"))
    write(
        more, de=[*[pair.source for pair in valid], "neu"], en=[f"another {i}" for i in range(20)] + ["new"]
    )
    mixed = dataclasses.replace(config, dataset=f"parallel_text,parallel_text@{more}")
    train = read_pairs(mixed, "train")
    assert [part.size for part in train.parts] == [len(read_pairs(config, "train")), 1]
    assert list(read_pairs(mixed, "valid")) == valid
    assert train.report["parts"][1]["held_out"] == {"valid": 0, "test": 0, "aside": 20}


def test_a_language_model_holds_out_targets(config):
    alone = dataclasses.replace(config, source_language="")
    train, valid = read_pairs(alone, "train"), read_pairs(alone, "valid")
    assert len(valid) == 20 and not sentences(train, 1) & sentences(valid, 1)


def test_what_cannot_be_is_refused(config, tmp_path):
    with pytest.raises(UserError, match="data.valid_pairs 200 and data.test_pairs 30 are more than half"):
        read_pairs(dataclasses.replace(config, valid_pairs=200), "train")
    write(tmp_path, "valid", de=["a"], en=["b"])
    for read in (read_pairs, has_split):
        with pytest.raises(UserError, match="data.valid_pairs is 20, but parallel_text has a valid split"):
            read(config, "valid")
    own = dataclasses.replace(config, valid_pairs=0)
    assert len(read_pairs(own, "valid")) == 1 and len(read_pairs(own, "test")) == 30
    with pytest.raises(UserError, match="toy_de_en has a test split of its own"):
        read_pairs(dataclasses.replace(config, dataset="toy_de_en"), "test")


def test_weights_stay_with_the_training_pairs(config, tmp_path):
    write(tmp_path, weights=[str(1 + i % 3) for i in range(NUMBER)])
    train, valid = read_pairs(config, "train"), read_pairs(config, "valid")
    assert valid.weights is None and len(train.weights) == len(train)
    numbers = [int(pair.source.split()[2]) for pair in train]
    assert train.weights.tolist() == [1 + number % 3 for number in numbers]
