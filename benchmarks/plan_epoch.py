"""Time and memory to plan an epoch of many pairs, and the share of padding in its batches, in both modes.

`PYTHONPATH=. python benchmarks/plan_epoch.py --pairs=5000000` draws random lengths; `--lengths=FILE.npz`,
with arrays `source` and `target`, reads the lengths of real sentences.
"""

import argparse
import dataclasses
import json
import resource
import time

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.batching import plan_epoch, plan_summary


def make_lengths(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw lognormal lengths with mean 25; source and target of a pair have similar lengths."""
    random = np.random.default_rng(0)
    source = np.exp(random.normal(3.0, 0.6, number))
    target = source * np.exp(random.normal(0.0, 0.2, number))
    return source.astype(np.int32) + 1, target.astype(np.int32) + 1


def main() -> None:
    """Print one JSON object per mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5_000_000)
    parser.add_argument("--lengths", default="")
    parser.add_argument("--batch_tokens", type=int, default=4096)
    parser.add_argument("--num_shapes", type=int, default=8)
    parser.add_argument("--length_multiple", type=int, default=4)
    options = parser.parse_args()
    if options.lengths:
        arrays = np.load(options.lengths)
        source, target = arrays["source"], arrays["target"]
    else:
        source, target = make_lengths(options.pairs)
    sizes = {name: getattr(options, name) for name in ("batch_tokens", "num_shapes", "length_multiple")}
    for batching in ("bucket", "pack"):
        config = dataclasses.replace(DataConfig(batching=batching), **sizes)
        started, started_cpu = time.perf_counter(), time.process_time()
        plan = plan_epoch(source, target, config=config, seed=1, epoch=0)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        facts = {
            "seconds": round(seconds, 2),
            "cpu_seconds": round(cpu_seconds, 2),
            "peak_gib": round(memory, 2),
        }
        print(json.dumps({"batching": batching, **facts, **plan_summary(plan)}))


if __name__ == "__main__":
    main()
