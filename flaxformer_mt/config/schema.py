"""Config of an experiment: frozen dataclasses with every field, its type and its default. Imports no JAX.

A field's comment is its `--help` text. Its annotation gives its bounds and whether a resumed run may change
it (config/field_values.py). Rules between fields are in config/checks.py.
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from flaxformer_mt.config.field_values import (
    USUAL,
    MayChange,
    above,
    at_least,
    between,
    replace_fields,
    share,
)
from flaxformer_mt.config.removed import refuse_removed
from flaxformer_mt.config.tag_styles import TagStyle

# What a user is told about changed settings that only affect rounding.
_ROUNDING = "further steps are the same up to rounding"
# Kinds of noise that need sources.
SOURCE_NOISE = ("lower_case", "typos", "inline")


@dataclass(frozen=True)
class NoiseConfig:
    """Noise in training text, drawn again in each epoch. Each field is a share, from 0 to 1."""

    # Share of pairs whose source and target are converted to upper case.
    upper_case: Annotated[float, between(0, 1)] = 0.0
    # Share of pairs in which every word begins with a capital letter.
    title_case: Annotated[float, between(0, 1)] = 0.0
    # Share of sources that are converted to lower case; targets do not change.
    lower_case: Annotated[float, between(0, 1)] = 0.0
    # Share of pairs whose final punctuation marks are removed, provided that both sides end in the same kind
    # of mark.
    end_punctuation: Annotated[float, between(0, 1)] = 0.0
    # Share of sources that may get typos: each of nine kinds is added at most once, with probability 0.1.
    typos: Annotated[float, between(0, 1)] = 0.0
    # Share of pairs that are replaced by words of random letters, the same in source and target. This text
    # teaches the model to copy.
    random_text: Annotated[float, between(0, 1)] = 0.0
    # Share of source words after which random words are inserted. The same random words are inserted after
    # the aligned target word, so that the model learns to copy. Source words count only if data.alignments
    # aligns them with a single target word that is spelled differently.
    inline: Annotated[float, between(0, 1)] = 0.0

    @property
    def active(self) -> bool:
        return any(dataclasses.astuple(self))

    @property
    def moves(self) -> bool:
        """Whether the noise may move words to other positions."""
        return bool(self.random_text or self.inline)


@dataclass(frozen=True)
class CleanConfig:
    """Rules for suspicious training pairs.

    `refuse` ends the command with an error, `drop` leaves the pairs out, `keep` only reports them. Validation
    and test pairs are never dropped, so that a score always covers the whole set.
    """

    # Text files with different numbers of lines: refuse (error), or drop the longer file's surplus lines.
    unequal_lines: Literal["refuse", "drop"] = "refuse"
    # Training pairs that are not valid UTF-8: refuse (error with file and line), or drop the pair.
    invalid_utf8: Literal["refuse", "drop"] = "refuse"
    # Training pairs whose source or target is empty or has only invisible characters (white space, byte order
    # marks, direction marks): refuse (error), drop, or keep and report.
    empty: Literal["refuse", "drop", "keep"] = "drop"
    # Training pairs whose source or target has more than max_characters: refuse (error), drop, or keep and
    # report.
    too_long: Literal["refuse", "drop", "keep"] = "drop"
    # Maximum length of a sentence in characters, for clean.too_long.
    max_characters: Annotated[int, at_least(1)] = 2000
    # Training pairs whose lengths in characters differ by more than a factor of max_length_ratio: refuse,
    # drop or keep.
    length_ratio: Literal["refuse", "drop", "keep"] = "drop"
    # Maximum ratio of the longer side to the shorter side in characters, for clean.length_ratio.
    max_length_ratio: Annotated[float, at_least(1)] = 9.0
    # Training pairs identical to an earlier pair: refuse (error), drop the repetitions, or keep and report.
    duplicates: Literal["refuse", "drop", "keep"] = "keep"
    # Training pairs whose source and target contain different digits (order and zeros ignored): off, refuse,
    # drop or keep.
    numbers: Literal["off", "refuse", "drop", "keep"] = "off"
    # Training pairs in which less than half of the source's letters are in source_script, or less than half
    # of the target's letters in target_script: off, refuse, drop or keep. Text without letters passes.
    script: Literal["off", "refuse", "drop", "keep"] = "off"
    # Script that clean.script requires in sources: the first word of the Unicode names of its letters, such
    # as LATIN or CYRILLIC. A plus sign joins several scripts, as in CJK+HIRAGANA+KATAKANA. Empty: any.
    source_script: str = ""
    # Script that clean.script requires in targets, named as in source_script. Empty: any.
    target_script: str = ""
    # Training pairs whose source or target is in another language with a probability of at least 0.5,
    # according to language_model: off, refuse, drop or keep.
    language: Literal["off", "refuse", "drop", "keep"] = "off"
    # fastText model that identifies languages, such as lid.176.bin (needs flaxformer_mt[languages]), for
    # clean.language and the check for swapped sides. Empty: none.
    language_model: str = ""
    # Conditions that training pairs must meet, separated by commas and checked after all other rules:
    # NAME>=SCORE (at least this score) or NAME best 80% (among the best 80% of the pairs). NAME is a scorer
    # that --scorer defines and that needs no references. Empty: none.
    scores: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """Return the values that affect results, without the values of rules that are off."""
        values = dataclasses.asdict(self)
        # Constants of earlier versions, by which data that those versions prepared is still recognized.
        values |= {"min_script_share": 0.5, "min_language_probability": 0.5}
        added = ("numbers", "script", "language")
        off = [name for name in added if values[name] == "off"]
        if "script" in off:
            off += ["source_script", "target_script", "min_script_share"]
        if "language" in off:
            off += ["language_model", "min_language_probability"]
        off += [] if self.scores else ["scores"]
        return {name: value for name, value in values.items() if name not in off}


# Data types in which a model can run, and other types of the matrices that translation multiplies.
Dtype = Literal["float32", "bfloat16"]
Quantization = Literal["int8"]
Normalization = Literal["identity", "nfkc", "nmt_nfkc", "nmt_nfkc_cf"]


@dataclass(frozen=True)
class StageConfig:
    """One stage of training, as in StageConfig("mid", mix=("clean 0.6", "medium 0.4"), until="medium 2")."""

    # Name of the stage in messages.
    name: str = ""
    # Data sets with their shares of the pairs, each as "NAME SHARE"; only the ratios of shares count. NAME is
    # the name in data.dataset, or the last part of that name or of the set's folder.
    mix: tuple[str, ...] = ()
    # When the stage ends. "NAME N": after N passes through the set NAME in this stage. "steps N": after N
    # steps. Empty or "NAME inf": at train.steps; only for the last stage.
    until: str = ""
    # Noise in this stage. None: data.noise.
    noise: NoiseConfig | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class DataConfig:
    """Data set, cleaning, sequence lengths and batches."""

    # Data set: toy_de_en or toy_documents (generated by this package), parallel_text (files in text_dir),
    # parallel_text@DIR (files in DIR), a TFDS set such as wmt14_translate/de-en, or hf:OWNER/NAME[/CONFIG] of
    # the Hugging Face Hub. Several sets, separated by commas, are mixed; each may name its direction, as in
    # parallel_text@DIR:de-fr, for a multilingual model.
    dataset: Annotated[str, USUAL] = "toy_de_en"
    # Passes per epoch through each set in data.dataset, as in 1,2.5 for two sets. Empty: computed
    # from temperature.
    weights: Annotated[tuple[float, ...], above(0, at_most=1_000_000)] = ()
    # Without weights, the share of a set in an epoch is proportional to size ** (1 / temperature), and the
    # largest set is seen once. 1: all sets are seen once; 5 is usual for many languages.
    temperature: Annotated[float, between(1, 1000)] = 1.0
    # Stages of training, each with its own mix of the sets in dataset. In a config file, a tuple of
    # StageConfig; as a flag, a YAML file in OpusTrainer's format. Empty: one mixture throughout.
    stages: tuple[StageConfig, ...] = ()
    # Noise in training text: case, typos, final marks and random words.
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    # Whether to write the tags of tag_style (opus: the target language before sources, such as >>fr<<). auto:
    # only for several target languages or other styles.
    target_tags: Literal["auto", "always", "never"] = "auto"
    # Whether sources begin with a tag of the source language, such as <from:de>, after the tag of the target
    # language.
    source_tags: bool = False
    # Format of language tags, named after the pretrained models that need it; import sets this field. opus
    # (>>fr<<), madlad (<2fr>) and t5 (translate English to French:) put a tag before sources. m2m_100
    # (__fr__), nllb (fra_Latn) and mbart_50 (fr_XX) put the tag of the source language before sources and the
    # tag of the target language before targets.
    tag_style: TagStyle = "opus"
    # Folder of the parallel_text files: SPLIT.LANGUAGE with one sentence per line, such as train.de and
    # train.en, or SPLIT.tsv with source and target columns, SPLIT.jsonl or SPLIT.parquet. Files may be
    # compressed (.gz, .zst), and the folder may be a URL (gs://, s3://).
    text_dir: Annotated[str, USUAL] = ""
    # File with the word alignments of the training pairs, for guided alignment: one line such as `0-0 1-2`
    # per pair. A name without a folder, such as train.align, is looked up in text_dir. If dataset has several
    # sets, give one file for each, separated by commas. Empty: none.
    alignments: tuple[str, ...] = ()
    # Maximum number of preceding lines of the same document that the model reads before each source, as far
    # as they fit into max_source_length. The subword <sep> follows each of these lines. Documents end at
    # blank lines, at the ends of files, and where the id in the file SPLIT.documents (such as
    # train.documents) changes. 0: none.
    context: Annotated[int, between(0, 100)] = 0
    # Folder of prepared data. Empty: $FLAXFORMER_MT_CACHE or ~/.cache/flaxformer_mt.
    cache_dir: Annotated[str, MayChange()] = ""
    # Source language, unless dataset gives a direction; spelled as in the data set or the file extension.
    # Empty: no source, to train a language model of target_language (needs model.architecture=decoder_only).
    source_language: Annotated[str, USUAL] = "de"
    # Target language, unless dataset gives a direction; spelled as in the data set or the file extension.
    target_language: Annotated[str, USUAL] = "en"
    # Name of the training split; for TFDS sets also a slice, such as train[:10%].
    train_split: str = "train"
    # Name of the validation split, evaluated during training; valid and validation mean the same split.
    valid_split: str = "valid"
    # Name of the test split, evaluated when training ends.
    test_split: str = "test"
    # Number of validation pairs to hold out from the training set of each direction, for data sets without a
    # validation split. 0: none.
    valid_pairs: Annotated[int, at_least(0)] = 0
    # Number of test pairs to hold out from the training set of each direction, for data sets without a test
    # split. 0: none.
    test_pairs: Annotated[int, at_least(0)] = 0
    # Rules for suspicious training pairs: refuse (error), drop (leave out) or keep (report only).
    clean: CleanConfig = field(default_factory=CleanConfig)
    # Maximum source length in tokens, including the end symbol; training skips longer pairs and counts them.
    max_source_length: Annotated[int, between(2, 1 << 20)] = 128
    # Maximum target length in tokens, including the end symbol; training skips longer pairs and counts them.
    max_target_length: Annotated[int, between(2, 1 << 20)] = 128
    # bucket: a batch holds pairs of similar length, one in each row. pack: a row holds several pairs,
    # separated by segment masks, so there is one batch shape and little padding. shuffle: a batch holds pairs
    # of any lengths.
    batching: Literal["bucket", "pack", "shuffle"] = "bucket"
    # Maximum batch size in tokens over all devices: rows * max(source length, target length), with padding.
    batch_tokens: Annotated[int, at_least(1), USUAL] = 4096
    # Without packing, maximum number of pairs in a batch; it must be a multiple of row_multiple. 0: no such
    # limit.
    batch_pairs: Annotated[int, at_least(0)] = 0
    # Without packing, maximum number of batch shapes. More shapes mean less padding and more compilations.
    num_shapes: Annotated[int, at_least(1)] = 8
    # Without packing, source and target lengths of batches are rounded up to a multiple of this number.
    length_multiple: Annotated[int, at_least(1)] = 4
    # The number of rows of a batch is a multiple of this number. Choose a multiple of parallel.data *
    # parallel.fsdp; otherwise, rows of padding are added to each batch.
    row_multiple: Annotated[int, at_least(1)] = 8


@dataclass(frozen=True)
class VocabConfig:
    """SentencePiece vocabularies, trained on the training split unless model files are given."""

    # Type of the SentencePiece model: byte-pair encoding, unigram language model, characters or words.
    # pretrained: the tokenizer of an imported model, set by import.
    kind: Literal["bpe", "unigram", "char", "word", "pretrained"] = "bpe"
    # Number of subwords in each vocabulary, including special symbols and bytes. With kind=word or char, 0
    # stands for all words or characters of the training text.
    size: Annotated[int, at_least(0), USUAL] = 8000
    # With joint=False, number of subwords in the source vocabulary; 0 has the same meaning as in size. None:
    # the value of size.
    source_size: Annotated[int | None, at_least(0)] = None
    # Whether both languages share one vocabulary; otherwise, each language has its own.
    joint: bool = True
    # Existing SentencePiece .model file for the source language (with joint=True, for both languages). Empty:
    # a model trained on the training split.
    source_model: str = ""
    # Existing SentencePiece .model file for the target language. Empty: the file of source_model if
    # joint=True, otherwise a model trained on the training split.
    target_model: str = ""
    # Whether characters outside the vocabulary become UTF-8 bytes (256 subwords) instead of the unknown
    # symbol.
    byte_fallback: bool = True
    # Fraction of the training text's characters that the vocabulary covers: 1, or about 0.9995 for scripts
    # with thousands of characters, such as Chinese.
    character_coverage: Annotated[float, between(0.98, 1)] = 1.0
    # SentencePiece's Unicode normalization of sources. identity changes nothing; the others also remove
    # invisible characters (soft hyphens, zero-width spaces, direction marks), and nmt_nfkc_cf folds case.
    normalization: Normalization = "nmt_nfkc"
    # SentencePiece's Unicode normalization of targets. With identity, the model can produce every character
    # of its training text. With any other normalization, translations lack the replaced characters, which
    # lowers BLEU in many languages.
    target_normalization: Normalization = "identity"
    # Symbols that are always one subword, such as <BT> before back-translated sources; vocab.size includes
    # them. An existing source_model or target_model must contain them, too. Empty: none.
    symbols: tuple[str, ...] = ()
    # Token id of padding; an existing source_model or target_model keeps its own id.
    pad_id: Annotated[int, at_least(0)] = 0
    # Token id of the start symbol (bos); an existing source_model or target_model keeps its own id.
    bos_id: Annotated[int, at_least(0)] = 1
    # Token id of the end symbol (eos); an existing source_model or target_model keeps its own id.
    eos_id: Annotated[int, at_least(0)] = 2
    # Token id of the unknown symbol; an existing source_model or target_model keeps its own id.
    unk_id: Annotated[int, at_least(0)] = 3
    # Subword regularization: segment training text differently in each epoch. For kind=bpe, the rate of
    # BPE-dropout (usually 0.1); for kind=unigram, the smoothing parameter alpha (0.1 to 0.5). 0: off.
    sampling: Annotated[float, between(0, 1)] = 0.0

    @property
    def size_of_source(self) -> int:
        return self.size if self.source_size is None else self.source_size


@dataclass(frozen=True)
class GuidedAlignmentConfig:
    """Guided alignment: one head of cross-attention is trained on the word alignments in data.alignments."""

    # Weight in the loss of the cross-entropy between the head's attention and the alignments; 0.05 to 0.5 is
    # usual. 0: no guided alignment.
    weight: Annotated[float, between(0, 100)] = 0.0
    # Decoder layer whose first head is trained. 0: first layer; -1: last.
    layer: Annotated[int, between(-10_000, 10_000)] = -1
    # Decoder step whose attention aligns a target token. predict: the step that predicts the token. read: the
    # following step, whose input is the token; this is more accurate, and works best in layer 0 or 1.
    step: Literal["predict", "read"] = "predict"


@dataclass(frozen=True)
class ModelConfig:
    """Architecture, initialization and numerics of the network."""

    # encoder_decoder: the Transformer of Vaswani et al. 2017. decoder_only: one causal stack over the source
    # followed by the target, or over the target alone (language model).
    architecture: Literal["encoder_decoder", "decoder_only"] = "encoder_decoder"
    # Number of encoder layers, usually 6; unused with architecture=decoder_only.
    num_encoder_layers: Annotated[int, between(0, 1000), USUAL] = 6
    # Number of decoder layers, usually 6; with architecture=decoder_only, layers of the single stack.
    num_decoder_layers: Annotated[int, between(1, 1000), USUAL] = 6
    # How decoder layers read earlier target tokens: by self-attention (attention), or by a recurrent unit
    # (ssru, the Simpler Simple Recurrent Unit of Kim et al. 2019), whose cost per step does not depend on the
    # length. architecture=decoder_only needs the value attention.
    decoder_self_attention: Literal["attention", "ssru"] = "attention"
    # Width of embeddings and hidden states (d_model in Vaswani et al. 2017).
    model_dim: Annotated[int, between(1, 1 << 16), USUAL] = 512
    # Number of attention heads in each layer.
    num_heads: Annotated[int, between(1, 1 << 16), USUAL] = 8
    # Width of the queries and keys of one attention head. None: model_dim / num_heads.
    key_dim: Annotated[int | None, between(1, 1 << 16)] = None
    # Width of the values of one attention head. None: model_dim / num_heads.
    value_dim: Annotated[int | None, between(1, 1 << 16)] = None
    # Hidden width of the feed-forward layers (d_ff in Vaswani et al. 2017), usually 4 * model_dim.
    ffn_dim: Annotated[int, between(1, 1 << 20), USUAL] = 2048
    # Activation function of the feed-forward layers. gelu is exact (erf), gelu_tanh the tanh approximation.
    # swiglu and geglu_tanh (as in T5 1.1) are silu and gelu_tanh with a gate, which adds a third weight
    # matrix.
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu_tanh"] = "relu"
    # Whether feed-forward layers are dense layers, or convolutions of kernel size 1, which compute the same.
    ffn_layer: Literal["dense", "convolution"] = "dense"
    # pre: normalize the input of each sublayer. post: normalize after the residual sum (Vaswani et al. 2017).
    norm_position: Literal["pre", "post"] = "pre"
    # Type of normalization: layer normalization, or RMS normalization (no mean subtraction).
    norm: Literal["layer", "rms"] = "layer"
    # Constant added to the variance (norm=rms: to the mean square), against division by zero.
    norm_epsilon: Annotated[float, between(0, 1)] = 1e-5
    # Whether normalization has learned parameters: a scale and, for norm=layer, a bias.
    norm_affine: bool = True
    # Whether to normalize the output of the last layer of each stack. None: only with norm_position=pre.
    final_norm: bool | None = None
    # Whether to normalize the sum of embeddings and positions before the first layer of each stack.
    embedding_norm: bool = False
    # Position encoding. sinusoidal, learned: vectors added to embeddings. sinusoidal_halves: like sinusoidal,
    # with all sines before all cosines, as in fairseq (M2M100, NLLB). rotary: queries and keys are rotated.
    # one_vector: the same vector is added at all positions; it is the sum of the rows of a learned table,
    # each multiplied by its index (see configs/decoder_only.py). relative: each head learns a bias of
    # attention scores for each distance, as in T5; encoder_decoder only.
    positions: Literal["sinusoidal", "sinusoidal_halves", "learned", "rotary", "one_vector", "relative"] = (
        "sinusoidal"
    )
    # With positions=relative, number of buckets into which distances are grouped, such as 32; the encoder
    # uses half of the buckets for each direction.
    relative_buckets: Annotated[int, between(4, 65536)] = 32
    # With positions=relative, all distances of this many tokens or more share one bucket.
    relative_distance: Annotated[int, between(2, 1_000_000)] = 128
    # Index of the first position, usually 0.
    first_position: Annotated[int, between(0, 1 << 20)] = 0
    # Maximum input length in tokens; positions=rotary, relative and one_vector have no limit.
    # positions=learned and one_vector have a table of this size. None: 512 for learned and one_vector, else
    # 5000.
    max_positions: Annotated[int | None, between(1, 1 << 20)] = None
    # Whether to multiply embeddings by sqrt(model_dim), as in Vaswani et al. 2017.
    embedding_scale: bool = True
    # Whether to divide attention scores by sqrt(key_dim). True in Vaswani et al. 2017, False in T5.
    attention_scale: bool = True
    # Whether to divide the decoder output by sqrt(model_dim) before it becomes logits.
    logit_scale: bool = False
    # Whether to add a learned bias vector to token embeddings and to learned positions.
    embedding_bias: bool = False
    # Which matrices are shared: none; embeddings (source and target embedding); target_output (target
    # embedding and output matrix); all (all three). The values embeddings and all need vocab.joint=True.
    tying: Literal["none", "embeddings", "target_output", "all"] = "all"
    # Where attention masks padding: in the source, in both source and target, or nowhere. none: padding is
    # read like text; encoder_decoder models do not train its embedding. both: only outputs at padding
    # positions differ from padding_mask=source, because causal attention already hides target padding from
    # real tokens.
    padding_mask: Literal["source", "both", "none"] = "source"
    # Whether the network reads the end symbol of sources. False: attention masks this symbol, for models of
    # OpenNMT-py and eole, whose sources have no end symbol.
    source_end: bool = True
    # First input of the decoder: the embedding of the start symbol (symbol), or a vector of zeros (zeros), as
    # in Marian; export to marian-npz and bergamot needs zeros, architecture=decoder_only needs symbol.
    target_start: Literal["symbol", "zeros"] = "symbol"
    # Whether the query, key, value and output projections of attention have biases.
    attention_bias: bool = True
    # Whether the feed-forward layers have biases.
    ffn_bias: bool = True
    # Whether the logits have a bias for each entry of the target vocabulary.
    output_bias: bool = False
    # Dropout rate of embeddings and of sublayer outputs before the residual sum, usually 0.1, or 0.3 with
    # little data. The embedding, attention and feed-forward dropout rates default to this rate.
    dropout_rate: Annotated[float, share(), USUAL] = 0.1
    # Dropout rate of the sum of embeddings and positions. None: the value of dropout_rate.
    embedding_dropout_rate: Annotated[float | None, share()] = None
    # Dropout rate of attention weights. None: the value of dropout_rate.
    attention_dropout_rate: Annotated[float | None, share()] = None
    # Dropout rate of the hidden units inside the feed-forward layers. None: the value of dropout_rate.
    ffn_dropout_rate: Annotated[float | None, share()] = None
    # Initial weights: Xavier (Glorot), LeCun normal, or normal with standard deviation 0.02; embeddings have
    # variance 1 / model_dim, biases are 0. torch: all parameters as in PyTorch's layers. kokoyi, aiayn: all
    # parameters as in the systems of configs/kokoyi_iwslt.py and configs/aiayn.py.
    initializer: Literal[
        "xavier_uniform", "xavier_normal", "lecun_normal", "normal", "torch", "kokoyi", "aiayn"
    ] = "xavier_uniform"
    # Implementation of attention over whole sequences: plain (matrix products and softmax), cudnn (flash
    # attention, on GPUs in bfloat16) or pallas (rows of up to about 256 tokens, on GPUs and TPUs in bfloat16;
    # plain elsewhere). auto: cudnn or pallas where they apply, else plain. Attention dropout and relative
    # positions need plain, or pallas on GPUs. Plots of attention weights use plain.
    attention: Annotated[Literal["auto", "plain", "cudnn", "pallas"], MayChange(_ROUNDING)] = "auto"
    # Data type of activations and of the operands of matrix products. Attention scores, softmax, norms, loss,
    # parameters, their gradients and the sums in matrix products are always float32.
    dtype: Dtype = "float32"
    # What the backward pass computes again, to save memory (rematerialization): nothing (none), whole layers
    # (full), or all but the results of matrix products (dots).
    remat: Annotated[Literal["none", "full", "dots"], MayChange(_ROUNDING)] = "none"
    # Whether to run the layers of a stack as one scan, so that compile time does not grow with the number of
    # layers. On GPUs, the scan costs a fifth of the throughput, and training takes more memory. auto: only on
    # GPUs and with at least three layers, if the scan saves more compile time than it costs training time.
    # Checkpoints are the same with and without the scan.
    scan_layers: Annotated[Literal["auto", True, False], MayChange()] = "auto"
    # Guided alignment: one head of cross-attention learns the word alignments in data.alignments.
    alignment: GuidedAlignmentConfig = field(default_factory=GuidedAlignmentConfig)

    @property
    def longest_input(self) -> int | None:
        """Maximum input length in tokens that the positions allow; None: unlimited."""
        if self.positions in ("rotary", "one_vector", "relative"):
            return None
        return self.max_positions or (512 if self.positions == "learned" else 5000)


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adaptation (Hu et al. 2022) of a trained model: trains low-rank changes to frozen matrices."""

    # Rank of the change that is trained for each adapted matrix, such as 8 or 32. All other parameters are
    # frozen. Needs a trained model (--init, or an imported run). 0: off.
    rank: Annotated[int, between(0, 1 << 16)] = 0
    # Each change is multiplied by alpha / rank, so that any rank works with the same learning rate.
    alpha: Annotated[float, above(0, at_most=1_000_000)] = 16.0
    # Matrices to adapt, as patterns of their paths. For example, *attention*,decoder/*/kernel adapts the
    # matrices of all attention layers and of the decoder.
    targets: tuple[str, ...] = ("*/kernel",)
    # Parameters that are trained in full, as patterns of their paths, such as *norm,*bias. Empty: none.
    also_train: tuple[str, ...] = ()
    # LoRA rank of embeddings and, if untied, of the output layer. 0: the value of rank.
    embedding_rank: Annotated[int, between(0, 1 << 16)] = 0


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    # Optimizer; muon orthogonalizes the updates of weight matrices and uses Adam for all other parameters.
    optimizer: Literal["adam", "adamw", "adafactor", "lion", "muon"] = "adam"
    # Peak learning rate. With schedule=noam, the factor before model_dim^-0.5 (1 in Vaswani et al. 2017).
    learning_rate: Annotated[float, above(0, at_most=1000), USUAL] = 1e-3
    # After linear warm-up, the learning rate stays (constant), falls to 0 at train.steps (cosine, linear)
    # or falls with 1/sqrt(step) (inverse_sqrt, noam). noam is equation 3 of Vaswani et al. 2017.
    schedule: Literal["noam", "inverse_sqrt", "cosine", "linear", "constant"] = "inverse_sqrt"
    # Number of steps in which the learning rate rises linearly to its peak. 0: none. If schedule is cosine
    # or linear and this number is train.steps or more, the rise takes half of train.steps instead.
    warmup_steps: Annotated[int, at_least(0), USUAL] = 4000
    # Beta 1 of adam (decay rate of the mean of gradients) and lion, and momentum of muon; 0.9 is usual.
    b1: Annotated[float, share()] = 0.9
    # Beta 2 of adam (decay rate of the mean of squared gradients; 0.98 in Vaswani et al. 2017) and lion.
    b2: Annotated[float, share()] = 0.98
    # Adam's epsilon: constant added to the square root of the mean of squared gradients.
    epsilon: Annotated[float, above(0, at_most=1)] = 1e-9
    # Decoupled weight decay of matrices (not of biases and norms), for adamw, lion and muon. 0: none.
    weight_decay: Annotated[float, between(0, 100)] = 0.0
    # Maximum global norm of the gradient; larger gradients are scaled down to it. 0: no clipping.
    clip_norm: Annotated[float, at_least(0)] = 1.0
    # Number of batches whose gradients are added up for one step (gradient accumulation). 1: off.
    accumulation: Annotated[int, at_least(1)] = 1
    # Decay rate of an exponential moving average of the parameters, which evaluation and translation then use
    # instead of the parameters; 0.999 is usual. 0: off.
    ema_decay: Annotated[float, share()] = 0.0
    # Parameters that are not trained, as patterns of their paths. For example, encoder,*_embedding freezes
    # the encoder and all embeddings. LoRA ignores this field; see optim.lora.also_train. Empty: all are
    # trained.
    freeze: tuple[str, ...] = ()
    # Low-rank adaptation (LoRA) of a trained model: trains low-rank changes to frozen matrices.
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True)
class TrainConfig:
    """Training loop: duration, loss, evaluation, checkpoints and logging."""

    # Number of training steps, each of which updates the parameters once.
    steps: Annotated[int, at_least(1), USUAL, MayChange("training ends at another step")] = 100_000
    # Label smoothing: probability mass spread evenly over the vocabulary, usually 0.1. 0: none.
    label_smoothing: Annotated[float, share()] = 0.1
    # To save memory, each device computes logits and loss, in training and evaluation, for this number of
    # tokens at a time. 0: all tokens. 256 to 512 is best on CPUs, 6,000 or more on GPUs and TPUs.
    loss_chunk_tokens: Annotated[int, at_least(0), MayChange(_ROUNDING)] = 0
    # Whether to log the token accuracy of training batches too; evaluations always report it.
    log_accuracy: bool = False
    # Batch shapes to compile in parallel before the first step. none: each shape is compiled when it first
    # occurs. all: the shapes that the remaining steps use. auto: all on GPUs and TPUs, none on CPUs.
    compile_ahead: Annotated[Literal["auto", "all", "none"], MayChange()] = "auto"
    # Number of steps between two lines of progress and metrics; the end of an epoch adds a line.
    log_every: Annotated[int, at_least(1), MayChange()] = 50
    # Number of steps between validations (loss, BLEU). Training also ends with a validation.
    evaluate_every: Annotated[
        int, at_least(1), USUAL, MayChange("other steps are evaluated, of which the best is chosen")
    ] = 1000
    # Number of steps between two checkpoints. Each validation also saves a checkpoint.
    checkpoint_every: Annotated[
        int,
        at_least(1),
        USUAL,
        MayChange("other steps are saved, of which train.average_last takes the mean"),
    ] = 1000
    # Number of newest checkpoints kept on disk, in addition to the best one.
    keep_checkpoints: Annotated[int, at_least(1), MayChange()] = 5
    # Validation metric for the best checkpoint and for early stopping: bleu, chrf, loss, chrf++, ter, or a
    # name that --scorer defines. If several metrics are given, separated by commas, all are logged and the
    # first one decides. If two checkpoints have the same score by a built-in metric (rounded to two
    # decimals), the one with the lower loss is better.
    best_metric: str = "bleu"
    # Training stops after this number of successive validations without an improvement of best_metric. 0:
    # never stop early.
    patience: Annotated[int, at_least(0), MayChange("training may stop at another step")] = 0
    # Number of newest checkpoints (at most keep_checkpoints) averaged when training ends. 0: no average.
    average_last: Annotated[int, at_least(0)] = 0
    # Checkpoint for the test score and, by default, for `translate`; average needs average_last.
    final_checkpoint: Literal["best", "last", "average"] = "best"
    # Whether to write TensorBoard files in addition to metrics.jsonl.
    tensorboard: Annotated[bool, MayChange()] = True
    # Services that also record the training: wandb, mlflow, or both, separated by a comma. They need
    # flaxformer_mt[wandb] and flaxformer_mt[mlflow]; their own environment variables configure them. Empty:
    # none.
    trackers: Annotated[tuple[Literal["wandb", "mlflow"], ...], MayChange()] = ()
    # Peak floating-point operations per second of one device, such as 989e12, to compute utilization (MFU).
    # 0: the value in a built-in table of GPUs and TPUs; for other devices, no utilization is reported.
    peak_flops: Annotated[float, at_least(0), MayChange()] = 0.0
    # sacreBLEU's tokenizer. auto: zh, ja-mecab or ko-mecab for Chinese, Japanese or Korean targets, char for
    # other languages without spaces between words, else 13a. none: the text is tokenized already.
    bleu_tokenize: Annotated[
        Literal["auto", "13a", "intl", "char", "zh", "ja-mecab", "ko-mecab", "none"],
        MayChange("BLEU counts other tokens, and another checkpoint may be the best"),
    ] = "auto"
    # Whether to ignore case in BLEU and chrF.
    lowercase: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        """The validation metrics that best_metric names; the first metric selects the best checkpoint."""
        return tuple(name.strip() for name in self.best_metric.split(","))


@dataclass(frozen=True)
class ParallelConfig:
    """Distribution of training over devices."""

    # pmap: data parallelism, all parameters on every device. mesh: jit over a device mesh, which can also
    # shard parameters. auto: pmap if several devices use data parallelism alone, else mesh.
    backend: Literal["auto", "pmap", "mesh"] = "auto"
    # Data parallelism: number of complete copies of the parameters. 0: devices / (fsdp * tensor).
    data: Annotated[int, at_least(0), USUAL] = 0
    # Fully sharded data parallelism: number of devices over which each batch, the parameters, the optimizer
    # state and the moving average are split. 1: off.
    fsdp: Annotated[int, at_least(1), USUAL] = 1
    # Tensor parallelism: number of devices over which heads, feed-forward width and vocabulary are split. 1:
    # off.
    tensor: Annotated[int, at_least(1)] = 1


@dataclass(frozen=True, kw_only=True)
class MbrConfig:
    """How one of several translations of a sentence is chosen: by minimum Bayes risk, or by a scorer."""

    # ---- minimum Bayes risk ----

    # Choose the translation by minimum Bayes risk (MBR) with this utility: chrf, chrf++, ter, bleu, or a name
    # that --scorer defines. The candidates are the hypotheses of beam search, or mbr_samples samples. MBR
    # chooses the candidate with the best mean utility, where all candidates serve as references (only 16 of
    # them if --scorer defines the utility).
    mbr: str = ""
    # With mbr and method=sample: number of samples per sentence, one of which is chosen.
    mbr_samples: Annotated[int, between(1, 4096)] = 32
    # ---- reranking ----

    # Rank the hypotheses of beam search by the scores of this scorer (a name that --scorer defines) instead
    # of the model's scores. The scorer must not need references.
    rerank: str = ""
    # With rerank: rank hypotheses by the model's score plus this weight times the scorer's score. Without a
    # weight, only the scorer's score counts; evaluate --tune_rerank finds a good weight.
    rerank_weight: Annotated[float | None, above(0, at_most=1_000_000)] = None


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """Minimum, maximum and expected lengths of translations."""

    # ---- content and length of translations ----

    # The minimum translation length in tokens is this number * source length + min_length_offset.
    min_length_ratio: Annotated[float, between(0, 1000)] = 0.0
    # The minimum translation length in tokens is min_length_ratio * source length + this number.
    min_length_offset: Annotated[int, between(0, 1_000_000)] = 0
    # The maximum translation length in tokens is this number * source length + max_length_offset.
    max_length_ratio: Annotated[float, between(0, 1000)] = 1.5
    # The maximum translation length in tokens is max_length_ratio * source length + this number.
    max_length_offset: Annotated[int, between(0, 1_000_000)] = 20
    # stopping=exact stops as if all hypotheses ended within this length; longer translations are still
    # possible. learned: the 99.9th percentile of training target lengths, if the run has recorded
    # it; limit: the maximum translation length.
    length_bound: Literal["learned", "limit"] = "learned"


@dataclass(frozen=True)
class SearchConfig(MbrConfig, LengthConfig):
    """Decoding: search method, scoring and limits of translations."""

    # ---- search ----

    # Search method: beam search, greedy search (the most probable token at each step) or random sampling.
    method: Literal["beam", "greedy", "sample"] = "beam"
    # Beam search: number of hypotheses kept for each sentence, usually 4 or 5.
    beam_size: Annotated[int, between(1, 1000), USUAL] = 4
    # Exponent alpha of the length penalty; log-probabilities are divided by the penalty. Larger values favor
    # longer translations; 0.6 to 1 is usual. 0: no penalty.
    length_penalty: Annotated[float, between(0, 100)] = 1.0
    # Formula of the length penalty. gnmt: ((5 + length) / 6) ** alpha (Wu et al. 2016, equation 14). length:
    # length ** alpha.
    length_penalty_kind: Literal["gnmt", "length"] = "gnmt"
    # ---- beam search ----

    # Beam search: weight beta of the coverage penalty (Wu et al. 2016, equation 14) for source tokens that
    # get little attention in the last decoder layer. 0: no penalty.
    coverage_penalty: Annotated[float, at_least(0)] = 0.0
    # When beam search stops. exact: when no unfinished hypothesis can still enter the result. inexact: also
    # when patience * beam_size hypotheses are finished.
    stopping: Literal["exact", "inexact"] = "exact"
    # Beam search with stopping=inexact: stop after this number * beam_size finished hypotheses; 1 is usual.
    patience: Annotated[float, above(0, at_most=1_000_000)] = 1.0
    # Diverse beam search (Vijayakumar et al. 2016): number of groups, which must divide beam_size. 1: off.
    diversity_groups: Annotated[int, at_least(1)] = 1
    # Diverse beam search: amount subtracted from a token's log-probability for each beam of an earlier group
    # that chose that token at the same step.
    diversity_strength: Annotated[float, at_least(0)] = 0.5
    # ---- sampling ----

    # Sampling: temperature that divides the logits. Values above 1 flatten the distribution, values below 1
    # sharpen it.
    temperature: Annotated[float, above(0)] = 1.0
    # Sampling: keep only the k most probable tokens. 0: all.
    top_k: Annotated[int, at_least(0)] = 0
    # Sampling: keep the smallest set of the most probable tokens whose total probability is at least this
    # number. 1: all.
    top_p: Annotated[float, above(0, at_most=1)] = 1.0
    # Sampling: keep only tokens with at least this fraction of the highest token probability. 0: all.
    min_p: Annotated[float, between(0, 1)] = 0.0
    # Sampling: random seed. The sample for a line depends on this seed and on the text and number of the
    # line, but not on other lines.
    seed: Annotated[int, between(0, 2**32 - 1)] = 1
    # ---- content and length of translations ----

    # No sequence of this number of tokens may occur twice in a translation. 0: repetition is allowed.
    no_repeat_ngram: Annotated[int, at_least(0)] = 0
    # Subwords of the target vocabulary, or their token ids, that translations must not contain, such as
    # <unk>, the unknown symbol. Commas separate the values of the flag; to suppress the comma itself, give
    # its token id.
    suppress: tuple[str, ...] = ()
    # ---- memory ----

    # Maximum number of tokens that each device searches at a time, counting sources, all beams and padding.
    # If a device runs out of memory, this number is halved automatically. If the config has no number, the
    # number depends on the device's memory; on CPUs, it is 8192.
    batch_tokens: Annotated[int | None, at_least(1)] = None


@dataclass(frozen=True)
class Config:
    """One experiment: data, vocabulary, model, training and search."""

    # Random seed of parameter initialization, dropout and the order of the data; the seed of sampling is
    # search.seed.
    seed: Annotated[int, between(0, 2**32 - 1)] = 1
    # Data set, cleaning, sequence lengths and batches.
    data: DataConfig = field(default_factory=DataConfig)
    # SentencePiece vocabularies.
    vocab: VocabConfig = field(default_factory=VocabConfig)
    # Architecture of the network.
    model: ModelConfig = field(default_factory=ModelConfig)
    # Optimizer and learning-rate schedule.
    optim: OptimConfig = field(default_factory=OptimConfig)
    # Training loop: duration, loss, evaluation, checkpoints and logging.
    train: TrainConfig = field(default_factory=TrainConfig)
    # Distribution of training over devices.
    parallel: Annotated[ParallelConfig, MayChange(_ROUNDING)] = field(default_factory=ParallelConfig)
    # Decoding: search method, scoring and limits of translations.
    search: Annotated[SearchConfig, MayChange("later translations and their scores differ")] = field(
        default_factory=SearchConfig
    )

    def replace(self, changes: Mapping[str, Any]) -> "Config":
        """Return a copy with changed values, such as {"model.model_dim": 512, "train.steps": 10_000}."""
        return replace_fields(self, refuse_removed(changes), "config")


def _take_removed_fields(section: type, where: str = "") -> None:
    """Let sections accept removed fields at their default values, which older config files set."""
    make = section.__init__  # type: ignore[misc]

    @functools.wraps(make)
    def initialize(self: Any, *positional: Any, **values: Any) -> None:
        make(self, *positional, **refuse_removed(values, where))

    section.__init__ = initialize  # type: ignore[misc]
    for name, hint in typing.get_type_hints(section).items():
        if dataclasses.is_dataclass(hint):
            _take_removed_fields(typing.cast(type, hint), f"{where}{name}.")


_take_removed_fields(Config)
