"""Formats marian and hf-pre-norm: arrays as in BART, with a tokenizer of this package.

marian is MarianMTModel, the class of the OPUS-MT models; post-norm. hf-pre-norm is
PegasusForConditionalGeneration, with one embedding for both languages; Pegasus models with their own
tokenizer (spiece.model) are not read. Both folders are loaded by AutoModelForSeq2SeqLM and AutoTokenizer:

    tokenizer, model = AutoTokenizer.from_pretrained(DIR), AutoModelForSeq2SeqLM.from_pretrained(DIR)
    tokenizer.batch_decode(model.generate(**tokenizer(lines, return_tensors="pt", padding=True)),
                           skip_special_tokens=True)

Position tables have 512 rows, or more if the longest source or translation needs them. Models without a start
symbol begin translations with the padding symbol, in both systems. Two flags of config.json tie the
embeddings and the output of the class. With model.tying=embeddings the class stores two copies of the
embedding, which are equal until the model is trained further.
"""

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.foreign_files import check_network
from flaxformer_mt.convert.formats import Format, ImportOverrides, Outputs, Weights
from flaxformer_mt.convert.huggingface.generation_options import lost_options, write_generation
from flaxformer_mt.convert.huggingface.model_config import (
    ACTIVATIONS,
    longest_target,
    make_config,
    make_model_fields,
    num_positions,
    read_model_fields,
)
from flaxformer_mt.convert.huggingface.tokenizer_files import (
    read_exported_tokenizer,
    read_tokenizer,
    write_tokenizer,
)
from flaxformer_mt.convert.name_table import (
    CONVOLUTION_TO_LINEAR,
    FLAT,
    HEADS_IN,
    HEADS_OUT,
    ROW,
    SAME,
    TABLE_TOLERANCE,
    TRANSPOSED,
    Constant,
    Layout,
    Rule,
    Table,
    half_split,
    half_split_order,
    rules_for,
)
from flaxformer_mt.convert.stored_tensors import WEIGHTS_NAME, open_tensors, save_safetensors
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.positions import sinusoidal_half_table, sinusoidal_table
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

_BIAS = "final_logits_bias"
# Stack -> Flax name of an attention sublayer -> its name in transformers.
_ATTENTIONS = {
    "encoder": {"self_attention": "self_attn"},
    "decoder": {"self_attention": "self_attn", "cross_attention": "encoder_attn"},
}


def make_bart_table(config: Config, shapes: Any, *, what: str, positions: int, final_norm: bool) -> Table:
    model = config.model
    names = _Layouts(model)
    rules: list[Rule | Constant] = [*_embedding_rules(model)]
    for side, attentions in _ATTENTIONS.items():
        flax, foreign = f"{side}/layers_{{n}}/", f"model.{side}.layers.{{n}}."
        rules += _position_rules(model, side, positions)
        pairs = [(flax + name, foreign + other) for name, other in attentions.items()]
        rules += rules_for(pairs, names.attention())
        rules += rules_for([(flax + "feedforward", foreign[:-1])], names.feedforward())
        norms = [(f"{name}_residual/norm", f"{other}_layer_norm") for name, other in attentions.items()]
        norms += [("feedforward_residual/norm", "final_layer_norm")]
        rules += rules_for([(flax + name, foreign + other) for name, other in norms], names.norm())
        rules += rules_for([(f"{side}/final_norm", f"model.{side}.layer_norm")], names.norm())
        rules += rules_for([(f"{side}/embedding_norm", f"model.{side}.layernorm_embedding")], names.norm())
    rules += [Rule("output_kernel", "lm_head.weight", names.width(TRANSPOSED, 0))]
    rules += [Rule("output_bias", _BIAS, ROW), *_constants(model, shapes, final_norm)]
    return Table(shapes, rules, what=what)


class _Layouts:
    """The layouts of a model's arrays: with permuted widths where the class has sines before cosines."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model

    def width(self, layout: Layout, axis: int) -> Layout:
        """Return a layout whose `axis` is the width of the model."""
        return half_split(layout, axis) if self._model.positions == "sinusoidal" else layout

    def attention(self) -> list[Rule]:
        return [
            Rule("/query/kernel", ".q_proj.weight", self.width(HEADS_IN, 0)),
            Rule("/query/bias", ".q_proj.bias", FLAT),
            Rule("/key/kernel", ".k_proj.weight", self.width(HEADS_IN, 0)),
            Rule("/key/bias", ".k_proj.bias", FLAT),
            Rule("/value/kernel", ".v_proj.weight", self.width(HEADS_IN, 0)),
            Rule("/value/bias", ".v_proj.bias", FLAT),
            Rule("/output/kernel", ".out_proj.weight", self.width(HEADS_OUT, 2)),
            Rule("/output/bias", ".out_proj.bias", self.width(SAME, 0)),
        ]

    def norm(self) -> list[Rule]:
        width = self.width(SAME, 0)
        return [Rule("/scale", ".weight", width), Rule("/bias", ".bias", width)]

    def feedforward(self) -> list[Rule]:
        convolution = self._model.ffn_layer == "convolution"
        dense, axis = (CONVOLUTION_TO_LINEAR, 1) if convolution else (TRANSPOSED, 0)
        return [
            Rule("/input/kernel", ".fc1.weight", self.width(dense, axis)),
            Rule("/input/bias", ".fc1.bias"),
            Rule("/output/kernel", ".fc2.weight", self.width(dense, axis + 1)),
            Rule("/output/bias", ".fc2.bias", self.width(SAME, 0)),
        ]


def _position_rules(model: ModelConfig, side: str, positions: int) -> Iterable[Rule | Constant]:
    foreign = f"model.{side}.embed_positions.weight"
    if model.positions == "learned":
        yield Rule(f"{side}/positions/embedding", foreign)
    elif model.positions == "sinusoidal_halves":
        # Files of earlier versions of transformers have the table, of which row 1 is that of padding.
        table = sinusoidal_half_table(positions, model.model_dim)
        table[1] = 0
        yield Constant(f"{foreign}s", table, True, tolerance=TABLE_TOLERANCE)
    else:
        order = half_split_order(model.model_dim)
        table = np.ascontiguousarray(sinusoidal_table(positions, model.model_dim)[:, order])
        yield Constant(foreign, table, True, tolerance=TABLE_TOLERANCE)


def _embedding_rules(model: ModelConfig) -> list[Rule]:
    shared = model.tying in ("all", "embeddings")
    source, target = ("shared_embedding",) * 2 if shared else ("source_embedding", "target_embedding")
    names = [("model.encoder.embed_tokens", source), ("model.decoder.embed_tokens", target)]
    names = [("model.shared", "shared_embedding")] + names if shared else names
    names += [("lm_head", target)] if model.tying in ("all", "target_output") else []
    rows = _Layouts(model).width(SAME, 1)
    return [Rule(f"{flax}/embedding", f"{foreign}.weight", rows) for foreign, flax in names]


def has_output_bias(tensors: Mapping[str, Any]) -> bool:
    return _BIAS in tensors and bool(np.any(np.asarray(tensors[_BIAS])))


def tied_names(model: ModelConfig) -> list[str]:
    """Return the names of one tied array, that under which files store it first; [] if nothing is tied."""
    rules = [rule for rule in _embedding_rules(model) if rule.ours != "source_embedding/embedding"]
    return [rule.theirs for rule in rules] if len(rules) > 1 else []


def _constants(model: ModelConfig, shapes: Any, final_norm: bool) -> Iterable[Constant]:
    """Return arrays that the class has and the Flax model lacks: biases of 0 and scales of 1."""
    width, inner = np.zeros(model.model_dim, np.float32), np.zeros(model.ffn_dim, np.float32)
    if not model.output_bias and model.positions != "sinusoidal_halves":  # M2M100 has none
        table = "target_embedding" if "target_embedding/embedding" in shapes else "shared_embedding"
        size = shapes[f"{table}/embedding"][0]
        yield Constant(_BIAS, np.zeros((1, size), np.float32), optional=True)
    for side, layers in (("encoder", model.num_encoder_layers), ("decoder", model.num_decoder_layers)):
        attentions = list(_ATTENTIONS[side].values())
        norms = [f"layers.{n}.{name}_layer_norm" for n in range(layers) for name in (*attentions, "final")]
        norms += ["layer_norm"] if final_norm else []
        for name in norms if not model.norm_affine else []:
            yield Constant(f"model.{side}.{name}.weight", width + 1)
            yield Constant(f"model.{side}.{name}.bias", width)
        for prefix in (f"model.{side}.layers.{n}." for n in range(layers)):
            for name in attentions if not model.attention_bias else []:
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    yield Constant(f"{prefix}{name}.{part}.bias", width)
            if not model.ffn_bias:
                yield Constant(f"{prefix}fc1.bias", inner)
                yield Constant(f"{prefix}fc2.bias", width)


# Importing transformers takes seconds, so `open_model` imports it. A missing package is reported here.
for _package in ("torch", "transformers"):
    if importlib.util.find_spec(_package) is None:
        raise ModuleNotFoundError(f"No module named {_package!r}", name=_package)


def open_model(path: Path, overrides: ImportOverrides | None = None) -> Outputs:
    import torch
    from transformers import AutoModelForSeq2SeqLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # our own lines say what is done
    folder = path if path.is_dir() else path.parent
    # Whatever kernels config.json asks for: they differ in rounding, and may not be installed.
    model, report = AutoModelForSeq2SeqLM.from_pretrained(
        folder,
        output_loading_info=True,
        dtype=torch.float32,
        local_files_only=True,
        attn_implementation="eager",
    )
    if mismatches := {kind: sorted(map(str, names)) for kind, names in report.items() if names}:
        raise UserError(f"{folder}: transformers reports missing or unexpected arrays: {mismatches}")
    model.eval()

    def outputs(batch: Batch) -> np.ndarray:
        with torch.no_grad():
            return model(
                input_ids=torch.from_numpy(np.asarray(batch.source, np.int64)),
                attention_mask=torch.from_numpy(np.asarray(batch.source_mask, np.int64)),
                decoder_input_ids=torch.from_numpy(np.asarray(batch.target_in, np.int64)),
            ).logits.numpy()

    return outputs


_ALLOWED: dict[str, tuple[Any, ...]] = {
    "model.architecture": ("encoder_decoder",),
    "model.decoder_self_attention": ("attention",),
    "model.norm": ("layer",),
    "model.norm_epsilon": (1e-5,),
    "model.embedding_norm": (False,),
    "model.positions": ("sinusoidal",),
    "model.first_position": (0,),
    "model.logit_scale": (False,),
    "model.embedding_bias": (False,),
    "model.padding_mask": ("source", "both"),
    "model.activation": ACTIVATIONS,
}
_FORMAT_OF_NORM_POSITION = {"pre": "hf-pre-norm", "post": "marian"}


@dataclass(frozen=True)
class HuggingFaceFormat:
    """A format whose folder is loaded by `from_pretrained` of transformers.

    name: the name of the format. model_type, class_name: the type and class in transformers.
    final_norm: whether both stacks end in a norm. tyings: the supported values of model.tying.
    """

    name: str
    model_type: str
    class_name: str
    norm_position: Literal["pre", "post"]
    final_norm: bool
    tyings: tuple[str, ...]

    def make_format(self) -> Format:
        return Format(
            self.name, self.problems, self._write, open_model, self._read, lost_options=lost_options
        )

    def problems(self, config: Config) -> list[str]:
        model = config.model
        size, rest = divmod(model.model_dim, model.num_heads)
        allowed = _ALLOWED | {
            "model.norm_position": (self.norm_position,),
            "model.final_norm": (None, self.final_norm),
            "model.tying": self.tyings,
            "model.key_dim": (None, size),
            "model.value_dim": (None, size),
        }
        other = _FORMAT_OF_NORM_POSITION[model.norm_position]
        problems = [
            f"{line} (for {model.norm_position}: --format={other})" if "norm_position" in line else line
            for line in formats.unsupported_fields(config, allowed)
        ]
        if rest:
            problems.append(
                f"model.model_dim {model.model_dim} is not divisible by model.num_heads {model.num_heads}; "
                "all heads of this class have the size model_dim / num_heads"
            )
        return problems

    # ---- name table ----

    def make_table(self, config: Config, vocabs: Vocabs, positions: int) -> Table:
        shapes = formats.shapes_of(
            config.model, source_size=vocabs.source.size, target_size=vocabs.target.size
        )
        return make_bart_table(
            config, shapes, what=self.name, positions=positions, final_norm=self.final_norm
        )

    # ---- files ----

    def _write(self, weights: Weights, folder: Path, quantization: str) -> None:
        config, vocabs = weights.config, weights.vocabs
        tensors = self.make_table(config, vocabs, num_positions(config)).to_foreign(weights.leaves)
        write_tokenizer(vocabs, config, folder)
        write_generation(config, vocabs.target, folder, longest_target=longest_target(config))
        class_fields = {"architectures": [self.class_name], "model_type": self.model_type}
        formats.write_config_json(
            weights, folder, self.name, class_fields | make_model_fields(config, vocabs)
        )
        if config.model.tying != "embeddings":  # with which the class stores copies
            for name in tied_names(config.model)[1:]:
                del tensors[name]
        save_safetensors(tensors, folder / WEIGHTS_NAME)

    def _read(self, path: Path, overrides: ImportOverrides) -> Weights:
        folder = path if path.is_dir() else path.parent
        stored = formats.read_config_json(folder)
        if stored.get("model_type") != self.model_type:
            raise UserError(
                f"{folder} has model_type {stored.get('model_type')}; {self.name} reads {self.model_type}"
            )
        fields = read_model_fields(folder)
        return self._read_tensors(path, overrides, stored, fields, open_tensors(folder))

    def _read_tensors(
        self,
        path: Path,
        overrides: ImportOverrides,
        stored: dict[str, Any],
        fields: dict[str, Any],
        tensors: Mapping[str, Any],
    ) -> Weights:
        folder = path if path.is_dir() else path.parent
        if overrides.vocabs is not None:
            vocabs = overrides.vocabs
        elif formats.OUR_KEY in stored:
            vocabs = read_exported_tokenizer(
                folder, joint=formats.find_config(folder, ImportOverrides()).vocab.joint
            )
        else:
            vocabs = read_tokenizer(folder, fields)
        if formats.OUR_KEY in stored or overrides.config is not None:
            config = formats.find_config(folder, overrides)
        else:
            bias = has_output_bias(tensors)
            config = make_config(folder, fields, vocabs, norm_position=self.norm_position, output_bias=bias)
        check_network(config, folder)
        if problems := self.problems(config):
            raise UserError("\n".join(f"{self.name} cannot express this config: {line}" for line in problems))
        table = self.make_table(config, vocabs, fields["max_position_embeddings"])
        leaves = table.to_flax(
            tensors,
            tied=tied_names(config.model),
            origin=str(path),
            sizes=formats.size_fields(config, vocabs),
        )
        return Weights(config, vocabs, leaves)


MARIAN = HuggingFaceFormat(
    name="marian",
    model_type="marian",
    class_name="MarianMTModel",
    norm_position="post",
    final_norm=False,
    tyings=("all", "embeddings", "target_output", "none"),
).make_format()
PEGASUS = HuggingFaceFormat(
    name="hf-pre-norm",
    model_type="pegasus",
    class_name="PegasusForConditionalGeneration",
    norm_position="pre",
    final_norm=True,
    tyings=("all", "embeddings"),
).make_format()
