"""The experiment as a tree of frozen dataclasses: the only home of defaults.

Owns field names, their types and their defaults. Knows nothing of JAX, of files (`config_files`), of what
goes together (`config_checks`), or of how a field is used. A field's comment is its `--help` text.
"""

from dataclasses import dataclass, field
from typing import Literal


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

    # toy_de_en (made here), parallel_text (your files in text_dir; parallel_text@DIR names another folder),
    # or any TFDS translation set by its name, as wmt14_translate/de-en. Several, with commas, are mixed.
    dataset: str = "toy_de_en"
    # One number for each set of a mixture: how many times each of its pairs is seen in an epoch. Empty: once.
    weights: tuple[float, ...] = ()
    # Folder of parallel_text: train.de and train.en (also .gz, or one two-column train.tsv), valid.*, test.*.
    text_dir: str = ""
    # Prepared data and token stores. Empty: $FLAXFORMER_MT_CACHE, else ~/.cache/flaxformer_mt.
    cache_dir: str = ""
    # Where TFDS keeps or downloads the sets known by name. Empty: $TFDS_DATA_DIR, else ~/tensorflow_datasets.
    tfds_data_dir: str = ""
    # Languages, as the set or the files name them. An empty source_language: a language model of the other,
    # with model.architecture=decoder_only.
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
    # bucket: pairs of like length share a batch; pack: several pairs share a row, told apart by segments.
    batching: Literal["bucket", "pack"] = "bucket"
    # Most tokens a batch holds on its larger side, padding included.
    batch_tokens: int = 4096
    # bucket: most pairs a batch holds. 0: as many as batch_tokens hold.
    batch_pairs: int = 0
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

    # An encoder and a decoder; or one causal stack that reads source and target in a row, or a target alone.
    architecture: Literal["encoder_decoder", "decoder_only"] = "encoder_decoder"
    # Layers of the encoder; decoder_only has none.
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
    # Nonlinearity of the feed-forward layers; gelu is the exact one.
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu"] = "relu"
    # The feed-forward maps as dense layers or as convolutions of width one: the same function.
    ffn_layer: Literal["dense", "convolution"] = "dense"
    # Normalise before each sublayer (pre) or after adding it to the stream (post, the paper).
    norm_position: Literal["pre", "post"] = "pre"
    # Layer normalisation, or root mean square without a mean.
    norm: Literal["layer", "rms"] = "layer"
    # Added to the variance.
    norm_epsilon: float = 1e-5
    # Whether norms have a learned scale and shift.
    norm_affine: bool = True
    # A norm after the last layer of each stack. None: with norm_position pre.
    final_norm: bool | None = None
    # A norm of embeddings and positions before the first layer.
    embedding_norm: bool = False
    # How layers know where a token stands. one_vector adds the same to every position: the position-weighted
    # sum of a learned table (document 002 read literally).
    positions: Literal["sinusoidal", "learned", "rotary", "one_vector"] = "sinusoidal"
    # Of the first token.
    first_position: int = 0
    # The longest input, in tokens. None: 5000 for sinusoidal positions, 512 for learned ones, which have a
    # row for each; rotary and one_vector have no bound.
    max_positions: int | None = None
    # Multiply embeddings by the square root of model_dim.
    embedding_scale: bool = True
    # Divide logits by the square root of model_dim.
    logit_scale: bool = False
    # Biases added to embeddings and learned positions.
    embedding_bias: bool = False
    # Share matrices: none, both embeddings, target embedding with the output, or all three.
    tying: Literal["none", "embeddings", "target_output", "all"] = "all"
    # Padding that attention leaves out: of the source, of source and target, or none, as some systems do.
    # Targets end in their padding, which no real token sees, so both differs from source in padding alone.
    padding_mask: Literal["source", "both", "none"] = "source"
    # Biases in attention.
    attention_bias: bool = True
    # Biases in the feed-forward layers.
    ffn_bias: bool = True
    # A bias for every word of the vocabulary.
    output_bias: bool = False
    # Dropout on embeddings and on what each sublayer adds to the residual stream.
    dropout_rate: float = 0.1
    # Dropout on embeddings. None: dropout_rate.
    embedding_dropout_rate: float | None = None
    # Dropout on attention weights. None: dropout_rate.
    attention_dropout_rate: float | None = None
    # Dropout inside the feed-forward layers. None: dropout_rate.
    ffn_dropout_rate: float | None = None
    # Matrices: the paper's Xavier, its normal twin, LeCun's, or a normal of standard deviation 0.02, with
    # embeddings of variance 1 / model_dim and biases of 0. Or all as in another system: torch (PyTorch's
    # layers), kokoyi (document 001), aiayn (document 003).
    initializer: Literal[
        "xavier_uniform", "xavier_normal", "lecun_normal", "normal", "torch", "kokoyi", "aiayn"
    ] = "xavier_uniform"
    # What computes attention over whole sequences: plain products and a softmax, xla's function, or cudnn's
    # flash kernel, which needs bfloat16 and a GPU. auto: cudnn where it can, else plain. Where weights are
    # dropped or plotted it is plain in any case.
    attention: Literal["auto", "plain", "xla", "cudnn"] = "auto"
    # Type of the computation; parameters are always float32, and so are softmax, norms and loss.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Recompute layers in the backward pass to save memory: no, all, or all but matrix products.
    remat: Literal["none", "full", "dots"] = "none"
    # Run the layers of a stack as a loop over one: compiling takes as long as for a single layer. For deep
    # models; where a step is short, a loop is a little slower.
    scan_layers: bool = False

    @property
    def longest_input(self) -> int | None:
        """The most tokens that positions are there for; None: no bound."""
        if self.positions in ("rotary", "one_vector"):
            return None
        return self.max_positions or {"sinusoidal": 5000, "learned": 512}[self.positions]


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
    # Tokens whose logits are made at a time for the loss. 0: all at once, best on accelerators; about 256
    # suits CPUs.
    loss_chunk_tokens: int = 0
    # Measure the share of tokens that are predicted rightly while training too, not only when evaluating.
    log_accuracy: bool = False
    # A line of progress and metrics every so many updates; and one at the end of each epoch.
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
    # Floating-point operations a second of which one device is capable, as 989e12: what utilization is a
    # share of. 0: from the table of known devices; none for others, as CPUs.
    peak_flops: float = 0.0
    # sacreBLEU's tokenizer for BLEU; none: the text is split into tokens already.
    bleu_tokenize: Literal["13a", "intl", "char", "zh", "ja-mecab", "none"] = "13a"
    # Count scores without regard to case.
    lowercase: bool = False


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is laid over devices."""

    # pmap: whole parameters on every device. mesh: jit over axes, which may split parameters too. auto: pmap
    # where several devices share batches alone, else mesh.
    backend: Literal["auto", "pmap", "mesh"] = "auto"
    # Devices to use, the first so many. 0: all of them. The axes below multiply to it.
    devices: int = 0
    # Parts of each batch that have whole parameters. 0: as many as fsdp and tensor leave devices.
    data: int = 0
    # Parts of each batch that share parameters, optimizer state and moving average.
    fsdp: int = 1
    # Devices that share heads, feed-forward width and vocabulary of every layer.
    tensor: int = 1


@dataclass(frozen=True)
class SearchConfig:
    """How a translation is searched."""

    # Beam search, always the most probable token, or tokens drawn at random.
    method: Literal["beam", "greedy", "sample"] = "beam"
    # beam: hypotheses that are kept.
    beam_size: int = 4
    # Exponent alpha of the length penalty, by which log-probabilities are divided. 0: none.
    length_penalty: float = 1.0
    # gnmt: ((5 + length) / 6) ** alpha (Wu et al. 2016, equation 14); length: length ** alpha.
    length_penalty_kind: Literal["gnmt", "length"] = "gnmt"
    # beam: weight beta of the coverage penalty (Wu et al. 2016, equation 14). 0: none.
    coverage_penalty: float = 0.0
    # Decoder layer whose mean cross-attention is coverage, counted from 0; -1: the last.
    coverage_layer: int = -1
    # beam: exact goes on while a better hypothesis is possible; inexact ends after patience * beam_size ends.
    stopping: Literal["exact", "inexact"] = "exact"
    # See stopping.
    patience: float = 1.0
    # beam: groups that are kept apart (Vijayakumar et al. 2016); they share beam_size. 1: plain search.
    diversity_groups: int = 1
    # Log-probability taken off a token for each beam of an earlier group that chose it in the same place.
    diversity_strength: float = 0.5
    # sample: above 1 flattens the distribution, below 1 sharpens it.
    temperature: float = 1.0
    # sample: only the so many likeliest tokens. 0: all.
    top_k: int = 0
    # sample: only the fewest likeliest tokens whose probabilities add up to this. 1: all.
    top_p: float = 1.0
    # sample: only tokens of at least this times the probability of the likeliest. 0: all.
    min_p: float = 0.0
    # sample: another seed gives another sample; the same seed and line give the same one.
    seed: int = 1
    # No sequence of so many tokens occurs twice in a translation. 0: any may.
    no_repeat_ngram: int = 0
    # Pieces, or ids, of the target vocabulary that never occur in a translation.
    suppress: tuple[str, ...] = ()
    # Whether translations may contain the symbol for what has no piece.
    allow_unknown: bool = True
    # The shortest translation, in tokens: this times the source's, plus min_length_offset.
    min_length_ratio: float = 0.0
    # See min_length_ratio.
    min_length_offset: int = 0
    # The longest translation, in tokens: this times the source's, plus max_length_offset.
    max_length_ratio: float = 1.5
    # See max_length_ratio.
    max_length_offset: int = 20
    # Several models at once: the mean of their log-probabilities or of their probabilities.
    ensemble_mean: Literal["log_probs", "probs"] = "log_probs"
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
