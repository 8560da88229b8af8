"""Validation of a config: constraints between fields, after the bounds of each (config/field_values.py)."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

from flaxformer_mt.config import Config, LoraConfig, MbrConfig, ModelConfig, SearchConfig, VocabConfig
from flaxformer_mt.config.directions import find_direction_problems
from flaxformer_mt.config.field_values import find_wrong_values, replace_fields
from flaxformer_mt.config.schema import SOURCE_NOISE, SPACE_NOISE, TARGET_NOISE
from flaxformer_mt.config.stage_mixes import find_stage_problems
from flaxformer_mt.errors import UserError, find_cloud_path

# Pieces that the vocabulary defines itself, those of vocab.byte_fallback among them.
_OWN_PIECE = re.compile("<pad>|<s>|</s>|<unk>|\u2581|<0x[0-9A-F]{2}>")


def validate(config: Config) -> None:
    """Check the bounds of fields and the constraints between them, and report all problems together."""
    problems = _find_problems(config, _conflicts)
    if problems:
        raise UserError("\n".join(problems))


def _conflicts(config: Config) -> Iterator[str]:
    yield from _model_problems(config.model)
    yield from _data_problems(config)
    yield from _vocab_problems(config.vocab)
    yield from _architecture_problems(config)
    yield from _alignment_problems(config)
    yield from _distillation_problems(config)
    yield from _rdrop_problems(config)
    yield from _training_problems(config)
    yield from _search_conflicts(config.search, config.model, "search.")


def _find_problems(section: Any, conflicts: Callable[[Any], Iterable[str]], where: str = "") -> list[str]:
    """List the wrong values of a section, and the conflicts between its other fields.

    Conflicts are looked for with defaults in place of wrong values, and those that name one are left out.
    """
    wrong = dict(find_wrong_values(section, where))
    paths, defaults = [name.removeprefix(where) for name in wrong], type(section)()
    valid = replace_fields(section, {path: attrgetter(path)(defaults) for path in paths}, "config")
    named = re.compile("|".join(rf"{re.escape(name)}\b" for name in wrong) or "(?!)")
    return [*wrong.values(), *(line for line in conflicts(valid) if not named.search(line))]


def _model_problems(model: ModelConfig) -> Iterator[str]:
    if model.num_encoder_layers < 1 and not _decoder_only(model):
        yield f"model.num_encoder_layers is {model.num_encoder_layers}; it must be at least 1"
    if model.model_dim % model.num_heads and None in (model.key_dim, model.value_dim):
        near = max(1, round(model.model_dim / model.num_heads)) * model.num_heads
        yield (
            f"model.model_dim {model.model_dim} is not divisible by model.num_heads {model.num_heads}; "
            f"the nearest multiple is {near} (or set model.key_dim and model.value_dim)"
        )
    key_dim = model.key_dim or model.model_dim // model.num_heads
    if model.positions == "rotary" and key_dim % 2:
        yield f"model.positions rotary needs an even key size per head, not {key_dim}; set model.key_dim"
    if model.max_positions is not None and model.positions in ("rotary", "relative"):
        yield (
            f"model.max_positions {model.max_positions} has no effect with {model.positions} positions; set "
            "it to none"
        )
    if model.positions == "relative":
        yield from _relative_problems(model)
    yield from _attention_problems(model)


def _relative_problems(model: ModelConfig) -> Iterator[str]:
    if _decoder_only(model) or model.decoder_self_attention != "attention":
        where = "architecture" if _decoder_only(model) else "decoder_self_attention"
        yield (
            f"model.positions relative needs an encoder_decoder with self-attention, but model.{where} is "
            f"{getattr(model, where)}; use other positions"
        )
    # The exact half of the buckets of a direction: wider buckets begin after it.
    exact = model.relative_buckets // 2
    if model.relative_buckets % 4 or model.relative_distance <= exact:
        yield (
            f"model.relative_buckets {model.relative_buckets} must be a multiple of 4, and "
            f"model.relative_distance {model.relative_distance} more than half of it ({exact}); the usual "
            "numbers are 32 and 128"
        )


def _attention_problems(model: ModelConfig) -> Iterator[str]:
    if model.attention not in ("xla", "cudnn", "pallas"):
        return
    rate = model.dropout_rate if model.attention_dropout_rate is None else model.attention_dropout_rate
    if rate and model.attention != "pallas":
        yield (
            f"model.attention {model.attention} does not support the attention dropout rate {rate}; set "
            "model.attention_dropout_rate=0, or model.attention=auto"
        )
    if model.attention in ("cudnn", "pallas") and model.dtype != "bfloat16":
        yield (
            f"model.attention {model.attention} needs model.dtype=bfloat16, not {model.dtype}; set it, "
            "or use auto"
        )


def _decoder_only(model: ModelConfig) -> bool:
    return model.architecture == "decoder_only"


def _data_problems(config: Config) -> Iterator[str]:
    data = config.data
    datasets = data.dataset.split(",")
    for name in ("cache_dir", "tfds_data_dir"):
        if problem := find_cloud_path(getattr(data, name)):
            yield f"data.{name}: {problem}"
    if data.weights and len(data.weights) != len(datasets):
        yield (
            f"data.weights has {len(data.weights)} numbers for {len(datasets)} data sets ({data.dataset}); "
            "give one number for each set"
        )
    if all(name.strip() for name in datasets):  # else the data cannot be read
        yield from find_direction_problems(data)
        yield from find_stage_problems(data)
    yield from _noise_problems(config)
    if data.clean.language != "off" and not data.clean.language_model:
        yield (
            f"data.clean.language {data.clean.language} needs a model: set data.clean.language_model to a "
            "file such as lid.176.bin"
        )
    longest = max(data.max_source_length if data.source_language else 0, data.max_target_length)
    if data.batch_tokens < longest * data.row_multiple:
        yield (
            f"data.batch_tokens {data.batch_tokens} is too small for data.row_multiple {data.row_multiple} "
            f"rows of the maximum length {longest}; raise it to {longest * data.row_multiple} or lower "
            "data.max_source_length and data.max_target_length"
        )
    if data.batch_pairs and data.batching == "pack":
        yield f"data.batch_pairs {data.batch_pairs} has no effect with data.batching=pack; set it to 0"
    if config.model.padding_mask == "none" and data.batching == "pack":
        yield "model.padding_mask none cannot separate the pairs of a packed row; use data.batching=bucket"
    if data.batch_pairs % data.row_multiple:
        yield (
            f"data.batch_pairs is {data.batch_pairs}; it must be a multiple of data.row_multiple "
            f"{data.row_multiple}"
        )


def _noise_problems(config: Config) -> Iterator[str]:
    data = config.data
    noises = {"data.noise": data.noise}
    noises |= {f"data.stages: {stage.name}: noise": stage.noise for stage in data.stages if stage.noise}
    reasons: dict[tuple[str, ...], str] = {}
    if not data.source_language:
        reasons[SOURCE_NOISE] = "a language model has no sources to change (data.source_language is empty)"
    if any(data.alignments):
        reasons[SPACE_NOISE] = "it changes the number of words, which data.alignments counts"
    if any(data.teacher_scores):
        reasons[TARGET_NOISE] = "it changes targets, of which data.teacher_scores has scores"
    for (where, noise), (kinds, reason) in itertools.product(noises.items(), reasons.items()):
        for kind in kinds:
            rate = attrgetter(kind)(noise)
            if rate and (noise.typos or not kind.startswith("typo_kinds.")):
                yield f"{where}.{kind} is {rate}, but {reason}; set it to 0"


def _vocab_problems(vocab: VocabConfig) -> Iterator[str]:
    ids = {name: getattr(vocab, name) for name in ("pad_id", "bos_id", "eos_id", "unk_id")}
    sizes = {"size": vocab.size} | ({} if vocab.source_size is None else {"source_size": vocab.source_size})
    for name, size in sizes.items():
        if size == 0 and vocab.kind not in ("word", "char"):
            yield f"vocab.{name} 0 means all words or characters, but vocab.kind is {vocab.kind}; give a size"
    if vocab.joint and vocab.source_size is not None:
        yield f"vocab.source_size {vocab.source_size} has no effect with vocab.joint=True; set it to none"
    if vocab.kind == "pretrained" and (vocab.symbols or not vocab.joint):
        yield (
            "vocab.kind pretrained is one vocabulary for both languages, without symbols of its own; set "
            "vocab.joint=True and leave out vocab.symbols"
        )
    least = min((size for size in sizes.values() if size > 0), default=4)
    distinct = len(set(ids.values())) == 4 or vocab.kind == "pretrained"
    if not distinct or max(ids.values()) >= least:
        yield f"the special ids must be four different numbers from 0 to {least - 1}, but they are {ids}"
    for symbol in vocab.symbols:
        if not symbol or symbol != "".join(symbol.split()) or vocab.symbols.count(symbol) > 1:
            yield (
                f"vocab.symbols has {symbol!r}; symbols are different from each other, and neither empty nor "
                "with spaces"
            )
        elif _OWN_PIECE.fullmatch(symbol):
            yield f"vocab.symbols has {symbol}, which the vocabulary defines itself; leave it out"
    if vocab.sampling and vocab.kind not in ("bpe", "unigram"):
        yield f"vocab.sampling needs vocab.kind bpe or unigram, not {vocab.kind}; set vocab.sampling=0"


def _architecture_problems(config: Config) -> Iterator[str]:
    data, vocab, model = config.data, config.vocab, config.model
    longest = max(data.max_source_length, data.max_target_length)
    decoder_only = _decoder_only(model)
    if decoder_only and data.source_language:
        longest = data.max_source_length + data.max_target_length
    elif not data.source_language:
        longest = data.max_target_length
    if model.longest_input is not None and longest > model.longest_input:
        what = "the maximum length of source plus target" if decoder_only else "the maximum sentence length"
        yield (
            f"model.max_positions {model.longest_input} is below {what}, {longest} tokens; raise it or lower "
            "data.max_source_length and data.max_target_length"
        )
    if not data.source_language and not decoder_only:
        yield (
            "data.source_language is empty, which means a language model, but model.architecture is "
            f"{model.architecture}; set model.architecture=decoder_only or set data.source_language"
        )
    if not data.source_language and config.train.best_metric != "loss":
        yield (
            f"train.best_metric is {config.train.best_metric}, but a language model has no translations to "
            "score (data.source_language is empty); set train.best_metric=loss"
        )
    if decoder_only and model.decoder_self_attention != "attention":
        yield (
            f"model.decoder_self_attention is {model.decoder_self_attention}, but a decoder_only model reads "
            "its source by self-attention; set it to attention, or set model.architecture=encoder_decoder"
        )
    if decoder_only and model.target_start != "symbol":
        yield (
            f"model.target_start is {model.target_start}, but model.architecture is decoder_only, in which "
            "targets follow sources; set model.target_start=symbol"
        )
    if not model.source_end and (decoder_only or model.padding_mask == "none"):
        yield (
            "model.source_end False masks the end symbol as padding, which needs model.architecture="
            f"encoder_decoder and model.padding_mask=source or both, but they are {model.architecture} and "
            f"{model.padding_mask}; set it to True"
        )
    if decoder_only and model.tying == "embeddings":
        yield "model.tying embeddings needs two embeddings, but decoder_only has one; use none or all"
    if decoder_only and data.source_language and not vocab.joint:
        yield "decoder_only reads source and target as one sequence, but vocab.joint is False; set it to True"
    if model.tying in ("all", "embeddings") and not vocab.joint and not decoder_only:
        yield (
            f"model.tying {model.tying} needs a joint vocabulary, but vocab.joint is False; set it to True, "
            f"or use model.tying={'target_output' if model.tying == 'all' else 'none'}"
        )


def _alignment_problems(config: Config) -> Iterator[str]:
    model, chosen = config.model, config.model.alignment
    yield from _side_file_problems(
        config,
        "data.alignments",
        "model.alignment.weight",
        purpose="guided alignment",
        usual=0.1,
        remedy="make one with align and set data.alignments=train.align",
    )
    if not chosen.weight:
        return
    if _decoder_only(model):
        yield (
            f"model.alignment.weight is {chosen.weight}, but a decoder_only model has no cross-attention to "
            "learn alignments; set it to 0"
        )
    for name, value, count in (
        ("layer", chosen.layer, model.num_decoder_layers),
        ("head", chosen.head, model.num_heads),
    ):
        least = -count if name == "layer" else 0
        if not least <= value < count:
            yield (
                f"model.alignment.{name} is {value}, but the decoder has {count} {name}s; it must be from "
                f"{least} to {count - 1}"
            )


def _rdrop_problems(config: Config) -> Iterator[str]:
    model, weight = config.model, config.train.rdrop_weight
    rates = (model.embedding_dropout_rate, model.attention_dropout_rate, model.ffn_dropout_rate)
    if weight and not any((model.dropout_rate, *rates)):
        yield (
            f"train.rdrop_weight is {weight}, but all dropout rates are 0, so that two passes are equal; set "
            "model.dropout_rate=0.3, or train.rdrop_weight=0"
        )


def _distillation_problems(config: Config) -> Iterator[str]:
    files = config.data.teacher_scores
    yield from _side_file_problems(
        config,
        "data.teacher_scores",
        "train.teacher_weight",
        purpose="distillation",
        usual=0.5,
        remedy="make one with distil --teacher_scores=8 and set data.teacher_scores=train.scores",
    )
    if any(files) and config.vocab.sampling:
        yield (
            f"vocab.sampling is {config.vocab.sampling}, which gives targets other tokens in each epoch than "
            "data.teacher_scores has scores of; set vocab.sampling=0, or leave out data.teacher_scores"
        )
    if any(files) and not config.data.source_language:
        yield (
            "data.teacher_scores needs translations, but data.source_language is empty, which means a "
            "language model; leave out data.teacher_scores"
        )


def _side_file_problems(
    config: Config, field: str, weight_field: str, *, purpose: str, usual: float, remedy: str
) -> Iterator[str]:
    files, weight = attrgetter(field, weight_field)(config)
    sets = config.data.dataset.split(",")
    if any(files) and not weight:
        yield (
            f"{field} is {','.join(files)}, but {weight_field} is 0, which means no {purpose}; set "
            f"{weight_field}={usual}, or leave out {field}"
        )
    if weight and not any(files):
        yield f"{weight_field} is {weight}, but {field} names no file; {remedy}, or set {weight_field}=0"
    if len(files) not in (0, 1, len(sets)):
        yield (
            f"{field} has {len(files)} names for {len(sets)} data sets ({config.data.dataset}); give one "
            "name for each set, empty for a set without such a file, or one for all"
        )
    for problem in filter(None, map(find_cloud_path, files)):
        yield f"{field}: {problem}"


def check_search(search: SearchConfig, *, model: ModelConfig | None = None, where: str = "search.") -> None:
    if problems := _find_problems(search, lambda valid: _search_conflicts(valid, model, where), where):
        raise UserError("\n".join(problems))


def _coverage_problems(search: SearchConfig, model: ModelConfig, where: str) -> Iterator[str]:
    if _decoder_only(model):
        yield (
            f"{where}coverage_penalty is {search.coverage_penalty}, but a decoder_only model has no "
            "cross-attention to measure coverage by; set it to 0"
        )
    if not model.source_end:
        yield (
            f"{where}coverage_penalty is {search.coverage_penalty}, but with model.source_end=False no "
            "attention covers the end of a source; set it to 0"
        )
    layers = model.num_decoder_layers
    if not -layers <= search.coverage_layer < layers:
        yield (
            f"{where}coverage_layer is {search.coverage_layer}, but model.num_decoder_layers is {layers}; it "
            f"must be from {-layers} to {layers - 1}"
        )


def _search_conflicts(search: SearchConfig, model: ModelConfig | None, where: str) -> Iterator[str]:
    if model is not None and search.coverage_penalty:
        yield from _coverage_problems(search, model, where)
    groups = search.diversity_groups
    if _searches_beams(search) and groups > 1 and search.beam_size % groups:
        near = max(1, round(search.beam_size / groups)) * groups
        yield (
            f"{where}beam_size {search.beam_size} is not divisible by {where}diversity_groups {groups}; the "
            f"nearest multiple is {near}"
        )
    # Both limits are linear in the source length: a minimum that is within the maximum at one token and does
    # not rise faster is within it at every length.
    steeper = search.min_length_ratio > search.max_length_ratio
    shortest = search.min_length_ratio + search.min_length_offset
    if steeper or (shortest > 1 and shortest > search.max_length_ratio + search.max_length_offset):
        yield (
            f"the minimum translation length ({where}min_length_ratio {search.min_length_ratio} * source + "
            f"{where}min_length_offset {search.min_length_offset}) is above the maximum of some sources ("
            f"{where}max_length_ratio {search.max_length_ratio} * source + {where}max_length_offset "
            f"{search.max_length_offset}); lower the minimum or raise the maximum"
        )


def _training_problems(config: Config) -> Iterator[str]:
    optim, train = config.optim, config.train
    if config.model.scan_layers is True and optim.optimizer == "muon":
        yield (
            "optim.optimizer muon needs a separate matrix for each layer, but model.scan_layers is True; set "
            "it to False, or use another optimizer"
        )
    if optim.weight_decay and optim.optimizer in ("adam", "adafactor"):
        yield (
            f"optim.weight_decay {optim.weight_decay} has no effect with optim.optimizer {optim.optimizer}; "
            "use adamw, lion or muon"
        )
    if optim.lora.rank and optim.freeze:
        yield (
            f"optim.freeze {','.join(optim.freeze)} has no effect with optim.lora.rank {optim.lora.rank}, "
            "which freezes all parameters but those of optim.lora.also_train; leave it out"
        )
    if not optim.lora.rank and optim.lora != LoraConfig():
        yield "optim.lora.rank is 0, so other settings of optim.lora have no effect; give a rank, such as 8"
    for flag in config.parallel.xla_flags:
        if not re.fullmatch(r"xla_\w+=\S+", flag):
            yield f"parallel.xla_flags has {flag!r}; give each flag as xla_NAME=VALUE, without dashes"
    if train.average_last > train.keep_checkpoints:
        yield (
            f"train.average_last {train.average_last} is more than train.keep_checkpoints "
            f"{train.keep_checkpoints}; raise train.keep_checkpoints"
        )
    if train.final_checkpoint == "average" and train.average_last < 2:
        yield f"train.final_checkpoint is average, but average_last is {train.average_last}; raise it to 2"


def search_width(options: SearchConfig, n_best: int) -> int:
    """W, the number of hypotheses of a sentence that are searched at a time."""
    widths = {"greedy": 1, "beam": options.beam_size, "sample": n_best}
    candidates = options.beam_size if _searches_beams(options) else options.mbr_samples
    return (widths | {"mbr": candidates})[options.method]


def candidate_search(search: SearchConfig) -> SearchConfig:
    """Return the search that finds the candidates of the method mbr; other searches stay as they are."""
    if search.method != "mbr":
        return search
    plain: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(MbrConfig)}
    plain["method"] = "beam" if search.mbr_candidates == "beam" else "sample"
    return dataclasses.replace(search, **plain)


def _searches_beams(options: SearchConfig) -> bool:
    return candidate_search(options).method == "beam"


def check_n_best(options: SearchConfig, n_best: int, *, where: str = "") -> None:
    if n_best < 1:
        raise UserError(f"{where}n_best is {n_best}; it must be at least 1")
    width = max(1, search_width(options, n_best))
    if n_best > width and options.method == "mbr":
        raise UserError(
            f"{where}n_best is {n_best}, but the search has {width} candidates to choose from; give 1 to "
            f"{width}, or {where}{'beam_size' if _searches_beams(options) else 'mbr_samples'}={n_best}"
        )
    if n_best > width:
        raise UserError(
            f"{where}n_best is {n_best}, but {options.method} search with beam_size {width} keeps {width}; "
            f"give 1 to {width}, or {where}method=beam {where}beam_size={n_best}"
        )
