"""CTranslate2's description of a Transformer, filled with our parameters; numpy alone, no PyTorch.

Owns the names of its variables and what is made of ours for them: heads of one size, tables of positions,
norms without parameters. Knows no files.
"""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from ctranslate2.specs import common_spec, model_spec, transformer_spec

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.convert.array_layouts import (
    CONVOLUTION_TO_LINEAR,
    FLAT,
    HEADS_IN,
    HEADS_OUT,
    TRANSPOSED,
)
from flaxformer_mt.convert.name_table import Constant, Leaves, Rule, Table, rules_for
from flaxformer_mt.model.positions import sinusoidal_table

_ACTIVATIONS = {
    "relu": common_spec.Activation.RELU,
    "gelu": common_spec.Activation.GELU,
    "gelu_tanh": common_spec.Activation.GELUTanh,
    "silu": common_spec.Activation.SWISH,
    "swiglu": common_spec.Activation.SWISH,
}

# Ours and theirs, of every norm: the prefixes before scale and bias, gamma and beta.
_NORMS = [
    ("encoder/embedding_norm", "encoder/layernorm_embedding"),
    ("decoder/embedding_norm", "decoder/layernorm_embedding"),
    ("encoder/final_norm", "encoder/layer_norm"),
    ("decoder/final_norm", "decoder/layer_norm"),
    ("encoder/layers_{n}/self_attention_residual/norm", "encoder/layer_{n}/self_attention/layer_norm"),
    ("encoder/layers_{n}/feedforward_residual/norm", "encoder/layer_{n}/ffn/layer_norm"),
    ("decoder/layers_{n}/self_attention_residual/norm", "decoder/layer_{n}/self_attention/layer_norm"),
    ("decoder/layers_{n}/cross_attention_residual/norm", "decoder/layer_{n}/attention/layer_norm"),
    ("decoder/layers_{n}/feedforward_residual/norm", "decoder/layer_{n}/ffn/layer_norm"),
]
_SELF_ATTENTIONS = [
    ("encoder/layers_{n}/self_attention", "encoder/layer_{n}/self_attention"),
    ("decoder/layers_{n}/self_attention", "decoder/layer_{n}/self_attention"),
]
_CROSS_ATTENTIONS = [("decoder/layers_{n}/cross_attention", "decoder/layer_{n}/attention")]
_FEEDFORWARDS = [
    ("encoder/layers_{n}/feedforward", "encoder/layer_{n}/ffn"),
    ("decoder/layers_{n}/feedforward", "decoder/layer_{n}/ffn"),
]

# Queries, keys and values of self-attention are one matrix; keys and values of cross-attention are one.
_SELF_ATTENTION = [
    Rule(("/query/kernel", "/key/kernel", "/value/kernel"), "/linear_0/weight", HEADS_IN),
    Rule(("/query/bias", "/key/bias", "/value/bias"), "/linear_0/bias", FLAT),
    Rule("/output/kernel", "/linear_1/weight", HEADS_OUT),
    Rule("/output/bias", "/linear_1/bias"),
]
_CROSS_ATTENTION = [
    Rule("/query/kernel", "/linear_0/weight", HEADS_IN),
    Rule("/query/bias", "/linear_0/bias", FLAT),
    Rule(("/key/kernel", "/value/kernel"), "/linear_1/weight", HEADS_IN),
    Rule(("/key/bias", "/value/bias"), "/linear_1/bias", FLAT),
    Rule("/output/kernel", "/linear_2/weight", HEADS_OUT),
    Rule("/output/bias", "/linear_2/bias"),
]


def make_spec(config: ModelConfig, leaves: Leaves) -> transformer_spec.TransformerSpec:
    """The description with all its arrays, copies of ours; vocabularies and special tokens are not in it yet.

    Raises:
      UserError: a parameter that it has no place for.
    """
    spec = _empty_spec(config)
    leaves = dict(_fitted(config, leaves))
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    table = Table(shapes, [*_rules(config), *_constants(config)], what="ctranslate2")
    # Quantization works in place, so it gets copies; of tied arrays one, which is then stored once.
    copies: dict[int, np.ndarray] = {}
    tensors = table.to_theirs(leaves)
    for name, array in tensors.items():
        scope, _, attribute = name.rpartition("/")
        copy = copies.setdefault(id(array), np.array(array, np.float32, order="C"))
        setattr(model_spec.index_spec(spec, scope), attribute, copy)
    spec.config.layer_norm_epsilon = config.norm_epsilon
    return spec


def quantize(spec: transformer_spec.TransformerSpec, quantization: str) -> None:
    """Checks that nothing is unset, then stores matrices as the quantization says; "none": float32."""
    spec.validate()
    if not quantization.endswith("bfloat16"):
        spec.optimize(None if quantization == "none" else quantization)
        return
    # The library would use PyTorch for this type.
    spec.optimize("int8_float32" if quantization == "int8_bfloat16" else None)

    def shorten(_: model_spec.LayerSpec, name: str, value: object) -> None:
        if isinstance(value, model_spec.NumpyVariable) and not name.endswith("_scale"):
            if value.dtype == "float32" and not value.is_scalar():
                value.array = value.array.astype(jnp.bfloat16)

    model_spec.visit_spec(spec, shorten)


def _empty_spec(config: ModelConfig) -> transformer_spec.TransformerSpec:
    key_dim, head_dim = _head_dims(config)
    pre_norm = config.norm_position == "pre"
    final_norm = pre_norm if config.final_norm is None else config.final_norm
    options = {
        "no_final_norm": not final_norm,
        "activation": _ACTIVATIONS[config.activation],
        "layernorm_embedding": config.embedding_norm,
        "ffn_glu": config.activation == "swiglu",
        "rms_norm": config.norm == "rms",
        "head_dim": None if head_dim * config.num_heads == config.model_dim else head_dim,
        # Of each head the first key_dim numbers turn, in pairs half of that apart.
        "rotary_dim": key_dim if config.positions == "rotary" else None,
        "rotary_interleave": False,
    }
    encoder = transformer_spec.TransformerEncoderSpec(config.num_encoder_layers, config.num_heads, **options)
    decoder = transformer_spec.TransformerDecoderSpec(config.num_decoder_layers, config.num_heads, **options)
    for stack in (encoder, decoder):
        # The constructors make no final norm for post-norm, though one is read where there is one.
        stack.pre_norm = pre_norm
        stack.scale_embeddings = config.embedding_scale
        if key_dim != head_dim:
            for layer in stack.layer:
                layer.self_attention.queries_scale = np.float32(key_dim**-0.5)
    if key_dim != head_dim:
        for layer in decoder.layer:
            layer.attention.queries_scale = np.float32(key_dim**-0.5)
    if config.logit_scale:
        decoder.scale_outputs = np.float32(config.model_dim**-0.5)
    return transformer_spec.TransformerSpec(encoder, decoder)


def _head_dims(config: ModelConfig) -> tuple[int, int]:
    """The size of a head's queries and keys, and the one that is stored for all three."""
    size = config.model_dim // config.num_heads
    key_dim, value_dim = config.key_dim or size, config.value_dim or size
    return key_dim, max(key_dim, value_dim)


def _fitted(config: ModelConfig, leaves: Leaves) -> Iterator[tuple[str, np.ndarray]]:
    """Ours with heads of one size, filled up with zeros, and learned positions from the first that is used.

    Zeros change no product: neither that of queries and keys nor that of values and the output matrix.
    """
    _, head_dim = _head_dims(config)
    for path, leaf in leaves.items():
        parent, _, name = path.rpartition("/")
        role = parent.rpartition("/")[2]
        in_attention = parent.rpartition("/")[0].endswith("_attention")
        if in_attention and role in ("query", "key", "value"):
            leaf = _fill(leaf, head_dim, axis=leaf.ndim - 1)  # [D, H, K] or [H, K]
        elif in_attention and role == "output" and name == "kernel":
            leaf = _fill(leaf, head_dim, axis=1)  # [H, E, D]
        elif role == "positions":
            leaf = leaf[config.first_position :]
        yield path, leaf


def _fill(leaf: np.ndarray, size: int, *, axis: int) -> np.ndarray:
    widths = [(0, 0)] * leaf.ndim
    widths[axis] = (0, size - leaf.shape[axis])
    return np.pad(leaf, widths)


def _rules(config: ModelConfig) -> list[Rule | Constant]:
    dense = CONVOLUTION_TO_LINEAR if config.ffn_layer == "convolution" else TRANSPOSED
    gated = config.activation == "swiglu"
    # The nonlinearity is on linear_0: in a gated layer that is our gate.
    inner = "/linear_0_noact" if gated else "/linear_0"
    feedforward = [
        Rule("/input/kernel", f"{inner}/weight", dense),
        Rule("/input/bias", f"{inner}/bias"),
        Rule("/gate/kernel", "/linear_0/weight", dense),
        Rule("/gate/bias", "/linear_0/bias"),
        Rule("/output/kernel", "/linear_1/weight", dense),
        Rule("/output/bias", "/linear_1/bias"),
    ]
    shared = config.tying in ("all", "embeddings")
    source, target = ("shared", "shared") if shared else ("source", "target")
    rules = [
        Rule(f"{source}_embedding/embedding", "encoder/embeddings_0/weight"),
        Rule(f"{target}_embedding/embedding", "decoder/embeddings/weight"),
        *rules_for(_NORMS, [Rule("/scale", "/gamma"), Rule("/bias", "/beta")]),
        *rules_for(_SELF_ATTENTIONS, _SELF_ATTENTION),
        *rules_for(_CROSS_ATTENTIONS, _CROSS_ATTENTION),
        *rules_for(_FEEDFORWARDS, feedforward),
        *(
            Rule(f"{stack}/positions/embedding", f"{stack}/position_encodings/encodings")
            for stack in ("encoder", "decoder")
        ),
        Rule("output_bias", "decoder/projection/bias"),
    ]
    if config.tying in ("all", "target_output"):
        return [*rules, Rule(f"{target}_embedding/embedding", "decoder/projection/weight")]
    return [*rules, Rule("output_kernel", "decoder/projection/weight", TRANSPOSED)]


def _constants(config: ModelConfig) -> Iterator[Constant]:
    """What is a formula in ours and an array in theirs."""
    if config.positions == "sinusoidal":
        first, longest = config.first_position, config.longest_input or 0
        encodings = sinusoidal_table(first + longest, config.model_dim)[first:]
        for stack in ("encoder", "decoder"):
            yield Constant(f"{stack}/position_encodings/encodings", encodings)
    if config.norm_affine:
        return
    ones, zeros = np.ones(config.model_dim, np.float32), np.zeros(config.model_dim, np.float32)
    for name in _norm_names(config):
        yield Constant(f"{name}/gamma", ones)
        if config.norm == "layer":
            yield Constant(f"{name}/beta", zeros)


def _norm_names(config: ModelConfig) -> Iterator[str]:
    spec = _empty_spec(config)
    for _, theirs in _NORMS:
        layers = spec.encoder.layer if theirs.startswith("encoder") else spec.decoder.layer
        for number in range(len(layers)) if "{n}" in theirs else (0,):
            name = theirs.replace("{n}", str(number))
            scope, _, attribute = name.rpartition("/")
            if hasattr(model_spec.index_spec(spec, scope), attribute):
                yield name
