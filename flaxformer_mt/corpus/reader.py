"""Opens the sentence pairs of a config: reads `data.dataset`, builds mixtures, and holds out pairs."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flaxformer_mt.atomic_folder import digest
from flaxformer_mt.config import DataConfig
from flaxformer_mt.config.directions import (
    Member,
    choose_tags,
    choose_target_tag,
    find_directions,
    read_members,
)
from flaxformer_mt.corpus.cleaning import Cleaned, describe_rules, load_or_clean
from flaxformer_mt.corpus.columns import COLUMNS, read_columns
from flaxformer_mt.corpus.documents import Context
from flaxformer_mt.corpus.hub_sets import PREFIX, has_hub_split, open_hub_set
from flaxformer_mt.corpus.mixture_weights import choose_weights
from flaxformer_mt.corpus.pairs import Pairs, RawSplit, RowSet
from flaxformer_mt.corpus.text_files import PACKINGS, TABLES, find_file, has_files
from flaxformer_mt.corpus.text_rows import drop_weightless, open_parallel_text
from flaxformer_mt.corpus.tfds_cache import cache_dir, match_split, quiet, tfds_dir
from flaxformer_mt.errors import UserError, find_url, show_as
from flaxformer_mt.object_store.remote_runs import fetch_files
from flaxformer_mt.tracking.progress_display import SILENT, WorkProgress
from flaxformer_mt.workers.worker_pool import NO_POOL, PoolOptions

Split = Literal["train", "valid", "test"]


def hold_out(
    splits: Sequence[RawSplit], cleaned: Sequence[Cleaned], sizes: Mapping[str, int], part: Split
) -> list[Cleaned]:
    """Hold out pairs of the first data set of each direction; return each set's rows in the split `part`.

    `sizes` are the numbers of `valid` and `test` pairs to hold out for each direction. The report of each set
    has the number of pairs held out, and the number of pairs left out of training (`aside`) because they
    share a sentence with a held-out pair.
    """
    rows = [
        np.arange(len(split)) if entry.rows is None else np.asarray(entry.rows)
        for split, entry in zip(splits, cleaned, strict=True)
    ]
    keys = [entry.sentences for entry in cleaned if entry.sentences is not None]
    seen: set[tuple[str, str]] = set()
    banned: dict[str, list[np.ndarray]] = {}
    held: list[dict[str, np.ndarray]] = []
    for split, own_rows, own_keys in zip(splits, rows, keys, strict=True):
        held.append({name: own_rows[:0] for name in sizes})
        if split.languages not in seen:
            # A set read in both directions has the same pairs held out in each.
            by_target = split.has_source and split.languages[0] > split.languages[1]
            sides = own_keys[:, ::-1] if by_target else own_keys
            places = _choose(sides[own_rows], sizes, split.name)
            held[-1] = {name: own_rows[numbers] for name, numbers in places.items()}
        seen.add(split.languages)
        for numbers in held[-1].values():
            for side, language in enumerate(split.languages):
                banned.setdefault(language, []).append(own_keys[numbers, side])
    shared = {language: np.concatenate(digests) for language, digests in banned.items()}
    results = []
    for split, entry, own_rows, own_keys, own_held in zip(splits, cleaned, rows, keys, held, strict=True):
        digests = zip(split.languages, own_keys[own_rows].T, strict=True)
        is_shared = np.any([np.isin(values, shared[language]) for language, values in digests], axis=0)
        counts = {name: len(numbers) for name, numbers in own_held.items()}
        counts["aside"] = int(is_shared.sum()) - sum(counts.values())
        selected = own_held[part] if part != "train" else own_rows[~is_shared]
        report = entry.report | {"pairs": len(selected), "held_out": counts}
        results.append(entry._replace(rows=selected, report=report))
    return results


def _choose(keys: np.ndarray, sizes: Mapping[str, int], name: str) -> dict[str, np.ndarray]:
    """Choose the pairs with the smallest digests, one pair per sentence of the first side.

    Test pairs share no sentence with validation pairs. keys: digests of both sides, uint64 [N, 2]. Returns
    positions, ascending, by split.
    """
    _, first = np.unique(keys[:, 0], return_index=True)
    wanted = sizes["valid"] + sizes["test"]
    if 2 * wanted > len(first):
        raise UserError(
            f"data.valid_pairs {sizes['valid']} and data.test_pairs {sizes['test']} are more than half of "
            f"the {len(first)} different sentences of {name}; lower them to {len(first) // 4} each or less"
        )
    valid, rest = first[: sizes["valid"]], first[sizes["valid"] :]
    free = rest[~np.isin(keys[rest, 1], keys[valid, 1])]
    return {"valid": np.sort(valid), "test": np.sort(free[: sizes["test"]])}


def copy_text(url: str, config: DataConfig) -> Path:
    """Copy the files that the config needs from the folder `url` if they changed; return the local folder."""
    folder = cache_dir(config) / "text" / hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    splits = {config.train_split, config.valid_split, config.test_split, "valid", "validation"}
    languages = {language for direction in find_directions(config) for language in direction}
    texts = _name_files(splits, {*filter(None, languages), *TABLES})
    wanted = texts | _name_files(splits, ["weights", "documents"])
    wanted |= {name for column in COLUMNS for name in getattr(config, column.option, ()) if name}
    folder.mkdir(parents=True, exist_ok=True)
    show_as(folder, url)
    present = fetch_files(url, folder, wanted=wanted)
    if not texts & set(present):
        state = f"it has {', '.join(present[:10])}" if present else "it is empty, or does not exist"
        raise UserError(
            f"{url} has no text file of the splits and languages of data: {state}; the files are named as "
            f"{config.train_split}.{config.target_language}; set --config.data.text_dir"
        )
    return folder


def _name_files(splits: Iterable[str], suffixes: Iterable[str]) -> set[str]:
    return {"".join(parts) for parts in itertools.product(splits, ["."], suffixes, PACKINGS)}


def read_pairs(
    config: DataConfig,
    split: Split,
    *,
    tagged: bool = True,
    pool: PoolOptions = NO_POOL,
    progress: WorkProgress = SILENT,
) -> Pairs:
    """Open the pairs of a split; prepare its data sets on disk first where necessary.

    `train` concatenates all sets of `data.dataset`, cleaned by `data.clean`. `valid` and `test` are complete
    splits of the first set only, so that scores of a mixture are comparable with scores of that set. With
    several directions, they join the splits of the first set of each direction, where they exist. If
    `data.valid_pairs` or `data.test_pairs` is set, pairs are instead held out from the cleaned training
    split. With an empty `data.source_language`, only targets are read, and every source is "". `tagged`:
    whether sources begin with the tags of their direction, as the model expects them.
    """
    members = _choose_members(config, split)
    is_held_out = any(_is_held_out(member, config, split) for member in members)
    stored: Split = "train" if is_held_out else split
    sizes = {"valid": config.valid_pairs, "test": config.test_pairs}
    holds_out = stored == "train" and any(sizes.values())
    splits, cleaned = [], []
    for member in members:
        with progress.part(f"reading {member.name}"):
            raw = _open(member, config, stored)
        _check_order(raw, member, config)
        folder, may_drop = cache_dir(config) / "cleaned", stored == "train"
        options: dict[str, Any] = {"digests": holds_out, "pool": pool, "progress": progress}
        rows = load_or_clean(raw, config.clean, folder=folder, may_drop=may_drop, **options)
        cleaned.append(_drop_and_check(raw, rows, member, config, split))
        tags = choose_tags(config, member.direction) if tagged else ()
        target_tag = choose_target_tag(config, member.direction)
        splits.append(dataclasses.replace(raw, name=member.name, tags=tags, target_tag=target_tag))
    _check_tables(members, splits)
    identities = [entry for pair in zip(members, splits, strict=True) for entry in _identify(*pair, config)]
    if holds_out:
        cleaned = hold_out(splits, cleaned, sizes, split)
        identities.append(["held_out", list(sizes.values())])
    reports = [entry.report for entry in cleaned]
    counts = [report["pairs"] for report in reports]
    weights = choose_weights(config, counts) if split == "train" else (1.0,) * len(members)
    rules = describe_rules(config.clean) if stored == "train" else None
    return Pairs(
        [
            RowSet(raw, entry.rows, entry.hashes, weight)
            for raw, entry, weight in zip(splits, cleaned, weights, strict=True)
        ],
        fingerprint=digest([split, rules, *identities]),
        report={"split": split, "pairs": sum(counts), "parts": reports},
        columns=read_columns(splits, config, find_files) if split == "train" else {},
        context=Context.of(config),
    )


def _check_order(raw: RawSplit, member: Member, config: DataConfig) -> None:
    if config.context and raw.documents is None:
        raise UserError(
            f"data.context is {config.context}, but the rows of {member.name} are in no known order; use "
            "text files (parallel_text) in the order of their documents, or set data.context=0"
        )


def _drop_and_check(
    raw: RawSplit, cleaned: Cleaned, member: Member, config: DataConfig, split: Split
) -> Cleaned:
    """Drop the pairs of weight 0; raise UserError if no pair is left."""
    rows, report = drop_weightless(raw, cleaned.rows, cleaned.report)
    if report["pairs"] == 0:
        problems = ", ".join(f"{name} {problem['count']}" for name, problem in report["problems"].items())
        noun = "pairs" if raw.has_source else "sentences"
        raise UserError(
            f"{member.name} has no {split} {noun} after cleaning: 0 of {report['read']} are left "
            f"({problems or 'the split is empty'}); check the text and data.clean"
        )
    report = report | {"name": member.name}
    if config.context and raw.documents is not None:
        report["documents"] = len(np.unique(raw.documents))
    return cleaned._replace(rows=rows, report=report)


def _identify(member: Member, split: RawSplit, config: DataConfig) -> list[list[Any]]:
    """Return the entries of the fingerprint for a data set: its text, and how it is read."""
    entries: list[list[Any]] = []
    if config.context and split.documents is not None:
        lengths = (config.max_source_length, config.max_target_length)
        numbers = hashlib.blake2b(split.documents.tobytes()).hexdigest()
        # False and the target length remain, so that caches of earlier versions are found.
        entries.append(["documents", config.context, False, lengths, numbers])
    # Without tags, the fingerprint is as in versions that had no tags.
    tags = [tag for tag in (split.tags, split.target_tag) if tag]
    return [*entries, [member.dataset.partition("@")[0], split.identity, split.languages, *tags]]


def _choose_members(config: DataConfig, split: Split) -> list[Member]:
    members = read_members(config)
    for member in members:
        source, target = member.direction
        if not target:
            raise UserError("data.target_language is empty; set it to the language of the text")
        if source == target:
            named = member.name != member.dataset
            where = (
                f"the languages of {member.name}"
                if named
                else "data.source_language and data.target_language"
            )
            raise UserError(f"{where} are both {source}; change one")
    if split == "train":
        return members
    first = [
        next(member for member in members if member.direction == direction)
        for direction in find_directions(config)
    ]
    return first if len(first) == 1 else [member for member in first if _has_split(member, config, split)]


def _check_tables(members: list[Member], splits: list[RawSplit]) -> None:
    """Raise UserError if a .tsv table is read in both directions, since its columns have no names."""
    tables = {
        (member.dataset, member.direction): split.sides[0]
        for member, split in zip(members, splits, strict=True)
        if split.sides[0] == split.sides[1] and ".tsv" in split.sides[0] and member.direction.source
    }
    for (dataset, (source, target)), file in tables.items():
        if (dataset, (target, source)) in tables:
            raise UserError(
                f"{dataset} is read as {source}-{target} and as {target}-{source}, but {file} does not say "
                f"which column is which; make a file for each language, as with `cut -f1 {file}`"
            )


def open_train_set(config: DataConfig) -> RawSplit:
    members = read_members(config)
    if len(members) > 1:
        raise UserError(
            f"data.dataset is {config.dataset}, a mixture; give one of its sets, with "
            "--config.data.dataset=SET"
        )
    return _open(members[0], config, "train")


def find_files(config: DataConfig, configured: tuple[str, ...]) -> list[Path | None]:
    """Return the configured file of each data set, or None.

    For text files, a name without a folder is a file in the folder of the data set.
    """
    names = [member.dataset for member in read_members(config)]
    files = configured or ("",)
    return [
        _find_file(name, file, config) if file else None
        for name, file in zip(names, files * (len(names) if len(files) == 1 else 1), strict=True)
    ]


def _find_file(name: str, file: str, config: DataConfig) -> Path:
    path = Path(file).expanduser()
    if _is_text(name) and path.name == file:
        path = _text_folder(name, config) / file
    return path if path.exists() else find_file(path.parent, path.name) or path


def has_split(config: DataConfig, split: Split) -> bool:
    """Return whether the first data set of at least one direction has the split."""
    members = _choose_members(config, split)
    several = len(find_directions(config)) > 1
    return bool(members) if several else _has_split(members[0], config, split)


def _is_held_out(member: Member, config: DataConfig, split: Split) -> bool:
    size = {"train": 0, "valid": config.valid_pairs, "test": config.test_pairs}[split]
    if size and _stores_split(member, config, split):
        raise UserError(
            f"data.{split}_pairs is {size}, but {member.name} has a {split} split of its own "
            f"({getattr(config, f'{split}_split')}); set data.{split}_pairs=0 to use that"
        )
    return size > 0


def _has_split(member: Member, config: DataConfig, split: Split) -> bool:
    return _is_held_out(member, config, split) or _stores_split(member, config, split)


def _stores_split(member: Member, config: DataConfig, split: Split) -> bool:
    name, wanted = member.dataset, getattr(config, f"{split}_split")
    if _is_text(name):
        return _match_files(_text_folder(name, config), wanted, member.direction) is not None
    if name.startswith(PREFIX):
        return has_hub_split(name, wanted)
    with quiet():
        if name == "toy_de_en":
            from flaxformer_mt.corpus.toy.toy_de_en import SIZES

            return match_split(wanted, SIZES) is not None
        from flaxformer_mt.corpus.tfds_sets import has_tfds_split

        return has_tfds_split(name, wanted, folder=tfds_dir())


def _open(member: Member, config: DataConfig, split: Split) -> RawSplit:
    """Open a split of one data set; TFDS is only imported for a TFDS data set."""
    name, wanted = member.dataset, getattr(config, f"{split}_split")
    languages = (member.direction.source, member.direction.target)
    if _is_text(name):
        folder = _text_folder(name, config)
        wanted, is_train = _match_files(folder, wanted, languages) or wanted, split == "train"
        return open_parallel_text(folder, wanted, languages, config, name=name, is_train=is_train)
    if name.startswith(PREFIX):
        return open_hub_set(name, wanted, languages=languages, cache=cache_dir(config))
    with quiet():
        if name == "toy_de_en":
            from flaxformer_mt.corpus.toy.toy_de_en import open_toy

            return open_toy(wanted, languages=languages, cache=cache_dir(config))
        from flaxformer_mt.corpus.tfds_sets import open_tfds_set

        return open_tfds_set(name, wanted, languages=languages, folder=tfds_dir())


def _is_text(name: str) -> bool:
    return name.partition("@")[0] == "parallel_text" or name == "toy_documents"


def _text_folder(name: str, config: DataConfig) -> Path:
    if name == "toy_documents":
        from flaxformer_mt.corpus.toy.grammar import write_documents

        return write_documents(cache_dir(config) / "toy")
    folder = name.partition("@")[2] if "@" in name else config.text_dir
    if not folder:
        raise UserError(
            "data.text_dir is empty; set it to the folder of your text files, or write parallel_text@DIR"
        )
    if not (url := find_url(folder)):
        return Path(folder).expanduser()
    return copy_text(url, config)


def _match_files(folder: Path, split: str, languages: tuple[str, str]) -> str | None:
    """Return the name under which the split has files; `valid` and `validation` are interchangeable."""
    return match_split(
        split, [name for name in (split, "valid", "validation") if has_files(folder, name, languages)]
    )
