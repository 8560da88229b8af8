"""Rules between the fields of a config, as a table: what is refused, and when.

The bounds of a single field stand beside it (config/schema.py).
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from flaxformer_mt.config import Config, LoraConfig, MbrConfig, ModelConfig, SearchConfig
from flaxformer_mt.config.directions import find_direction_problems
from flaxformer_mt.config.field_values import find_wrong_values, replace_fields
from flaxformer_mt.config.schema import SOURCE_NOISE, DataConfig, NoiseConfig
from flaxformer_mt.config.stage_mixes import find_stage_problems
from flaxformer_mt.errors import UserError, find_cloud_path

# Pieces that the vocabulary defines itself, those of vocab.byte_fallback among them.
_OWN_PIECE = re.compile("<pad>|<s>|</s>|<unk>|\u2581|<0x[0-9A-F]{2}>")

# What is refused -> whether it is in a config. In the text, {model.norm} is "model.norm layer", and
# {model.norm is} "model.norm is layer"; other names are of values that the function returns in place of True.
Rules = Mapping[str, Callable[[Config], Any]]


def _decoder_only(config: Config) -> bool:
    return config.model.architecture == "decoder_only"


def _relative(config: Config) -> bool:
    return config.model.positions == "relative"


def _nearest(value: int, divisor: int) -> dict[str, int] | None:
    """The multiple of the divisor that is nearest to a value; None if the value is one."""
    return {"nearest": max(1, round(value / divisor)) * divisor} if value % divisor else None


def _outside(index: int, count: int, least: int = 0) -> dict[str, int] | None:
    return None if least <= index < count else {"count": count, "least": least, "most": count - 1}


def _odd_key_size(model: ModelConfig) -> dict[str, int] | None:
    size = model.key_dim or model.model_dim // model.num_heads
    return {"size": size} if size % 2 else None


def _attention_dropout(model: ModelConfig) -> dict[str, float] | None:
    rate = model.dropout_rate if model.attention_dropout_rate is None else model.attention_dropout_rate
    return {"rate": rate} if rate else None


def _too_few_positions(config: Config) -> dict[str, Any] | None:
    source, target, what = config.data.max_source_length, config.data.max_target_length, "sentence length"
    longest, most = max(source, target), config.model.longest_input
    if not config.data.source_language:
        longest = target
    elif _decoder_only(config):
        longest, what = source + target, "length of source plus target"
    return {"most": most, "what": what, "longest": longest} if most is not None and longest > most else None


def _too_few_batch_tokens(config: Config) -> dict[str, int] | None:
    data = config.data
    longest = max(data.max_source_length if data.source_language else 0, data.max_target_length)
    least = longest * data.row_multiple
    return {"longest": longest, "least": least} if data.batch_tokens < least else None


def _wrong_special_ids(config: Config) -> dict[str, Any] | None:
    vocab = config.vocab
    ids = {name: getattr(vocab, name) for name in ("pad_id", "bos_id", "eos_id", "unk_id")}
    least = min((size for size in (vocab.size, vocab.size_of_source) if size > 0), default=4)
    distinct = len(set(ids.values())) == 4 or vocab.kind == "pretrained"
    return None if distinct and max(ids.values()) < least else {"most": least - 1, "ids": ids}


# Values of model.tying that need a joint vocabulary -> the nearest that needs none.
_JOINT_TYING = {"all": {"other": "target_output"}, "embeddings": {"other": "none"}}
_RULES: Rules = {
    # ---- network ----
    "{model.num_encoder_layers is}; it must be at least 1": (
        lambda c: c.model.num_encoder_layers < 1 and not _decoder_only(c)
    ),
    "{model.model_dim} is not divisible by {model.num_heads}; the nearest multiple is {nearest} (or set "
    "model.key_dim and model.value_dim)": (
        lambda c: (
            None in (c.model.key_dim, c.model.value_dim) and _nearest(c.model.model_dim, c.model.num_heads)
        )
    ),
    "{model.positions} needs an even key size per head, not {size}; set model.key_dim": (
        lambda c: c.model.positions == "rotary" and _odd_key_size(c.model)
    ),
    "{model.max_positions} has no effect with {model.positions}; set it to none": (
        lambda c: c.model.max_positions is not None and c.model.positions in ("rotary", "relative")
    ),
    "{model.positions} needs an encoder_decoder with self-attention, but {model.architecture is}; use other "
    "positions": lambda c: _relative(c) and _decoder_only(c),
    "{model.positions} needs self-attention, but {model.decoder_self_attention is}; use other positions": (
        lambda c: _relative(c) and c.model.decoder_self_attention != "attention"
    ),
    # The exact half of the buckets of a direction: wider buckets begin after it.
    "{model.relative_buckets} must be a multiple of 4, and {model.relative_distance} more than half of it; "
    "the usual numbers are 32 and 128": lambda c: (
        _relative(c)
        and (c.model.relative_buckets % 4 or c.model.relative_distance <= c.model.relative_buckets // 2)
    ),
    "{model.attention} does not support the attention dropout rate {rate}; set "
    "model.attention_dropout_rate=0, or model.attention=auto": (
        lambda c: c.model.attention == "cudnn" and _attention_dropout(c.model)
    ),
    "{model.attention} needs model.dtype bfloat16, but {model.dtype is}; set it, or use auto": (
        lambda c: c.model.attention in ("cudnn", "pallas") and c.model.dtype != "bfloat16"
    ),
    "model.max_positions {most} is below the maximum {what}, {longest} tokens; raise it or lower "
    "data.max_source_length and data.max_target_length": _too_few_positions,
    "data.source_language is empty, which means a language model, but {model.architecture is}; set "
    "model.architecture=decoder_only or set data.source_language": (
        lambda c: not c.data.source_language and not _decoder_only(c)
    ),
    "{model.decoder_self_attention is}, but a decoder_only model reads its source by self-attention; set it "
    "to attention, or set model.architecture=encoder_decoder": (
        lambda c: _decoder_only(c) and c.model.decoder_self_attention != "attention"
    ),
    "{model.target_start is}, but {model.architecture is}, in which targets follow sources; set "
    "model.target_start=symbol": lambda c: _decoder_only(c) and c.model.target_start != "symbol",
    "{model.source_end} masks the end symbol as padding, which needs model.architecture=encoder_decoder and "
    "model.padding_mask=source or both, but {model.architecture is} and {model.padding_mask is}; set it to "
    "True": lambda c: not c.model.source_end and (_decoder_only(c) or c.model.padding_mask == "none"),
    "{model.tying} needs two embeddings, but decoder_only has one; use none or all": (
        lambda c: _decoder_only(c) and c.model.tying == "embeddings"
    ),
    "decoder_only reads source and target as one sequence, but {vocab.joint is}; set it to True": (
        lambda c: _decoder_only(c) and c.data.source_language and not c.vocab.joint
    ),
    "{model.tying} needs a joint vocabulary, but {vocab.joint is}; set it to True, or use "
    "model.tying={other}": lambda c: (
        not (c.vocab.joint or _decoder_only(c)) and _JOINT_TYING.get(c.model.tying)
    ),
    "{model.alignment.weight is}, but a decoder_only model has no cross-attention to learn alignments; set "
    "it to 0": lambda c: c.model.alignment.weight and _decoder_only(c),
    "{model.alignment.layer is}, but the decoder has {count} layers; it must be from {least} to {most}": (
        lambda c: (
            c.model.alignment.weight
            and _outside(c.model.alignment.layer, layers := c.model.num_decoder_layers, -layers)
        )
    ),
    "{model.alignment.head is}, but the decoder has {count} heads; it must be from {least} to {most}": (
        lambda c: c.model.alignment.weight and _outside(c.model.alignment.head, c.model.num_heads)
    ),
    # ---- data ----
    "data.weights has {count} numbers for {sets} data sets ({names}); give one number for each set": (
        lambda c: (
            len(c.data.weights) not in (0, sets := len(c.data.dataset.split(",")))
            and {"count": len(c.data.weights), "sets": sets, "names": c.data.dataset}
        )
    ),
    "{data.alignments is}, but model.alignment.weight is 0, which means no guided alignment; set "
    "model.alignment.weight=0.1, or leave out data.alignments": (
        lambda c: any(c.data.alignments) and not (c.model.alignment.weight or _has_inline_noise(c.data))
    ),
    "{model.alignment.weight is}, but data.alignments names no file; make one with align and set "
    "data.alignments=train.align, or set model.alignment.weight=0": (
        lambda c: c.model.alignment.weight and not any(c.data.alignments)
    ),
    "data.alignments has {count} names for {sets} data sets ({names}); give one name for each set, empty for "
    "a set without such a file, or one for all": (
        lambda c: (
            len(c.data.alignments) not in (0, 1, sets := len(c.data.dataset.split(",")))
            and {"count": len(c.data.alignments), "sets": sets, "names": c.data.dataset}
        )
    ),
    "{data.clean.language} needs a model: set data.clean.language_model to a file such as lid.176.bin": (
        lambda c: c.data.clean.language != "off" and not c.data.clean.language_model
    ),
    "{data.batch_tokens} is too small for {data.row_multiple} rows of the maximum length {longest}; raise it "
    "to {least} or lower data.max_source_length and data.max_target_length": _too_few_batch_tokens,
    "{data.batch_pairs} has no effect with data.batching=pack; set it to 0": (
        lambda c: c.data.batch_pairs and c.data.batching == "pack"
    ),
    "{model.padding_mask} cannot separate the pairs of a packed row; use data.batching=bucket": (
        lambda c: c.model.padding_mask == "none" and c.data.batching == "pack"
    ),
    "{data.batch_pairs is}; it must be a multiple of {data.row_multiple}": (
        lambda c: c.data.batch_pairs % c.data.row_multiple
    ),
    "{data.context is}, but a language model has no sources to read lines before (data.source_language is "
    "empty); set it to 0": lambda c: c.data.context and not c.data.source_language,
    "{data.context is}, but {data.valid_pairs} and {data.test_pairs} hold out single lines of documents that "
    "are trained on; set both to 0, and give files of whole documents for validation and test": (
        lambda c: c.data.context and (c.data.valid_pairs or c.data.test_pairs)
    ),
    # ---- vocabulary ----
    "{vocab.size} means all words or characters, but {vocab.kind is}; give a size": (
        lambda c: c.vocab.size == 0 and c.vocab.kind not in ("word", "char")
    ),
    "{vocab.source_size} means all words or characters, but {vocab.kind is}; give a size": (
        lambda c: c.vocab.source_size == 0 and c.vocab.kind not in ("word", "char")
    ),
    "{vocab.source_size} has no effect with vocab.joint=True; set it to none": (
        lambda c: c.vocab.joint and c.vocab.source_size is not None
    ),
    "{vocab.kind} is one vocabulary for both languages, without symbols of its own; set vocab.joint=True and "
    "leave out vocab.symbols": (
        lambda c: c.vocab.kind == "pretrained" and (c.vocab.symbols or not c.vocab.joint)
    ),
    "the special ids must be four different numbers from 0 to {most}, but they are {ids}": _wrong_special_ids,
    "{vocab.sampling} needs vocab.kind bpe or unigram, not {vocab.kind}; set vocab.sampling=0": (
        lambda c: c.vocab.sampling and c.vocab.kind not in ("bpe", "unigram")
    ),
    # ---- training ----
    "{train.best_metric is}, but a language model has no translations to score (data.source_language is "
    "empty); set train.best_metric=loss": (
        lambda c: not c.data.source_language and c.train.best_metric != "loss"
    ),
    "data.clean.scores needs pairs, but data.source_language is empty, which means a language model; leave "
    "out data.clean.scores": lambda c: c.data.clean.scores and not c.data.source_language,
    "{optim.optimizer} needs a separate matrix for each layer, but {model.scan_layers is}; set it to False, "
    "or use another optimizer": lambda c: c.model.scan_layers is True and c.optim.optimizer == "muon",
    "{optim.weight_decay} has no effect with {optim.optimizer}; use adamw, lion or muon": (
        lambda c: c.optim.weight_decay and c.optim.optimizer in ("adam", "adafactor")
    ),
    "{optim.lora.rank is}, so other settings of optim.lora have no effect; give a rank, such as 8": (
        lambda c: not c.optim.lora.rank and c.optim.lora != LoraConfig()
    ),
    "{train.average_last} is more than {train.keep_checkpoints}; raise train.keep_checkpoints": (
        lambda c: c.train.average_last > c.train.keep_checkpoints
    ),
    "{train.final_checkpoint is}, but {train.average_last is}; raise it to 2": (
        lambda c: c.train.final_checkpoint == "average" and c.train.average_last < 2
    ),
}
_SEARCH_RULES: Rules = {
    "{search.coverage_penalty is}, but a decoder_only model has no cross-attention to measure coverage by; "
    "set it to 0": lambda c: c.search.coverage_penalty and _decoder_only(c),
    "{search.coverage_penalty is}, but with model.source_end=False no attention covers the end of a source; "
    "set it to 0": lambda c: c.search.coverage_penalty and not c.model.source_end,
    "{search.beam_size} is not divisible by {search.diversity_groups}; the nearest multiple is {nearest}": (
        lambda c: c.search.method == "beam" and _nearest(c.search.beam_size, c.search.diversity_groups)
    ),
    "{search.mbr is}, but {search.method is}, which finds one translation, so that there is none to choose; "
    "use sample or beam, or leave out mbr": lambda c: c.search.mbr and c.search.method == "greedy",
    "{search.mbr is} and {search.rerank is}, but only one score can choose a translation; leave one out": (
        lambda c: c.search.mbr and c.search.rerank
    ),
    "{search.rerank is}, but {search.method is}, which has no list of hypotheses to choose from; use beam "
    "search, or leave it out": lambda c: c.search.rerank and c.search.method != "beam",
    "{search.rerank_weight} has no effect without search.rerank; give a scorer, or leave it out": (
        lambda c: c.search.rerank_weight is not None and not c.search.rerank
    ),
    # Both limits are linear in the source length: a minimum that is within the maximum at one token and does
    # not rise faster is within it at every length.
    "the minimum translation length ({search.min_length_ratio} * source + {search.min_length_offset}) is "
    "above the maximum of some sources ({search.max_length_ratio} * source + {search.max_length_offset}); "
    "lower the minimum or raise the maximum": lambda c: (
        c.search.min_length_ratio > c.search.max_length_ratio
        or (shortest := c.search.min_length_ratio + c.search.min_length_offset) > 1
        and shortest > c.search.max_length_ratio + c.search.max_length_offset
    ),
}


def validate(config: Config) -> None:
    """Check the bounds of fields and the rules between them, and report all problems together."""
    _refuse(config, lambda valid: [*_apply({**_RULES, **_SEARCH_RULES}, valid), *_find_in_lists(valid)])


def check_search(search: SearchConfig, *, model: ModelConfig | None = None, where: str = "search.") -> None:
    network = ModelConfig() if model is None else model
    _refuse(search, lambda valid: _apply(_SEARCH_RULES, Config(model=network, search=valid), where), where)


def _refuse(section: Any, conflicts: Callable[[Any], Iterable[str]], where: str = "") -> None:
    """Refuse the wrong values of a section, and the conflicts between its other fields.

    Conflicts are looked for with defaults in place of wrong values, and those that name one are left out.
    """
    wrong = dict(find_wrong_values(section, where))
    paths, defaults = [name.removeprefix(where) for name in wrong], type(section)()
    valid = replace_fields(section, {path: attrgetter(path)(defaults) for path in paths}, "config")
    named = re.compile("|".join(rf"{re.escape(name)}\b" for name in wrong) or "(?!)")
    if problems := [*wrong.values(), *(line for line in conflicts(valid) if not named.search(line))]:
        raise UserError("\n".join(problems))


def _apply(rules: Rules, config: Config, where: str = "search.") -> Iterator[str]:
    """Yield what the config breaks, with the values; options of a search are named `where` and their name."""
    for text, breaks in rules.items():
        if values := breaks(config):

            def fill(match: re.Match[str], values: Any = values) -> str:
                name, verb = match.groups()
                if "." not in name:
                    return str(values[name])
                value = attrgetter(name)(config)
                shown = ",".join(value) if isinstance(value, tuple) else value
                return f"{re.sub('^search[.]', where, name)}{verb or ''} {shown}"

            yield re.sub(r"\{([\w.]+)( is)?\}", fill, text)


def _find_in_lists(config: Config) -> Iterator[str]:
    """Yield what is wrong of the items of a list, and of names of files and data sets."""
    data, vocab = config.data, config.vocab
    for name in ("cache_dir", "tfds_data_dir"):
        if problem := find_cloud_path(getattr(data, name)):
            yield f"data.{name}: {problem}"
    if all(name.strip() for name in data.dataset.split(",")):  # else the data cannot be read
        yield from find_direction_problems(data)
        yield from find_stage_problems(data)
    yield from _noise_problems(data)
    for symbol in vocab.symbols:
        if not symbol or symbol != "".join(symbol.split()) or vocab.symbols.count(symbol) > 1:
            yield (
                f"vocab.symbols has {symbol!r}; symbols are different from each other, and neither empty nor "
                "with spaces"
            )
        elif _OWN_PIECE.fullmatch(symbol):
            yield f"vocab.symbols has {symbol}, which the vocabulary defines itself; leave it out"
    for flag in config.parallel.xla_flags:
        if not re.fullmatch(r"xla_\w+=\S+", flag):
            yield f"parallel.xla_flags has {flag!r}; give each flag as xla_NAME=VALUE, without dashes"
    for problem in filter(None, map(find_cloud_path, data.alignments)):
        yield f"data.alignments: {problem}"


def _find_noises(data: DataConfig) -> dict[str, NoiseConfig]:
    stages = {f"data.stages: {stage.name}: noise": stage.noise for stage in data.stages if stage.noise}
    return {"data.noise": data.noise, **stages}


def _has_inline_noise(data: DataConfig) -> bool:
    return any(noise.inline for noise in _find_noises(data).values())


def _noise_problems(data: DataConfig) -> Iterator[str]:
    for where, noise in _find_noises(data).items():
        if noise.inline and not any(data.alignments):
            yield f"{where}.inline is {noise.inline}, but data.alignments names no file; make one with align"
        for kind in SOURCE_NOISE:
            if not data.source_language and (rate := getattr(noise, kind)):
                yield (
                    f"{where}.{kind} is {rate}, but a language model has no sources to change "
                    "(data.source_language is empty); set it to 0"
                )


def search_width(options: SearchConfig, n_best: int) -> int:
    """W, the number of hypotheses of a sentence that are searched at a time."""
    samples = options.mbr_samples if options.mbr else n_best
    return {"greedy": 1, "beam": options.beam_size, "sample": samples}[options.method]


def candidate_search(search: SearchConfig) -> SearchConfig:
    """Return the search that finds the candidates of minimum Bayes risk, or the hypotheses to be reranked."""
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
