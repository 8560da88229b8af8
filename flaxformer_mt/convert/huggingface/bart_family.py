"""Hugging Face formats: files, array names and the parity check that Marian and Pegasus share.

Contains model.safetensors and the array names that all descendants of BART have in common. marian.py and
pegasus.py give the class of each format, model_config.py the config files, tokenizer_files.py the tokenizer.
"""

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import safe_open

from flaxformer_mt.config import Config
from flaxformer_mt.convert.array_layouts import (
    CONVOLUTION_TO_LINEAR,
    FLAT,
    HEADS_IN,
    HEADS_OUT,
    ROW,
    SAME,
    TRANSPOSED,
)
from flaxformer_mt.convert.foreign_limits import check_network, check_tensors
from flaxformer_mt.convert.format_interface import (
    OUR_KEY,
    Format,
    Given,
    Outputs,
    Weights,
    find_config,
    read_config_json,
    shapes_of,
    size_fields,
    unsupported_fields,
    write_config_json,
)
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
from flaxformer_mt.convert.name_table import TABLE_TOLERANCE, Constant, Rule, Table, Tensors, rules_for
from flaxformer_mt.convert.safetensors_file import save_safetensors
from flaxformer_mt.convert.sinusoid_halves import half_split, half_split_order
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

# Importing transformers takes seconds, so `_open` imports it. A missing package is reported here already.
for _package in ("torch", "transformers"):
    if importlib.util.find_spec(_package) is None:
        raise ModuleNotFoundError(f"No module named {_package!r}", name=_package)

_FILE = "model.safetensors"
_BIAS = "final_logits_bias"
_WIDTH = half_split(SAME, 0)
_ROWS = half_split(SAME, 1)

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
_ATTENTION = [
    Rule("/query/kernel", ".q_proj.weight", half_split(HEADS_IN, 0)),
    Rule("/query/bias", ".q_proj.bias", FLAT),
    Rule("/key/kernel", ".k_proj.weight", half_split(HEADS_IN, 0)),
    Rule("/key/bias", ".k_proj.bias", FLAT),
    Rule("/value/kernel", ".v_proj.weight", half_split(HEADS_IN, 0)),
    Rule("/value/bias", ".v_proj.bias", FLAT),
    Rule("/output/kernel", ".out_proj.weight", half_split(HEADS_OUT, 2)),
    Rule("/output/bias", ".out_proj.bias", _WIDTH),
]
_NORM = [Rule("/scale", ".weight", _WIDTH), Rule("/bias", ".bias", _WIDTH)]
# Stack -> Flax name of an attention sublayer -> its name in transformers.
_ATTENTIONS = {
    "encoder": {"self_attention": "self_attn"},
    "decoder": {"self_attention": "self_attn", "cross_attention": "encoder_attn"},
}


def _feedforward(config: Config) -> list[Rule]:
    if config.model.ffn_layer == "convolution":
        into, out = half_split(CONVOLUTION_TO_LINEAR, 1), half_split(CONVOLUTION_TO_LINEAR, 2)
    else:
        into, out = half_split(TRANSPOSED, 0), half_split(TRANSPOSED, 1)
    return [
        Rule("/input/kernel", ".fc1.weight", into),
        Rule("/input/bias", ".fc1.bias"),
        Rule("/output/kernel", ".fc2.weight", out),
        Rule("/output/bias", ".fc2.bias", _WIDTH),
    ]


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
        """The interface for the export and import commands."""
        return Format(
            self.name, self.problems, self._write, self._open, self._read, lost_options=lost_options
        )

    def problems(self, config: Config) -> list[str]:
        """Reasons why the class cannot express the model, one line each."""
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
            for line in unsupported_fields(config, allowed)
        ]
        if rest:
            problems.append(
                f"model.model_dim {model.model_dim} is not divisible by model.num_heads {model.num_heads}; "
                "all heads of this class have the size model_dim / num_heads"
            )
        return problems

    # ---- name table ----

    def make_table(self, config: Config, vocabs: Vocabs, positions: int) -> Table:
        """The table of all arrays of the class, with position tables of `positions` rows."""
        shapes = shapes_of(config.model, source_size=vocabs.source.size, target_size=vocabs.target.size)
        rules: list[Rule | Constant] = [*_embedding_rules(config.model.tying)]
        order = half_split_order(config.model.model_dim)
        table = np.ascontiguousarray(sinusoidal_table(positions, config.model.model_dim)[:, order])
        for side, attentions in _ATTENTIONS.items():
            rules.append(
                Constant(f"model.{side}.embed_positions.weight", table, True, tolerance=TABLE_TOLERANCE)
            )
            flax, foreign = f"{side}/layers_{{n}}/", f"model.{side}.layers.{{n}}."
            names = [(flax + name, foreign + other) for name, other in attentions.items()]
            rules += rules_for(names, _ATTENTION)
            rules += rules_for([(flax + "feedforward", foreign[:-1])], _feedforward(config))
            norms = [(f"{name}_residual/norm", f"{other}_layer_norm") for name, other in attentions.items()]
            norms += [("feedforward_residual/norm", "final_layer_norm")]
            rules += rules_for([(flax + name, foreign + other) for name, other in norms], _NORM)
            rules += rules_for([(f"{side}/final_norm", f"model.{side}.layer_norm")], _NORM)
        rules += [Rule("output_kernel", "lm_head.weight", half_split(TRANSPOSED, 0))]
        rules += [Rule("output_bias", _BIAS, ROW), *self._constants(config, vocabs)]
        return Table(shapes, rules, what=self.name)

    def _constants(self, config: Config, vocabs: Vocabs) -> Iterable[Constant]:
        """Arrays that the class has and the Flax model lacks: biases of 0 and scales of 1."""
        model = config.model
        width, inner = np.zeros(model.model_dim, np.float32), np.zeros(model.ffn_dim, np.float32)
        if not model.output_bias:
            yield Constant(_BIAS, np.zeros((1, vocabs.target.size), np.float32), optional=True)
        for side, layers in (("encoder", model.num_encoder_layers), ("decoder", model.num_decoder_layers)):
            attentions = list(_ATTENTIONS[side].values())
            norms = [
                f"layers.{n}.{name}_layer_norm" for n in range(layers) for name in (*attentions, "final")
            ]
            norms += ["layer_norm"] if self.final_norm else []
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

    # ---- files ----

    def _write(self, weights: Weights, folder: Path, quantization: str) -> None:
        config, vocabs = weights.config, weights.vocabs
        tensors = self.make_table(config, vocabs, num_positions(config)).to_foreign(weights.leaves)
        write_tokenizer(vocabs, config, folder)
        write_generation(config, vocabs.target, folder, longest_target=longest_target(config))
        facts = {"architectures": [self.class_name], "model_type": self.model_type}
        write_config_json(weights, folder, self.name, facts | make_model_fields(config, vocabs))
        for name in _tied_names(config.model.tying)[1:] if _class_ties_arrays(config) else []:
            del tensors[name]
        save_safetensors(tensors, folder / _FILE)

    def _open(self, path: Path, given: Given | None = None) -> Outputs:
        import torch
        from transformers import AutoModelForSeq2SeqLM

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

    def _read(self, path: Path, given: Given) -> Weights:
        folder = path if path.is_dir() else path.parent
        stored = read_config_json(folder)
        if stored.get("model_type") != self.model_type:
            raise UserError(
                f"{folder} has model_type {stored.get('model_type')}; {self.name} reads {self.model_type}"
            )
        facts = read_model_fields(folder)
        tensors = _load(folder)
        if given.vocabs is not None:
            vocabs = given.vocabs
        elif OUR_KEY in stored:
            vocabs = read_exported_tokenizer(folder, joint=find_config(folder, Given()).vocab.joint)
        else:
            vocabs = read_tokenizer(folder, facts)
        if OUR_KEY in stored or given.config is not None:
            config = find_config(folder, given)
        else:
            bias = bool(np.any(tensors.get(_BIAS, np.zeros(()))))
            config = make_config(folder, facts, vocabs, norm_position=self.norm_position, output_bias=bias)
        check_network(config, folder)
        if problems := self.problems(config):
            raise UserError("\n".join(f"{self.name} cannot express this config: {line}" for line in problems))
        table = self.make_table(config, vocabs, facts["max_position_embeddings"])
        leaves = table.to_flax(
            tensors,
            tied=_tied_names(config.model.tying),
            origin=str(path),
            sizes=size_fields(config, vocabs),
        )
        return Weights(config, vocabs, leaves)


def _embedding_rules(tying: str) -> list[Rule]:
    shared = tying in ("all", "embeddings")
    source, target = ("shared_embedding",) * 2 if shared else ("source_embedding", "target_embedding")
    names = [("model.encoder.embed_tokens", source), ("model.decoder.embed_tokens", target)]
    names = [("model.shared", "shared_embedding")] + names if shared else names
    names += [("lm_head", target)] if tying in ("all", "target_output") else []
    return [Rule(f"{flax}/embedding", f"{foreign}.weight", _ROWS) for foreign, flax in names]


def _tied_names(tying: str) -> list[str]:
    """Names of one tied array, the name under which files store it first; empty if nothing is tied."""
    rules = [rule for rule in _embedding_rules(tying) if rule.ours != "source_embedding/embedding"]
    return [rule.theirs for rule in rules] if len(rules) > 1 else []


def _class_ties_arrays(config: Config) -> bool:
    """Whether the class shares what model.tying shares; with tying=embeddings it stores copies."""
    return config.model.tying in ("all", "target_output")


def _load(folder: Path) -> Tensors:
    """Reads the arrays of model.safetensors as float32."""
    path = folder / _FILE
    if not path.is_file():
        found = [name for name in ("pytorch_model.bin", f"{_FILE}.index.json") if (folder / name).is_file()]
        hint = (
            f"{folder} has {found[0]}, which is not read: pickles can run code, and sharded files are not "
            f"supported. Save it again with transformers: AutoModelForSeq2SeqLM.from_pretrained('{folder}')"
            ".save_pretrained('NEW', max_shard_size='50GB'), and copy the tokenizer files to NEW"
            if found
            else "give the folder of a model as --input=PATH"
        )
        raise UserError(f"{path} does not exist; {hint}")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # a damaged header raises errors of many types
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    check_tensors(tensors, path)
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}
