"""`show --target`: what compilers make of a config for accelerators that are not at hand.

With the search for settings near to the config whose update fits into their memory.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax

from flaxformer_mt.commands.compile_for_target import (
    Compiled,
    Target,
    TargetCompiler,
    name_missing_library,
    parse_target,
)
from flaxformer_mt.commands.compiled_text import (
    MEASURED_RATES,
    Kernel,
    Rates,
    Traffic,
    is_attention,
    kernel_seconds,
    sum_kernels,
)
from flaxformer_mt.commands.show import longest_batch, show
from flaxformer_mt.commands.terminal_tables import Parts
from flaxformer_mt.config import Config
from flaxformer_mt.config.checks import validate
from flaxformer_mt.data.batch_array import BatchArray
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.tables import Table, make_table, write_text
from flaxformer_mt.flops import padded_work, peak_flops, training_flops
from flaxformer_mt.kernels.attention_kernels import explain_attention

# Names and values of fields: {"model.remat": "dots"}.
Changes = dict[str, Any]

# How often the batch is halved.
_HALVINGS = 3
# The loss computes the logits of this share of the tokens at a time.
_LOSS_CHUNKS = 8

# What steps cost: the more, the more of the speed of an update depends on them. The loss in chunks costs next
# to nothing; remat computes some or all activations twice; a layout that splits parameters sends them; a
# smaller batch leaves devices with less to do at a time, and halving it again with still less.
_LOSS_COST = 1
_REMAT_COSTS = {"none": 0, "dots": 2, "full": 4}
_LAYOUT_COST = 6
_BATCH_COST, _HALF_COST = 6, 3


class Step(NamedTuple):
    """A change that saves memory, and what it costs."""

    changes: Changes
    cost: int


# Steps of one kind, of which a config takes one or none; each saves more than the one before, and costs more.
Ladder = list[Step]


class Attempt(NamedTuple):
    """Settings that were tried, the bytes that an update then needs on a device, and whether they fit.

    distance: how far the settings are from those of the config: the sum of what their steps cost. 1 for the
    loss in chunks; 2 for `model.remat=dots`, 4 for `full`; 6 for another layout; 9, 12 and 15 for a half, a
    fourth and an eighth of the batch.
    """

    changes: Changes
    needed: int
    fits: bool
    distance: int


def list_ladders(config: Config, *, device_count: int, loss_tokens: int) -> list[Ladder]:
    """List what can save memory, by kind, the cheapest kind first.

    All of them leave the result of training as it is, up to rounding and the random numbers of dropout. The
    loss computes the logits of `loss_tokens` of a batch on one device.
    """
    chunk = max(256, loss_tokens // _LOSS_CHUNKS // 256 * 256)
    loss = [Step({"train.loss_chunk_tokens": chunk}, _LOSS_COST)]
    if config.train.loss_chunk_tokens or chunk >= loss_tokens:
        loss = []
    spent = _REMAT_COSTS[config.model.remat]
    remat = [Step({"model.remat": to}, cost - spent) for to, cost in _REMAT_COSTS.items() if cost > spent]
    parallel = config.parallel
    split = device_count // parallel.tensor
    layout = [Step({"parallel.fsdp": split, "parallel.data": 1}, _LAYOUT_COST)]
    if parallel.fsdp >= split or config.model.model_dim % split or parallel.backend == "pmap":
        layout = []
    least = max(config.data.max_source_length, config.data.max_target_length) * config.data.row_multiple
    batch = [
        Step(
            {
                "data.batch_tokens": config.data.batch_tokens >> power,
                "optim.accumulation": config.optim.accumulation << power,
            },
            _BATCH_COST + _HALF_COST * power,
        )
        for power in range(1, _HALVINGS + 1)
        if config.data.batch_tokens >> power >= least
    ]
    return [ladder for ladder in (loss, remat, layout, batch) if ladder]


def find_settings(
    config: Config,
    ladders: list[Ladder],
    *,
    measure: Callable[[Config], int],
    memory: int,
    report: Callable[[Attempt], object] = lambda attempt: None,
) -> list[Attempt]:
    """Find settings that fit and of which none can be taken back; return all that were tried, in order.

    Step after step is added, the cheapest kind first, until the update fits. Then the steps of each kind, the
    dearest first, are taken back as far as it still fits. `measure` returns the bytes that an update needs on
    a device with this `memory`; the config itself needs more.
    """
    # Settings are told by how many steps they climb on each ladder.
    nothing = (0,) * len(ladders)
    attempts: dict[tuple[int, ...], Attempt] = {}

    def fits(heights: tuple[int, ...]) -> bool:
        if heights == nothing:
            return False
        if heights not in attempts:
            steps = [ladder[height - 1] for ladder, height in zip(ladders, heights, strict=True) if height]
            changes = {name: value for step in steps for name, value in step.changes.items()}
            needed, distance = measure(config.replace(changes)), sum(step.cost for step in steps)
            attempts[heights] = Attempt(changes, needed, needed <= memory, distance)
            report(attempts[heights])
        return attempts[heights].fits

    found = nothing
    for kind, ladder in enumerate(ladders):
        for height in range(1, len(ladder) + 1):
            if not fits(found):
                found = (*found[:kind], height, *nothing[kind + 1 :])
    if fits(found):
        for kind in reversed(range(len(ladders))):
            lower = [(*found[:kind], height, *found[kind + 1 :]) for height in range(found[kind])]
            found = next(filter(fits, lower), found)
    return list(attempts.values())


def count_most_attempts(ladders: list[Ladder]) -> int:
    """Return the largest number of attempts that `find_settings` makes."""
    # All steps up, and down again from all ladders but the last, whose lower steps were tried on the way up.
    return sum(map(len, [*ladders, *ladders[:-1]]))


# `generate` has a loop that refills rows, and in it one that decodes a token.
_STEP_LOOPS = 2
# JAX reserves this share of a GPU's memory for itself unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
_GPU_MEMORY_SHARE = 0.75


def show_for_target(
    config: Config,
    run_dir: Path | None,
    target_name: str,
    *,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Add `target` to the result of `show`: what a compiler makes of the config for these devices.

    `say` receives a line before each compilation, which can take minutes.
    """
    target = parse_target(target_name)
    jax.config.update("jax_platforms", "cpu")  # the devices at hand, if there are any, are not needed
    result = show(config, run_dir, device_kind=target.accelerator.device_kind)
    sizes = (result["vocabulary"]["source_size"], result["vocabulary"]["target_size"])
    with name_missing_library(target):
        return result | {"target": describe_target(config, target, sizes=sizes, say=say)}


def describe_target(
    config: Config, target: Target, *, sizes: tuple[int, int], say: Callable[[str], object]
) -> dict[str, Any]:
    """Compile the update and the search of a config, and describe both as JSON values."""
    compiler = TargetCompiler(target, sizes=sizes)
    update = describe_update(config, compiler, say=say)
    say(f"compiling the programs of a search for {target.name}")
    programs, size = compiler.compile_search(config)
    memory, search = usable_memory(target), programs["generate"]
    step = [kernel for kernel in search.kernels if kernel.loops >= _STEP_LOOPS]
    refill = [kernel for kernel in search.kernels if 0 < kernel.loops < _STEP_LOOPS]
    return update | {
        "decoding_step": _describe_program(search)
        | size
        | {
            "fits": max(program.needed for program in programs.values()) <= memory,
            "step": sum_kernels(step, None),
            "refill": sum_kernels(refill, None),
            "prefill": _describe_program(programs["prefill"])
            | {"kernels": sum_kernels(programs["prefill"].kernels, None)},
        },
        "settings_tried": None if update["fits"] else _try_settings(config, compiler, memory, say),
    }


def describe_update(
    config: Config, compiler: TargetCompiler, *, say: Callable[[str], object] = lambda text: None
) -> dict[str, Any]:
    """Compile the update of the longest batch, and describe it as JSON values."""
    target, layout, batch = compiler.target, compiler.parallel(config).layout, longest_batch(config)
    rows, source, length = batch.shape
    memory = usable_memory(target)
    say(f"compiling an update of {rows} rows for {target.name}; this can take minutes")
    programs = compiler.compile_update(config)
    needed = max(program.needed for program in programs)
    kernel, reason = explain_attention(
        config.model,
        target.accelerator.platform,
        lengths=(source, length),
        tensor=layout.tensor,
    )
    return {
        "name": target.name,
        "devices": target.chips,
        "device_kind": compiler.device_kind,
        "layout": layout.describe(),
        "memory_gib": _gib(memory),
        "batch": {"rows": rows, "source_length": source, "target_length": length},
        "fits": needed <= memory,
        "peak_gib": _gib(needed),
        "attention": {"kernel": kernel, "reason": reason, "calls": _kernels(programs)},
        "collectives": {kind: asdict(found) for kind, found in _add_traffic(programs).items()},
        "estimate": model_update(
            config, target, programs, batch, devices=layout.device_count, target_size=compiler.sizes[1]
        ),
        "programs": [_describe_program(program) for program in programs],
    }


def usable_memory(target: Target) -> int:
    """Return bytes of a device that a program can use: all of a TPU, the share of a GPU that JAX reserves."""
    if target.accelerator.platform == "tpu":
        return target.accelerator.memory
    share = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", _GPU_MEMORY_SHARE)
    try:
        return int(target.accelerator.memory * float(share))
    except ValueError as error:
        raise UserError(
            f"XLA_PYTHON_CLIENT_MEM_FRACTION is {share!r}, but JAX reserves a share of the memory, such as "
            f"{_GPU_MEMORY_SHARE}; set it to a number, or not at all"
        ) from error


def model_update(
    config: Config,
    target: Target,
    programs: Sequence[Compiled],
    batch: BatchArray,
    *,
    devices: int,
    target_size: int,
) -> dict[str, Any] | None:
    """Describe what the programs of an update cost; None if the peak rate is unknown, or one was refused.

    `milliseconds` and what follows from them are a model of the kernels, and None where no measured run backs
    it; `basis` says which do. `computing_`, `memory_` and `collectives_milliseconds` are the operations of
    the model, the bytes of the programs and those of their collectives at the rates of the data sheet; a loop
    counts once.
    """
    peak = peak_flops(config, target.accelerator.device_kind)
    if not peak or any(program.accessed is None for program in programs):
        return None
    rows, source, length = batch.shape
    accumulation = config.optim.accumulation
    work = padded_work(rows, source, length)
    flops = training_flops(config.model, work, target_size=target_size) * accumulation
    computing = flops / devices / peak
    kernels = [one._replace(times=one.times * each.times) for each in programs for one in each.kernels]
    accessed = sum(
        (each.accessed or sum(one.times * one.bytes for one in each.kernels)) * each.times
        for each in programs
    )
    sent = sum(one.sent for one in _add_traffic(programs).values())
    basis, rates = _find_rates(config, target, kernels, devices)
    seconds = sum(kernel_seconds(kernel, rates) for kernel in kernels) if rates else None
    return {
        "milliseconds": seconds and round(1e3 * seconds, 3),
        "computing_milliseconds": round(1e3 * computing, 3),
        "memory_milliseconds": round(1e3 * accessed / target.accelerator.bandwidth, 3),
        "collectives_milliseconds": round(1e3 * sent / target.accelerator.interconnect, 3),
        "target_tokens_a_second": seconds and round(rows * length * accumulation / seconds),
        "mfu": seconds and round(computing / seconds, 3),
        "hours": seconds and float(f"{config.train.steps * seconds / 3600:.3g}"),
        "kernels": sum_kernels(kernels, rates),
        "products_in_float32": sum(one.times for one in kernels if one.in_float32),
        "million_cycles": round(sum(each.cycles * each.times for each in programs) / 1e6, 1),
        "loops_counted_once": sum(program.loops for program in programs),
        "basis": basis,
    }


def _find_rates(
    config: Config, target: Target, kernels: Sequence[Kernel], devices: int
) -> tuple[str, Rates | None]:
    """Return what a modelled time rests on, and the rates of kernels if measured updates back it."""
    if target.accelerator.platform == "tpu":
        return (
            "no time: the cycles are what the compiler expects, without Pallas kernels; no TPU was measured",
            None,
        )
    rates = MEASURED_RATES.get(target.kind)
    if rates is None:
        return f"no time: no update was measured on {target.accelerator.device_kind}", None
    if devices > 1 or config.model.dtype != "bfloat16":
        why = "float32" if devices == 1 else f"{devices} devices"
        return f"no time: updates were measured on one device in bfloat16, not with {why}", None
    basis = "modelled by the kernels of the compiled text, within 15% of the updates that were measured"
    if own := sum(1e3 * kernel_seconds(one, rates) for one in kernels if one.name.startswith("attention_")):
        basis += f"; {own:.1f} ms of it are attention by a kernel that was not among them"
    return basis, rates


def _describe_program(compiled: Compiled) -> dict[str, Any]:
    return {
        "name": compiled.name,
        "times": compiled.times,
        "peak_gib": _gib(compiled.peak),
        "compiled": compiled.accessed is not None,
        "compile_seconds": round(compiled.seconds, 1),
    }


def _kernels(programs: Sequence[Compiled]) -> dict[str, int]:
    """Calls of kernels that compute attention in an update, by name."""
    calls: Counter[str] = Counter()
    for compiled in programs:
        for name, count in compiled.calls.items():
            if is_attention(name):
                calls[name] += count * compiled.times
    return dict(calls)


def _add_traffic(programs: Sequence[Compiled]) -> dict[str, Traffic]:
    total: dict[str, Traffic] = {}
    for compiled in programs:
        for kind, traffic in compiled.collectives.items():
            total[kind] = total.get(kind, Traffic()).add(traffic, compiled.times)
    return total


def _try_settings(
    config: Config, compiler: TargetCompiler, memory: int, say: Callable[[str], object]
) -> list[dict[str, Any]]:
    layout, batch = compiler.parallel(config).layout, longest_batch(config)
    tokens = batch.shape.rows * batch.shape.target // layout.row_parts
    ladders = list_ladders(config, device_count=layout.device_count, loss_tokens=tokens)

    def measure(changed: Config) -> int:
        validate(changed)
        return max(program.needed for program in compiler.compile_update(changed))

    def report(attempt: Attempt) -> None:
        fits = "fits" if attempt.fits else "does not fit"
        say(f"  {_flags(attempt.changes)}: {_gib(attempt.needed)} GiB, {fits}")

    most = count_most_attempts(ladders)
    say(f"the update does not fit; looking for the nearest settings that do, by {most} compilations at most")
    attempts = find_settings(config, ladders, measure=measure, memory=memory, report=report)
    return [
        {"changes": a.changes, "peak_gib": _gib(a.needed), "fits": a.fits, "distance": a.distance}
        for a in sorted(attempts, key=lambda a: (not a.fits, a.distance))
    ]


def _flags(changes: Changes) -> str:
    return " ".join(f"--config.{name}={value}" for name, value in changes.items())


def _gib(size: int) -> float:
    return round(size / 2**30, 2)


def summarize_target(target: Mapping[str, Any]) -> str:
    """Return the part `target` of the result, for a person."""
    batch, decoding, estimate = target["batch"], target["decoding_step"], target["estimate"]
    columns = {
        "program": "{name}",
        "peak GiB": "{peak_gib:.2f}",
        "seconds to compile": "{compile_seconds:.0f}",
    }
    programs = [*target["programs"], decoding, decoding["prefill"]]
    fits = "fits into" if target["fits"] else "does NOT fit into"
    attention = target["attention"]
    calls = ", ".join(f"{count} x {name}" for name, count in attention["calls"].items())
    parts: Parts = [
        f"Compiled for, not run: {target['name']}, {target['devices']} x {target['device_kind']}, "
        f"{target['layout']}",
        f"An update of {batch['rows']} rows of {batch['source_length']} source and "
        f"{batch['target_length']} target tokens {fits} the {target['memory_gib']} GiB of a device: "
        f"{target['peak_gib']} GiB at its peak",
        make_table(columns, programs),
        f"  a search has {decoding['rows']} rows of {decoding['beams']} beams, "
        f"{decoding['source_length']} source and up to {decoding['capacity']} target tokens"
        + ("" if decoding["fits"] else "; it does NOT fit"),
        f"Attention: {attention['kernel']} ({attention['reason']})" + (f": {calls}" if calls else ""),
        *_summarize_traffic(target["collectives"]),
        *_summarize_estimate(estimate, target["programs"]),
        *_summarize_kernels(decoding["step"], "A step of a search:"),
        *_summarize_kernels(decoding["refill"], "A refill of its rows:"),
    ]
    if attempts := target["settings_tried"]:
        fitting = any(attempt["fits"] for attempt in attempts)
        head = (
            "Settings that fit, nearest first, and others that were tried"
            if fitting
            else "No settings tried fit"
        )
        rows = [
            [_flags(one["changes"]), f"{one['peak_gib']:.2f}", "fits" if one["fits"] else "does not fit"]
            for one in attempts
        ]
        parts.append(Table((), rows, f"{head} (GiB at the peak):"))
    return write_text(parts)


def _summarize_traffic(collectives: Mapping[str, Mapping[str, Any]]) -> Parts:
    if not collectives:
        return ["Collectives of an update: none"]
    columns = {"collective": "{kind}", "number": "{count:,}", "whole arrays": "{bytes:,.1f} MiB"}
    columns |= {"sent": "{sent:,.1f} MiB", "beside kernels": "{overlapped:,.1f} MiB"}
    sizes = [
        {"kind": kind, "count": one["count"]}
        | {name: one[name] / 2**20 for name in ("bytes", "sent", "overlapped")}
        for kind, one in collectives.items()
    ]
    total, sent = (sum(size[name] for size in sizes) for name in ("bytes", "sent"))
    caption = (
        f"Collectives of an update, on each device: arrays of {total:,.1f} MiB are gathered, scattered or "
        f"added up; {sent:,.1f} MiB are sent to other devices"
    )
    return [make_table(columns, sizes, caption)]


def _summarize_estimate(estimate: Mapping[str, Any] | None, programs: Sequence[Any]) -> Parts:
    if estimate is None:
        compiled = all(program["compiled"] for program in programs)
        why = "the peak rate is unknown; set train.peak_flops"
        return [f"Time: not modelled; {why if compiled else 'the compiler has refused the update'}"]
    once, parts = estimate["loops_counted_once"], Parts([f"Time of an update: {estimate['basis']}"])
    if estimate["milliseconds"] is not None:
        parts.append(
            f"  {estimate['milliseconds']:.1f} ms, {estimate['target_tokens_a_second']:,} target tokens a "
            f"second, MFU {estimate['mfu']:.1%}; all steps of such batches: {estimate['hours']:g} hours"
        )
    if estimate["million_cycles"]:
        parts.append(f"  {estimate['million_cycles']:,.1f} million cycles")
    parts += _summarize_kernels(estimate["kernels"], "Kernels of an update:")
    return [*parts, *([f"  {once} loops of unknown length are counted once"] if once else [])]


def _summarize_kernels(kinds: Sequence[Mapping[str, Any]], title: str) -> Parts:
    if not kinds:
        return []
    forms = {"kernels": ",", "gigabytes": ",.2f", "teraflops": ",.2f", "milliseconds": ",.1f"}
    forms = {name: form for name, form in forms.items() if kinds[0][name] is not None}
    total = {"kind": "all"} | {name: sum(row[name] for row in kinds) for name in forms}
    columns = {"kind": "{kind}"} | {name: f"{{{name}:{form}}}" for name, form in forms.items()}
    return [make_table(columns, [*kinds, total], title)]
