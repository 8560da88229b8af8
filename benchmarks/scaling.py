"""Cost of a training step as one quantity grows: width, depth, batch size, or the number of devices.

    # --axis=depth: only that axis; --tiny: toy sizes, in seconds
    PYTHONPATH=. python benchmarks/scaling.py

Each row is measured in a process of its own, which initializes the state, compiles the training update, and
runs it on a batch without padding. Columns:

* `init_s`, `compile_s`: seconds to initialize the state, and to trace and compile the update (with pmap: the
  first call minus a later one). The cache of compiled programs is not used.
* `step_ms`: the median time of several updates. `tokens_per_second`: target tokens per second at that time.
* `state_mib`, `temporary_mib`: memory per device as reported by XLA: arguments and results of the update, and
  its temporary buffers, which include activations. Empty with pmap, which reports neither.
* `peak_mib`: on a CPU the peak memory of the process, Python and the compiler included; elsewhere of a
  device.

Depth is the number of layers of each stack, measured with `model.scan_layers` off and on; remat is measured
at one depth, with both. Devices are simulated on the CPU and share its cores, so that more devices do not
make a step of the same batch faster. The rows show the cost of the layouts: memory per device, and time for
communication and compilation.
"""

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from flaxformer_mt.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.parallel import make_parallel
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training.optimizers import make_hyperparameters
from flaxformer_mt.training.state import TrainState, init_state
from flaxformer_mt.training.update import UpdateConfig, make_train_step

AXES = ("width", "depth", "remat", "batch", "devices")


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table: an axis, a value on that axis, and all sizes of the model and the batch."""

    axis: str
    value: str
    width: int = 256
    depth: int = 3
    scan: bool = False
    remat: str = "none"
    rows: int = 64
    length: int = 32
    vocabulary: int = 8000
    devices: int = 1
    # Fields of ParallelConfig.
    layout: dict[str, Any] = dataclasses.field(default_factory=dict)


TINY = Case("", "", width=16, depth=1, rows=8, length=8, vocabulary=40)


def plan_cases(*, tiny: bool) -> Iterator[Case]:
    """Yield all rows, in order."""

    def case(axis: str, value: object, **changes: Any) -> Case:
        start = TINY if tiny else Case("", "")
        return dataclasses.replace(start, axis=axis, value=str(value), **changes)

    for width in (16, 32) if tiny else (128, 256, 512):
        yield case("width", width, width=width)
    for depth in (1, 2) if tiny else (2, 6, 12, 24):
        for scan in (False, True):
            name = f"{depth}{' scanned' if scan else ''}"
            yield case("depth", name, width=16 if tiny else 128, depth=depth, scan=scan)
    for remat in ("none", "dots", "full"):
        for scan in (False, True):
            name = f"{remat}{' scanned' if scan else ''}"
            yield case("remat", name, depth=2 if tiny else 6, scan=scan, remat=remat)
    for rows in (8, 16) if tiny else (16, 64, 128):
        yield case("batch", rows * TINY.length if tiny else rows * 32, rows=rows)
    for count in (2,) if tiny else (1, 2, 4, 8):
        for layout in _layouts(count):
            name = "one" if count == 1 else f"{count} {' '.join(str(part) for part in layout.values())}"
            yield case("devices", name.strip(), devices=count, layout=_to_fields(layout, count))


def _layouts(count: int) -> list[dict[str, str]]:
    kinds = [{"kind": "pmap"}, {"kind": "mesh data"}, {"kind": "mesh fsdp"}, {"kind": "mesh tensor"}]
    return [{"kind": "mesh data"}] if count == 1 else kinds


def _to_fields(layout: dict[str, str], count: int) -> dict[str, Any]:
    backend, _, axis = layout["kind"].partition(" ")
    return {"backend": backend, **({axis: count} if axis in ("fsdp", "tensor") else {})}


def make_config(case: Case) -> Config:
    """Build the config that a row measures."""
    split = case.layout.get("fsdp", 1) * case.layout.get("tensor", 1)
    return Config(
        data=DataConfig(
            batch_tokens=case.rows * case.length, max_source_length=case.length, max_target_length=case.length
        ),
        model=ModelConfig(
            num_encoder_layers=case.depth,
            num_decoder_layers=case.depth,
            model_dim=case.width,
            num_heads=8,
            ffn_dim=4 * case.width,
            scan_layers=case.scan,
            remat=case.remat,  # type: ignore[arg-type]
        ),
        train=TrainConfig(),
        parallel=ParallelConfig(data=case.devices // split, **case.layout),
    )


def make_full_batch(case: Case) -> Batch:
    """Make a batch of random ids without padding."""
    random = np.random.default_rng(0)
    shape = (case.rows, case.length)
    ids = [random.integers(4, case.vocabulary, shape, np.int32) for _ in range(3)]
    return Batch(*ids, np.ones(shape, bool), np.ones(shape, bool))


def measure(case: Case, *, seconds: float = 3.0) -> dict[str, Any]:
    """Measure one row in this process; repeat the update for about `seconds`, and at least three times."""
    config = make_config(case)
    parallel = make_parallel(config)
    model = make_model(
        config.model, source_size=case.vocabulary, target_size=case.vocabulary, platform=parallel.platform
    )
    numbers = parallel.place(make_hyperparameters(config))

    def make_state(params: Any) -> TrainState:
        return init_state(params, config.optim)

    start = time.perf_counter()
    params = init_params(model, jax.random.key(0), sharding_of=parallel.sharding_of)
    state = jax.block_until_ready(parallel.init(make_state, params, donate=(0,)))
    init = time.perf_counter() - start
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    batch = jax.block_until_ready(parallel.put(make_full_batch(case)))
    step = parallel.compile(make_train_step(model, UpdateConfig.of(config), parallel), donate=(0,))
    compiled, times = None, []
    if hasattr(step, "lower"):
        start = time.perf_counter()
        compiled = step = step.lower(state, numbers, batch).compile()
        compilation = time.perf_counter() - start
    while len(times) < 4 or sum(times[1:]) < seconds:
        start = time.perf_counter()
        state, metrics = step(state, numbers, batch)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - start)
    if not np.isfinite(metrics.loss_sum):
        raise ArithmeticError(f"the loss of {case} is {metrics.loss_sum}; its measurements are invalid")
    typical = statistics.median(times[1:])
    if compiled is None:
        compilation = times[0] - typical
    peak = parallel.memory() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {
        "axis": case.axis,
        "value": case.value,
        "parameters": parameters,
        "init_s": round(init, 1),
        "compile_s": round(compilation, 1),
        "step_ms": round(1e3 * typical, 1),
        "tokens_per_second": round(case.rows * case.length / typical),
        **_memory_of(compiled),
        "peak_mib": peak >> 20,
    }


def _memory_of(compiled: Any) -> dict[str, int | None]:
    if compiled is None:
        return {"state_mib": None, "temporary_mib": None}
    found = compiled.memory_analysis()
    state = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return {"state_mib": state >> 20, "temporary_mib": found.temp_size_in_bytes >> 20}


def measure_apart(case: Case, *, seconds: float) -> dict[str, Any]:
    """Run `measure` in a process of its own, with the number of simulated devices of the row."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if case.axis == "devices":
        flags = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={case.devices}"
        environment |= {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, f"--case={json.dumps(dataclasses.asdict(case))}"]
    command.append(f"--seconds={seconds}")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ChildProcessError(f"{case} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def format_table(rows: list[dict[str, Any]]) -> str:
    """Format rows with equal keys as text: numbers right-aligned, a blank line between axes."""
    cells = [list(rows[0])] + [
        ["" if x is None else f"{x:,}" if isinstance(x, int) else str(x) for x in row.values()]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines, before = [], ""
    for row in cells:
        if before and row[0] != before and lines:
            lines.append("")
        before = row[0]
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(left + right).rstrip())
    return "\n".join(lines)


def main() -> None:
    """Print the table, or JSON objects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--axis", choices=AXES, action="append", help="only this axis; may be repeated")
    parser.add_argument("--seconds", type=float, default=3.0, help="time to repeat the update of each row")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one object per row, instead of the table")
    parser.add_argument("--case", help="measure one row, given as JSON, in this process")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(Case(**json.loads(options.case)), seconds=options.seconds)))
        return
    rows = []
    for case in plan_cases(tiny=options.tiny):
        if options.axis is None or case.axis in options.axis:
            print(f"{case.axis} {case.value}", file=sys.stderr)
            rows.append(measure_apart(case, seconds=0.0 if options.tiny else options.seconds))
            if options.json:
                print(json.dumps(rows[-1]), flush=True)
    if not options.json:
        print(format_table(rows))


if __name__ == "__main__":
    main()
