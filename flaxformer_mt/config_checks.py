"""What goes together in a config: facts that span fields, and bounds of single ones.

Owns the check that every command makes before it works. Knows nothing of data on disk or of devices.
"""

from collections.abc import Iterator

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.errors import UserError


def validate(config: Config) -> None:
    """Checks the facts that span fields or bound them, and reports every problem at once.

    Raises:
      UserError: one line for each problem, with both values and the remedy.
    """
    problems = [
        *_model_problems(config.model),
        *_data_problems(config),
        *_architecture_problems(config),
        *_training_problems(config),
    ]
    if problems:
        raise UserError("\n".join(problems))


def _model_problems(model: ModelConfig) -> Iterator[str]:
    for name in (
        "num_encoder_layers",
        "num_decoder_layers",
        "model_dim",
        "num_heads",
        "ffn_dim",
    ):
        if getattr(model, name) < 1 and not (name == "num_encoder_layers" and _decoder_only(model)):
            yield f"model.{name} is {getattr(model, name)}; it must be at least 1"
    if (
        model.num_heads >= 1
        and model.model_dim % model.num_heads
        and None in (model.key_dim, model.value_dim)
    ):
        near = max(1, round(model.model_dim / model.num_heads)) * model.num_heads
        yield (
            f"model.model_dim {model.model_dim} is not divisible by model.num_heads {model.num_heads}; "
            f"the nearest that is: {near} (or set model.key_dim and model.value_dim)"
        )
    key_dim = model.key_dim or model.model_dim // max(model.num_heads, 1)
    if model.positions == "rotary" and key_dim % 2:
        yield f"model.positions rotary needs heads of an even key size, not {key_dim}; set model.key_dim"
    if model.max_positions is not None and model.max_positions < 1:
        yield f"model.max_positions is {model.max_positions}; it must be at least 1, or none"
    if model.max_positions is not None and model.longest_input is None and model.positions == "rotary":
        yield f"model.max_positions {model.max_positions} has no effect with rotary positions; set it to none"
    if model.first_position < 0:
        yield f"model.first_position is {model.first_position}; it must be at least 0"
    if model.norm_epsilon < 0:
        yield f"model.norm_epsilon is {model.norm_epsilon}; it must be at least 0"
    for name in ("dropout_rate", "embedding_dropout_rate", "attention_dropout_rate", "ffn_dropout_rate"):
        rate = getattr(model, name)
        if rate is not None and not 0 <= rate < 1:
            yield f"model.{name} is {rate}; it must be at least 0 and below 1"


def _decoder_only(model: ModelConfig) -> bool:
    return model.architecture == "decoder_only"


def _data_problems(config: Config) -> Iterator[str]:
    data, vocab = config.data, config.vocab
    has_source = bool(data.source_language)
    datasets = data.dataset.split(",")
    if data.weights and len(data.weights) != len(datasets):
        yield (
            f"data.weights has {len(data.weights)} numbers for {len(datasets)} data sets ({data.dataset}); "
            "give one for each"
        )
    if any(weight <= 0 for weight in data.weights):
        yield f"data.weights {data.weights} must all be above 0; leave a set out of data.dataset instead"
    longest = max(data.max_source_length if has_source else 0, data.max_target_length)
    if min(data.max_source_length, data.max_target_length) < 2:
        yield "data.max_source_length and data.max_target_length must be at least 2: a token and its end"
    if data.batch_tokens < longest * data.row_multiple:
        yield (
            f"data.batch_tokens {data.batch_tokens} does not hold data.row_multiple {data.row_multiple} rows "
            f"of the longest {longest} tokens; raise it to {longest * data.row_multiple} or lower "
            "data.max_*_length"
        )
    if data.batch_pairs and data.batching == "pack":
        yield f"data.batch_pairs {data.batch_pairs} has no effect with data.batching=pack; set it to 0"
    if config.model.padding_mask == "none" and data.batching == "pack":
        yield "model.padding_mask none attends to everything in a row; use data.batching=bucket with it"
    if data.batch_pairs < 0 or data.batch_pairs % data.row_multiple:
        yield (
            f"data.batch_pairs is {data.batch_pairs}; it must be a multiple of data.row_multiple "
            f"{data.row_multiple}"
        )
    ids = {name: getattr(vocab, name) for name in ("pad_id", "bos_id", "eos_id", "unk_id")}
    if len(set(ids.values())) < 4 or not all(0 <= i < vocab.size for i in ids.values()):
        yield f"the special ids must be four different numbers from 0 to {vocab.size - 1}, got {ids}"
    if vocab.sampling and vocab.kind not in ("bpe", "unigram"):
        yield f"vocab.sampling needs vocab.kind bpe or unigram, not {vocab.kind}; set vocab.sampling=0"
    if not 0 <= vocab.sampling <= 1:
        yield f"vocab.sampling is {vocab.sampling}; it must be from 0 to 1"


def _architecture_problems(config: Config) -> Iterator[str]:
    data, vocab, model = config.data, config.vocab, config.model
    longest = max(data.max_source_length, data.max_target_length)
    decoder_only = _decoder_only(model)
    if decoder_only and data.source_language:
        longest = data.max_source_length + data.max_target_length
    elif not data.source_language:
        longest = data.max_target_length
    if model.longest_input is not None and longest > model.longest_input:
        what = "source and target of the longest pair" if decoder_only else "the longest sentence"
        yield (
            f"model.max_positions {model.longest_input} is below {what}, {longest} tokens; raise it or lower "
            "data.max_*_length"
        )
    if not data.source_language and not decoder_only:
        yield (
            "data.source_language is empty, which asks for a language model, but model.architecture is "
            f"{model.architecture}; set it to decoder_only or name the language"
        )
    if not data.source_language and config.train.best_metric != "loss":
        yield (
            f"train.best_metric is {config.train.best_metric}, but a language model has no translations to "
            "score (data.source_language is empty); set it to loss"
        )
    if decoder_only and model.tying == "embeddings":
        yield "model.tying embeddings has no meaning for decoder_only, which has one; use none or all"
    if decoder_only and data.source_language and not vocab.joint:
        yield "decoder_only reads source and target as one text, but vocab.joint is False; set it to True"
    if model.tying in ("all", "embeddings") and not vocab.joint and not decoder_only:
        yield (
            f"model.tying {model.tying} shares one embedding, but vocab.joint is False; use "
            f"model.tying={'target_output' if model.tying == 'all' else 'none'}"
        )


def _training_problems(config: Config) -> Iterator[str]:
    optim, train, search = config.optim, config.train, config.search
    at_least = [
        ("optim.warmup_steps", optim.warmup_steps, 0),
        ("optim.accumulation", optim.accumulation, 1),
        ("optim.clip_norm", optim.clip_norm, 0),
        ("train.steps", train.steps, 1),
        ("train.log_every", train.log_every, 1),
        ("train.evaluate_every", train.evaluate_every, 1),
        ("train.checkpoint_every", train.checkpoint_every, 1),
        ("train.keep_checkpoints", train.keep_checkpoints, 1),
        ("train.patience", train.patience, 0),
        ("search.beam_size", search.beam_size, 1),
        ("search.length_penalty", search.length_penalty, 0),
        ("data.num_shapes", config.data.num_shapes, 1),
        ("data.length_multiple", config.data.length_multiple, 1),
        ("data.row_multiple", config.data.row_multiple, 1),
        ("parallel.data", config.parallel.data, 0),
    ]
    for name, value, bound in at_least:
        if value < bound:
            yield f"{name} is {value}; it must be at least {bound}"
    if optim.learning_rate <= 0:
        yield f"optim.learning_rate is {optim.learning_rate}; it must be above 0"
    for name, share in [
        ("optim.ema_decay", optim.ema_decay),
        ("train.label_smoothing", train.label_smoothing),
    ]:
        if not 0 <= share < 1:
            yield f"{name} is {share}; it must be at least 0 and below 1"
    if optim.weight_decay and optim.optimizer in ("adam", "adafactor"):
        yield (
            f"optim.weight_decay {optim.weight_decay} has no effect with optim.optimizer {optim.optimizer}; "
            "use adamw, lion or muon"
        )
    if optim.schedule in ("cosine", "linear") and optim.warmup_steps >= train.steps:
        yield f"optim.warmup_steps {optim.warmup_steps} leaves nothing of train.steps {train.steps}; lower it"
    if train.average_last > train.keep_checkpoints:
        yield (
            f"train.average_last {train.average_last} is more than train.keep_checkpoints "
            f"{train.keep_checkpoints} keeps; raise keep_checkpoints"
        )
    if train.final_checkpoint == "average" and train.average_last < 2:
        yield f"train.final_checkpoint is average, but average_last is {train.average_last}; raise it to 2"
