"""`new`: finds the files of a corpus, prepares the data, and writes a config with reasons for its choices."""

import dataclasses
import json
import re
import shlex
import sys
import textwrap
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.commands import new_finetuning, new_sizing, new_student
from flaxformer_mt.commands.new_finetuning import Parent, list_changes
from flaxformer_mt.commands.new_sizing import Choice, Corpus, Machine
from flaxformer_mt.commands.options import NewOptions
from flaxformer_mt.config import CleanConfig, Config, DataConfig, VocabConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.directions import LANGUAGE_CODE, Direction, read_members
from flaxformer_mt.config.files import load_config
from flaxformer_mt.corpus.text_files import TABLES, find_packing, name_unpacked
from flaxformer_mt.errors import UserError, command_line, find_url, suggest_sibling, warn_user
from flaxformer_mt.object_store.remote_runs import to_url
from flaxformer_mt.text_io.lines import check_writable
from flaxformer_mt.tracking.progress_display import WorkProgress
from flaxformer_mt.workers.worker_pool import choose_pool

_WIDTH = 110

# Pairs whose characters and scripts are looked at.
_SAMPLE = 20_000
# Maximum length with which tokens are counted, before the maximum lengths are chosen.
_LONGEST = 1000
# The maximum lengths are those that this percentage of the sides do not exceed.
_PERCENTAGE = 99.9


def format_config(summary: str, description: str, choices: Sequence[Choice]) -> str:
    """Return the text of a config file, in which a comment above each choice gives the reason."""
    named = {choice.name.partition(".")[0] for choice in choices}
    kinds = {name: kind.__name__ for name, kind in typing.get_type_hints(Config).items() if name in named}
    values = {type(choice.value).__name__ for choice in choices if dataclasses.is_dataclass(choice.value)}
    imported = sorted({"Config", *kinds.values(), *values})
    described = f"{summary}\n\n{description}".replace("\\", "\\\\").replace('"', '\\"')
    lines = [f'"""{described}', '"""', ""]
    lines += ["from flaxformer_mt.config import (", *(f"    {name}," for name in imported), ")", "", ""]
    lines += [
        "def get_config() -> Config:",
        '    """Returns the config; `train --help` explains each field."""',
    ]
    lines += ["    return Config("]
    for section, kind in kinds.items():
        section_choices = [choice for choice in choices if choice.name.startswith(f"{section}.")]
        lines.append(f"        {section}={kind}(")
        for choice in section_choices:
            if choice.reason:
                mark = "            # "
                options: dict[str, Any] = {"initial_indent": mark, "subsequent_indent": mark}
                reason = f"{choice.reason[0].upper()}{choice.reason[1:]}."
                lines += textwrap.wrap(reason, _WIDTH, break_long_words=False, **options)
            lines.append(f"            {choice.name.partition('.')[2]}={_spell(choice.value)},")
        lines.append("        ),")
    return "\n".join([*lines, "    )", ""])


def _spell(value: object) -> str:
    text = repr(value)
    if isinstance(value, str):
        return json.dumps(value)
    if dataclasses.is_dataclass(value):
        changed = [f"{name}={_spell(item)}" for name, item in list_changes(value).items()]
        return f"{type(value).__name__}({', '.join(changed)})"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:_}"
    return text


class CorpusFiles(NamedTuple):
    """Values for the config section `data`; `links` maps names of links in `text_dir` to corpus files."""

    text_dir: Path
    train_split: str
    source_language: str
    target_language: str
    links: dict[str, Path]


def find_corpus(files: Sequence[str], languages: tuple[str | None, str | None], links: Path) -> CorpusFiles:
    if len(files) not in (1, 2):
        raise UserError(
            f"{len(files)} files are given ({', '.join(files)}); give two, source first, as in corpus.fr "
            "corpus.en, or a table, as in corpus.tsv or corpus.jsonl"
        )
    paths = [_check_file(name) for name in files]
    if len(paths) == 2 and paths[0].samefile(paths[1]):
        raise UserError(f"both files are {files[0]}; give the source's and the target's")
    names = [name_unpacked(path) for path in paths]
    if len(paths) == 1:
        return _find_table(paths[0], names[0], languages, links)
    source, target = (
        language or _guess_language(name, side)
        for language, name, side in zip(languages, names, ("source", "target"), strict=True)
    )
    _check_languages(source, target)
    stem = names[0].removesuffix(f".{source}")
    if names == [f"{stem}.{source}", f"{stem}.{target}"] and paths[0].parent == paths[1].parent:
        return CorpusFiles(paths[0].parent, stem, source, target, {})
    linked = {
        f"train.{language}{find_packing(path)}": path
        for language, path in zip((source, target), paths, strict=True)
    }
    return CorpusFiles(links, "train", source, target, linked)


def make_links(corpus: CorpusFiles) -> None:
    """Create the links to the corpus files, and replace existing links of the same names."""
    for name, path in corpus.links.items():
        corpus.text_dir.mkdir(parents=True, exist_ok=True)
        link = corpus.text_dir / name
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            raise UserError(f"{link} exists and is no link; move it away, or give another --run")
        link.symlink_to(path)


def _find_table(path: Path, name: str, languages: tuple[str | None, str | None], links: Path) -> CorpusFiles:
    source, target = languages
    if source is None or target is None:
        match = re.search(rf"(?<![a-z])({LANGUAGE_CODE})-({LANGUAGE_CODE})\.({'|'.join(TABLES)})$", name)
        if match is None:
            raise UserError(
                f"the languages of {path} are unknown; of a corpus of two files, give both, as in corpus.fr "
                "corpus.en; of a table, give --source_language=fr --target_language=en"
            )
        source, target = source or match[1], target or match[2]
    _check_languages(source, target)
    stem, _, ending = name.rpartition(".")
    if ending in TABLES:
        return CorpusFiles(path.parent, stem, source, target, {})
    return CorpusFiles(links, "train", source, target, {f"train.tsv{find_packing(path)}": path})


def _check_file(name: str) -> Path:
    if find_url(name):
        raise UserError(f"{name} is in an object store; copy the file here first")
    path = Path(name).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        hint = "" if path.is_dir() else suggest_sibling(path)
        hint = hint or "; give the files of the corpus, as in corpus.fr corpus.en"
        raise UserError(f"{name} {what}{hint}")
    return path.resolve()


def _guess_language(name: str, side: str) -> str:
    stem, _, ending = name.rpartition(".")
    if re.fullmatch(LANGUAGE_CODE, ending) and ending not in ("txt", "tsv", "csv"):
        return ending
    if re.fullmatch(r"[a-z]{2}(_[A-Za-z]+)?", stem):
        return stem
    raise UserError(
        f"the {side} language is not in the name {name}; give --{side}_language=CODE, such as fr or zh"
    )


def _check_languages(source: str, target: str) -> None:
    for side, code in (("source", source), ("target", target)):
        if not re.fullmatch(r"[A-Za-z0-9_-]+", code):
            raise UserError(f"--{side}_language is {code!r}; give a code such as fr or zh_Hant")
    if source == target:
        raise UserError(f"both languages are {source}; give --source_language and --target_language")


def write_new_config(options: NewOptions) -> dict[str, Any]:
    run, goal = options.run, options.for_
    if url := find_url(to_url(run)):
        raise UserError(
            f"--run={url} is in an object store, and a config must be a local file; give a folder here, and "
            f"train with its config and --run={url}"
        )
    parent = new_finetuning.read_parent(options)
    teacher = run if goal is None else new_student.name_teacher(run)
    for name in dict.fromkeys([teacher, run]):
        _check_new(name, overwrite=options.overwrite)
    check_writable(run.parent)
    machine = _find_machine()
    data, described = _find_data(options, parent)
    report, choices = _choose_sizes(data, machine, parent)
    configs = {teacher: [*described, *choices]}
    commands = [["train", f"--config={run}.py", f"--run={run}"]]
    if parent is not None:  # step 0 is the model before training
        commands[0].append(f"--init={parent.name}")
        commands.append(["evaluate", f"--run={run}", f"--against={run}@0"])
    if goal is not None:
        new_student.write_text(data, run)
        configs[run] = new_student.choose_student(configs[teacher], run, goal)
        commands = new_student.list_commands(run, goal, data)
    description = _describe(options, commands, report, machine)
    part, *_ = report["train"]["parts"]
    languages, pairs = f"{data.source_language}-{data.target_language}", f"{part['pairs']:,} pairs"
    for name, config in configs.items():
        role = "a model" if goal is None else f"a student (--for={goal})" if name == run else "the teacher"
        file, text = Path(f"{name}.py"), format_config(f"{languages}: {role}, {pairs}.", description, config)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text.encode())
        validate(load_config(file))
    lines = [command_line(*command) for command in commands]
    written = " and ".join(f"{name}.py" for name in configs)
    verb, act = "are" if len(configs) > 1 else "is", "run in this order" if len(lines) > 1 else "train with"
    print(f"{written} {verb} written; change what you like, and {act}:", *lines, sep="\n", file=sys.stderr)
    sizes = {split: report[split]["pairs"] if report[split] else 0 for split in ("train", "valid", "test")}
    problems = {name: found["count"] for name, found in part["problems"].items()}
    result = {"config": f"{run}.py", "pairs": sizes, "problems": problems, "train": lines[0]}
    result |= {"commands": lines} if len(lines) > 1 else {}
    return result if goal is None else result | {"teacher": f"{teacher}.py"}


def _check_new(run: Path, *, overwrite: bool) -> None:
    if Path(f"{run}.py").exists() and not overwrite:
        raise UserError(f"{run}.py exists; give --overwrite to replace it, or another --run=DIR")
    if (run / "config.json").exists():
        raise UserError(f"{run} is a run already, with its own config; give another --run=DIR")


def _find_data(options: NewOptions, parent: Parent | None) -> tuple[DataConfig, list[Choice]]:
    languages = options.source_language, options.target_language
    links = options.run.with_name(f"{options.run.name}_text").absolute()
    corpus = find_corpus(options.files, languages, links)
    if options.replay is not None and (split := corpus.train_split) != "train":  # as in the other sets
        renamed = {f"train{path.name.removeprefix(split)}": path for path in map(_check_file, options.files)}
        held = [path for path in corpus.text_dir.iterdir() if path.name.startswith(("valid", "test."))]
        renamed |= {path.name: path for path in held}
        corpus = corpus._replace(text_dir=links, train_split="train", links=renamed)
    make_links(corpus)
    try:
        return _choose_data(corpus, options, parent)
    except UserError as error:  # the remedy of training is a flag that `new` lacks
        message = re.sub(
            r"--config\.data\.clean\.(unequal_lines|invalid_utf8)=drop", "--drop_invalid", str(error)
        )
        for link, path in corpus.links.items():  # the user knows the files, not the links to them
            message = message.replace(str(corpus.text_dir / link), str(path))
        raise UserError(message) from error


def _find_machine() -> Machine:
    from flaxformer_mt.parallel.devices import default_device_kind, device_memory
    from flaxformer_mt.parallel.rows_per_device import training_devices
    from flaxformer_mt.processor import processor_name, slow_bfloat16_reason

    devices = training_devices()
    platform = devices[0].platform
    if platform == "cpu":
        return Machine(processor_name(), platform, 1, None, slow_bfloat16_reason() is None)
    memory = device_memory(devices[0])
    return Machine(default_device_kind(), platform, len(devices), memory[0] if memory else None, True)


def _choose_data(
    corpus: CorpusFiles, options: NewOptions, parent: Parent | None
) -> tuple[DataConfig, list[Choice]]:
    """Return the section `data`, without lengths and batches, and the choices for it."""
    from flaxformer_mt.corpus import read_pairs

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
            "" if parent else "exchange the two languages to translate the other way",
        ),
        Choice("data.target_language", corpus.target_language, ""),
    ]
    if parent is not None:
        direction = Direction(corpus.source_language, corpus.target_language)
        choices = [*new_finetuning.choose_sets(parent, direction, options.replay), *choices[1:]]
    if options.cache_dir is not None:
        cache = str(options.cache_dir.absolute())
        choices.append(Choice("data.cache_dir", cache, "prepared data, which can be made again"))
    reason = "pairs that occur several times count once; empty sides and very unequal lengths are left out"
    clean = CleanConfig(duplicates="drop")
    if options.drop_invalid:
        clean = CleanConfig(duplicates="drop", unequal_lines="drop", invalid_utf8="drop")
    choices.append(Choice("data.clean", clean, reason))
    data = DataConfig(**_fields(choices))
    train = read_pairs(data, "train", pool=choose_pool(None, None), progress=WorkProgress(sys.stderr))
    sizes = [part["pairs"] for part in train.report["parts"]]
    if sizes[0] < new_sizing.FEWEST_PAIRS:
        raise UserError(
            f"{', '.join(options.files)} have {sizes[0]} pairs after cleaning; a model needs at least "
            f"{new_sizing.FEWEST_PAIRS} to learn anything, and tens of thousands to translate"
        )
    choices += _choose_held_out(data, corpus, min(sizes))
    data = DataConfig(**_fields(choices))
    if parent is not None and options.replay is not None:
        sizes = [part["pairs"] for part in read_pairs(data, "train").report["parts"]]
        choices.append(new_finetuning.choose_weights(parent, sizes))
    return DataConfig(**_fields(choices)), choices


def _choose_held_out(data: DataConfig, corpus: CorpusFiles, pairs: int) -> list[Choice]:
    """Choose how many pairs to hold out from the first set of each direction; none if the split exists."""
    from flaxformer_mt.corpus import has_split

    first = {member.direction: member.name for member in reversed(read_members(data))}
    sets = [dataclasses.replace(data, dataset=name) for name in first.values()]
    choices = []
    for split in ("valid", "test"):
        held_out = new_sizing.choose_held_out(pairs, split)
        if len(present := [one.dataset for one in sets if has_split(one, split)]) not in (0, len(sets)):
            raise UserError(f"only {', '.join(present)} has {split} files; give them to all sets, or to none")
        if present:
            reason = f"none are held out: {corpus.text_dir} has {split} files"
            held_out = Choice(f"data.{split}_pairs", 0, reason)
        choices.append(held_out)
    return choices


def _fields(choices: list[Choice]) -> dict[str, Any]:
    return {choice.name.partition(".")[2]: choice.value for choice in choices}


def _choose_sizes(
    data: DataConfig, machine: Machine, parent: Parent | None
) -> tuple[dict[str, Any], list[Choice]]:
    """Prepare the data; return its report and the choices for all other sections."""
    from flaxformer_mt.corpus import read_pairs
    from flaxformer_mt.data.corpus_diagnostics import describe_lost_text, describe_overlap
    from flaxformer_mt.data.prepare import plan_first_epoch

    if parent is not None:
        vocabulary = new_finetuning.copy_section(parent, "vocab")
    else:
        pairs = read_pairs(data, "train")
        vocabulary = new_sizing.choose_vocabulary(len(pairs), *_look_at_text(pairs))
    config, prepared = _prepare(data, vocabulary, parent)
    report = prepared.report
    for warning in (*describe_overlap(report["overlap"]), *describe_lost_text(report["lost_text"])):
        warn_user(warning)
    store = prepared.train.base
    pairs = sum(part.size for part in store.parts[: parent.new_sets if parent else 1])
    lengths = np.stack([store.source_lengths, store.target_lengths])[:, :pairs]
    most = np.ceil(np.percentile(lengths, _PERCENTAGE, axis=1))
    corpus = Corpus(pairs, int(lengths.max(axis=0).sum()), *map(int, most))
    limits = new_sizing.choose_lengths(corpus)

    def count_updates(batches: dict[str, Any]) -> int:
        changed = dataclasses.replace(data, **_fields(limits), **batches)
        return plan_first_epoch(dataclasses.replace(config, data=changed), prepared.train)["batches"]

    model = new_sizing.choose_model(corpus, machine, joint=config.vocab.joint)
    training = new_sizing.choose_training(
        corpus,
        machine,
        longest=max(choice.value for choice in limits),
        width=parent.config.model.model_dim if parent else _fields(model)["model_dim"],
        row_multiple=data.row_multiple,
        count_updates=count_updates,
        pretrained=parent is not None,
    )
    search = Choice("search.beam_size", 5, "usual; 1 is greedy search, faster and a little worse")
    choices = [*limits, *vocabulary, *model, *training, search]
    return report, new_finetuning.adapt(parent, machine, choices) if parent else choices


def _prepare(data: DataConfig, vocabulary: list[Choice], parent: Parent | None) -> tuple[Config, Any]:
    """Prepare the data without length limits; reduce `vocabulary` if the text has too few subwords."""
    from flaxformer_mt.data.prepare import prepare
    from flaxformer_mt.vocab.sentencepiece_vocab import VocabularyTooLarge

    longest: dict[str, Any] = {
        "max_source_length": _LONGEST,
        "max_target_length": _LONGEST,
        "batch_tokens": 16 * _LONGEST,
    }
    options: dict[str, Any] = {"progress": WorkProgress(sys.stderr), "pool": choose_pool(None, None)}
    options["vocabs"] = None if parent is None else parent.vocabs
    while True:
        config = Config(data=dataclasses.replace(data, **longest), vocab=VocabConfig(**_fields(vocabulary)))
        try:
            return config, prepare(config, overlap=True, **options)
        except VocabularyTooLarge as error:
            reason = f"this text gives {error.maximum:,} subwords at most"
            vocabulary[0] = Choice("vocab.size", error.maximum, reason)


def _look_at_text(pairs: Any) -> tuple[int, tuple[str, str]]:
    from flaxformer_mt.unicode_text import find_main_script

    sample = [
        pairs[number] for number in np.linspace(0, len(pairs) - 1, min(len(pairs), _SAMPLE)).astype(int)
    ]
    sides = [[pair[side] for pair in sample] for side in (0, 1)]
    characters = {character for side in sides for text in side for character in text}
    source, target = (find_main_script(side).capitalize() for side in sides)
    return len(characters), (source, target)


def _describe(
    options: NewOptions, commands: list[list[str]], report: dict[str, Any], machine: Machine
) -> str:
    part, *_ = report["train"]["parts"]
    held = part.get("held_out", {})
    words = {
        "valid": "for validation",
        "test": "for testing",
        "aside": "that share a sentence with one of these",
    }
    others = [f"{held[name]:,} {text}" for name, text in words.items() if held.get(name)]
    others += [f"{name} {problem['count']:,}" for name, problem in part["problems"].items()]
    lines = [
        *(f"    python -m flaxformer_mt {shlex.join(command)}" for command in commands),
        "",
        f"Written by `new` for {machine.name} from {part['read']:,} pairs:",
        *(f"    {name}" for name in options.files),
        f"{part['pairs']:,} of them are trained on. The others: {', '.join(others) or 'none'}.",
    ]
    return "\n".join(lines)
