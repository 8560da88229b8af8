"""Formats results as text for a terminal instead of JSON: results of `prepare`, of `show`, and others."""

from collections.abc import Mapping, Sequence
from typing import Any

from flaxformer_mt.evaluation.tables import Table, make_table, write_text

_MORE = "All values: --json."
# Lines and tables, one below the other.
Parts = list[str | Table]


def summarize_values(values: Mapping[str, Any], indent: str = "") -> str:
    """Format values as lines, nested values indented: {"a": {"b": 1}} gives the lines `a` and `  b  1`."""
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
    """Format the report of `prepare`: kept and dropped pairs of each split, vocabulary, and batches."""
    splits = [split for split in ("train", "valid", "test") if report[split] is not None]
    rows = [row for split in splits for part in report[split]["parts"] for row in _describe_part(split, part)]
    heading = ["split", "data set", "read", "kept", "problem", "pairs", "action", "first at"]
    parts: Parts = [Table(heading, rows, "Pairs"), ""]
    if mixture := report.get("mixture"):
        columns = {"mixture": "{name}", "pairs": "{pairs:,}", "weight": "{weight:.4g}"}
        parts += [make_table(columns | {"share of an epoch": "{share:.1%}"}, mixture, "Mixture"), ""]
    parts += _describe_stages(report.get("stages"))
    if overlap := report.get("overlap"):
        columns = {"also in the training set": "{name}", "pairs": "{pairs:,}", "sources": "{sources:,}"}
        records = [{"name": name, **counts} for name, counts in overlap.items()]
        parts += [make_table(columns | {"of": "{of:,}"}, records, "Overlap"), ""]
    vocabulary, size = report["vocabulary"], "{target_size:,}"
    if vocabulary["source_size"]:
        both = "{source_size:,} source and {target_size:,} target"
        size = "{target_size:,}, shared by both languages" if vocabulary["joint"] else both
    parts.append(f"Vocabulary: {vocabulary['kind']} subwords, {size.format_map(vocabulary)}")
    if lost := report.get("lost_text"):
        produced, lines = lost["lines"] - lost["lost"], lost["lines"]
        parts.append(f"  It can produce {produced:,} of {lines:,} targets of the validation set exactly")
    parts.append("")
    if lengths := report.get("target_lengths"):
        numbers = {name: f"{{{name}:,}}" for name in ("pairs", "median", "99%")}
        columns = {"source tokens": "{to}", **numbers, "99.9%": "{rare:,}", "longest target": "{longest:,}"}
        groups = [
            # A name with a point would be an attribute in a format.
            {**group, "to": f"to {group.get('longest_source')}", "rare": group["99.9%"]}
            for group in lengths["groups"]
        ]
        groups[-1]["to"] = groups[-1]["to"] if "longest_source" in groups[-1] else "more"
        caption = (
            f"Target lengths: {lengths['share']:.1%} of the pairs have at most {lengths['ratio']:g} x source "
            f"tokens {'+' if lengths['offset'] >= 0 else '-'} {abs(lengths['offset']):g}"
        )
        parts += [make_table(columns, groups, caption), ""]
    return write_text([*parts, *_describe_batches(report["batches"]), "", _MORE])


def summarize_experiment(result: Mapping[str, Any]) -> str:
    """Format the result of `show`: parameters, and the shapes, the memory and the time of a step."""
    parameters, step, batch = result["parameters"], result["step"], result["longest_batch"]
    vocabulary, memory, peak = result["vocabulary"], step["memory_mib"], result["at_peak"]
    shares = [[name.replace("_", " "), f"{size:,.1f}"] for name, size in memory.items()]
    parts: Parts = [
        f"Parameters: {parameters['total']:,}, of which {parameters['embeddings']:,} in embeddings",
        Table((), [[name, f"{count:,}"] for name, count in parameters["modules"].items()]),
        "",
        f"Vocabulary: {vocabulary['source_size']:,} source and {vocabulary['target_size']:,} target entries"
        + ("" if result["batches"] else " (by the config; the data is not prepared)"),
        f"Longest batch: {batch['rows']} rows of {batch['source_length']} source and "
        f"{batch['target_length']} target tokens",
        f"Layers: {result['layers']}",
        f"A step: {step['target_tokens']:,} target tokens, {step['teraflops']:.4g} teraflops "
        f"({step['megaflops_a_target_token']:,.1f} megaflops a token)",
        "",
        f"Memory on each device: {memory['without_activations']:,.1f} MiB and what activations need",
        Table((), shares[:-1]),
        "",
    ]
    if peak is None:
        parts.append("Time: the peak rate of this device is unknown; give --config.train.peak_flops=NUMBER")
    else:
        parts.append(
            f"Time at the peak rate of {peak['device']} ({peak['teraflops_a_second']:g} teraflops/s): "
            f"{peak['seconds_a_step']:g} s a step, {peak['device_hours']:g} device hours in all"
        )
    if result["batches"]:
        parts += ["", *_describe_stages(result.get("stages")), *_describe_batches(result["batches"])]
    return write_text([*parts, "", f"{_MORE[:-1]} (the whole config too)."])


def _describe_part(split: str, part: Mapping[str, Any]) -> list[list[str]]:
    from flaxformer_mt.corpus.cleaning import ACTION_WORDS, PROBLEM_WORDS

    head = [split, part["name"], f"{part['read']:,}", f"{part['pairs']:,}"]
    problems = []
    for name, problem in part["problems"].items():
        first = problem["examples"][0]["where"] if problem["examples"] else ""
        words = PROBLEM_WORDS.get(name, name)
        problems.append([words, f"{problem['count']:,}", ACTION_WORDS[problem["action"]], first])
    held = part.get("held_out") if split == "train" else None
    reasons = {"valid": "held out for validation", "test": "held out for test", "aside": "shared with these"}
    problems += [
        [words, f"{held[name]:,}", "left out", ""] for name, words in reasons.items() if held and held[name]
    ]
    return [
        (["" for _ in head] if number else head) + problem
        for number, problem in enumerate(problems or [[""] * 4])
    ]


def _describe_stages(stages: Sequence[Mapping[str, Any]] | None) -> Parts:
    if not stages:
        return []
    rows = []
    for stage in stages:
        updates = "to the end" if stage["updates"] is None else f"{stage['updates']:,}"
        epochs = "" if stage["epochs"] is None else f"{stage['epochs']:,} of {stage['epoch_of']}"
        noise = ", ".join(f"{kind} {rate:g}" for kind, rate in stage["noise"].items())
        begin = f"{stage['from_update']:,}" if stage["reached"] else "not reached"
        head = [stage["name"], begin, updates, epochs]
        for number, part in enumerate(stage["mix"]):
            cells = [part["name"], f"{part['share']:.1%}"]
            rows.append([*head, *cells, noise] if number == 0 else [""] * 4 + cells + [""])
    heading = ["stage", "from step", "steps", "epochs", "data set", "share", "noise"]
    return [Table(heading, rows, "Stages (numbers of steps are exact where a stage ends after steps)"), ""]


def _describe_batches(plan: Mapping[str, Any]) -> Parts:
    said = (
        f"Batches: {plan['batches']:,} an epoch, {plan['padding']:.1%} padding; "
        f"{plan['pairs']:,} pairs, {plan['target_tokens']:,} target tokens"
    )
    skipped = f"  {plan['skipped']:,} pairs have too many tokens and are left out"
    columns = {axis: f"{{{axis}:,}}" for axis in ("rows", "source", "target", "batches")}
    return [said, *([skipped] if plan["skipped"] else []), make_table(columns, plan["shapes"])]
