"""Real target tokens a second of a training step: ours beside two PyTorch peers on the same arrays.

    # DIR: train.de, train.en; else the toy corpus
    PYTHONPATH=. python benchmarks/train.py --setting=small --text_dir=DIR

The same post-norm Transformer with the same numbers of parameters, dropout 0.1 everywhere, label smoothing
0.1 and Adam, in ours, in `MarianMTModel` of transformers and in `torch.nn.Transformer`, on batches of our own
planner. Each system is a process of its own, since thread pools in one process disturb each other; all have
large memory pages and as many threads as `--threads` says. They compile and warm up first, one after the
other, which is not measured; then they take turns, several rounds of all batches, and medians are compared.

Settings: small and base for CPUs in float32; big is Transformer-big in bfloat16 for a GPU. With big, and
with `--batching=pack`, ours trains on packed batches, the peers on buckets of as many tokens. `--tiny` runs
everything with a toy model in seconds. Prints JSON: for each system tokens a second of every round, the
matrix products of a step as GFLOP/s, padding included as it is multiplied, and their share of what a
1024 x 1024 float32 product reaches in the same process; `ratio` of ours to the faster peer; and where the
device's peak is known `utilization` of it by real tokens alone.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from workers import open_worker

from flaxformer_mt.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig, VocabConfig
from flaxformer_mt.config.files import to_dict
from flaxformer_mt.data.batching import plan_epoch
from flaxformer_mt.data.loader import make_batch
from flaxformer_mt.data.prepare import prepare
from flaxformer_mt.flops import padded_work, peak_flops, real_work, training_flops
from flaxformer_mt.shapes import Batch

PEERS = ("marian", "torch")
# Repetitions of the 1024 x 1024 product.
_REPEATS = 30


@dataclasses.dataclass(frozen=True)
class Setting:
    """A size of model and batches, and how long it is measured."""

    model: ModelConfig
    # Rows of the embedding, and pieces that the text is cut into: no more, as small corpora have fewer.
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
    """The same with a model that takes milliseconds a step."""
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


def make_config(setting: Setting, options: argparse.Namespace, batching: Any) -> Config:
    """The experiment: no clipping and a constant learning rate, as the peers have it."""
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


def make_batches(config: Config, count: int) -> list[Batch]:
    """The first batches of the first epoch, in the order in which training sees them."""
    prepared = prepare(config)
    store, vocab = prepared.train.base, prepared.vocabs.target
    plan = plan_epoch(
        store.source_lengths, store.target_lengths, config=config.data, seed=config.seed, epoch=0
    )
    return [
        make_batch(store, plan, index, pad_id=vocab.pad_id, bos_id=vocab.bos_id)
        for index in range(min(count, len(plan)))
    ]


def count_flops(batches: list[Batch], setting: Setting, *, padded: bool) -> int:
    """Floating-point operations of the matrix products of an update on each batch, in all.

    padded: of everything that is multiplied, padding too; else of real tokens alone, what the model needs.
    """
    total = 0
    for batch in batches:
        if padded:
            work = padded_work(*batch.source.shape, batch.target_in.shape[1])
        else:
            segments = batch.source_segments, batch.target_segments
            work = real_work(batch.source_mask, batch.target_mask, *segments)
        total += training_flops(setting.model, work, target_size=setting.vocabulary)
    return total


def write_task(setting: Setting, options: argparse.Namespace, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Writes batches and everything else that workers read; also returns the batches by their kind."""
    kinds = ["bucket"] if options.batching == "bucket" else ["pack", "bucket"]
    batches = {
        kind: make_batches(make_config(setting, options, kind), options.batches or setting.batches)
        for kind in kinds
    }
    for kind, some in batches.items():
        arrays = {
            f"{number}.{name}": array
            for number, batch in enumerate(some)
            for name, array in batch._asdict().items()
            if array is not None
        }
        np.savez(folder / f"{kind}.npz", **arrays)
    task = {
        "config": to_dict(make_config(setting, options, kinds[0])),
        "batches": {kind: str(folder / f"{kind}.npz") for kind in kinds},
        "vocabulary": setting.vocabulary,
        "device": options.device,
        "threads": options.threads,
        "torch_compile": options.torch_compile,
        "peer_dtype": options.peer_dtype or setting.model.dtype,
        "marian_attention": options.marian_attention,
        "warm_up": {
            "ours": _one_of_each_shape(batches[kinds[0]]),
            "peers": _one_of_each_shape(batches["bucket"]),
        },
    }
    path = folder / "task.json"
    path.write_text(json.dumps(task), encoding="utf-8")
    return path, {"ours": batches[kinds[0]], "peers": batches["bucket"]}


def _one_of_each_shape(batches: list[Batch]) -> list[int]:
    """Numbers of batches to warm up with: one of each shape, twice."""
    first = {(b.source.shape, b.target_in.shape): number for number, b in enumerate(batches)}
    return sorted(first.values()) * 2


def measure(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Lets the systems take turns; returns what was measured as JSON values."""
    names = options.systems.split(",")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        task, batches = write_task(setting, options, Path(folder))
        platform = "cuda" if options.device == "gpu" else "cpu"
        workers = {
            name: stack.enter_context(
                open_worker(Path(__file__), name, task, threads=options.threads, platform=platform)
            )
            for name in names
        }
        tokens = {
            name: sum(int(b.target_mask.sum()) for b in batches["ours" if name == "ours" else "peers"])
            for name in names
        }
        rates: dict[str, list[float]] = {name: [] for name in names}
        losses, products = {}, {name: [] for name in names}
        for number in range(options.rounds or setting.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                count = len(batches["ours" if name == "ours" else "peers"])
                answer = workers[name].ask({"train": list(range(count))})
                rates[name].append(tokens[name] / answer["seconds"])
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
    batches: dict[str, list[Batch]],
    tokens: dict[str, int],
) -> dict[str, Any]:
    """What follows from the rates: the ratio, the share of products, the batches."""
    result: dict[str, Any] = {"setting": options.setting, "tiny": options.tiny, "systems": systems}
    for kind, some in batches.items():
        counts: dict[str, int] = {}
        for batch in some:
            shape = "x".join(map(str, (*batch.source.shape, batch.target_in.shape[1])))
            counts[shape] = counts.get(shape, 0) + 1
        real = sum(int(b.target_mask.sum()) for b in some)
        result[f"batches_{kind}"] = {"shapes": counts, "target_tokens": real}
    peers = {name: systems[name]["target_tokens_per_second"] for name in PEERS if name in systems}
    for name, system in systems.items():
        kind = "ours" if name == "ours" else "peers"
        a_second = system["target_tokens_per_second"] / tokens[name]  # rounds of all batches
        gflops = count_flops(batches[kind], setting, padded=True) * a_second / 1e9
        system["step_gflops"] = round(gflops, 1)
        system["share_of_product"] = round(gflops / system["product_gflops"], 3)
        if peak := peak_flops(make_config(setting, options, "bucket"), system.get("device_kind", "")):
            model_flops = count_flops(batches[kind], setting, padded=False) * a_second
            system["utilization"] = round(model_flops / peak, 3)
    if "ours" in systems and peers:
        faster = max(peers, key=peers.__getitem__)
        result["faster_peer"] = faster
        result["ratio"] = round(systems["ours"]["target_tokens_per_second"] / peers[faster], 2)
    return result


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=SETTINGS, default="small")
    parser.add_argument("--text_dir", default="")
    parser.add_argument("--cache_dir", default="")
    parser.add_argument("--systems", default="ours,marian,torch", help="of these, with commas")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="of each system, on a CPU")
    parser.add_argument("--batching", choices=("bucket", "pack"), help="of ours; pack with big, else bucket")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batches", type=int, default=0, help="0: as the setting says")
    parser.add_argument("--rounds", type=int, default=0, help="0: as the setting says")
    parser.add_argument("--loss_chunk_tokens", type=int, help="of ours; else 256 on a CPU, 0 on a GPU")
    parser.add_argument("--torch_compile", action="store_true", help="compile the peers, shape by shape")
    parser.add_argument("--marian_attention", choices=("sdpa", "eager"), default="sdpa")
    parser.add_argument("--peer_dtype", choices=("float32", "bfloat16"), help="bfloat16: autocast")
    parser.add_argument("--peak_tflops", type=float, default=0.0, help="of the device, for utilisation")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--task", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.loss_chunk_tokens is None:
        options.loss_chunk_tokens = 256 if options.device == "cpu" else 0
    if options.batching is None:
        options.batching = "pack" if options.setting == "big" else "bucket"
    return options


def main() -> None:
    """Prints the comparison as JSON; or is one of the systems in it."""
    options = parse_options()
    if options.worker:
        from training_worker import serve

        serve(options.worker, json.loads(options.task.read_text(encoding="utf-8")))
        return
    setting = SETTINGS[options.setting]
    print(json.dumps(measure(shrink(setting) if options.tiny else setting, options), indent=2))


if __name__ == "__main__":
    main()
