"""One system of `benchmarks/train.py` in a process of its own, which trains on given batches on command.

Contains the protocol (one JSON value per line; commands in, results out) and our own system. The parent
starts one worker per system, lets it compile, and then gives the workers turns; a waiting worker computes
nothing.
"""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import marian_peer
import numpy as np

from flaxformer_mt.config import Config
from flaxformer_mt.data.batch_array import BatchArray

# Width of the square matrices whose product measures the speed of the device.
PRODUCT_SIZE = 1024


class System(NamedTuple):
    """A system that a worker runs.

    train: runs updates on the batches of the given indices in order, waits for them, and returns the loss per
      token of the last batch; with the number of target tokens, if it makes batches of its own.
    product: multiplies two square float32 matrices with the library of this system, and waits.
    facts: properties of the system, for the report.
    """

    train: Callable[[list[int]], float | tuple[float, int]]
    product: Callable[[], object]
    facts: dict[str, Any]


def load_batches(path: Path, config: Config) -> list[BatchArray]:
    """Read the batches that the parent wrote: arrays named INDEX.FIELD."""
    ids = config.vocab.pad_id, config.vocab.bos_id
    with np.load(path) as arrays:
        return [
            BatchArray(
                arrays[f"{index}.numbers"],
                int(arrays[f"{index}.source_length"]),
                bool(arrays[f"{index}.packed"]),
                *ids,
            )
            for index in range(len(arrays.files) // 3)
        ]


def make_ours(
    config: Config, batches: list[BatchArray], vocabulary: int, shapes: list[dict[str, Any]]
) -> System:
    """Build our training step, compiled and fed in the same way as by the command `train`.

    Args:
      shapes: those of an epoch, as `plan_summary` describes them.
    """
    import jax
    import jax.numpy as jnp

    from flaxformer_mt.model import init_params, make_model
    from flaxformer_mt.parallel import make_parallel
    from flaxformer_mt.training.compile_ahead import find_unpadded_sizes, fitting_sizes
    from flaxformer_mt.training.optimizers import make_hyperparameters
    from flaxformer_mt.training.state import init_state
    from flaxformer_mt.training.update import UpdateConfig, make_train_step

    parallel = make_parallel(config)
    model = make_model(
        config.model, source_size=vocabulary, target_size=vocabulary, platform=parallel.platform
    )
    numbers = parallel.place(make_hyperparameters(config))
    step = parallel.compile(make_train_step(model, UpdateConfig.of(config), parallel), donate=(0,))
    params = init_params(model, jax.random.key(config.seed))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    held = {"state": parallel.place(init_state(params, config.optim))}

    sizes = find_unpadded_sizes(config, parallel, [shapes])

    def put(batch: BatchArray) -> Any:
        return parallel.put(dataclasses.replace(batch, unpadded=fitting_sizes(batch, sizes)))

    def train(chosen: list[int]) -> float:
        for index in chosen:
            held["state"], metrics = step(held["state"], numbers, put(batches[index]))
        loss, weight, skipped = parallel.fetch((metrics.loss_sum, metrics.weight, metrics.skipped))
        if skipped:
            raise ArithmeticError(f"{skipped} updates were skipped because their gradients were non-finite")
        return float(loss / weight)

    square = jnp.asarray(np.random.default_rng(0).normal(size=(PRODUCT_SIZE, PRODUCT_SIZE)), jnp.float32)
    multiply = jax.jit(jnp.dot)
    facts = {
        "parameters": parameters,
        "versions": {"jax": jax.__version__},
        "device": parallel.describe(),
        "device_kind": parallel.device_kind,
    }
    return System(train, lambda: multiply(square, square).block_until_ready(), facts)


def make_system(name: str, task: dict[str, Any]) -> System:
    """Build the system `name` with its model and optimizer, before the first update."""
    from flaxformer_mt.config.files import from_dict

    config = from_dict(task["config"])
    file = Path(task["batches"][config.data.batching if name == "ours" else "bucket"])
    batches = load_batches(file, config)
    if name == "ours":
        return make_ours(config, batches, task["vocabulary"], task["shapes"])
    if name == marian_peer.NAME:
        peer_batches = [batch.to_batch(np) for batch in batches]
        square = np.ones((PRODUCT_SIZE, PRODUCT_SIZE), np.float32)  # not Marian's product, but numpy's
        facts = {"versions": marian_peer.find_version(task["marian_python"])}
        return System(marian_peer.make_trainer(config, peer_batches, task), lambda: square @ square, facts)
    from torch_peers import make_peer

    return make_peer(name, config, [batch.to_batch(np) for batch in batches], task)


def measure_product(system: System, *, repeats: int) -> float:
    """Return the GFLOP/s of the product at the median time."""
    system.product()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        system.product()
        seconds.append(time.perf_counter() - start)
    return 2 * PRODUCT_SIZE**3 / statistics.median(seconds) / 1e9


def serve(name: str, task: dict[str, Any]) -> None:
    """Answer commands until standard input ends: {"train": [indices]} and {"product": repeats}."""
    start = time.perf_counter()
    system = make_system(name, task)
    for number in task["warm_up"]["ours" if name == "ours" else "peers"]:
        system.train([number])
    _send({**system.facts, "compile_seconds": time.perf_counter() - start})
    for line in sys.stdin:
        command = json.loads(line)
        if "product" in command:
            _send({"gflops": measure_product(system, repeats=command["product"])})
            continue
        start = time.perf_counter()
        loss = system.train(command["train"])
        seconds = time.perf_counter() - start
        loss, tokens = loss if isinstance(loss, tuple) else (loss, None)
        _send({"seconds": seconds, "loss": loss, "tokens": tokens})


def _send(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)
