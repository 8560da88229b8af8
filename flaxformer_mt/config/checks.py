"""Checks of conflicts between config fields; each error names the values and the remedy.

The bounds of a single field are in its annotation (config/schema.py).
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

from flaxformer_mt.config import Config, LoraConfig, MbrConfig, ModelConfig, SearchConfig
from flaxformer_mt.config.directions import find_direction_problems
from flaxformer_mt.config.field_values import find_wrong_values, replace_fields
from flaxformer_mt.config.schema import SOURCE_NOISE, DataConfig, NoiseConfig, VocabConfig
from flaxformer_mt.config.stage_mixes import find_stage_problems
from flaxformer_mt.errors import UserError, find_cloud_path

# Pieces that the vocabulary defines itself, those of vocab.byte_fallback among them.
_OWN_PIECE = re.compile("<pad>|<s>|</s>|<unk>|\u2581|<0x[0-9A-F]{2}>")

# The largest table of positions, in numbers: 1 GiB in float64, in which it is computed.
_POSITION_NUMBERS = 1 << 27


def validate(config: Config) -> None:
    """Check the bounds of fields and the rules between fields; raise one UserError with all problems."""
    _refuse(config, _find_conflicts)


def check_search(search: SearchConfig, *, model: ModelConfig | None = None, where: str = "search.") -> None:
    network = ModelConfig() if model is None else model
    _refuse(search, lambda valid: _find_search_conflicts(valid, network, where), where)


def check_bounds(config: Config, where: str = "") -> None:
    """Check only what limits memory use: bounds of fields, and the size of the position table."""
    model, problems = config.model, [problem for _, problem in find_wrong_values(config)]
    if not problems and (positions := model.longest_input or 0) * model.model_dim > _POSITION_NUMBERS:
        problems = [f"the table of {positions} positions of model.model_dim {model.model_dim} is too large"]
    if problems:
        raise UserError("\n".join(where + problem for problem in problems))


def _refuse(section: Any, find_conflicts: Callable[[Any], Iterable[str]], where: str = "") -> None:
    """Raise UserError for wrong values in a section and for conflicts between its other fields.

    In the check for conflicts, fields with wrong values have their defaults; conflicts that name them are
    ignored.
    """
    wrong = dict(find_wrong_values(section, where))
    paths, defaults = [name.removeprefix(where) for name in wrong], type(section)()
    valid = replace_fields(section, {path: attrgetter(path)(defaults) for path in paths}, "config")
    named = re.compile("|".join(rf"{re.escape(name)}\b" for name in wrong) or "(?!)")
    if problems := [*wrong.values(), *(line for line in find_conflicts(valid) if not named.search(line))]:
        raise UserError("\n".join(problems))


def _find_conflicts(config: Config) -> Iterator[str]:
    data = config.data
    yield from _find_network_conflicts(config)
    yield from _find_decoder_only_conflicts(config)
    yield from _find_sharing_conflicts(config)
    yield from _find_data_conflicts(config)
    yield from _find_vocab_conflicts(config.vocab)
    yield from _find_training_conflicts(config)
    yield from _find_search_conflicts(config.search, config.model, "search.")
    if problem := find_cloud_path(data.cache_dir):
        yield f"data.cache_dir: {problem}"
    if all(name.strip() for name in data.dataset.split(",")):  # else the data cannot be read
        yield from find_direction_problems(data)
        yield from find_stage_problems(data)
    yield from _find_noise_conflicts(data)
    yield from _find_symbol_problems(config.vocab)
    for problem in filter(None, map(find_cloud_path, data.alignments)):
        yield f"data.alignments: {problem}"


def _find_network_conflicts(config: Config) -> Iterator[str]:
    model = config.model
    decoder_only = model.architecture == "decoder_only"
    if model.num_encoder_layers < 1 and not decoder_only:
        yield f"model.num_encoder_layers is {model.num_encoder_layers}; it must be at least 1"
    if None in (model.key_dim, model.value_dim) and model.model_dim % model.num_heads:
        yield (
            f"model.model_dim {model.model_dim} is not divisible by model.num_heads {model.num_heads}; the "
            f"nearest multiple is {_nearest_multiple(model.model_dim, model.num_heads)} (or set "
            "model.key_dim and model.value_dim)"
        )
    key_size = model.key_dim or model.model_dim // model.num_heads
    if model.positions == "rotary" and key_size % 2:
        yield f"model.positions rotary needs an even key size per head, not {key_size}; set model.key_dim"
    if model.positions == "relative":
        yield from _find_relative_conflicts(model)
    rate = model.dropout_rate if model.attention_dropout_rate is None else model.attention_dropout_rate
    if model.attention == "cudnn" and rate:
        yield (
            f"model.attention cudnn does not support the attention dropout rate {rate}; set "
            "model.attention_dropout_rate=0, or model.attention=auto"
        )
    if model.attention in ("cudnn", "pallas") and model.dtype != "bfloat16":
        yield (
            f"model.attention {model.attention} needs model.dtype bfloat16, but model.dtype is "
            f"{model.dtype}; set it, or use auto"
        )
    yield from _find_length_conflicts(config)


def _find_relative_conflicts(model: ModelConfig) -> Iterator[str]:
    if model.architecture == "decoder_only":
        yield (
            "model.positions relative needs an encoder_decoder with self-attention, but model.architecture "
            "is decoder_only; use other positions"
        )
    if model.decoder_self_attention != "attention":
        yield (
            "model.positions relative needs self-attention, but model.decoder_self_attention is "
            f"{model.decoder_self_attention}; use other positions"
        )
    # The exact half of the buckets of a direction: wider buckets begin after it.
    if model.relative_buckets % 4 or model.relative_distance <= model.relative_buckets // 2:
        yield (
            f"model.relative_buckets {model.relative_buckets} must be a multiple of 4, and "
            f"model.relative_distance {model.relative_distance} more than half of it; the usual numbers are "
            "32 and 128"
        )


def _find_length_conflicts(config: Config) -> Iterator[str]:
    data, most = config.data, config.model.longest_input
    longest, what = max(data.max_source_length, data.max_target_length), "sentence length"
    if not data.source_language:
        longest = data.max_target_length
    elif config.model.architecture == "decoder_only":
        longest = data.max_source_length + data.max_target_length
        what = "length of source plus target"
    if most is not None and longest > most:
        yield (
            f"model.max_positions {most} is below the maximum {what}, {longest} tokens; raise it or lower "
            "data.max_source_length and data.max_target_length"
        )


def _find_decoder_only_conflicts(config: Config) -> Iterator[str]:
    data, model = config.data, config.model
    decoder_only = model.architecture == "decoder_only"
    if not data.source_language and not decoder_only:
        yield (
            "data.source_language is empty, which means a language model, but model.architecture is "
            f"{model.architecture}; set model.architecture=decoder_only or set data.source_language"
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
            "model.source_end False masks the end symbol as padding, which needs "
            "model.architecture=encoder_decoder and model.padding_mask=source or both, but "
            f"model.architecture is {model.architecture} and model.padding_mask is {model.padding_mask}; set "
            "it to True"
        )
    if decoder_only and model.tying == "embeddings":
        yield "model.tying embeddings needs two embeddings, but decoder_only has one; use none or all"
    if decoder_only and data.source_language and not config.vocab.joint:
        yield (
            "decoder_only reads source and target as one sequence, but vocab.joint is False; set it to True"
        )


def _find_sharing_conflicts(config: Config) -> Iterator[str]:
    """Find problems with tied matrices and with the head that learns alignments."""
    model, alignment = config.model, config.model.alignment
    decoder_only = model.architecture == "decoder_only"
    if not (config.vocab.joint or decoder_only) and model.tying in ("all", "embeddings"):
        yield (
            f"model.tying {model.tying} needs a joint vocabulary, but vocab.joint is False; set it to True, "
            f"or use model.tying={'target_output' if model.tying == 'all' else 'none'}"
        )
    if not alignment.weight:
        return
    if decoder_only:
        yield (
            f"model.alignment.weight is {alignment.weight}, but a decoder_only model has no cross-attention "
            "to learn alignments; set it to 0"
        )
    layers = model.num_decoder_layers
    if not -layers <= alignment.layer < layers:
        yield (
            f"model.alignment.layer is {alignment.layer}, but the decoder has {layers} layers; it must be "
            f"from {-layers} to {layers - 1}"
        )


def _find_data_conflicts(config: Config) -> Iterator[str]:
    data = config.data
    sets, weight = len(data.dataset.split(",")), config.model.alignment.weight
    if len(data.weights) not in (0, sets):
        yield (
            f"data.weights has {len(data.weights)} numbers for {sets} data sets ({data.dataset}); give one "
            "number for each set"
        )
    inline_noise = any(noise.inline for noise in _find_noises(data).values())
    if any(data.alignments) and not (weight or inline_noise):
        yield (
            f"data.alignments is {','.join(data.alignments)}, but model.alignment.weight is 0, which means "
            "no guided alignment; set model.alignment.weight=0.1, or leave out data.alignments"
        )
    if weight and not any(data.alignments):
        yield (
            f"model.alignment.weight is {weight}, but data.alignments names no file; make one with align and "
            "set data.alignments=train.align, or set model.alignment.weight=0"
        )
    if len(data.alignments) not in (0, 1, sets):
        yield (
            f"data.alignments has {len(data.alignments)} names for {sets} data sets ({data.dataset}); give "
            "one name for each set, empty for a set without such a file, or one for all"
        )
    if data.clean.language != "off" and not data.clean.language_model:
        yield (
            f"data.clean.language {data.clean.language} needs a model: set data.clean.language_model to a "
            "file such as lid.176.bin"
        )
    yield from _find_batch_conflicts(config)
    if data.context and not data.source_language:
        yield (
            f"data.context is {data.context}, but a language model has no sources to read lines before "
            "(data.source_language is empty); set it to 0"
        )
    if data.context and (data.valid_pairs or data.test_pairs):
        yield (
            f"data.context is {data.context}, but data.valid_pairs {data.valid_pairs} and data.test_pairs "
            f"{data.test_pairs} hold out single lines of documents that are trained on; set both to 0, and "
            "give files of whole documents for validation and test"
        )


def _find_batch_conflicts(config: Config) -> Iterator[str]:
    data = config.data
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


def _find_vocab_conflicts(vocab: VocabConfig) -> Iterator[str]:
    for name in ("size", "source_size"):
        if getattr(vocab, name) == 0 and vocab.kind not in ("word", "char"):
            yield f"vocab.{name} 0 means all words or characters, but vocab.kind is {vocab.kind}; give a size"
    if vocab.joint and vocab.source_size is not None:
        yield (f"vocab.source_size {vocab.source_size} has no effect with vocab.joint=True; set it to none")
    if vocab.kind == "pretrained" and (vocab.symbols or not vocab.joint):
        yield (
            "vocab.kind pretrained is one vocabulary for both languages, without symbols of its own; set "
            "vocab.joint=True and leave out vocab.symbols"
        )
    ids = {name: getattr(vocab, name) for name in ("pad_id", "bos_id", "eos_id", "unk_id")}
    smallest = min((size for size in (vocab.size, vocab.size_of_source) if size > 0), default=4)
    distinct = len(set(ids.values())) == 4 or vocab.kind == "pretrained"
    if not distinct or max(ids.values()) >= smallest:
        yield (f"the special ids must be four different numbers from 0 to {smallest - 1}, but they are {ids}")
    if vocab.sampling and vocab.kind not in ("bpe", "unigram"):
        yield (
            f"vocab.sampling {vocab.sampling} needs vocab.kind bpe or unigram, not vocab.kind {vocab.kind}; "
            "set vocab.sampling=0"
        )


def _find_training_conflicts(config: Config) -> Iterator[str]:
    train, optim = config.train, config.optim
    if not config.data.source_language and train.best_metric != "loss":
        yield (
            f"train.best_metric is {train.best_metric}, but a language model has no translations to score "
            "(data.source_language is empty); set train.best_metric=loss"
        )
    if not config.data.source_language and config.data.clean.scores:
        yield (
            "data.clean.scores needs pairs, but data.source_language is empty, which means a language model; "
            "leave out data.clean.scores"
        )
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
    if not optim.lora.rank and optim.lora != LoraConfig():
        yield "optim.lora.rank is 0, so other settings of optim.lora have no effect; give a rank, such as 8"
    if train.average_last > train.keep_checkpoints:
        yield (
            f"train.average_last {train.average_last} is more than train.keep_checkpoints "
            f"{train.keep_checkpoints}; raise train.keep_checkpoints"
        )
    if train.final_checkpoint == "average" and train.average_last < 2:
        yield (
            f"train.final_checkpoint is average, but train.average_last is {train.average_last}; raise it "
            "to 2"
        )


def _find_search_conflicts(search: SearchConfig, model: ModelConfig, where: str) -> Iterator[str]:
    """Find conflicts between search options; `where` precedes their names in messages: `--` or `search.`."""
    if search.coverage_penalty and model.architecture == "decoder_only":
        yield (
            f"{where}coverage_penalty is {search.coverage_penalty}, but a decoder_only model has no "
            "cross-attention to measure coverage by; set it to 0"
        )
    if search.coverage_penalty and not model.source_end:
        yield (
            f"{where}coverage_penalty is {search.coverage_penalty}, but with model.source_end=False no "
            "attention covers the end of a source; set it to 0"
        )
    if search.method == "beam" and search.beam_size % search.diversity_groups:
        yield (
            f"{where}beam_size {search.beam_size} is not divisible by {where}diversity_groups "
            f"{search.diversity_groups}; the nearest multiple is "
            f"{_nearest_multiple(search.beam_size, search.diversity_groups)}"
        )
    yield from _find_choice_conflicts(search, where)
    shortest = search.min_length_ratio + search.min_length_offset
    # Both limits are linear in the source length: a minimum that is within the maximum at one token and does
    # not rise faster is within it at every length.
    if search.min_length_ratio > search.max_length_ratio or (
        shortest > 1 and shortest > search.max_length_ratio + search.max_length_offset
    ):
        yield (
            f"the minimum translation length ({where}min_length_ratio {search.min_length_ratio} * source + "
            f"{where}min_length_offset {search.min_length_offset}) is above the maximum of some sources "
            f"({where}max_length_ratio {search.max_length_ratio} * source + {where}max_length_offset "
            f"{search.max_length_offset}); lower the minimum or raise the maximum"
        )


def _find_choice_conflicts(search: SearchConfig, where: str) -> Iterator[str]:
    """Find problems with the options of minimum Bayes risk and reranking."""
    if search.mbr and search.method == "greedy":
        yield (
            f"{where}mbr is {search.mbr}, but {where}method is greedy, which finds one translation, so that "
            "there is none to choose; use sample or beam, or leave out mbr"
        )
    if search.mbr and search.rerank:
        yield (
            f"{where}mbr is {search.mbr} and {where}rerank is {search.rerank}, but only one score can choose "
            "a translation; leave one out"
        )
    if search.rerank and search.method != "beam":
        yield (
            f"{where}rerank is {search.rerank}, but {where}method is {search.method}, which has no list of "
            "hypotheses to choose from; use beam search, or leave it out"
        )
    if search.rerank_weight is not None and not search.rerank:
        yield (
            f"{where}rerank_weight {search.rerank_weight} has no effect without {where}rerank; give a "
            "scorer, or leave it out"
        )


def _find_noises(data: DataConfig) -> dict[str, NoiseConfig]:
    stages = {f"data.stages: {stage.name}: noise": stage.noise for stage in data.stages if stage.noise}
    return {"data.noise": data.noise, **stages}


def _find_noise_conflicts(data: DataConfig) -> Iterator[str]:
    for where, noise in _find_noises(data).items():
        if noise.inline and not any(data.alignments):
            yield f"{where}.inline is {noise.inline}, but data.alignments names no file; make one with align"
        for kind in SOURCE_NOISE:
            if not data.source_language and (rate := getattr(noise, kind)):
                yield (
                    f"{where}.{kind} is {rate}, but a language model has no sources to change "
                    "(data.source_language is empty); set it to 0"
                )


def _find_symbol_problems(vocab: VocabConfig) -> Iterator[str]:
    for symbol in vocab.symbols:
        if not symbol or symbol != "".join(symbol.split()) or vocab.symbols.count(symbol) > 1:
            yield (
                f"vocab.symbols has {symbol!r}; symbols are different from each other, and neither empty nor "
                "with spaces"
            )
        elif _OWN_PIECE.fullmatch(symbol):
            yield f"vocab.symbols has {symbol}, which the vocabulary defines itself; leave it out"


def _nearest_multiple(value: int, divisor: int) -> int:
    return max(1, round(value / divisor)) * divisor


def search_width(options: SearchConfig, n_best: int) -> int:
    """Return W, the number of hypotheses per sentence that are searched in parallel."""
    samples = options.mbr_samples if options.mbr else n_best
    return {"greedy": 1, "beam": options.beam_size, "sample": samples}[options.method]


def candidate_search(search: SearchConfig) -> SearchConfig:
    """Return the search options that produce the candidates for minimum Bayes risk or for reranking."""
    plain: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(MbrConfig)}
    return dataclasses.replace(search, **plain)


def check_n_best(options: SearchConfig, n_best: int, *, where: str = "") -> None:
    if n_best < 1:
        raise UserError(f"{where}n_best is {n_best}; it must be at least 1")
    width = max(1, search_width(options, n_best))
    if n_best > width and options.method == "sample":  # minimum Bayes risk
        raise UserError(
            f"{where}n_best is {n_best}, but {where}mbr chooses among {where}mbr_samples={width}; give 1 to "
            f"{width}, or {where}mbr_samples={n_best}"
        )
    if n_best > width:
        raise UserError(
            f"{where}n_best is {n_best}, but {options.method} search with beam_size {width} keeps {width}; "
            f"give 1 to {width}, or {where}method=beam {where}beam_size={n_best}"
        )
