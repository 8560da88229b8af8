"""The command `new`: reads a corpus once, checks it, and writes a config that trains on it.

What is prepared on the way, vocabulary and token ids, is in the cache when training starts.
"""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.commands.new.config_text import format_config
from flaxformer_mt.commands.new.corpus_files import CorpusFiles, find_corpus, make_links
from flaxformer_mt.commands.new.new_options import NewOptions
from flaxformer_mt.commands.new.sizing import (
    FEWEST_PAIRS,
    Choice,
    Corpus,
    Machine,
    choose_held_out,
    choose_lengths,
    choose_model,
    choose_training,
    choose_vocabulary,
)
from flaxformer_mt.config import CleanConfig, Config, DataConfig, VocabConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.files import load_config
from flaxformer_mt.errors import UserError, command_line, name_full_disk, warn_user
from flaxformer_mt.text_io.lines import check_writable
from flaxformer_mt.tracking.work_progress import WorkProgress
from flaxformer_mt.workers.open_crew import choose_hands

# Pairs whose characters and scripts are looked at.
_SAMPLE = 20_000
# Maximum length with which tokens are counted, before the maximum lengths are chosen.
_LONGEST = 1000
# The maximum lengths are those that this percentage of the sides do not exceed.
_PERCENTAGE = 99.9


def write_new_config(options: NewOptions) -> dict[str, Any]:
    """Run the command; return the config's file, the numbers of pairs and the command that trains.

    Raises:
      UserError: the files, their languages or the output are wrong, or the corpus has too few pairs.
    """
    file = options.run.with_name(f"{options.run.name}.py")
    if file.exists() and not options.overwrite:
        raise UserError(f"{file} exists; give --overwrite to replace it, or another --run=DIR")
    if (options.run / "config.json").exists():
        raise UserError(f"{options.run} is a run already, with its own config; give another --run=DIR")
    check_writable(file.parent)
    languages = options.source_language, options.target_language
    corpus = find_corpus(
        options.files, languages, options.run.with_name(f"{options.run.name}_text").absolute()
    )
    make_links(corpus)
    machine = _find_machine()
    try:
        data, described = _choose_data(corpus, options)
    except UserError as error:  # the remedy of training is a flag that `new` lacks
        message = re.sub(
            r"--config\.data\.clean\.(unequal_lines|invalid_utf8)=drop", "--drop_invalid", str(error)
        )
        for link, path in corpus.links.items():  # the user knows the files, not the links to them
            message = message.replace(str(corpus.text_dir / link), str(path))
        raise UserError(message) from error
    config, report, choices = _choose_sizes(data, machine)
    choices = [*described, *choices]
    text = format_config(*_describe(options, corpus, report, machine, file), choices)
    file.parent.mkdir(parents=True, exist_ok=True)
    with name_full_disk(file):
        file.write_text(text, encoding="utf-8")
    validate(load_config(file))
    train = command_line("train", f"--config={file}", f"--run={options.run}")
    print(f"{file} is written; change what you like, and train with:\n{train}", file=sys.stderr)
    (part,) = report["train"]["parts"]
    sizes = {split: report[split]["pairs"] if report[split] else 0 for split in ("train", "valid", "test")}
    problems = {name: found["count"] for name, found in part["problems"].items()}
    return {"config": str(file), "pairs": sizes, "problems": problems, "train": train}


def _find_machine() -> Machine:
    from flaxformer_mt.parallel.devices import default_device_kind, device_memory
    from flaxformer_mt.parallel.independent_rows import training_devices
    from flaxformer_mt.processor import processor_name, slow_bfloat16_reason

    devices = training_devices()
    platform = devices[0].platform
    if platform == "cpu":
        return Machine(processor_name(), platform, 1, None, slow_bfloat16_reason() is None)
    memory = device_memory(devices[0])
    return Machine(default_device_kind(), platform, len(devices), memory[0] if memory else None, True)


def _choose_data(corpus: CorpusFiles, options: NewOptions) -> tuple[DataConfig, list[Choice]]:
    """Return the section `data` but for lengths and batches, and its choices."""
    from flaxformer_mt.corpus import has_split, read_pairs

    name = f"{corpus.train_split}.{{{corpus.source_language},{corpus.target_language}}}"
    choices = [
        Choice(
            "data.dataset",
            "parallel_text",
            f"text files; training reads {name} (or .tsv, .jsonl, .parquet, .gz, .zst)",
        ),
        Choice("data.text_dir", str(corpus.text_dir), ""),
        Choice("data.train_split", corpus.train_split, ""),
        Choice(
            "data.source_language",
            corpus.source_language,
            "exchange the two languages to translate the other way",
        ),
        Choice("data.target_language", corpus.target_language, ""),
    ]
    if options.cache_dir is not None:
        cache = str(options.cache_dir.absolute())
        choices.append(Choice("data.cache_dir", cache, "prepared data, which can be made again"))
    reason = "pairs that occur several times count once; empty sides and very unequal lengths are left out"
    clean = CleanConfig(duplicates="drop")
    if options.drop_invalid:
        clean = CleanConfig(duplicates="drop", unequal_lines="drop", invalid_utf8="drop")
    choices.append(Choice("data.clean", clean, reason))
    data = DataConfig(**_fields(choices))
    train = read_pairs(data, "train", hands=choose_hands(None, None), progress=WorkProgress(sys.stderr))
    if len(train) < FEWEST_PAIRS:
        raise UserError(
            f"{', '.join(options.files)} have {len(train)} pairs after cleaning; a model needs at least "
            f"{FEWEST_PAIRS} to learn anything, and tens of thousands to translate"
        )
    for split in ("valid", "test"):
        held = choose_held_out(len(train), split)
        if has_split(data, split):
            held = Choice(f"data.{split}_pairs", 0, f"none are held out: {corpus.text_dir} has {split} files")
        choices.append(held)
    return DataConfig(**_fields(choices)), choices


def _fields(choices: list[Choice]) -> dict[str, Any]:
    """Return the values of choices of one section, by the names of its fields."""
    return {choice.name.partition(".")[2]: choice.value for choice in choices}


def _choose_sizes(data: DataConfig, machine: Machine) -> tuple[Config, dict[str, Any], list[Choice]]:
    """Return a config that is prepared, the report of its preparation, and the choices that it lacks."""
    from flaxformer_mt.corpus import read_pairs
    from flaxformer_mt.data.lost_text import describe_lost_text
    from flaxformer_mt.data.overlap import describe_overlap
    from flaxformer_mt.data.prepare import prepare
    from flaxformer_mt.vocab.vocabulary import VocabularyTooLarge

    pairs = read_pairs(data, "train")
    characters, scripts = _look_at_text(pairs)
    vocabulary = choose_vocabulary(len(pairs), characters, scripts)
    longest: dict[str, Any] = {
        "max_source_length": _LONGEST,
        "max_target_length": _LONGEST,
        "batch_tokens": 16 * _LONGEST,
    }
    while True:
        config = Config(data=dataclasses.replace(data, **longest), vocab=VocabConfig(**_fields(vocabulary)))
        try:
            prepared = prepare(
                config, progress=WorkProgress(sys.stderr), overlap=True, hands=choose_hands(None, None)
            )
            break
        except VocabularyTooLarge as error:
            reason = f"this text gives {error.maximum:,} pieces at most"
            vocabulary[0] = Choice("vocab.size", error.maximum, reason)
    report = prepared.report
    for warning in (*describe_overlap(report["overlap"]), *describe_lost_text(report["lost_text"])):
        warn_user(warning)
    store = prepared.train.base
    lengths = np.stack([store.source_lengths, store.target_lengths])
    most = np.ceil(np.percentile(lengths, _PERCENTAGE, axis=1))
    facts = Corpus(len(pairs), int(lengths.max(axis=0).sum()), *map(int, most))
    limits = choose_lengths(facts)
    model = choose_model(facts, machine, joint=config.vocab.joint)
    training = choose_training(
        facts,
        machine,
        longest=max(choice.value for choice in limits),
        width=_fields(model)["model_dim"],
        row_multiple=data.row_multiple,
    )
    search = Choice("search.beam_size", 5, "usual; 1 is greedy search, faster and a little worse")
    return config, report, [*limits, *vocabulary, *model, *training, search]


def _look_at_text(pairs: Any) -> tuple[int, tuple[str, str]]:
    """Return the number of different characters, and the main script of each side, in a sample of
    the pairs.
    """
    from flaxformer_mt.writing_systems import find_main_script

    sample = [
        pairs[number] for number in np.linspace(0, len(pairs) - 1, min(len(pairs), _SAMPLE)).astype(int)
    ]
    sides = [[pair[side] for pair in sample] for side in (0, 1)]
    characters = {character for side in sides for text in side for character in text}
    source, target = (find_main_script(side).capitalize() for side in sides)
    return len(characters), (source, target)


def _describe(
    options: NewOptions, corpus: CorpusFiles, report: dict[str, Any], machine: Machine, file: Path
) -> tuple[str, str]:
    """First line and text of the config's docstring."""
    pairs = report["train"]["pairs"]
    (part,) = report["train"]["parts"]
    languages = f"{corpus.source_language}-{corpus.target_language}"
    problems = [f"{name} {found['count']:,}" for name, found in part["problems"].items()]
    facts = [
        f"    python -m flaxformer_mt train --config={file} --run={options.run}",
        "",
        f"Written by `new` for {machine.name} from {part['read']:,} pairs:",
        *(f"    {name}" for name in options.files),
        f"{pairs:,} of them are trained on. Problems of the others: {', '.join(problems) or 'none'}.",
    ]
    return f"{languages}: a model for {pairs:,} pairs.", "\n".join(facts)
