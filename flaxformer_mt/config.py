"""The experiment as a tree of frozen dataclasses: the only home of defaults.

Owns field names, their types and their defaults, the facts that span fields (`validate`), and the way to and
from JSON. Knows nothing of JAX, files of data, or how a field is used. A field's comment is its `--help` text.
"""

import dataclasses
import difflib
import importlib.util
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flaxformer_mt.errors import UserError


@dataclass(frozen=True)
class CleanConfig:
    """What happens to training pairs that look wrong; `refuse` ends the command, `drop` leaves them out.

    Validation and test pairs are never dropped, only reported: a score is always over the whole set.
    """

    # Files of different line counts: refuse, or drop the surplus lines of the longer file.
    unequal_lines: Literal["refuse", "drop"] = "refuse"
    # Lines that are not UTF-8: refuse with file and line, or drop the pair.
    invalid_utf8: Literal["refuse", "drop"] = "refuse"
    # Pairs with an empty side (nothing but white space).
    empty: Literal["refuse", "drop", "keep"] = "drop"
    # Pairs with a side of more than max_characters characters.
    too_long: Literal["refuse", "drop", "keep"] = "drop"
    # What too_long means.
    max_characters: int = 2000
    # Pairs whose longer side has more than max_length_ratio times the characters of the shorter one.
    length_ratio: Literal["refuse", "drop", "keep"] = "drop"
    # What length_ratio means.
    max_length_ratio: float = 9.0
    # Pairs that were already seen word for word.
    duplicates: Literal["refuse", "drop", "keep"] = "keep"


@dataclass(frozen=True)
class DataConfig:
    """Where the pairs come from and how they become batches."""

    # toy_de_en (made here), parallel_text (your files in text_dir; parallel_text@DIR names another folder), or
    # any TFDS translation set by its name, as wmt14_translate/de-en. Several, separated by commas, are mixed.
    dataset: str = "toy_de_en"
    # One number for each set of a mixture: how many times each of its pairs is seen in an epoch. Empty: once.
    weights: tuple[float, ...] = ()
    # Folder of parallel_text: train.de and train.en (also .gz, or one two-column train.tsv), valid.*, test.*.
    text_dir: str = ""
    # Prepared data and token stores. Empty: $FLAXFORMER_MT_CACHE, else ~/.cache/flaxformer_mt.
    cache_dir: str = ""
    # Where TFDS keeps or downloads the sets known by name. Empty: $TFDS_DATA_DIR, else ~/tensorflow_datasets.
    tfds_data_dir: str = ""
    # Languages, as the set or the files name them.
    source_language: str = "de"
    # The language to translate into.
    target_language: str = "en"
    # Names of the splits in the set; parallel_text reads files of these names.
    train_split: str = "train"
    # The split that is scored while training.
    valid_split: str = "valid"
    # The split that is scored at the end.
    test_split: str = "test"
    # What happens to training pairs that look wrong.
    clean: CleanConfig = field(default_factory=CleanConfig)
    # Longest source, in tokens with the end symbol. Longer training pairs are left out, and counted.
    max_source_length: int = 128
    # Longest target, likewise.
    max_target_length: int = 128
    # bucket: pairs of like length share a batch; pack: several pairs share a row, told apart by segment numbers.
    batching: Literal["bucket", "pack"] = "bucket"
    # Most tokens a batch holds on its larger side, padding included.
    batch_tokens: int = 4096
    # bucket: how many different batch shapes there may be; each costs one compilation.
    num_shapes: int = 8
    # Lengths of batches are multiples of this.
    length_multiple: int = 4
    # Rows of batches are multiples of this, so that devices can share them.
    row_multiple: int = 8
    # Threads that make batches ahead of the training step.
    loader_threads: int = 2
    # Batches made ahead.
    prefetch: int = 8


@dataclass(frozen=True)
class VocabConfig:
    """The SentencePiece vocabulary, trained on the train split unless a model file is given."""

    # How text is cut: byte pairs, a unigram model, characters or words.
    kind: Literal["bpe", "unigram", "char", "word"] = "bpe"
    # How many pieces, special symbols included.
    size: int = 8000
    # One vocabulary for both languages, or one each.
    joint: bool = True
    # A SentencePiece model to use as it is (joint: source_model serves both). Empty: train one.
    source_model: str = ""
    # The same for the target language, when vocab.joint is False.
    target_model: str = ""
    # Characters never seen are spelled in bytes instead of becoming unknown.
    byte_fallback: bool = True
    # Share of the characters in the text that get a piece; below 1 for scripts of thousands.
    character_coverage: float = 1.0
    # What SentencePiece does to characters first; _cf also folds case.
    normalization: Literal["identity", "nfkc", "nmt_nfkc", "nmt_nfkc_cf"] = "nmt_nfkc"
    # Most sentences that training of the vocabulary looks at.
    max_sentences: int = 2_000_000
    # Id of padding.
    pad_id: int = 0
    # Id of the start symbol.
    bos_id: int = 1
    # Id of the end symbol.
    eos_id: int = 2
    # Id of what has no piece.
    unk_id: int = 3
    # Subword regularisation while training: dropout of merges (bpe) or the sharpness alpha (unigram). 0: off.
    sampling: float = 0.0


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    # Which network.
    architecture: Literal["encoder_decoder"] = "encoder_decoder"
    # Layers of the encoder.
    num_encoder_layers: int = 6
    # Layers of the decoder.
    num_decoder_layers: int = 6
    # Width of the residual stream.
    model_dim: int = 512
    # Attention heads.
    num_heads: int = 8
    # Size of a head's queries and keys. None: model_dim / num_heads.
    key_dim: int | None = None
    # Size of a head's values. None: model_dim / num_heads.
    value_dim: int | None = None
    # Width of the feed-forward layers.
    ffn_dim: int = 2048
    # Nonlinearity of the feed-forward layers.
    activation: Literal["relu", "gelu", "gelu_tanh", "swiglu"] = "relu"
    # Normalise before each sublayer (pre) or after adding it to the stream (post, the paper).
    norm_position: Literal["pre", "post"] = "pre"
    # Layer normalisation, or root mean square without a mean.
    norm: Literal["layer", "rms"] = "layer"
    # Added to the variance.
    norm_epsilon: float = 1e-5
    # How layers know where a token stands.
    positions: Literal["sinusoidal", "learned", "rotary"] = "sinusoidal"
    # Rows of the learned position table. Sinusoidal and rotary positions have no bound of their own.
    max_positions: int = 512
    # Multiply embeddings by the square root of model_dim.
    embedding_scale: bool = True
    # Share matrices: none, target embedding with the output, or all three.
    tying: Literal["none", "target_output", "all"] = "all"
    # Biases in attention.
    attention_bias: bool = True
    # Biases in the feed-forward layers.
    ffn_bias: bool = True
    # A bias for every word of the vocabulary.
    output_bias: bool = False
    # Dropout on embeddings and on what each sublayer adds to the residual stream.
    dropout_rate: float = 0.1
    # Dropout on attention weights. None: dropout_rate.
    attention_dropout_rate: float | None = None
    # Dropout inside the feed-forward layers. None: dropout_rate.
    ffn_dropout_rate: float | None = None
    # Matrices: the paper's Xavier, its normal twin, LeCun's, or a normal of standard deviation 0.02.
    initializer: Literal["xavier_uniform", "xavier_normal", "lecun_normal", "normal"] = "xavier_uniform"
    # Type of the computation; parameters are always float32, and so are softmax, norms and loss.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Recompute layers in the backward pass to save memory: no, all, or all but matrix products.
    remat: Literal["none", "full", "dots"] = "none"


@dataclass(frozen=True)
class OptimConfig:
    """The update rule and its learning rate."""

    # The update rule.
    optimizer: Literal["adam", "adamw", "adafactor", "lion", "muon"] = "adam"
    # Peak of the schedule; with noam the factor before model_dim^-0.5.
    learning_rate: float = 1e-3
    # noam: the paper's equation 3. inverse_sqrt: the same shape with learning_rate as its peak.
    schedule: Literal["noam", "inverse_sqrt", "cosine", "linear", "constant"] = "inverse_sqrt"
    # Updates over which the learning rate rises from zero.
    warmup_steps: int = 4000
    # Where cosine and linear end, as a share of learning_rate.
    final_fraction: float = 0.0
    # Decay of the mean of gradients, Adam's beta 1.
    b1: float = 0.9
    # Decay of the mean of their squares, Adam's beta 2.
    b2: float = 0.98
    # Added to the root of that mean.
    epsilon: float = 1e-9
    # Decoupled weight decay, of matrices only. 0: none.
    weight_decay: float = 0.0
    # Global-norm clipping. 0: off.
    clip_norm: float = 1.0
    # Batches whose gradients are added up for one update.
    accumulation: int = 1
    # Decay of the moving average of parameters that evaluation and translation use. 0: off.
    ema_decay: float = 0.0


@dataclass(frozen=True)
class TrainConfig:
    """The loop: how long, how often it looks, what it keeps."""

    # Updates.
    steps: int = 100_000
    # Probability that the loss spreads over the whole vocabulary.
    label_smoothing: float = 0.1
    # Tokens whose logits are made at a time for the loss. 0: all at once, best on accelerators; about 256 suits CPUs.
    loss_chunk_tokens: int = 0
    # A line of progress and metrics every so many updates.
    log_every: int = 50
    # Loss and BLEU on the validation set every so many steps.
    evaluate_every: int = 1000
    # A checkpoint every so many updates.
    checkpoint_every: int = 1000
    # Last checkpoints to keep, beside the best.
    keep_checkpoints: int = 5
    # What `best` means, and what early stopping watches.
    best_metric: Literal["bleu", "chrf", "loss"] = "bleu"
    # Evaluations without a better best_metric before training stops. 0: never.
    patience: int = 0
    # Average this many last checkpoints when training ends. 0: none.
    average_last: int = 0
    # What the report and `translate` use: the best, the last or the averaged checkpoint.
    final_checkpoint: Literal["best", "last", "average"] = "best"
    # Updates with a non-finite gradient are skipped; this many in a row end the run.
    max_nonfinite_steps: int = 20
    # Random numbers of dropout: rbg is fast; threefry is the same on every backend and layout.
    prng: Literal["rbg", "threefry"] = "rbg"
    # Write TensorBoard files beside metrics.jsonl.
    tensorboard: bool = True
    # sacreBLEU's tokenizer for BLEU; none: the text is split into tokens already.
    bleu_tokenize: Literal["13a", "intl", "char", "zh", "ja-mecab", "none"] = "13a"
    # Count scores without regard to case.
    lowercase: bool = False


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is laid over devices."""

    # Devices that share each batch. 0: all of them.
    data: int = 0


@dataclass(frozen=True)
class SearchConfig:
    """How a translation is searched."""

    # Beam search, or always the most probable token.
    method: Literal["beam", "greedy"] = "beam"
    # Hypotheses that beam search keeps.
    beam_size: int = 4
    # Exponent alpha of the length penalty ((5 + length) / 6) ** alpha (Wu et al. 2016, equation 14). 0: none.
    length_penalty: float = 1.0
    # The longest translation, in tokens: this times the source's, plus max_length_offset.
    max_length_ratio: float = 1.5
    # See max_length_ratio.
    max_length_offset: int = 20
    # Source and beam tokens that are searched together.
    batch_tokens: int = 8192


@dataclass(frozen=True)
class Config:
    """One experiment."""

    # Of everything random: parameters, dropout, order of the data.
    seed: int = 1
    # Where the pairs come from and how they become batches.
    data: DataConfig = field(default_factory=DataConfig)
    # The SentencePiece vocabularies.
    vocab: VocabConfig = field(default_factory=VocabConfig)
    # The network.
    model: ModelConfig = field(default_factory=ModelConfig)
    # The update rule and its learning rate.
    optim: OptimConfig = field(default_factory=OptimConfig)
    # The loop: how long, how often it looks, what it keeps.
    train: TrainConfig = field(default_factory=TrainConfig)
    # How the work is laid over devices.
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    # How a translation is searched.
    search: SearchConfig = field(default_factory=SearchConfig)


def load_config(path: str | Path) -> Config:
    """Runs a config file (Python with `get_config() -> Config`) and returns what it describes.

    Raises:
      UserError: the file is absent, fails, or has no `get_config` that returns a Config.
    """
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise UserError(f"config file {path} does not exist{hint}")
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"config file {path} is not a Python file; it should define get_config() -> Config")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except UserError:
        raise
    except Exception as error:  # whatever the user's own Python raises is his to read, in one line
        raise UserError(f"config file {path} fails: {type(error).__name__}: {error}") from error
    if not isinstance(config, Config):
        raise UserError(f"get_config() of {path} returns {type(config).__name__}, not flaxformer_mt.config.Config")
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """The config as nested dicts of JSON values."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], *, kind: type = Config, where: str = "config") -> Any:
    """Builds a config (or a section) from nested dicts; a field that is absent takes its default.

    Raises:
      UserError: an unknown field (the near one is named) or a value of the wrong type.
    """
    hints = typing.get_type_hints(kind)
    built = {}
    for name, value in values.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            hint = f"; did you mean {where}.{near[0]}?" if near else f"; known: {', '.join(hints)}"
            raise UserError(f"unknown config field {where}.{name}{hint}")
        built[name] = _read_value(value, hints[name], f"{where}.{name}")
    return kind(**built)


def _read_value(value: Any, hint: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise UserError(f"{where} should be an object, got {value!r}")
        return from_dict(value, kind=typing.cast(type, hint), where=where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in args:
            raise UserError(f"{where} is {value!r}; allowed: {', '.join(map(str, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{where} should be a list, got {value!r}")
        return tuple(_read_value(item, args[0], where) for item in value)
    if origin is types.UnionType:
        if value is None and type(None) in args:
            return None
        return _read_value(value, next(a for a in args if a is not type(None)), where)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise UserError(f"{where} should be {hint.__name__}, got {value!r} ({type(value).__name__})")
    return value


def save_config(config: Config, path: Path) -> None:
    """Writes the config as JSON."""
    path.write_text(json.dumps(to_dict(config), indent=2) + "\n", encoding="utf-8")


def read_config(path: Path) -> Config:
    """Reads a config that `save_config` wrote. Raises UserError if it is absent or damaged."""
    try:
        return from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"{path.parent} is not a run directory: it has no {path.name}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is damaged: {error}") from error


def flatten(config: Config) -> dict[str, Any]:
    """All fields by their dotted names, as {"data.clean.empty": "drop", ...}."""

    def walk(node: dict[str, Any], prefix: str) -> typing.Iterator[tuple[str, Any]]:
        for name, value in node.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield prefix + name, value

    return dict(walk(to_dict(config), ""))


def compare_configs(old: Config, new: Config) -> list[str]:
    """Fields that differ, one line each: `model.model_dim: 256 in the old, 512 in the new`."""
    before, after = flatten(old), flatten(new)
    return [f"{name}: {before[name]!r} -> {after[name]!r}" for name in before if before[name] != after[name]]


def validate(config: Config) -> None:
    """Checks the facts that span fields or bound them, and reports every problem at once.

    Raises:
      UserError: one line for each problem, with both values and the remedy.
    """
    problems = [*_model_problems(config.model), *_data_problems(config), *_training_problems(config)]
    if problems:
        raise UserError("\n".join(problems))


def _model_problems(model: ModelConfig) -> typing.Iterator[str]:
    for name in ("num_encoder_layers", "num_decoder_layers", "model_dim", "num_heads", "ffn_dim", "max_positions"):
        if getattr(model, name) < 1:
            yield f"model.{name} is {getattr(model, name)}; it must be at least 1"
    if model.num_heads >= 1 and model.model_dim % model.num_heads and None in (model.key_dim, model.value_dim):
        near = max(1, round(model.model_dim / model.num_heads)) * model.num_heads
        yield (
            f"model.model_dim {model.model_dim} is not divisible by model.num_heads {model.num_heads}; "
            f"the nearest that is: {near} (or set model.key_dim and model.value_dim)"
        )
    key_dim = model.key_dim or model.model_dim // max(model.num_heads, 1)
    if model.positions == "rotary" and key_dim % 2:
        yield f"model.positions rotary turns pairs of numbers, but a head's key size is {key_dim}; make it even"
    if model.positions == "sinusoidal" and model.model_dim % 2:
        yield f"model.model_dim {model.model_dim} is odd; sinusoidal positions need an even width"
    for name in ("dropout_rate", "attention_dropout_rate", "ffn_dropout_rate"):
        rate = getattr(model, name)
        if rate is not None and not 0 <= rate < 1:
            yield f"model.{name} is {rate}; it must be at least 0 and below 1"


def _data_problems(config: Config) -> typing.Iterator[str]:
    data, vocab, model = config.data, config.vocab, config.model
    datasets = data.dataset.split(",")
    if data.weights and len(data.weights) != len(datasets):
        yield f"data.weights has {len(data.weights)} numbers for {len(datasets)} data sets ({data.dataset}); give one each"
    if any(weight <= 0 for weight in data.weights):
        yield f"data.weights {data.weights} must all be above 0; leave a set out of data.dataset instead"
    longest = max(data.max_source_length, data.max_target_length)
    if min(data.max_source_length, data.max_target_length) < 2:
        yield "data.max_source_length and data.max_target_length must be at least 2: one token and the end symbol"
    if data.batch_tokens < longest * data.row_multiple:
        yield (
            f"data.batch_tokens {data.batch_tokens} does not hold data.row_multiple {data.row_multiple} pairs of the "
            f"longest {longest} tokens; raise it to {longest * data.row_multiple} or lower data.max_*_length"
        )
    if model.positions == "learned" and longest > model.max_positions:
        yield f"model.max_positions {model.max_positions} is below the longest sentence of {longest} tokens; raise it"
    ids = {name: getattr(vocab, name) for name in ("pad_id", "bos_id", "eos_id", "unk_id")}
    if len(set(ids.values())) < 4 or not all(0 <= i < vocab.size for i in ids.values()):
        yield f"the special ids must be four different numbers from 0 to {vocab.size - 1}, got {ids}"
    if model.tying == "all" and not vocab.joint:
        yield "model.tying all shares one embedding between the languages, but vocab.joint is False; use target_output"
    if vocab.sampling and vocab.kind not in ("bpe", "unigram"):
        yield f"vocab.sampling needs vocab.kind bpe or unigram, not {vocab.kind}; set vocab.sampling=0"
    if not 0 <= vocab.sampling <= 1:
        yield f"vocab.sampling is {vocab.sampling}; it must be from 0 to 1"


def _training_problems(config: Config) -> typing.Iterator[str]:
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
    for name, share in [("optim.ema_decay", optim.ema_decay), ("train.label_smoothing", train.label_smoothing)]:
        if not 0 <= share < 1:
            yield f"{name} is {share}; it must be at least 0 and below 1"
    if optim.weight_decay and optim.optimizer in ("adam", "adafactor"):
        yield f"optim.weight_decay {optim.weight_decay} has no effect with optim.optimizer {optim.optimizer}; use adamw"
    if optim.schedule in ("cosine", "linear") and optim.warmup_steps >= train.steps:
        yield f"optim.warmup_steps {optim.warmup_steps} leaves nothing of train.steps {train.steps}; lower it"
    if train.average_last > train.keep_checkpoints:
        yield (
            f"train.average_last {train.average_last} is more than train.keep_checkpoints "
            f"{train.keep_checkpoints} keeps; raise keep_checkpoints"
        )
    if train.final_checkpoint == "average" and train.average_last < 2:
        yield f"train.final_checkpoint is average, but train.average_last is {train.average_last}; set it to 2 or more"
