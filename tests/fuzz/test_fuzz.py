"""Damaged files and senseless values: one message of the user's, or the same result; never a traceback.

Seeds are fixed. FLAXFORMER_MT_FUZZ=100 tries a hundred times as many.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import warnings

import jax
import numpy as np
import pytest
from damage import SIZE, VALUES, damage_file, damaged_copies, mutate
from tiny_experiment import change, random_params

from flaxformer_mt.commands.flags import parse_flags
from flaxformer_mt.commands.main import _REMEDIES
from flaxformer_mt.commands.options import EvaluateOptions, TrainOptions, TranslateOptions
from flaxformer_mt.config import Config
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.files import flatten, from_dict, read_config, to_dict
from flaxformer_mt.convert.format_interface import Given, Weights
from flaxformer_mt.convert.format_registry import find_format
from flaxformer_mt.corpus import cache_use, read_pairs
from flaxformer_mt.data.prepare import prepare
from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.model import make_model
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.trees import flatten_tree
from flaxformer_mt.vocab import load_vocabs


@pytest.fixture(autouse=True)
def warnings_are_messages():
    """A warning of ours is for the user, as an error is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlaxformerWarning)
        yield


def check_message(error: Exception, what: object) -> None:
    """The command line prints these errors as one message."""
    assert isinstance(error, UserError) or error.errno in _REMEDIES, what
    assert len(str(error)) < 20_000, what


def contents(trained) -> tuple:
    """What translations depend on, besides the search options."""
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trained.params)]
    return trained.config.model, trained.vocabs.source.fingerprint, trained.vocabs.target.fingerprint, leaves


def test_damage_to_any_file_of_a_run(tiny_run, tmp_path):
    """The parameters and vocabularies are those that were trained, or the user is told."""
    expected = contents(load_trained(tiny_run))
    refused = 0
    for run, what in damaged_copies(tiny_run, tmp_path, 60 * SIZE, seed=1):
        try:
            found = contents(load_trained(run))
        except (UserError, OSError) as error:
            check_message(error, what)
            refused += 1
        else:
            # A config that is still a config describes another network only if its parameters fit it.
            same = found[1:] == expected[1:]
            assert same and (found == expected or "config.json" in what), what
    assert refused > 2


def test_damage_to_any_file_of_the_cache(tiny_config, tiny_text, tmp_path):
    cache = tmp_path / "cache"
    shutil.copytree(tiny_config.data.cache_dir, cache)
    config = change(tiny_config, data={"cache_dir": str(cache)})

    def ids():
        prepared = prepare(config)
        store = prepared.train.base
        pairs = [*read_pairs(config.data, "test")]
        return prepared.vocabs.target.fingerprint, store.target.tokens.tolist(), pairs

    expected = ids()
    whole = shutil.copytree(cache, tmp_path / "whole")
    shutil.rmtree(whole / "compiled", ignore_errors=True)  # JAX's own, outside of what a run chooses
    for copy, what in damaged_copies(whole, tmp_path / "copies", 25 * SIZE, seed=2):
        shutil.rmtree(cache)
        shutil.copytree(copy, cache, symlinks=True)
        try:
            assert ids() == expected, what
        except (UserError, OSError) as error:
            check_message(error, what)


def test_mutated_configs():
    draw, accepted = random.Random(3), 0
    for number in range(500 * max(1, SIZE // 10)):
        try:
            validate(from_dict(mutate(to_dict(Config()), draw)))
            accepted += 1
        except UserError as error:
            check_message(error, number)
    assert accepted > 3


def test_mutated_flags(tmp_path):
    draw, names = random.Random(4), sorted(flatten(Config()))
    flags = [
        "--run=x",
        "--method=beam",
        "--beam_size=4",
        "--checkpoint=last",
        "--input=-",
        "--config=toy_de_en",
    ]
    for _ in range(20 * SIZE):
        kind = draw.choice([TrainOptions, TranslateOptions, EvaluateOptions])
        given = draw.sample(flags, 2)
        for _ in range(draw.randint(1, 3)):
            name = draw.choice([f"config.{draw.choice(names)}", "beam_size", "seed", "", "config"])
            given.append(
                draw.choice([f"--{name}={draw.choice(VALUES)}", f"--{name}", str(draw.choice(VALUES))])
            )
        try:
            parse_flags(kind, given, prog="x")
        except (UserError, OSError) as error:
            check_message(error, given)


@pytest.fixture(scope="module")
def foreign(tiny_config, tiny_run, tmp_path_factory):
    """Folders of three formats, with random parameters."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    vocabs = load_vocabs(tiny_run / "vocab")
    folders = {}
    post = {"norm_position": "post", "max_positions": 40}
    handbuilt = {
        **post,
        "first_position": 1,
        "embedding_scale": False,
        "tying": "none",
        "padding_mask": "both",
    }
    for name, model in [("torch", {}), ("marian", post), ("handbuilt", handbuilt)]:
        config = change(tiny_config, model=model)
        network = make_model(config.model, source_size=vocabs.source.size, target_size=vocabs.target.size)
        folder = tmp_path_factory.mktemp(name) / name
        folder.mkdir()
        leaves = {path: np.asarray(leaf) for path, leaf in flatten_tree(random_params(network)).items()}
        find_format(name).write(Weights(config, vocabs, leaves), folder, "none")
        folders[name] = folder
    return folders


@pytest.mark.filterwarnings("ignore")  # of torch, about the kinds of damaged files
def test_damaged_and_mutated_foreign_files(foreign, tmp_path):
    draw = random.Random(5)
    for name, folder in foreign.items():
        source = find_format(name)
        stored = json.loads((folder / "config.json").read_text())
        for copy, what in damaged_copies(folder, tmp_path / name, 12 * SIZE, seed=6):
            try:
                source.read(copy, Given())
            except (UserError, OSError) as error:
                check_message(error, (name, what))
        mutated = shutil.copytree(folder, tmp_path / f"{name} mutated")
        for number in range(12 * SIZE):
            text = json.dumps(mutate(stored, draw))
            (mutated / "config.json").write_text(text)
            try:
                validate(source.read(mutated, Given()).config)
            except UserError as error:
                check_message(error, (name, number))


def test_damage_is_damage(tmp_path):
    """The generator draws every kind, the same each time."""
    kinds = set()
    for seed in range(200):
        (tmp_path / str(seed)).write_bytes(b"0123456789" * 20)
        kinds.add(damage_file(tmp_path / str(seed), random.Random(seed)))
    assert len(kinds) == 13
    assert mutate(to_dict(Config()), random.Random(1)) == mutate(to_dict(Config()), random.Random(1))
    assert read_config  # configs on disk are damaged with the runs


class Killed(BaseException):
    """Stands for the end of the process: nothing of ours catches it."""


def test_a_preparation_killed_at_any_moment_is_repeated_alike(tiny_config, tmp_path, monkeypatch):
    """At a rename, a folder being made, or a file being flushed: the next run gives the same and sweeps."""
    draw = random.Random(7)
    cache, run = tmp_path / "cache", tmp_path / "run"
    config = change(tiny_config, data={"cache_dir": str(cache)})
    expected = prepare(tiny_config).train.base
    for _ in range(3 * SIZE):
        shutil.rmtree(cache, ignore_errors=True)
        shutil.rmtree(run, ignore_errors=True)
        last = draw.randrange(40)
        with monkeypatch.context() as patch:
            die_at(patch, last)
            with contextlib.suppress(Killed):
                prepare(config, run)
        for descriptor in cache_use._held.values():
            os.close(descriptor)
        cache_use._held.clear()
        store = prepare(config, run).train.base
        for side in ("source", "target"):
            ours, theirs = getattr(store, side), getattr(expected, side)
            assert all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True)), last
        left = [path for path in cache.rglob("*") if path.name.startswith(("incomplete.", ".tokens-"))]
        assert not left, last


def die_at(patch, last: int) -> None:
    """Ends the process, so to speak, at the last of so many changes that it makes to the disk."""
    calls = itertools.count()

    def mortal(change):
        def call(*arguments, **options):
            if next(calls) == last:
                raise Killed
            return change(*arguments, **options)

        return call

    for name in ("rename", "replace", "fsync", "mkdir"):
        patch.setattr(os, name, mortal(getattr(os, name)))
