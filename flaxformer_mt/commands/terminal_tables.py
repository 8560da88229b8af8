"""Results as tables on a terminal, in place of JSON: those of `prepare` and `show`, and any other values."""

from collections.abc import Mapping, Sequence
from typing import Any

_MORE = "All values: --json."


def summarize_values(values: Mapping[str, Any], indent: str = "") -> str:
    """Format values as lines, those within others indented: {"a": {"b": 1}} is `a` and `  b  1`."""
    width = max(map(len, values), default=0)
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}", summarize_values(value, f"{indent}  ")]
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            lines.append(f"{indent}{name:<{width}}  {text}")
    return "\n".join(lines)


def summarize_preparation(report: Mapping[str, Any]) -> str:
    """Return what became of the pairs of each split, the vocabulary, and the batches."""
    rows = [["split", "data set", "read", "kept", "problem", "pairs", "action", "first at"]]
    for split in ("train", "valid", "test"):
        if report[split] is not None:
            for part in report[split]["parts"]:
                rows += _describe_part(split, part)
    vocabulary = report["vocabulary"]
    sides = [f"{vocabulary[f'{side}_size']:,} {side}" for side in ("source", "target")]
    size = f"{vocabulary['target_size']:,}, shared by both languages"
    if not vocabulary["source_size"]:
        size = f"{vocabulary['target_size']:,}"
    elif not vocabulary["joint"]:
        size = " and ".join(sides)
    lines = [
        "Pairs",
        *align(rows),
        "",
        *_describe_mixture(report.get("mixture")),
        *_describe_stages(report.get("stages")),
        *_describe_overlap(report.get("overlap")),
        f"Vocabulary: {vocabulary['kind']} pieces, {size}",
        *_describe_lost(report.get("lost_text")),
        "",
        *_describe_lengths(report.get("target_lengths")),
        *_describe_batches(report["batches"]),
        "",
        _MORE,
    ]
    return "\n".join(lines)


def summarize_experiment(result: Mapping[str, Any]) -> str:
    """Return the result of `show`: parameters, the shapes, the memory and the time of a step."""
    parameters, step, batch = result["parameters"], result["step"], result["longest_batch"]
    vocabulary = result["vocabulary"]
    memory, peak = step["memory_mib"], result["at_peak"]
    total = memory["without_activations"]
    parts = [[name.replace("_", " "), f"{memory[name]:,.1f}"] for name in memory]
    lines = [
        f"Parameters: {parameters['total']:,}, of which {parameters['embeddings']:,} in embeddings",
        *align([[name, f"{count:,}"] for name, count in parameters["modules"].items()]),
        "",
        f"Vocabulary: {vocabulary['source_size']:,} source and {vocabulary['target_size']:,} target entries"
        + ("" if result["batches"] else " (by the config; the data is not prepared)"),
        f"Longest batch: {batch['rows']} rows of {batch['source_length']} source and "
        f"{batch['target_length']} target tokens",
        f"Layers: {result['layers']}",
        f"A step: {step['target_tokens']:,} target tokens, {step['teraflops']:.4g} teraflops "
        f"({step['megaflops_a_target_token']:,.1f} megaflops a token)",
        "",
        f"Memory on each device: {total:,.1f} MiB and what activations need",
        *align(parts[:-1]),
        "",
    ]
    if peak is None:
        lines.append("Time: the peak rate of this device is unknown; give --config.train.peak_flops=NUMBER")
    else:
        lines.append(
            f"Time at the peak rate of {peak['device']} ({peak['teraflops_a_second']:g} teraflops/s): "
            f"{peak['seconds_a_step']:g} s a step, {peak['device_hours']:g} device hours in all"
        )
    if result["batches"]:
        lines += ["", *_describe_stages(result.get("stages")), *_describe_batches(result["batches"])]
    return "\n".join([*lines, "", f"{_MORE[:-1]} (the whole config too)."])


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table in columns, indented by two; numbers are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    number = [
        all(cell == "" or cell[0].isdigit() for cell in column[len(rows) > 1 :])
        for column in zip(*rows, strict=True)
    ]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, number, strict=True)
        ).rstrip()
        for row in rows
    ]


def _describe_part(split: str, part: Mapping[str, Any]) -> list[list[str]]:
    from flaxformer_mt.corpus.cleaning import ACTION_WORDS, PROBLEM_WORDS

    head = [split, part["name"], f"{part['read']:,}", f"{part['pairs']:,}"]
    problems = []
    for name, problem in part["problems"].items():
        first = problem["examples"][0]["where"] if problem["examples"] else ""
        words = PROBLEM_WORDS.get(name, name)
        problems.append([words, f"{problem['count']:,}", ACTION_WORDS[problem["action"]], first])
    if split == "train" and (held := part.get("held_out")):
        parts = {
            "held out for validation": "valid",
            "held out for test": "test",
            "shared with these": "aside",
        }
        problems += [
            [words, f"{held[name]:,}", "left out", ""] for words, name in parts.items() if held[name]
        ]
    problems = problems or [[""] * 4]
    return [(head if number == 0 else [""] * 4) + problem for number, problem in enumerate(problems)]


def _describe_lengths(report: Mapping[str, Any] | None) -> list[str]:
    if report is None:
        return []
    rows = [["source tokens", "pairs", "median", "99%", "99.9%", "longest target"]]
    for group in report["groups"]:
        longest = f"to {group['longest_source']}" if "longest_source" in group else "more"
        lengths = (f"{group[name]:,}" for name in ("median", "99%", "99.9%", "longest"))
        rows.append([longest, f"{group['pairs']:,}", *lengths])
    return [
        f"Target lengths: {report['share']:.1%} of the pairs have at most {report['ratio']:g} x source "
        f"tokens {'+' if report['offset'] >= 0 else '-'} {abs(report['offset']):g}",
        *align(rows),
        "",
    ]


def _describe_mixture(shares: Sequence[Mapping[str, Any]] | None) -> list[str]:
    if not shares:
        return []
    rows = [["mixture", "pairs", "weight", "share of an epoch"]]
    rows += [
        [part["name"], f"{part['pairs']:,}", f"{part['weight']:.4g}", f"{part['share']:.1%}"]
        for part in shares
    ]
    return ["Mixture", *align(rows), ""]


def _describe_stages(stages: Sequence[Mapping[str, Any]] | None) -> list[str]:
    if not stages:
        return []
    rows = [["stage", "from update", "updates", "epochs", "data set", "share", "noise"]]
    for stage in stages:
        updates = "to the end" if stage["updates"] is None else f"{stage['updates']:,}"
        epochs = "" if stage["epochs"] is None else f"{stage['epochs']:,} of {stage['epoch_of']}"
        noise = ", ".join(f"{kind} {rate:g}" for kind, rate in stage["noise"].items())
        begin = f"{stage['from_update']:,}" if stage["reached"] else "not reached"
        head = [stage["name"], begin, updates, epochs]
        for number, part in enumerate(stage["mix"]):
            cells = [part["name"], f"{part['share']:.1%}"]
            rows.append([*head, *cells, noise] if number == 0 else [""] * 4 + cells + [""])
    return ["Stages (numbers of updates are exact where a stage ends after steps)", *align(rows), ""]


def _describe_overlap(overlap: Mapping[str, Any] | None) -> list[str]:
    if not overlap:
        return []
    rows = [["also in the training set", "pairs", "sources", "of"]]
    rows += [
        [name, f"{counts['pairs']:,}", f"{counts['sources']:,}", f"{counts['of']:,}"]
        for name, counts in overlap.items()
    ]
    return ["Overlap", *align(rows), ""]


def _describe_lost(lost_text: Mapping[str, Any] | None) -> list[str]:
    if not lost_text:
        return []
    produced = lost_text["lines"] - lost_text["lost"]
    return [f"  It can produce {produced:,} of {lost_text['lines']:,} targets of the validation set exactly"]


def _describe_batches(plan: Mapping[str, Any]) -> list[str]:
    axes = ["rows", "source", "target", "batches"]
    rows = [axes, *([f"{shape[axis]:,}" for axis in axes] for shape in plan["shapes"])]
    skipped = (
        [f"  {plan['skipped']:,} pairs have too many tokens and are left out"] if plan["skipped"] else []
    )
    return [
        f"Batches: {plan['batches']:,} an epoch, {plan['padding']:.1%} padding; "
        f"{plan['pairs']:,} pairs, {plan['target_tokens']:,} target tokens",
        *skipped,
        *align(rows),
    ]
