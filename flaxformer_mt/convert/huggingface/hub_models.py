"""Format hf: the models of Hugging Face's Hub that translation starts from, to and from their own layout.

    bart                BART
    mbart               mBART-50
    m2m_100             M2M100 and NLLB-200
    t5, mt5             T5, T5 1.1, mT5, MADLAD-400, ByT5
    marian, pegasus     the formats marian and hf-pre-norm

The model_type of config.json says which one it is. An export writes the arrays under the names of the class,
and all other files as the import has found them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.foreign_files import check_network
from flaxformer_mt.convert.formats import Format, ImportOverrides, Weights
from flaxformer_mt.convert.huggingface import bart_family
from flaxformer_mt.convert.huggingface.generation_options import read_search
from flaxformer_mt.convert.huggingface.model_config import ACTIVATIONS
from flaxformer_mt.convert.huggingface.pretrained import (
    Family,
    make_model_config,
    make_pretrained_config,
    read_family,
    read_vocab,
    write_vocab,
)
from flaxformer_mt.convert.name_table import SAME, TRANSPOSED, Rule, Table, attention_rules, rules_for
from flaxformer_mt.convert.stored_tensors import WEIGHTS_NAME, open_tensors, save_safetensors
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import PretrainedVocab, Vocabs

# Arrays that early files have and no version of transformers uses.
UNUSED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)

_ATTENTION = attention_rules(("q", "k", "v"), "o")
# Stack -> Flax name of a sublayer -> its name in transformers, in a layer with the number of the sublayer.
_SUBLAYERS = {
    "encoder": {"self_attention": "SelfAttention", "feedforward": "DenseReluDense"},
    "decoder": {
        "self_attention": "SelfAttention",
        "cross_attention": "EncDecAttention",
        "feedforward": "DenseReluDense",
    },
}


def make_t5_table(config: Config, shapes: Any, *, what: str) -> Table:
    model = config.model
    gated = model.activation in ("swiglu", "geglu_tanh")
    # The gate of two input matrices is the first one.
    feedforward = [Rule("/gate/kernel", ".wi_0.weight", TRANSPOSED)] if gated else []
    feedforward += [
        Rule("/input/kernel", ".wi_1.weight" if gated else ".wi.weight", TRANSPOSED),
        Rule("/output/kernel", ".wo.weight", TRANSPOSED),
    ]
    rules = [Rule("shared_embedding/embedding", f"{name}.weight", SAME) for name in tied_names(model)]
    if model.tying == "embeddings":
        rules.append(Rule("output_kernel", "lm_head.weight", TRANSPOSED))
    for stack, sublayers in _SUBLAYERS.items():
        for number, (ours, theirs) in enumerate(sublayers.items()):
            flax, foreign = f"{stack}/layers_{{n}}/{ours}", f"{stack}.block.{{n}}.layer.{number}"
            sublayer_rules = feedforward if ours == "feedforward" else _ATTENTION
            rules += rules_for([(flax, f"{foreign}.{theirs}")], sublayer_rules)
            rules.append(Rule(f"{flax}_residual/norm/scale", f"{foreign}.layer_norm.weight"))
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rules.append(Rule(f"{stack}/relative_positions/embedding", bias))
        rules.append(Rule(f"{stack}/final_norm/scale", f"{stack}.final_layer_norm.weight"))
    return Table(shapes, rules, what=what)


def tied_names(model: ModelConfig) -> list[str]:
    names = ["shared", "encoder.embed_tokens", "decoder.embed_tokens"]
    return names + ["lm_head"] if model.tying == "all" else names


_NAME = "hf"
# The formats of models with a vocabulary of this package, by the model_type of their classes.
_WITH_OUR_VOCABULARY = {"marian": bart_family.MARIAN, "pegasus": bart_family.PEGASUS}

# What the classes of both families have, by whether the positions are relative.
_ALLOWED: dict[bool, dict[str, tuple[Any, ...]]] = {
    True: {
        "model.norm": ("rms",),
        "model.norm_position": ("pre",),
        "model.final_norm": (None, True),
        "model.embedding_norm": (False,),
        "model.embedding_scale": (False,),
        "model.attention_scale": (False,),
        "model.attention_bias": (False,),
        "model.ffn_bias": (False,),
        "model.output_bias": (False,),
    },
    False: {
        "model.positions": ("learned", "sinusoidal_halves"),
        "model.first_position": (2,),
        "model.norm": ("layer",),
        "model.norm_epsilon": (1e-5,),
        "model.attention_bias": (True,),
        "model.ffn_bias": (True,),
        "model.activation": ACTIVATIONS,
    },
}
_ALLOWED_BOTH: dict[str, tuple[Any, ...]] = {
    "model.architecture": ("encoder_decoder",),
    "model.decoder_self_attention": ("attention",),
    "model.ffn_layer": ("dense",),
    "model.norm_affine": (True,),
    "model.embedding_bias": (False,),
    "model.tying": ("all", "embeddings"),
    "model.padding_mask": ("source", "both"),
}


def _problems(config: Config) -> list[str]:
    if config.vocab.kind != "pretrained":
        return _format_with_our_vocabulary(config).problems(config)
    return formats.unsupported_fields(config, _ALLOWED_BOTH | _ALLOWED[_is_t5(config)])


def _format_with_our_vocabulary(config: Config) -> Format:
    return _WITH_OUR_VOCABULARY["marian" if config.model.norm_position == "post" else "pegasus"]


def _is_t5(config: Config) -> bool:
    return config.model.positions == "relative"


def _make_table(config: Config, vocabs: Vocabs) -> Table:
    shapes = formats.shapes_of(config.model, source_size=vocabs.source.size, target_size=vocabs.target.size)
    if _is_t5(config):
        return make_t5_table(config, shapes, what=_NAME)
    positions = (config.model.longest_input or 0) + config.model.first_position
    final_norm = config.model.norm_position == "pre"
    return bart_family.make_bart_table(config, shapes, what=_NAME, positions=positions, final_norm=final_norm)


def _tied_names(config: Config) -> list[str]:
    """Return names of one array, as tensors, of which files have the first one at least."""
    if _is_t5(config):
        return [f"{name}.weight" for name in tied_names(config.model)]
    return bart_family.tied_names(config.model)


def _write(weights: Weights, folder: Path, quantization: str) -> None:
    config, vocab = weights.config, weights.vocabs.target
    if not isinstance(vocab, PretrainedVocab):
        _format_with_our_vocabulary(config).write(weights, folder, quantization)
        return
    if vocab.metadata.kept is not None:
        raise UserError(
            f"{_NAME} cannot express this model: its vocabulary was cut at the import (--vocab_text), and "
            "the original tokenizer has other ids; give --format=ctranslate2"
        )
    tensors = _make_table(config, weights.vocabs).to_foreign(weights.leaves)
    for name in _tied_names(config)[1:]:
        del tensors[name]
    for name in [name for name in tensors if name.endswith("embed_positions.weights")]:
        del tensors[name]  # computed by the class
    changes = {"vocab_size": vocab.size} | {
        field: "float32"
        for field in ("dtype", "torch_dtype")
        if f'"{field}"'.encode() in vocab.files["config.json"]
    }
    write_vocab(vocab, folder, changes)
    save_safetensors(tensors, folder / WEIGHTS_NAME)


def _read(path: Path, overrides: ImportOverrides) -> Weights:
    folder = path if path.is_dir() else path.parent
    stored = formats.read_config_json(folder)
    if not stored:
        raise UserError(f"{folder} has no config.json; give the folder of a model as --input=PATH")
    if (our_format := _WITH_OUR_VOCABULARY.get(str(stored.get("model_type")))) is not None:
        assert our_format.read is not None
        return our_format.read(path, overrides)
    formats.refuse_overrides(overrides, folder)
    family = read_family(folder, stored)
    tensors = {name: tensor for name, tensor in open_tensors(folder).items() if name not in UNUSED}
    return _read_tensors(folder, family, tensors)


def _read_tensors(folder: Path, family: Family, tensors: Mapping[str, Any]) -> Weights:
    vocab, data = read_vocab(folder, family)
    vocabs = Vocabs(vocab, vocab, joint=True)
    tied, bias = _is_tied(family, tensors), bart_family.has_output_bias(tensors)
    model = make_model_config(family, tied=tied, output_bias=bias)
    search = read_search(folder, family.fields, vocab)
    config = make_pretrained_config(family, model, vocab, search, data)
    try:
        check_network(config, folder)
    except UserError as error:
        raise UserError(f"{folder}: its config.json makes this config: {error}") from error
    leaves = _make_table(config, vocabs).to_flax(
        tensors, tied=_tied_names(config), origin=str(folder), sizes=formats.size_fields(config, vocabs)
    )
    return Weights(config, vocabs, leaves)


def _is_tied(family: Family, tensors: Mapping[str, Any]) -> bool:
    """Return whether the output matrix is the embedding, by what the file has, as transformers decides it."""
    shared = "shared.weight" if family.is_t5 else "model.shared.weight"
    if "lm_head.weight" not in tensors or shared not in tensors:
        return True
    output, embedding = tensors["lm_head.weight"], tensors[shared]
    return output.shape == embedding.shape and np.array_equal(np.asarray(output), np.asarray(embedding))


FORMAT = Format(_NAME, _problems, _write, bart_family.open_model, _read)
