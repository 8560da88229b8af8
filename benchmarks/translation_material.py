"""What benchmarks/translate.py translates: a trained model and its test set, or random weights and news.

Knows nothing of systems, batches and rates.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxformer_mt.config import Config, DataConfig, ModelConfig, VocabConfig
from flaxformer_mt.convert.export_run import load_weights
from flaxformer_mt.convert.formats import Weights
from flaxformer_mt.corpus.reader import read_pairs
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.parameter_trees import flatten_tree
from flaxformer_mt.vocab import make_vocabs

BEAM = 4
# Lengths in subwords of the first 500 English lines of newstest2014, percentiles 0, 10, 25, 50, 75, 90, 100.
_NEWS_LENGTHS = (3, 11, 15, 23, 32, 41, 91)


class Pair(NamedTuple):
    """A source sentence and its translation."""

    source: str
    target: str


class Material(NamedTuple):
    """The weights, the sentences as ids, and the references (None if the weights are random)."""

    weights: Weights
    sentences: list[list[int]]
    references: list[str] | None
    facts: dict[str, Any]


def make_material(options: argparse.Namespace, cache: Path) -> Material:
    """Build the model and the sentences of the setting."""
    if options.setting == "captions" and not options.tiny:
        if not options.run:
            raise SystemExit("--setting=captions needs --run=RUN, a trained run")
        weights = load_weights(options.run, checkpoint=options.checkpoint, warn=print_error)
        data = weights.config.data
        if options.text_dir:
            data = dataclasses.replace(data, text_dir=str(options.text_dir))
        pairs = read_pairs(data, "test")
        some = [pairs[index] for index in range(min(options.lines, len(pairs)))]
        facts = {"weights": f"trained for {weights.step} steps ({options.run.name}, {weights.checkpoint})"}
        references: list[str] | None = [pair.target for pair in some]
        texts = [pair.source for pair in some]
    else:
        pairs = read_news(options)
        weights = make_random_weights(options, pairs, cache)
        texts, references = [pair.source for pair in pairs[: options.lines]], None
        facts = {"weights": "random", "text": str(options.news or "made up")}
    beam: dict[str, Any] = {"method": "beam", "beam_size": BEAM, "batch_tokens": options.batch_tokens}
    search = dataclasses.replace(weights.config.search, **beam)
    if options.setting == "news":  # exactly as long as the source, which is never truncated
        lengths: dict[str, Any] = {"ratio": 1.0, "offset": 0}
        bounds = {f"{end}_length_{part}": value for end in ("min", "max") for part, value in lengths.items()}
        search = dataclasses.replace(search, **bounds)
    weights = dataclasses.replace(weights, config=dataclasses.replace(weights.config, search=search))
    longest, vocab = weights.config.data.max_source_length, weights.vocabs.source
    sentences = [[*ids[: longest - 1][:-1], vocab.eos_id] for ids in map(vocab.tokenize, texts)]
    return Material(weights, sentences, references, facts)


def read_news(options: argparse.Namespace) -> list[Pair]:
    """Read all pairs of --news; without it, make pairs of similar lengths from equally frequent words."""
    if options.news:
        sides = [(options.news / f"test.{code}").read_text(encoding="utf-8") for code in ("en", "de")]
        return [Pair(*pair) for pair in zip(*(side.strip("\n").split("\n") for side in sides), strict=True)]
    random, words = np.random.default_rng(1), 60 if options.tiny else 40_000
    sentences = 12 if options.tiny else 3000
    places = np.linspace(0, 1, len(_NEWS_LENGTHS))
    shares = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)
    assert len(shares) == len(places)
    lengths = np.interp(random.random(2 * sentences), shares, _NEWS_LENGTHS).astype(int)
    if options.tiny:
        lengths = lengths % 7 + 3
    numbers = np.arange(lengths.sum()) % words
    random.shuffle(numbers)
    parts = np.split(numbers, np.cumsum(lengths)[:-1])
    texts = [" ".join(f"w{number}" for number in part) for part in parts]
    return [Pair(*texts[start : start + 2]) for start in range(0, 2 * sentences, 2)]


def make_random_weights(options: argparse.Namespace, pairs: Sequence[Pair], cache: Path) -> Weights:
    """Initialize a Transformer-base, post-norm, with all embeddings tied."""
    sizes = {
        "model_dim": 512,
        "ffn_dim": 2048,
        "num_heads": 8,
        "num_encoder_layers": 6,
        "num_decoder_layers": 6,
    }
    if options.tiny:
        sizes = {name: {"num_heads": 2, "model_dim": 8, "ffn_dim": 16}.get(name, 1) for name in sizes}
    kind: Any = "bpe" if options.news else "word"
    config = Config(
        data=DataConfig(
            dataset="parallel_text",
            text_dir=str(options.news or ""),
            source_language="en",
            target_language="de",
            max_source_length=128,
            max_target_length=128,
        ),
        vocab=VocabConfig(kind=kind, size=40 if options.tiny else 32_000, byte_fallback=bool(options.news)),
        model=ModelConfig(norm_position="post", tying="all", **sizes),
    )
    name = f"vocab_{'tiny' if options.tiny else 'news'}_{kind}"
    vocabs = make_vocabs(config.vocab, pairs, cache / name)  # takes half a minute the first time
    model = make_model(config.model, source_size=vocabs.source.size, target_size=vocabs.target.size)
    params = jax.jit(lambda: init_params(model, jax.random.key(config.seed)))()
    leaves = {path: np.asarray(leaf) for path, leaf in flatten_tree(params).items()}
    return Weights(config, vocabs, leaves)


def print_error(message: str) -> None:
    """Print a warning or an error to standard error; standard output is for the JSON."""
    print(message, file=sys.stderr)
