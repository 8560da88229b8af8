"""What beam search computes for some lines, and what each loss costs: `translate.py --account`, on CPUs.

Counts and times come from runs of their own, since counting takes time:
1. timed: processor time of reading sources and of decoding, by size of state, each call awaited;
2. counted: in every step of every state, the rows that search, the hypotheses that live, and real positions;
3. traced by jax.profiler: number and time of the operations, among them library calls (products and sums).

A row-step is one step of one row of a state, whether the row has a sentence or not; a row has as many
hypotheses as beams. Positions are those of keys and values that a row-step attends to, padding included.
"""

import collections
import contextlib
import glob
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax
import numpy as np
from translation_worker import make_ours

from flaxformer_mt.decoding.compiled_programs import SearchPrograms, StatePrograms
from flaxformer_mt.parameter_trees import flatten_tree
from flaxformer_mt.search import Search, Size

# Operations that are calls of a library (products of matrices and sums), by their names in a trace, and those
# that consist of others.
_LIBRARY, _CONTAINER = re.compile(r"dot|ynn|custom-call"), re.compile(r"while|call|conditional")


@dataclass
class Tally:
    """Sums over the steps of all parts of a state."""

    row_steps: int = 0
    searching: int = 0  # row-steps of rows with a sentence
    hypotheses: int = 0  # steps of hypotheses that have not ended
    target: int = 0  # real positions of targets, of rows with a sentence
    source: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prefill", "generate"), 0.0))
    calls: int = 0


class Account:
    """The tallies of the sizes of states, and of the sources that are read (capacity 1)."""

    def __init__(self) -> None:
        self.sizes: dict[Size, Tally] = collections.defaultdict(Tally)
        self.bytes_of_step: dict[Size, tuple[int, int]] = {}  # of parameters, of the cache
        self._names: dict[int, tuple[Size, int]] = {}  # id of programs -> their size and parameters

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Wait for each call, and add its processor time to the tally of its size."""
        find, prefill, generate = SearchPrograms.find, StatePrograms.prefill, StatePrograms.generate

        def find_and_note(all_of_them: Any, params: Any, size: Size, *example: Any, **how: Any) -> Any:
            programs = find(all_of_them, params, size, *example, **how)
            self._names[id(programs)] = size, _bytes_of_step(params[0])
            return programs

        def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def run(programs: StatePrograms, *arguments: Any, **how: Any) -> Any:
                size, params = self._names[id(programs)]
                start = time.process_time()
                found = jax.block_until_ready(call(programs, *arguments, **how))
                tally = self.sizes[size]
                tally.seconds[name] += time.process_time() - start
                tally.calls += name == "generate"
                if name == "generate":
                    cache = sum(leaf.nbytes for leaf in found.state) // len(jax.local_devices())
                    self.bytes_of_step[size] = params, cache
                return found

            return run

        with (
            mock.patch.object(SearchPrograms, "find", find_and_note),
            mock.patch.object(StatePrograms, "prefill", timed("prefill", prefill)),
            mock.patch.object(StatePrograms, "generate", timed("generate", generate)),
        ):
            yield

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Let programs that are compiled meanwhile count each step."""
        step, lock = Search.step, threading.Lock()

        def record(done: Any, live: Any, lengths: Any, sources: Any, size: Size) -> None:
            searching = ~np.asarray(done)
            with lock:  # each device calls from a thread of its own
                tally = self.sizes[size]
                tally.row_steps += len(searching)
                tally.searching += int(searching.sum())
                tally.hypotheses += int(np.asarray(live)[searching].sum())
                tally.target += int((np.asarray(lengths)[searching] + 1).sum())
                tally.source += int(np.asarray(sources)[searching].sum())

        def counted(task: Search, state: Any) -> Any:
            mask = state.cache.shared["source_mask"]
            size = Size(len(state.done), mask.shape[1], task.max_length)
            live = (state.log_probs > -np.inf).sum(axis=1)
            values = (state.done, live, state.prefix_lengths, mask.sum(axis=1))
            jax.debug.callback(lambda *found: record(*found, size=size), *values)
            return step(task, state)

        with mock.patch.object(Search, "step", counted):
            yield
        jax.effects_barrier()


def _bytes_of_step(params: Any) -> int:
    """Return the bytes of the parameters that a step reads: not those of the encoder, nor of its outputs."""
    leaves = flatten_tree(params)
    read = [
        leaf
        for path, leaf in leaves.items()
        if not path.startswith(("encoder", "source_embedding"))
        and not re.search(r"cross_attention/(key|value)", path)
    ]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in read)


def account_for(task: dict[str, Any]) -> dict[str, Any]:
    """Return the account of the first variant of a task of `translate.py`, as JSON values."""
    variant = next(iter(task["our_variants"]))
    task = task | {"our_variants": {variant: task["our_variants"][variant]}}
    translate, account = make_ours(task).variants[variant], Account()
    translate([])  # compiles
    with account.timing():
        busy, thread, start = time.process_time(), time.thread_time(), time.perf_counter()
        tokens = sum(map(len, translate([])))
        seconds, wall = time.process_time() - busy, time.perf_counter() - start
        main_thread = time.thread_time() - thread
    with account.counting():
        make_ours(task).variants[variant]([])
    steps = sum(tally.row_steps // size.rows for size, tally in account.sizes.items() if size.capacity > 1)
    return {
        "variant": variant,
        "tokens": tokens,
        "processor_seconds": round(seconds, 2),
        "tokens_per_processor_second": round(tokens / seconds, 1),
        "wall_seconds": round(wall, 2),
        "main_thread_seconds": round(main_thread, 2),
        **_report(account, seconds),
        **_trace(translate, steps),
    }


def _report(account: Account, seconds: float) -> dict[str, Any]:
    """Return the rows of the account, and what the lines would cost without each loss."""
    sizes = {size: tally for size, tally in account.sizes.items() if size.capacity > 1}
    read = [(size, tally) for size, tally in account.sizes.items() if size.capacity == 1]
    states, losses = {}, collections.Counter[str]()
    rates = {size: tally.seconds["generate"] / tally.row_steps for size, tally in sizes.items()}
    for size, tally in sorted(sizes.items()):
        params, cache = account.bytes_of_step[size]
        decoding, width = tally.seconds["generate"], max(1, -(-tally.hypotheses // tally.searching))
        computed = tally.row_steps * (size.source_length + size.capacity)
        states[f"{size.rows} rows, source {size.source_length}, target {size.capacity}"] = {
            "calls": tally.calls,
            "steps": tally.row_steps // size.rows,
            "row_steps": tally.row_steps,
            "searching": _share(tally.searching, tally.row_steps),
            "hypotheses_alive": _share(tally.hypotheses, width * tally.searching),
            "source_real": _share(tally.source, tally.searching * size.source_length),
            "target_real": _share(tally.target, tally.searching * size.capacity),
            "megabytes_of_a_step": {"parameters": round(params / 1e6, 1), "cache": round(cache / 1e6, 1)},
            "seconds": {name: round(value, 2) for name, value in tally.seconds.items()},
            "ms_of_a_row_step": round(1000 * rates[size], 3),
        }
        # The cheapest row-step of the states that have at least as much room.
        cheapest = min(rate for other, rate in rates.items() if other.capacity >= size.capacity)
        losses["rows that are free"] += decoding * (1 - tally.searching / tally.row_steps)
        losses["hypotheses that have ended"] += decoding * (1 - tally.hypotheses / (width * tally.searching))
        losses["rows too few for their parameters"] += max(0.0, decoding - cheapest * tally.row_steps)
        padding = 1 - (tally.source + tally.target) / computed
        losses["padding, if bytes are the cost"] += decoding * padding * cache / (params + cache)
    reading = sum(tally.seconds["prefill"] for tally in sizes.values())
    positions = sum(tally.row_steps * size.source_length for size, tally in read)
    real = sum(tally.source for _, tally in read)
    losses["padding of sources that are read"] = reading * (1 - real / positions)
    losses["outside of the programs"] = (
        seconds - reading - sum(tally.seconds["generate"] for tally in sizes.values())
    )
    return {
        "states": states,
        "sources_read": {"positions": positions, "real": _share(real, positions)},
        "row_steps": sum(tally.row_steps for tally in sizes.values()),
        "searching": sum(tally.searching for tally in sizes.values()),
        "seconds_without": {name: round(seconds - loss, 2) for name, loss in losses.items()},
    }


def _share(part: int, whole: int) -> float:
    return round(part / max(1, whole), 3)


def _trace(translate: Callable[[list], Any], steps: int) -> dict[str, Any]:
    """Return the number and time of operations; `steps` are those of all parts."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            translate([])
        [path] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        profile = jax.profiler.ProfileData.from_file(path)
    counts, seconds = collections.Counter[str](), collections.Counter[str]()
    for event in (event for plane in profile.planes for line in plane.lines for event in line.events):
        operation = dict(event.stats).get("hlo_op")
        if operation and not event.name.startswith("end: ") and not _CONTAINER.match(operation):
            kind = "library calls" if _LIBRARY.search(operation) else "others"
            counts[kind] += 1
            seconds[kind] += event.duration_ns / 1e9
    return {
        "operations_of_a_step": {kind: round(count / steps) for kind, count in counts.items()},
        "seconds_of_operations": {kind: round(value, 2) for kind, value in seconds.items()},
    }
