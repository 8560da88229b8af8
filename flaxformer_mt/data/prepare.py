"""Prepares the data that a config describes: pairs, vocabularies, token stores, and a report on them."""

import collections
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flaxformer_mt.atomic_folder import artifact, digest, digest_file
from flaxformer_mt.config import Config, DataConfig
from flaxformer_mt.config.directions import common_languages, find_directions
from flaxformer_mt.config.stage_mixes import read_stages
from flaxformer_mt.corpus.documents import SEPARATOR, find_separator
from flaxformer_mt.corpus.language_identification import load_identifier
from flaxformer_mt.corpus.mixture_weights import describe_shares
from flaxformer_mt.corpus.reader import Pairs, Split, cache_dir, has_split, read_pairs
from flaxformer_mt.corpus.sentence_split import split_sentences
from flaxformer_mt.corpus.side_checks import describe_side_problem, find_side_problems
from flaxformer_mt.data.batching import plan_epoch, plan_summary
from flaxformer_mt.data.buckets import make_training_shapes
from flaxformer_mt.data.corpus_diagnostics import find_lost_text, find_overlap
from flaxformer_mt.data.curriculum import plan_stages
from flaxformer_mt.data.epoch_stores import EpochStores
from flaxformer_mt.data.learned_shortlist import ShortlistRequest, write_shortlist
from flaxformer_mt.data.text_noise import TextNoise
from flaxformer_mt.data.token_store import TokenStore
from flaxformer_mt.data.tokenization import Drawing
from flaxformer_mt.errors import UserError, name_full_disk, warn_user
from flaxformer_mt.object_store.remote_runs import open_copy, publish
from flaxformer_mt.parallel.processes import is_first
from flaxformer_mt.runs.run_directory import (
    check_run,
    forget_preparation,
    has_vocabs,
    load_sealed_vocabs,
    open_run,
    seal_vocabs,
)
from flaxformer_mt.runs.target_lengths import TargetLengths, describe_target_lengths, write_target_lengths
from flaxformer_mt.tracking.progress_display import SILENT, WorkProgress
from flaxformer_mt.unicode_text import CASES, find_case
from flaxformer_mt.vocab import Vocabs, make_vocabs
from flaxformer_mt.vocab.symbols import check_language_tags, check_tags
from flaxformer_mt.workers.worker_pool import NO_POOL, PoolOptions

# Training lines whose sentences and letter cases are counted.
_SAMPLE = 2000


class Prepared(NamedTuple):
    """Data ready for training; without a validation set or a test set, the set's fields are None."""

    vocabs: Vocabs
    train: EpochStores
    valid_pairs: Pairs | None
    valid: TokenStore | None
    test_pairs: Pairs | None
    report: dict[str, Any]
    # The length that few targets of the training set exceed; None: too few pairs, or no sources.
    target_lengths: TargetLengths | None
    # The share of its source lines that have several sentences; None: unknown.
    several_sentences: float | None


def prepare(
    config: Config,
    run_dir: Path | None = None,
    *,
    own_store: Path | None = None,
    progress: WorkProgress = SILENT,
    overlap: bool = False,
    shortlist: ShortlistRequest | None = None,
    pool: PoolOptions = NO_POOL,
    vocabs: Vocabs | None = None,
) -> Prepared:
    """Read the data set, train or load the vocabularies, and tokenize; results are cached and reused.

    Without a source language, there is only a target vocabulary, and sources are empty.

    Args:
      run_dir: a run directory that receives the config, the vocabularies (if it has none), and statistics of
        target lengths.
      own_store: a folder for the stores of later epochs that only this process writes.
      overlap: whether to read the whole training set and report how many held-out pairs it contains.
      vocabs: the vocabularies of another run, to use instead of the config's.
    """
    if run_dir is not None:
        run_dir = open_copy(run_dir)
        check_run(run_dir, config)
        forget_preparation(run_dir, config)
    root = cache_dir(config.data)
    pairs: dict[str, Pairs] = {"train": read_pairs(config.data, "train", pool=pool, progress=progress)}
    splits: tuple[Split, ...] = ("valid", "test")
    pairs |= {split: read_pairs(config.data, split) for split in splits if has_split(config.data, split)}
    making = "reading" if config.vocab.kind == "pretrained" else "training"
    with progress.part(f"{making} the vocabulary ({config.vocab.kind}, {config.vocab.size:,} subwords)"):
        vocabs = vocabs or _find_vocabs(config, pairs["train"], root, run_dir)
        _check_vocabs(vocabs, pairs["train"])
    _check_noise(config, pairs["train"])
    if run_dir is not None and is_first():
        publish(run_dir)
    with progress.part("tokenizing", total=len(pairs["train"])) as count:
        options = {"root": root / "tokens", "own_root": own_store, "pool": pool, "count": count}
        train = _tokenize_train(config, pairs["train"], vocabs, **options)
    valid = TokenStore.build(pairs["valid"], vocabs, root / "tokens") if "valid" in pairs else None
    lengths = _learn_lengths(config, train, vocabs, run_dir)
    report = _describe_data(config, pairs, vocabs, train, lengths)
    if overlap:
        with progress.part("comparing the sets"):
            held_out = {split: held for split, held in pairs.items() if split != "train"}
            report["overlap"] = find_overlap(pairs["train"], held_out)
    if shortlist is not None:
        with progress.part("learning translations of subwords"):
            report["shortlist"] = write_shortlist(shortlist, train.base, vocabs)
    line = None if lengths is None else TargetLengths(lengths["ratio"], lengths["offset"])
    several = None if lengths is None else lengths["several_sentences"]
    return Prepared(vocabs, train, pairs.get("valid"), valid, pairs.get("test"), report, line, several)


def _check_vocabs(vocabs: Vocabs, pairs: Pairs) -> None:
    check_language_tags(vocabs.source, pairs.tags)
    check_language_tags(vocabs.target, filter(None, pairs.target_tags))
    check_tags(vocabs.source, pairs.report["parts"])
    if pairs.context:
        find_separator(vocabs.source)


def _check_noise(config: Config, pairs: Pairs) -> None:
    noises = [config.data.noise, *(stage.noise for stage in read_stages(config.data))]
    if any(noise.moves for noise in noises) and (pairs.tags or any(pairs.target_tags)):
        raise UserError(
            "noise of the kinds random_text and inline would move the tags of languages; set their rates to 0"
        )


def _tokenize_train(config: Config, pairs: Pairs, vocabs: Vocabs, **options: Any) -> EpochStores:
    """Tokenize the training set; `options` are keyword arguments of `EpochStores`."""
    # Noise leaves tags and the symbols of the vocabulary as they are.
    tags = (part.get("tag", "") for part in pairs.report["parts"])
    symbols = dict.fromkeys([*config.vocab.symbols, *pairs.tags, *filter(None, tags)])
    noise = TextNoise(config.data.noise, tuple(symbols))
    return EpochStores(
        pairs,
        vocabs,
        drawing=Drawing(config.vocab.sampling, config.seed, noise),
        varies=any(stage.noise.active for stage in read_stages(config.data)),
        # With data.noise.tags, alignments may be needed only for the noise of the text.
        unused=() if config.model.alignment.weight else ("alignment",),
        **options,
    )


def _describe_data(
    config: Config,
    pairs: Mapping[str, Pairs],
    vocabs: Vocabs,
    train: EpochStores,
    lengths: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the report on the data, except for the optional parts (overlap, shortlist)."""
    valid = pairs.get("valid")
    return {
        **{split: pairs[split].report if split in pairs else None for split in ("train", "valid", "test")},
        "vocabulary": {
            "kind": config.vocab.kind,
            "joint": vocabs.joint,
            "source_size": vocabs.source.size if config.data.source_language else 0,
            "target_size": vocabs.target.size,
        },
        "target_lengths": lengths,
        "lost_text": find_lost_text(valid, vocabs.target) if valid is not None else None,
        **_describe_epochs(config, train),
        "sides": _check_sides(config.data.clean.language_model, pairs),
    }


def _learn_lengths(
    config: Config, train: EpochStores, vocabs: Vocabs, run_dir: Path | None
) -> dict[str, Any] | None:
    """Return statistics on the lengths of training lines, and write them into the run directory."""
    lengths = describe_target_lengths(train.base.source_lengths, train.base.target_lengths)
    if lengths is not None:
        lengths |= _describe_lines(config.data, train, vocabs)
    if run_dir is not None and is_first():
        write_target_lengths(run_dir, lengths)
        publish(run_dir)
    return lengths


def _describe_lines(data: DataConfig, train: EpochStores, vocabs: Vocabs) -> dict[str, float]:
    """Return the shares of source lines with several sentences and in each letter case, from a sample."""
    numbers = range(0, len(train.base), -(-len(train.base) // _SAMPLE))
    texts = [vocabs.source.detokenize(train.base[number][0]) for number in numbers]
    texts = [text.rpartition(SEPARATOR)[2] for text in texts] if data.context else texts
    language = common_languages(find_directions(data)).source
    cases = collections.Counter(map(find_case, texts))
    several = sum(len(split_sentences(text, language=language)) > 1 for text in texts)
    return {"several_sentences": several / len(texts), **{case: cases[case] / len(texts) for case in CASES}}


def _describe_epochs(config: Config, train: EpochStores) -> dict[str, Any]:
    if config.data.stages:
        stages = plan_stages(config, train)
        return {"batches": stages[0]["batches"], "stages": stages}
    parts = train.base.parts
    mixture = {"mixture": describe_shares(parts)} if len(parts) > 1 else {}
    return {"batches": plan_first_epoch(config, train), **mixture}


def plan_first_epoch(config: Config, train: EpochStores) -> Any:
    lengths = train.base.source_lengths, train.base.target_lengths
    shapes = make_training_shapes(*lengths, config=config.data, headroom=train.varies)
    # With one seed for all runs, so that a sweep over seeds compiles its programs only once.
    plan = plan_epoch(*lengths, config=config.data, seed=0, epoch=0, parts=train.base.parts, shapes=shapes)
    return plan_summary(plan, *lengths)


def _check_sides(model: str, splits: Mapping[str, Pairs]) -> list[dict[str, Any]]:
    findings = find_side_problems(splits, load_identifier(model) if model else None)
    for finding in findings if is_first() else ():
        warn_user(describe_side_problem(finding))
    return [dataclasses.asdict(finding) for finding in findings]


def _find_vocabs(config: Config, pairs: Pairs, root: Path, run_dir: Path | None) -> Vocabs:
    symbols = [*config.vocab.symbols, *([SEPARATOR] if config.data.context else [])]
    vocab = dataclasses.replace(config.vocab, symbols=tuple(dict.fromkeys(symbols)))
    if run_dir is not None and has_vocabs(run_dir):
        open_run(run_dir, config)
        load_sealed_vocabs(run_dir / "vocab")
        return make_vocabs(vocab, pairs, run_dir / "vocab", target_only=not pairs.has_source)
    # A vocabulary is a function of the text, of its settings, and of the bytes of the given model files.
    fields = dataclasses.asdict(vocab) | {"sampling": None}
    models = map(Path, filter(None, (vocab.source_model, vocab.target_model)))
    key = digest([pairs.fingerprint, fields, [digest_file(model) for model in models if model.is_file()]])
    folder = root / "vocabularies" / key

    def load(folder: Path, metadata: Any = None) -> Vocabs:
        return make_vocabs(vocab, pairs, folder, target_only=not pairs.has_source)

    with name_full_disk(folder):
        vocabs = artifact(folder, lambda partial: load(partial) and {}, load)
    if run_dir is not None:
        open_run(run_dir, config)
        vocabs.save(run_dir / "vocab")
        seal_vocabs(run_dir / "vocab")
    return vocabs
