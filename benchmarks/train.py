"""Training speed in target tokens per second, without padding: ours and two PyTorch peers on the same arrays.

    # DIR: train.de, train.en; without --text_dir, the toy corpus
    PYTHONPATH=. python benchmarks/train.py --setting=small --text_dir=DIR

All systems train the same post-norm Transformer with the same number of parameters, dropout 0.1 everywhere,
label smoothing 0.1 and Adam: ours, `MarianMTModel` of transformers, and `torch.nn.Transformer`. The batches
come from our own planner; `marian-cpp` is Marian itself, which makes its own (marian_peer.py). Each system
runs in a process of its own, since thread pools in one process slow each other down; all systems have
`--threads` threads and keep their memory from update to update as `train` does (commands/launch.py;
GLIBC_TUNABLES, if set, holds for all instead). They first compile and warm up one after another, which is not
measured; then they take turns for several rounds of all batches, and medians are compared.

Settings: small and base for CPUs, each system in float32 and in bfloat16 (`--dtypes`; of the peers, by
autocast), so that the fastest of ours is compared with the fastest peer (`ratio`), and each dtype with itself
(`ratios`); big is Transformer-big in bfloat16 for a GPU. With big, and with `--batching=pack`, ours trains on
packed batches, and the peers on buckets with the same number of tokens per batch. `--tiny` runs everything
with a toy model in seconds.

Prints JSON: for each system the tokens per second of every round, the GFLOP/s of the matrix products of a
step (padding included, most of which ours leaves out on a CPU), and their share of the GFLOP/s of a
1024 x 1024 float32 product in the same process;
`ratio`, our rate divided by that of the fastest peer; and, if the peak of the device is known, `utilization`,
the share of the peak that the FLOPs of non-padding tokens reach.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import marian_peer
import numpy as np
from systems import add_marian, choose_systems, require_packages
from workers import open_worker

from flaxformer_mt.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig, VocabConfig
from flaxformer_mt.config.files import to_dict
from flaxformer_mt.data.batch_array import BatchArray, make_batch
from flaxformer_mt.data.batching import plan_epoch, plan_summary
from flaxformer_mt.data.prepare import prepare
from flaxformer_mt.flops import padded_work, peak_flops, real_work, training_flops

PEERS = ("marian", "torch", marian_peer.NAME)
# Repetitions of the 1024 x 1024 product in each round.
_REPEATS = 30


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes of the model and the batches, and the length of the measurement."""

    model: ModelConfig
    # Rows of the embedding, and subwords of the tokenizer: at most as many, since small corpora yield fewer.
    vocabulary: int
    pieces: int
    batch_tokens: int
    num_shapes: int
    batches: int
    rounds: int


def _model(width: int, ffn: int, layers: int, heads: int, *, dtype: Any = "float32") -> ModelConfig:
    return ModelConfig(
        model_dim=width,
        ffn_dim=ffn,
        num_encoder_layers=layers,
        num_decoder_layers=layers,
        num_heads=heads,
        norm_position="post",
        dropout_rate=0.1,
        dtype=dtype,
    )


SETTINGS = {
    "small": Setting(_model(256, 1024, 3, 8), 8000, 8000, 2048, num_shapes=6, batches=10, rounds=5),
    "base": Setting(_model(512, 2048, 6, 8), 32000, 16000, 2048, num_shapes=3, batches=3, rounds=3),
    "big": Setting(
        _model(1024, 4096, 6, 16, dtype="bfloat16"), 32000, 16000, 32768, num_shapes=4, batches=20, rounds=5
    ),
}


def shrink(setting: Setting) -> Setting:
    """Return the setting with a model whose steps take milliseconds."""
    small = {"model_dim": 16, "ffn_dim": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}
    return dataclasses.replace(
        setting,
        model=dataclasses.replace(setting.model, **small),
        vocabulary=400,
        pieces=400,
        batch_tokens=256,
        num_shapes=1,
        batches=2,
        rounds=1,
    )


def choose_setting(options: argparse.Namespace) -> Setting:
    """Return the setting that the flags name, with what they change."""
    setting = SETTINGS[options.setting]
    model = dataclasses.replace(setting.model, attention_dropout_rate=options.attention_dropout_rate)
    setting = dataclasses.replace(setting, model=model)
    return shrink(setting) if options.tiny else setting


def make_config(setting: Setting, options: argparse.Namespace, batching: Any) -> Config:
    """Build the config: without gradient clipping, and with a constant learning rate, as in the peers."""
    toy = not options.text_dir
    return Config(
        data=DataConfig(
            dataset="toy_de_en" if toy else "parallel_text",
            text_dir=options.text_dir,
            cache_dir=options.cache_dir,
            max_source_length=100 if not options.tiny else 30,
            max_target_length=100 if not options.tiny else 30,
            batching=batching,
            batch_tokens=setting.batch_tokens,
            num_shapes=setting.num_shapes,
            length_multiple=2,
        ),
        vocab=VocabConfig(size=min(setting.pieces, 1000) if toy else setting.pieces),
        model=setting.model,
        optim=OptimConfig(learning_rate=1e-4, schedule="constant", warmup_steps=1, clip_norm=0.0),
        train=TrainConfig(loss_chunk_tokens=options.loss_chunk_tokens, peak_flops=options.peak_tflops * 1e12),
    )


def make_batches(config: Config, count: int) -> tuple[list[BatchArray], list[dict[str, Any]]]:
    """Make the first `count` batches of the first epoch, in the order of training.

    Returns them, and the shapes of the epoch as `plan_summary` describes them.
    """
    prepared = prepare(config)
    store, vocab = prepared.train.base, prepared.vocabs.target
    plan = plan_epoch(
        store.source_lengths, store.target_lengths, config=config.data, seed=config.seed, epoch=0
    )
    batches = [
        make_batch(store, plan[index], pad_id=vocab.pad_id, bos_id=vocab.bos_id)
        for index in range(min(count, len(plan)))
    ]
    return batches, plan_summary(plan, store.source_lengths, store.target_lengths)["shapes"]


def count_flops(batches: list[BatchArray], setting: Setting, *, padded: bool) -> int:
    """Count the floating-point operations of the matrix products of one update on every batch.

    padded: count all operations, those on padding included; otherwise only those on non-padding tokens.
    """
    total = 0
    for batch in batches:
        if padded:
            work = padded_work(*batch.shape)
        else:
            sides = batch.sides
            segments = [side.segments(np) for side in sides] if batch.packed else []
            work = real_work(*(side.mask for side in sides), *segments)
        total += training_flops(setting.model, work, target_size=setting.vocabulary)
    return total


def write_tasks(
    setting: Setting, options: argparse.Namespace, folder: Path
) -> tuple[dict[str, Path], dict[str, Any]]:
    """Write the batches and a task file for each dtype; return their paths and the batches by kind."""
    kinds = ["bucket"] if options.batching == "bucket" else ["pack", "bucket"]
    made = {
        kind: make_batches(make_config(setting, options, kind), options.batches or setting.batches)
        for kind in kinds
    }
    batches = {kind: some for kind, (some, _) in made.items()}
    for kind, some in batches.items():
        arrays = {
            f"{number}.{name}": array
            for number, batch in enumerate(some)
            for name, array in vars(batch).items()
            if name in ("numbers", "source_length", "packed")
        }
        np.savez(folder / f"{kind}.npz", **arrays)
    task: dict[str, Any] = {
        "config": to_dict(make_config(setting, options, kinds[0])),
        "batches": {kind: str(folder / f"{kind}.npz") for kind in kinds},
        "shapes": made[kinds[0]][1],
        "vocabulary": setting.vocabulary,
        "device": options.device,
        "threads": options.threads,
        "torch_compile": options.torch_compile,
        "marian_attention": options.marian_attention,
        "marian_python": options.marian_python,
        "warm_up": {
            "ours": _one_of_each_shape(batches[kinds[0]]),
            "peers": _one_of_each_shape(batches["bucket"]),
        },
    }
    paths = {}
    for dtype in options.dtypes:
        task["config"]["model"]["dtype"] = dtype
        task["peer_dtype"] = options.peer_dtype or dtype
        paths[dtype] = folder / f"task_{dtype}.json"
        paths[dtype].write_text(json.dumps(task), encoding="utf-8")
    return paths, {"ours": batches[kinds[0]], "peers": batches["bucket"]}


def name_systems(options: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Return the system and the dtype of each worker by its name: "ours", or "ours bfloat16" of several."""
    several = len(options.dtypes) > 1
    return {
        f"{system} {dtype}" if several else system: (system, dtype)
        for dtype in options.dtypes
        for system in options.systems
        if system != marian_peer.NAME or dtype == "float32"
    }


def _kind(name: str) -> str:
    """Return whose batches a system trains on."""
    return "ours" if name.startswith("ours") else "peers"


def _one_of_each_shape(batches: list[BatchArray]) -> list[int]:
    """Return the indices of batches to warm up with: one of each shape, twice."""
    first = {b.shape: number for number, b in enumerate(batches)}
    return sorted(first.values()) * 2


def measure(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the systems in turns; return the results as JSON values."""
    systems_of = name_systems(options)
    names = list(systems_of)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        tasks, batches = write_tasks(setting, options, Path(folder))
        platform = "cuda" if options.device == "gpu" else "cpu"
        workers = {
            name: stack.enter_context(
                open_worker(
                    Path(__file__),
                    system,
                    tasks[dtype],
                    threads=options.threads,
                    platform=platform,
                    keep_memory=True,
                )
            )
            for name, (system, dtype) in systems_of.items()
        }
        tokens = {name: sum(int(b.sides[1].mask.sum()) for b in batches[_kind(name)]) for name in names}
        rates: dict[str, list[float]] = {name: [] for name in names}
        losses, products = {}, {name: [] for name in names}
        for number in range(options.rounds or setting.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                count = len(batches[_kind(name)])
                answer = workers[name].ask({"train": list(range(count))})
                rates[name].append((answer.get("tokens") or tokens[name]) / answer["seconds"])
                losses[name] = answer["loss"]
                products[name].append(workers[name].ask({"product": _REPEATS})["gflops"])
        systems = {
            name: {
                "target_tokens_per_second": round(statistics.median(rates[name]), 1),
                "rounds": [round(rate, 1) for rate in rates[name]],
                "product_gflops": round(statistics.median(products[name]), 1),
                "last_loss": round(losses[name], 3),
                **worker.facts,
            }
            for name, worker in workers.items()
        }
    return _conclude(setting, options, systems, batches, tokens)


def _conclude(
    setting: Setting,
    options: argparse.Namespace,
    systems: dict[str, Any],
    batches: dict[str, list[BatchArray]],
    tokens: dict[str, int],
) -> dict[str, Any]:
    """Derive the ratio, the shares and the summaries of the batches from the rates."""
    result: dict[str, Any] = {"setting": options.setting, "tiny": options.tiny, "systems": systems}
    for kind, some in batches.items():
        counts: dict[str, int] = {}
        for batch in some:
            shape = "x".join(map(str, batch.shape))
            counts[shape] = counts.get(shape, 0) + 1
        real = sum(int(b.sides[1].mask.sum()) for b in some)
        result[f"batches_{kind}"] = {"shapes": counts, "target_tokens": real}
    for name, system in systems.items():
        kind = _kind(name)
        a_second = system["target_tokens_per_second"] / tokens[name]  # rounds of all batches
        gflops = count_flops(batches[kind], setting, padded=True) * a_second / 1e9
        system["step_gflops"] = round(gflops, 1)
        system["share_of_product"] = round(gflops / system["product_gflops"], 3)
        if peak := peak_flops(make_config(setting, options, "bucket"), system.get("device_kind", "")):
            model_flops = count_flops(batches[kind], setting, padded=False) * a_second
            system["utilization"] = round(model_flops / peak, 3)
    rates = {name: system["target_tokens_per_second"] for name, system in systems.items()}
    if {_kind(name) for name in rates} == {"ours", "peers"}:
        ours, result["faster_peer"], result["ratio"] = _compare(rates)
        if len(options.dtypes) > 1:
            result["faster_of_ours"] = ours
            of_dtype = {
                dtype: {name: rate for name, rate in rates.items() if name.endswith(dtype)}
                for dtype in options.dtypes
            }
            # A peer may have one of them alone.
            compared = {dtype: own for dtype, own in of_dtype.items() if len(set(map(_kind, own))) == 2}
            result["ratios"] = {dtype: _compare(own)[-1] for dtype, own in compared.items()}
    return result


def _compare(rates: dict[str, float]) -> tuple[str, str, float]:
    """Return the fastest of ours, the fastest of the peers, and the ratio of their rates."""
    ours, peer = (
        max((name for name in rates if _kind(name) == kind), key=rates.__getitem__)
        for kind in ("ours", "peers")
    )
    return ours, peer, round(rates[ours] / rates[peer], 2)


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=SETTINGS, default="small")
    parser.add_argument("--text_dir", default="")
    parser.add_argument("--cache_dir", default="")
    parser.add_argument("--systems", default="ours,marian,torch", help="systems to measure, comma-separated")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="threads per system, on a CPU")
    parser.add_argument(
        "--batching",
        choices=("bucket", "pack"),
        help="batching of our system; default: pack with big, else bucket",
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batches", type=int, default=0, help="number of batches; 0: as the setting says")
    parser.add_argument("--rounds", type=int, default=0, help="number of rounds; 0: as the setting says")
    parser.add_argument(
        "--loss_chunk_tokens", type=int, help="loss chunk of our system; default: 512 on a CPU, 0 on a GPU"
    )
    parser.add_argument("--torch_compile", action="store_true", help="compile the peers, once for each shape")
    parser.add_argument(
        "--attention_dropout_rate", type=float, default=0.1, help="of our system; the peers have 0.1"
    )
    add_marian(parser)
    parser.add_argument("--marian_attention", choices=("sdpa", "eager"), default="sdpa")
    parser.add_argument(
        "--peer_dtype", choices=("float32", "bfloat16"), help="dtype of the peers; bfloat16 means autocast"
    )
    parser.add_argument(
        "--dtypes", help="dtypes of all systems, comma-separated; default: bfloat16 with big, else both"
    )
    parser.add_argument(
        "--peak_tflops", type=float, default=0.0, help="peak of the device, for utilization; 0: from a table"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--task", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.loss_chunk_tokens is None:
        options.loss_chunk_tokens = 512 if options.device == "cpu" else 0
    if options.batching is None:
        options.batching = "pack" if options.setting == "big" else "bucket"
    default = "bfloat16" if options.setting == "big" else "float32,bfloat16"
    options.dtypes = (options.dtypes or default).split(",")
    if unknown := set(options.dtypes) - {"float32", "bfloat16"}:
        parser.error(f"unknown dtypes {', '.join(unknown)}; known: float32, bfloat16")
    options.systems = choose_systems(parser, options.systems, PEERS)
    return options


def main() -> None:
    """Print the comparison as JSON; with --worker, run one of the systems."""
    options = parse_options()
    if options.worker:
        from training_worker import serve

        serve(options.worker, json.loads(options.task.read_text(encoding="utf-8")))
        return
    require_packages(options.systems)
    print(json.dumps(measure(choose_setting(options), options), indent=2))


if __name__ == "__main__":
    main()
