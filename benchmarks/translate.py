"""Beam search speed in target tokens per second: ours, Hugging Face and CTranslate2 with the same weights.

    PYTHONPATH=. python benchmarks/translate.py --setting=captions --run=RUN  # a trained run's test set
    PYTHONPATH=. python benchmarks/translate.py --setting=news --news=DIR  # test.en, test.de of newstest2014
    PYTHONPATH=. python benchmarks/translate.py --setting=many --text_dir=DIR  # train.de: 10,000 lines

captions: a trained run on its own test set, where hypotheses end with the end symbol, so that the BLEU of all
three systems can be compared as well. A short training is enough, for example of configs/multi30k_de_en.py.
news: a Transformer-base with random weights and 32,000 subwords on the first 500 lines. All translations of a
batch are as long as its longest source, since the peers have one length per batch; ours has no batches, and
gets the same lengths. Without --news, the sentences are random words.

many: see many_lines.py; of our system alone, from text to text, with `--width=64` a minute on a CPU.

The model is exported with our formats `marian` or, with norms first, `hf-pre-norm`, for `generate` of
transformers, and `ctranslate2`, for `translate_batch`. Each system translates in the precisions of
`--precisions` that it has: ours in all three (int8: `--quantization=int8`, with activations in bfloat16),
Hugging Face in float32 and bfloat16, CTranslate2 in float32 and int8; so does `marian-cpp`, Marian itself
(marian_peer.py), for models that `export --format=marian-npz` takes.
The beam size is 4, and all other options are the defaults of each system. All systems get the same sentences
as ids (CTranslate2: as subwords), so that tokenization is excluded. --batch_tokens limits the size of a batch
of every system: rows x (source length + beam size x longest translation). The peers get batches of sentences
sorted by length. CTranslate2 may also make its own batches, with its threads on one batch or on several; its
fastest variant is compared.

Each system runs in a process of its own, with the same number of threads. The systems first compile, which is
reported separately, and then take turns for several rounds of all sentences. Prints JSON: tokens per second
of every round, and the ratio of each variant of ours to the fastest variant of each peer, and to that of each
precision of it, by medians; `best` is the ratio of the fastest variant of ours whose BLEU is at most 0.1
lower. With --clock=processor, a second is one of processor time of all threads: such rates hardly depend on
what else a machine does, but do not tell how well threads are used.
`--account` prints what beam search of ours computes instead (account.py): steps, positions, bytes and time,
and what the lines would cost without each loss. `--precisions=int8` chooses what is accounted for.
With --shortlist=FILE, ours and CTranslate2 (its vmap) are also measured with a shortlist.
`--tiny` runs everything with a toy model in seconds.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import marian_peer
import numpy as np
from systems import add_marian, choose_systems, require_packages
from translation_material import BEAM, Material, make_material, print_error
from workers import Worker, open_worker

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.files import to_dict
from flaxformer_mt.convert.export_run import write_checked
from flaxformer_mt.convert.formats import Weights, find_format
from flaxformer_mt.errors import UserError
from flaxformer_mt.parallel import use_cpu_cores_as_devices
from flaxformer_mt.runs.target_lengths import read_target_lengths
from flaxformer_mt.scoring.metrics import score_translations

PEERS = ("hugging_face", "ctranslate2", marian_peer.NAME)
# Hugging Face's model, by the place of the norms.
_HUGGING_FACE = {"post": "marian", "pre": "hf-pre-norm"}
# Tolerance of the export check: random weights give logits in the hundreds; equal weights are enough here.
_TOLERANCE = 1e-2
# A translation system whose BLEU is lower by at most this much counts as equally good.
_EQUAL_BLEU = 0.1


def write_models(weights: Weights, folder: Path, systems: Sequence[str]) -> None:
    """Write the same weights for each of the systems, each to a folder of its own."""
    if "ours" in systems:
        (folder / "ours").mkdir()
        np.savez(folder / "ours" / "params.npz", **weights.leaves)
        weights.vocabs.save(folder / "ours" / "vocab")
    formats = {
        "ctranslate2": "ctranslate2",
        marian_peer.NAME: "marian-npz",
        "hugging_face": _HUGGING_FACE[weights.config.model.norm_position],
    }
    for system in (peer for peer in PEERS if peer in systems):
        name = formats[system]
        target = find_format(name)
        if problems := target.problems(weights.config):
            raise SystemExit(f"{name} cannot express this model: {'; '.join(problems)}")
        (folder / system).mkdir()
        write_checked(target, weights, folder / system, _TOLERANCE)


def plan_batches(lengths: Sequence[int], search: SearchConfig, *, forced: bool) -> list[dict[str, Any]]:
    """Make batches for the peers: sorted by length, longest first, each as large as batch_tokens allows.

    The limit of a batch is the maximum translation length of its longest sentence.
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


def make_task(options: argparse.Namespace, material: Material, folder: Path) -> dict[str, Any]:
    """Return what the workers need as JSON values; the weights are in `folder`."""
    search, forced = material.weights.config.search, options.setting == "news"
    return {
        "config": to_dict(material.weights.config),
        "folder": str(folder),
        "sentences": material.sentences,
        "batches": plan_batches(list(map(len, material.sentences)), search, forced=forced),
        "beam_size": BEAM,
        "forced": forced,
        "threads": options.threads,
        "marian_python": options.marian_python,
        "our_variants": our_variants(options),
        "precisions": options.precisions,
        "shortlist": str(options.shortlist or ""),
        "target_lengths": None if forced or not options.run else read_target_lengths(options.run)[0],
    }


def make_account(options: argparse.Namespace) -> dict[str, Any]:
    """Return the account of our first variant, in this process."""
    from account import account_for

    use_cpu_cores_as_devices()
    with tempfile.TemporaryDirectory() as name:
        material = make_material(options, options.work or Path(name))
        write_models(material.weights, Path(name), ["ours"])
        return account_for(make_task(options, material, Path(name)))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the systems in turns; return the results as JSON values."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        material = make_material(options, options.work or folder)
        write_models(material.weights, folder, options.systems)
        if options.shortlist and "ctranslate2" in options.systems:
            shutil.copy(options.shortlist, folder / "ctranslate2" / "vmap.txt")
        path = folder / "task.json"
        path.write_text(json.dumps(make_task(options, material, folder)), encoding="utf-8")
        workers = {
            system: stack.enter_context(open_worker(Path(__file__), system, path, threads=options.threads))
            for system in options.systems
        }
        systems = take_turns(workers, options.rounds, options.clock, material)
    result: dict[str, Any] = {
        "setting": options.setting,
        "tiny": options.tiny,
        **material.facts,
        "sentences": len(material.sentences),
        "source_tokens": sum(map(len, material.sentences)),
        "batch_tokens": options.batch_tokens,
        "clock": options.clock,
        "systems": systems,
    }
    ours = systems.get("ours", {}).get("variants", {})
    for variant in ours:
        result.setdefault("ratios", {})[variant] = {
            name: round(median_rate(ours[variant]) / median_rate(peers), 2)
            for name, (_, peers) in fastest_peers(systems, options.precisions).items()
        }
    if ours:
        result["best"] = compare_best(ours, fastest_peers(systems, options.precisions))
    return result


def median_rate(variant: dict[str, Any]) -> float:
    """Return the median rate of the rounds of a variant."""
    return statistics.median(variant["rounds"])


def fastest_peers(systems: dict[str, Any], precisions: Sequence[str]) -> dict[str, tuple[str, dict]]:
    """Return name and report of each peer's fastest variant, and of that of each precision."""
    found = {}
    for peer in (peer for peer in PEERS if peer in systems):
        variants = systems[peer]["variants"]
        for ending in ("", *precisions, *(f"{precision}, shortlist" for precision in precisions)):
            some = [name for name in variants if not ending or name.endswith(f", {ending}")]
            if some:
                best = max(some, key=lambda name: median_rate(variants[name]))
                found[f"{peer} {ending}".strip()] = best, variants[best]
    return found


def compare_best(
    ours: dict[str, dict[str, Any]], peers: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Compare each peer variant with the fastest of ours whose BLEU is not lower by more than 0.1.

    There is no entry for a peer variant whose BLEU none of ours reaches.
    """
    found: dict[str, dict[str, Any]] = {}
    for label, (peer_name, peer) in peers.items():
        for name, own in sorted(ours.items(), key=lambda item: -median_rate(item[1])):
            gain = round(own.get("bleu", 0.0) - peer.get("bleu", 0.0), 2)
            if gain >= -_EQUAL_BLEU:
                ratio = round(median_rate(own) / median_rate(peer), 2)
                found[label] = {"ours": name, "peer": peer_name, "ratio": ratio, "bleu_difference": gain}
                break
    return found


def our_variants(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the dtype and the changed search options of each variant of ours; the first is reported.

    captions: the peers end the search of a sentence when as many hypotheses as beams have ended; ours ends it
    when no better hypothesis is possible. The other variants use the peers' rule, the last more patiently.
    """
    variants: dict[str, dict[str, Any]] = {}
    for precision in options.precisions:
        int8 = {"dtype": "bfloat16", "quantization": "int8"}
        numbers = int8 if precision == "int8" else {"dtype": precision}
        variants[f"as configured, {precision}"] = numbers
        if options.setting == "captions":
            inexact = numbers | {"stopping": "inexact"}
            variants[f"stopping inexact, as CTranslate2, {precision}"] = inexact
            variants[f"stopping inexact, patience 1.25, {precision}"] = inexact | {"patience": 1.25}
    if options.shortlist:
        variants |= {f"{name}, shortlist": one | {"shortlist": True} for name, one in variants.items()}
    return variants


def take_turns(workers: dict[str, Worker], rounds: int, clock: str, material: Material) -> dict[str, Any]:
    """Run rounds in which every system runs each of its variants; return the report of each system."""
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
                rates[name][variant].append(answer["tokens"] / answer["seconds"][clock])
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
    """Return the BLEU of translations; empty without references."""
    if material.references is None:
        return {}
    texts = [material.weights.vocabs.target.detokenize(ids) for ids in translations]
    return {"bleu": round(score_translations(texts, material.references)["bleu"], 2)}


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=("captions", "news", "many"), default="news")
    parser.add_argument("--run", type=Path, help="captions: the directory of a trained run")
    parser.add_argument("--checkpoint", help="captions: best, last, average or a step")
    parser.add_argument("--text_dir", type=Path, help="captions: folder of the test set; else the run's own")
    parser.add_argument("--news", type=Path, help="news: a folder with test.en and test.de")
    parser.add_argument("--work", type=Path, help="folder that keeps the vocabulary of news for later runs")
    parser.add_argument("--lines", type=int, default=0, help="sentences; 0: 1000 captions, 500 news")
    parser.add_argument("--batch_tokens", type=int, default=8192)
    parser.add_argument(
        "--systems", default="ours,hugging_face,ctranslate2", help="systems to measure, comma-separated"
    )
    add_marian(parser)
    parser.add_argument("--precisions", default="float32,bfloat16,int8", help="precisions, comma-separated")
    parser.add_argument("--shortlist", type=Path, help="also measure with this file of prepare --shortlist")
    parser.add_argument("--threads", type=int, default=2, help="threads per system")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall", help="time of the rates")
    parser.add_argument("--account", action="store_true", help="what ours computes, and what losses cost")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--width", type=int, choices=(64, 512), default=64, help="many: of the model")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--task", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.systems = choose_systems(parser, options.systems, PEERS)
    options.precisions = options.precisions.split(",")
    if unknown := set(options.precisions) - {"float32", "bfloat16", "int8"}:
        parser.error(f"unknown precisions {', '.join(unknown)}; known: float32, bfloat16, int8")
    options.lines = options.lines or {"captions": 1000, "news": 500, "many": 10_000}[options.setting]
    return options


def main() -> None:
    """Print the comparison as JSON; with --worker, run one of the systems."""
    options = parse_options()
    if options.setting == "many":
        from many_lines import measure as measure_many

        use_cpu_cores_as_devices()
        print(json.dumps(measure_many(options), indent=2))
        return
    if options.worker:
        from translation_worker import serve

        serve(options.worker, json.loads(options.task.read_text(encoding="utf-8")))
        return
    if not options.account:
        require_packages(options.systems)
    try:
        print(json.dumps((make_account if options.account else measure)(options), indent=2))
    except UserError as error:
        print_error(f"error: {error}")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
