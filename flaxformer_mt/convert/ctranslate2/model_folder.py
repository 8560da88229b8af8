"""Format ctranslate2: writes a model folder for CTranslate2 (export only).

Files: model.bin; config.json (CTranslate2's fields and the entry of this package); shared_vocabulary.json, or
source_vocabulary.json and target_vocabulary.json; the SentencePiece models source.spm and target.spm; vocab/
as in every format; with a shortlist, vmap.txt for translate_batch(..., use_vmap=True). A source consists of
SentencePiece subwords without special tokens; CTranslate2 appends the end symbol. For a pretrained model, the
folder has the model's tokenizer in vocab/tokenizer instead of SentencePiece models, and sources and target
prefixes begin with the language tags of the model, if it has any.

    source = SentencePieceProcessor(model_file="DIR/source.spm").encode(line, out_type=str)
    translator = ctranslate2.Translator("DIR")
    result = translator.translate_batch([source], beam_size=1, min_decoding_length=0, max_input_length=0,
                                        suppress_sequences=[["<pad>"], ["<s>"]], max_decoding_length=N)

This call gives the tokens of this package's greedy search, up to rounding. N is the length limit of the call,
in tokens including the end symbol. This package has a limit per source instead: int(search.max_length_ratio *
length + search.max_length_offset). The other arguments replace defaults of CTranslate2: min_decoding_length=1
forbids empty translations, max_input_length=1024 silently truncates sources, and pad and bos are ordinary
tokens.

Beam search differs. CTranslate2 divides a log-probability by length ** length_penalty (default 1), this
package by ((5 + length) / 6) ** length_penalty; both count the end symbol. CTranslate2 stops when beam_size *
patience hypotheses have ended, this package when no unfinished hypothesis can win. CTranslate2 replaces ended
hypotheses by the next best candidates; this package does not.
"""

from collections.abc import Iterator
from pathlib import Path

import ctranslate2
import jax.numpy as jnp
import numpy as np
from ctranslate2.specs import common_spec, model_spec, transformer_spec

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.formats import Format, ImportOverrides, Outputs, Weights
from flaxformer_mt.convert.name_table import Constant, Leaves, Table, read_names
from flaxformer_mt.convert.network_fields import EVERY_FIELD, Field, find_problems, value_of
from flaxformer_mt.model.positions import SINUSOIDAL_TABLES
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import PretrainedVocab, Vocab

_ACTIVATIONS = {
    "relu": common_spec.Activation.RELU,
    "gelu": common_spec.Activation.GELU,
    "gelu_tanh": common_spec.Activation.GELUTanh,
    "silu": common_spec.Activation.SWISH,
    "swiglu": common_spec.Activation.SWISH,
    "geglu_tanh": common_spec.Activation.GELUTanh,
}
_GATED = ("swiglu", "geglu_tanh")

_NORMS = """
(encoder|decoder)/(embedding_norm|final_norm)                               (encoder|decoder)/(layernorm_embedding|layer_norm)
(encoder|decoder)/layers_{n}/(self_attention|feedforward)_residual/norm     (encoder|decoder)/layer_{n}/(self_attention|ffn)/layer_norm
decoder/layers_{n}/cross_attention_residual/norm                            decoder/layer_{n}/attention/layer_norm
"""  # noqa: E501
# CTranslate2 concatenates the query, key and value projections of self-attention into one matrix, and the key
# and value projections of cross-attention into another.
_NAMES = """
source_embedding                                                 encoder/embeddings_0
target_embedding                                                 decoder/embeddings
output                                                           decoder/projection
output_bias                                                      decoder/projection/bias
(encoder|decoder)/layers_{n}/self_attention/(query+key+value|output)/(kernel|bias)  (encoder|decoder)/layer_{n}/self_attention/linear_(0|1)/(weight|bias)
decoder/layers_{n}/cross_attention/(query|key+value|output)/(kernel|bias)           decoder/layer_{n}/attention/linear_(0|1|2)/(weight|bias)
(encoder|decoder)/positions/embedding                            (encoder|decoder)/position_encodings/encodings
(encoder|decoder)/relative_positions/embedding                   (encoder|decoder)/layer_0/self_attention/relative_attention_bias
"""  # noqa: E501
# CTranslate2 applies the nonlinearity to linear_0, which in a gated layer is the Flax gate.
_PLAIN = """
(encoder|decoder)/layers_{n}/feedforward/(input|output)          (encoder|decoder)/layer_{n}/ffn/linear_(0|1)
"""
_GATE = """
(encoder|decoder)/layers_{n}/feedforward/(gate|input|output)     (encoder|decoder)/layer_{n}/ffn/linear_(0|0_noact|1)
"""  # noqa: E501
_PARAMETERS = {"kernel": "/weight", "bias": "/bias", "embedding": "/weight"}
_MISSING = ("architecture", "decoder_self_attention", "embedding_bias")
_FIELDS = (
    *(field for field in EVERY_FIELD if field.ours not in _MISSING),
    Field("positions", values=("sinusoidal", "sinusoidal_halves", "learned", "rotary", "relative")),
    Field("padding_mask", values=("source", "both")),
    Field("target_start"),
)


def make_spec(config: ModelConfig, leaves: Leaves) -> transformer_spec.TransformerSpec:
    """Make a TransformerSpec with copies of all arrays, but without vocabularies and special tokens."""
    spec = _empty_spec(config)
    leaves = dict(_adapt_leaves(config, leaves))
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    rules = [*read_names(_NORMS, parameters={"scale": "/gamma", "bias": "/beta"}), *_constants(config)]
    names = _NAMES + (_GATE if config.activation in _GATED else _PLAIN)
    rules += read_names(names, parameters=_PARAMETERS)
    table = Table(
        shapes,
        rules,
        what="ctranslate2",
        absent=formats.absent_shapes(config, ["norm_affine"], source_size=1, target_size=1),
    )
    # Quantization works in place, so the spec gets copies. Tied arrays share one copy, which is stored once.
    copies: dict[int, np.ndarray] = {}
    tensors = table.to_foreign(leaves)
    for name, array in tensors.items():
        scope, _, attribute = name.rpartition("/")
        copy = copies.setdefault(id(array), np.array(array, np.float32, order="C"))
        setattr(model_spec.index_spec(spec, scope), attribute, copy)
    # All layers of a stack have the biases of its first layer, which CTranslate2 then stores once.
    for stack in (spec.encoder, spec.decoder) if config.positions == "relative" else ():
        biases = stack.layer[0].self_attention.relative_attention_bias
        longest = np.dtype("int32").type(config.relative_distance)
        for layer in stack.layer:
            layer.self_attention.relative_attention_bias = biases
            layer.self_attention.relative_attention_max_distance = longest
    spec.config.layer_norm_epsilon = config.norm_epsilon
    return spec


def quantize(spec: transformer_spec.TransformerSpec, quantization: str) -> None:
    """Check that all variables are set, and quantize the matrices ("none": keep float32)."""
    spec.validate()
    if not quantization.endswith("bfloat16"):
        spec.optimize(None if quantization == "none" else quantization)
        return
    # CTranslate2 needs PyTorch for the conversion to bfloat16, so the matrices are converted here.
    spec.optimize("int8_float32" if quantization == "int8_bfloat16" else None)

    def to_bfloat16(_: model_spec.LayerSpec, name: str, value: object) -> None:
        if isinstance(value, model_spec.NumpyVariable) and not name.endswith("_scale"):
            if value.dtype == "float32" and not value.is_scalar():
                value.array = value.array.astype(jnp.bfloat16)

    model_spec.visit_spec(spec, to_bfloat16)


def _empty_spec(config: ModelConfig) -> transformer_spec.TransformerSpec:
    key_dim, head_dim = _head_dims(config)
    options = {
        "no_final_norm": not value_of(config, "final_norm"),
        "activation": _ACTIVATIONS[config.activation],
        "layernorm_embedding": config.embedding_norm,
        "ffn_glu": config.activation in _GATED,
        "rms_norm": config.norm == "rms",
        "head_dim": None if head_dim * config.num_heads == config.model_dim else head_dim,
        # Rotary embeddings rotate elements i and i + key_dim / 2 of each head as a pair.
        "rotary_dim": key_dim if config.positions == "rotary" else None,
        "rotary_interleave": False,
        "relative_attention_bias": config.positions == "relative",
    }
    encoder = transformer_spec.TransformerEncoderSpec(config.num_encoder_layers, config.num_heads, **options)
    if config.alignment.weight:  # CTranslate2 takes alignments from the first heads of a layer
        options |= {"alignment_layer": config.alignment.layer, "alignment_heads": 1}
    decoder = transformer_spec.TransformerDecoderSpec(config.num_decoder_layers, config.num_heads, **options)
    for stack in (encoder, decoder):
        # Set after construction: with pre_norm=False, the constructors leave out the final norm, although
        # CTranslate2 applies it in post-norm models as well if the file has one.
        stack.pre_norm = config.norm_position == "pre"
        stack.scale_embeddings = config.embedding_scale
        if key_dim != head_dim or not config.attention_scale:
            scale = np.float32(key_dim**-0.5 if config.attention_scale else 1)
            for layer in stack.layer:
                layer.self_attention.queries_scale = scale
                if stack is decoder:
                    layer.attention.queries_scale = scale
    decoder.start_from_zero_embedding = config.target_start == "zeros"
    if config.logit_scale:
        decoder.scale_outputs = np.float32(config.model_dim**-0.5)
    return transformer_spec.TransformerSpec(encoder, decoder)


def _head_dims(config: ModelConfig) -> tuple[int, int]:
    """Return the size of queries and keys in a head, and the size to which all heads are padded."""
    key_dim = value_of(config, "key_dim")
    return key_dim, max(key_dim, value_of(config, "value_dim"))


def _adapt_leaves(config: ModelConfig, leaves: Leaves) -> Iterator[tuple[str, np.ndarray]]:
    """Zero-pad heads to one size, which changes no output; drop positions before the first used position."""
    _, head_dim = _head_dims(config)
    for path, leaf in leaves.items():
        parent, _, name = path.rpartition("/")
        role = parent.rpartition("/")[2]
        in_attention = parent.rpartition("/")[0].endswith("_attention")
        if in_attention and role in ("query", "key", "value"):
            leaf = _zero_pad(leaf, head_dim, axis=leaf.ndim - 1)  # [D, H, K] or [H, K]
        elif in_attention and role == "output" and name == "kernel":
            leaf = _zero_pad(leaf, head_dim, axis=1)  # [H, E, D]
        elif role == "positions":
            leaf = leaf[config.first_position :]
        yield path, leaf


def _zero_pad(leaf: np.ndarray, size: int, *, axis: int) -> np.ndarray:
    widths = [(0, 0)] * leaf.ndim
    widths[axis] = (0, size - leaf.shape[axis])
    return np.pad(leaf, widths)


def _constants(config: ModelConfig) -> Iterator[Constant]:
    """Yield the sinusoidal position tables, which Flax computes and CTranslate2 stores."""
    if config.positions in SINUSOIDAL_TABLES:
        first, longest = config.first_position, config.longest_input or 0
        encodings = SINUSOIDAL_TABLES[config.positions](first + longest, config.model_dim)[first:]
        for stack in ("encoder", "decoder"):
            yield Constant(f"{stack}/position_encodings/encodings", encodings)


_NAME = "ctranslate2"
_QUANTIZATIONS = (
    *("none", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"),
)


def _problems(config: Config) -> list[str]:
    if config.model.architecture != "encoder_decoder":
        return [
            f"model.architecture is {config.model.architecture}; supported: encoder_decoder "
            "(for other architectures use --format=torch)"
        ]
    return find_problems(_FIELDS, config)


def _write(weights: Weights, folder: Path, quantization: str) -> None:
    vocabs = weights.vocabs
    spec = make_spec(weights.config.model, weights.leaves)
    tokens = _special_tokens(vocabs.target)
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = tokens
    spec.config.decoder_start_token = spec.config.bos_token
    spec.config.add_source_bos = False
    spec.config.add_source_eos = weights.config.model.source_end
    spec.register_source_vocabulary(vocabs.source.pieces(range(vocabs.source.size)))
    spec.register_target_vocabulary(vocabs.target.pieces(range(vocabs.target.size)))
    quantize(spec, quantization)
    spec.save(str(folder))
    formats.write_config_json(weights, folder, _NAME, spec.config.to_dict())
    vocabs.save(folder / formats.VOCAB_NAME)
    if not isinstance(vocabs.target, PretrainedVocab):
        vocabs.source.save(folder / "source.spm")
        vocabs.target.save(folder / "target.spm")


def _special_tokens(vocab: Vocab) -> list[str]:
    return vocab.pieces([vocab.unk_id, vocab.bos_id, vocab.eos_id])


def _find_symbol_problem(weights: Weights) -> list[str]:
    source, target = (_special_tokens(vocab) for vocab in (weights.vocabs.source, weights.vocabs.target))
    if source == target:
        return []
    return [
        f"unk, bos and eos are {', '.join(source)} in the source vocabulary and {', '.join(target)} in the "
        "target vocabulary; they must be equal"
    ]


def _open(folder: Path) -> Outputs:
    # "default" computes in the stored type of the weights, or in the nearest type that this CPU supports.
    translator = ctranslate2.Translator(str(folder), device="cpu", compute_type="default")
    vocabs = formats.find_vocabs(folder, ImportOverrides())

    def outputs(batch: Batch) -> np.ndarray:
        source_mask, target_mask = np.asarray(batch.source_mask), np.asarray(batch.target_mask)
        sources = [
            _without_eos(row[mask], vocabs.source)
            for row, mask in zip(batch.source, source_mask, strict=True)
        ]
        targets = [
            _without_eos(row[mask], vocabs.target)
            for row, mask in zip(batch.target_out, target_mask, strict=True)
        ]
        scored = translator.score_batch(sources, targets, max_input_length=0)
        log_probs = np.zeros(target_mask.shape, np.float32)
        for row, (mask, result) in enumerate(zip(target_mask, scored, strict=True)):
            log_probs[row, mask] = result.log_probs
        return log_probs

    return outputs


def _without_eos(ids: np.ndarray, vocab: Vocab) -> list[str]:
    """Return the subwords of a sentence without the end symbol, which CTranslate2 appends."""
    if not len(ids) or ids[-1] != vocab.eos_id:
        raise ValueError(f"sentences must end in eos, {vocab.eos_id}, but got {ids.tolist()}")
    return vocab.pieces(ids[:-1])


FORMAT = Format(
    name=_NAME,
    problems=_problems,
    write=_write,
    open=_open,
    read=None,
    quantity="log_probs",
    quantizations=_QUANTIZATIONS,
    write_shortlist=lambda shortlist, folder: shortlist.write(folder / "vmap.txt"),
    more_problems=_find_symbol_problem,
)
