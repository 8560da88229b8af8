"""Target tokens a second of beam search: ours, Hugging Face and CTranslate2, on the same weights, in one run.

    # the test set of a trained post-norm run
    PYTHONPATH=. python benchmarks/translate.py --setting=captions --run=RUN
    # DIR: test.en, test.de of newstest2014
    PYTHONPATH=. python benchmarks/translate.py --setting=news --news=DIR

captions: a trained run, its own test set and natural ends, so that all three must also find as good
translations; a short training is enough, as of configs/multi30k_de_en.py with model.norm_position=post (what
MarianMTModel is). news: a Transformer-base with random weights and 32,000 pieces, the first 500 lines, and
translations that are all as long as the longest source of their batch, since peers have one length for a
batch; ours has no batches, and gets the lengths of theirs. Without --news, sentences and words are made up.

The model goes out through our own exports, `marian` for `MarianMTModel.generate` and `ctranslate2` in float32
for `translate_batch`. Beam 4, everything else at the defaults of each system. All get the same sentences as
ids (pieces, for CTranslate2): tokenization is left out. --batch_tokens bounds a batch for all alike, rows x
(source + beams x longest translation). The peers get batches of sentences sorted by length; CTranslate2 may
also make its own, with its threads on one batch or on several, and its fastest way counts.

Each system is a process of its own with as many threads; they compile first, which is reported apart, and
then take turns, several rounds of all sentences. Prints JSON: tokens a second of every round, and the ratios
of each way to run ours to each peer's fastest, by medians. `--tiny` runs everything with a toy model in
seconds.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from workers import Worker, open_worker

from flaxformer_mt.config import Config, DataConfig, ModelConfig, SearchConfig, VocabConfig
from flaxformer_mt.config.files import to_dict
from flaxformer_mt.convert.export_run import load_weights, write_checked
from flaxformer_mt.convert.format_interface import Weights
from flaxformer_mt.convert.format_registry import find_format
from flaxformer_mt.corpus.reader import read_pairs
from flaxformer_mt.evaluation.metrics import score_translations
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.trees import flatten_tree
from flaxformer_mt.vocab import make_vocabs

BEAM = 4
PEERS = {"marian": "hugging_face", "ctranslate2": "ctranslate2"}
# Lengths in pieces of the first 500 lines of newstest2014, English, at 0, 10, 25, 50, 75, 90 and 100 %.
_NEWS_LENGTHS = (3, 11, 15, 23, 32, 41, 91)
# Random weights give logits in the hundreds; what matters here is that the weights are the same.
_TOLERANCE = 1e-2


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


class Material(NamedTuple):
    """What is translated, by what; references are there where weights are trained."""

    weights: Weights
    sentences: list[list[int]]
    references: list[str] | None
    facts: dict[str, Any]


def make_material(options: argparse.Namespace, cache: Path) -> Material:
    """The model and the sentences of the setting."""
    if options.setting == "captions" and not options.tiny:
        if not options.run:
            raise SystemExit("--setting=captions needs --run=RUN, a trained run")
        weights = load_weights(options.run, checkpoint=options.checkpoint, warn=print_error)
        pairs = read_pairs(weights.config.data, "test")
        some = [pairs[index] for index in range(min(options.lines, len(pairs)))]
        facts = {"weights": f"trained for {weights.step} steps ({options.run.name}, {weights.checkpoint})"}
        references: list[str] | None = [pair.target for pair in some]
        texts = [pair.source for pair in some]
    else:
        pairs = read_news(options)
        weights = make_random_weights(options, pairs, cache)
        texts, references = [pair.source for pair in pairs[: options.lines]], None
        facts = {"weights": "random", "text": str(options.news or "made up")}
    search = dataclasses.replace(weights.config.search, beam_size=BEAM, batch_tokens=options.batch_tokens)
    if options.setting == "news":  # as long as the source, which is cut nowhere
        lengths: dict[str, Any] = {"ratio": 1.0, "offset": 0}
        bounds = {f"{end}_length_{part}": value for end in ("min", "max") for part, value in lengths.items()}
        search = dataclasses.replace(search, **bounds)
    weights = dataclasses.replace(weights, config=dataclasses.replace(weights.config, search=search))
    longest, vocab = weights.config.data.max_source_length, weights.vocabs.source
    sentences = [[*ids[: longest - 1][:-1], vocab.eos_id] for ids in map(vocab.tokenize, texts)]
    return Material(weights, sentences, references, facts)


def read_news(options: argparse.Namespace) -> list[Pair]:
    """All pairs of --news, or as many made-up ones of like lengths whose words recur as in no language."""
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
    """Transformer-base, post-norm, all embeddings tied, as it is initialised."""
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
    vocabs = make_vocabs(config.vocab, pairs, cache / name)  # half a minute, the first time
    model = make_model(config.model, source_size=vocabs.source.size, target_size=vocabs.target.size)
    params = jax.jit(lambda: init_params(model, jax.random.key(config.seed)))()
    leaves = {path: np.asarray(leaf) for path, leaf in flatten_tree(params).items()}
    return Weights(config, vocabs, leaves)


def write_models(weights: Weights, folder: Path) -> None:
    """The same weights for every system, each in a folder of its own."""
    (folder / "ours").mkdir()
    np.savez(folder / "ours" / "params.npz", **weights.leaves)
    weights.vocabs.save(folder / "ours" / "vocab")
    for name in PEERS:
        target = find_format(name)
        if problems := target.problems(weights.config):
            raise SystemExit(f"{name} cannot express this model: {'; '.join(problems)}")
        write_checked(target, weights, folder / name, _TOLERANCE)


def plan_batches(lengths: Sequence[int], search: SearchConfig, *, forced: bool) -> list[dict[str, Any]]:
    """Batches for the peers: sorted by length, the longest first, each as large as batch_tokens allows.

    A batch's limit is the longest translation of its longest sentence.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches, start = [], 0
    while start < len(order):
        longest = lengths[order[start]]
        limit = longest if forced else int(search.max_length_ratio * longest + search.max_length_offset)
        rows = max(1, search.batch_tokens // (longest + search.beam_size * limit))
        batches.append({"indices": order[start : start + rows], "limit": limit})
        start += rows
    return batches


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Lets the systems take turns; returns what was measured as JSON values."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        material = make_material(options, options.work or folder)
        write_models(material.weights, folder)
        search, forced = material.weights.config.search, options.setting == "news"
        task = {
            "config": to_dict(material.weights.config),
            "folder": str(folder),
            "sentences": material.sentences,
            "batches": plan_batches(list(map(len, material.sentences)), search, forced=forced),
            "beam_size": BEAM,
            "forced": forced,
            "threads": options.threads,
            "our_variants": our_variants(options),
        }
        path = folder / "task.json"
        path.write_text(json.dumps(task), encoding="utf-8")
        workers = {
            system: stack.enter_context(open_worker(Path(__file__), system, path, threads=options.threads))
            for system in options.systems.split(",")
        }
        systems = take_turns(workers, options.rounds, material)
    result: dict[str, Any] = {
        "setting": options.setting,
        "tiny": options.tiny,
        **material.facts,
        "sentences": len(material.sentences),
        "source_tokens": sum(map(len, material.sentences)),
        "batch_tokens": options.batch_tokens,
        "systems": systems,
    }
    for variant, ours in systems.get("ours", {}).get("variants", {}).items():
        rate = statistics.median(ours["rounds"])
        result.setdefault("ratios", {})[variant] = {
            peer: round(rate / systems[peer]["target_tokens_per_second"], 2)
            for peer in PEERS.values()
            if peer in systems
        }
    return result


def our_variants(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Ways to run ours, by name; the first is what counts.

    captions: theirs end a sentence when as many hypotheses as beams have ended; ours when no better one is
    possible, unless it is told to do as they do.
    """
    variants: dict[str, dict[str, Any]] = {"as configured": {}}
    if options.setting == "captions":
        variants["stopping inexact, as CTranslate2"] = {"stopping": "inexact"}
    return variants


def take_turns(workers: dict[str, Worker], rounds: int, material: Material) -> dict[str, Any]:
    """Rounds in which every system runs each of its variants; the report of each system."""
    names = list(workers)
    rates: dict[str, dict[str, list[float]]] = {
        name: {variant: [] for variant in worker.facts["variants"]} for name, worker in workers.items()
    }
    found: dict[str, dict[str, list[list[int]]]] = {name: {} for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            for variant in rates[name]:
                answer = workers[name].ask({"variant": variant, "keep": number == 0})
                rates[name][variant].append(answer["tokens"] / answer["seconds"])
                found[name].setdefault(variant, answer.get("translations", []))
    systems = {}
    for name, worker in workers.items():
        medians = {variant: statistics.median(some) for variant, some in rates[name].items()}
        best = next(iter(medians)) if name == "ours" else max(medians, key=medians.__getitem__)
        systems[name] = {
            "target_tokens_per_second": round(medians[best], 1),
            "variant": best,
            "variants": {
                variant: {
                    "rounds": [round(rate, 1) for rate in rates[name][variant]],
                    "target_tokens": sum(map(len, found[name][variant])),
                    **score(found[name][variant], material),
                    **worker.facts["variants"][variant],
                }
                for variant in medians
            },
            "versions": worker.facts["versions"],
        }
    return systems


def score(translations: list[list[int]], material: Material) -> dict[str, float]:
    """BLEU where there are references."""
    if material.references is None:
        return {}
    texts = [material.weights.vocabs.target.detokenize(ids) for ids in translations]
    return {"bleu": round(score_translations(texts, material.references).bleu, 2)}


def print_error(message: str) -> None:
    """Warnings, apart from the JSON."""
    print(message, file=sys.stderr)


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=("captions", "news"), default="news")
    parser.add_argument("--run", type=Path, help="captions: a trained run")
    parser.add_argument("--checkpoint", help="captions: best, last, average or a step")
    parser.add_argument("--news", type=Path, help="news: a folder of test.en and test.de")
    parser.add_argument("--work", type=Path, help="keeps the vocabulary of news for the next time")
    parser.add_argument("--lines", type=int, default=0, help="0: 1000 captions, 500 news")
    parser.add_argument("--batch_tokens", type=int, default=SearchConfig().batch_tokens)
    parser.add_argument("--systems", default="ours,hugging_face,ctranslate2", help="of these, with commas")
    parser.add_argument("--threads", type=int, default=2, help="of each system")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--task", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.lines = options.lines or {"captions": 1000, "news": 500}[options.setting]
    return options


def main() -> None:
    """Prints the comparison as JSON; or is one of the systems in it."""
    options = parse_options()
    if options.worker:
        from translation_worker import serve

        serve(options.worker, json.loads(options.task.read_text(encoding="utf-8")))
        return
    print(json.dumps(measure(options), indent=2))


if __name__ == "__main__":
    main()
