"""Formats marian and hf-pre-norm: classes of transformers for models with a vocabulary of this package.

marian is MarianMTModel, the post-norm class of the OPUS-MT models. hf-pre-norm is
PegasusForConditionalGeneration, with one embedding for both languages; Pegasus models with their own
tokenizer (spiece.model) are not supported. AutoModelForSeq2SeqLM and AutoTokenizer load both formats:

    tokenizer, model = AutoTokenizer.from_pretrained(DIR), AutoModelForSeq2SeqLM.from_pretrained(DIR)
    tokenizer.batch_decode(model.generate(**tokenizer(lines, return_tensors="pt", padding=True)),
                           skip_special_tokens=True)

Position tables have 512 rows, or more if the longest source or translation needs them. Models without a start
symbol begin translations with the padding symbol, in both systems. Two flags of config.json determine whether
the embeddings and the output matrix are tied. With model.tying=embeddings, the class stores two copies of the
embedding, which are equal until the model is trained further.
"""

import dataclasses
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.foreign_files import check_network
from flaxformer_mt.convert.formats import Format, ImportOverrides, Outputs, Weights
from flaxformer_mt.convert.huggingface.generation_options import lost_options, write_generation
from flaxformer_mt.convert.huggingface.model_config import (
    BART_FIELDS,
    longest_target,
    make_config,
    make_model_fields,
    num_positions,
    read_model_fields,
)
from flaxformer_mt.convert.huggingface.tokenizer_files import (
    find_symbol_problem,
    read_exported_tokenizer,
    read_tokenizer,
    write_tokenizer,
)
from flaxformer_mt.convert.name_table import (
    ROW,
    TABLE_TOLERANCE,
    Constant,
    Rule,
    Table,
    half_split_order,
    read_names,
)
from flaxformer_mt.convert.network_fields import TYING, Field, Fields, any_value, find_problems
from flaxformer_mt.convert.stored_tensors import WEIGHTS_NAME, WRAPPERS, open_tensors, save_safetensors
from flaxformer_mt.convert.toolkits.fairseq import STACK_NAMES
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.positions import sinusoidal_half_table, sinusoidal_table
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

_BIAS = "final_logits_bias"
_NAMES = """
shared_embedding             model.shared
(source|target)_embedding    model.(encoder|decoder).embed_tokens
output                       lm_head
"""


def make_bart_table(config: Config, vocabs: Vocabs, *, what: str, positions: int) -> Table:
    model = config.model
    half_width = model.positions == "sinusoidal"  # the class has sines before cosines
    rules: list[Rule | Constant] = [Rule("output_bias", _BIAS, ROW)]
    rules += read_names(_NAMES, half_width=half_width)
    rules += read_names(STACK_NAMES, prefix="model.", half_width=half_width)
    rules += _make_constants(model, positions, vocabs.target.size)
    absent = ("norm_affine", "attention_bias", "ffn_bias")
    return formats.make_table(model, vocabs, rules, what=what, absent=absent)


def _make_constants(model: ModelConfig, positions: int, vocab_size: int) -> Iterable[Constant]:
    if not model.output_bias and model.positions != "sinusoidal_halves":  # M2M100 has none
        yield Constant(_BIAS, np.zeros((1, vocab_size), np.float32), optional=True)
    for stack in ("encoder", "decoder"):
        name = f"model.{stack}.embed_positions.weight"
        if model.positions == "sinusoidal_halves":
            # Files of earlier versions of transformers have the table, in which row 1 is for padding.
            table = sinusoidal_half_table(positions, model.model_dim)
            table[1] = 0
            yield Constant(f"{name}s", table, True, tolerance=TABLE_TOLERANCE)
        elif model.positions == "sinusoidal":
            order = half_split_order(model.model_dim)
            table = np.ascontiguousarray(sinusoidal_table(positions, model.model_dim)[:, order])
            yield Constant(name, table, True, tolerance=TABLE_TOLERANCE)


def open_bart_tensors(folder: Path) -> dict[str, Any]:
    """Open the tensors of a folder; add the prefix "model." to names that lack it, as in BartModel files."""
    tensors = open_tensors(folder)
    if any(name.startswith("model.") for name in tensors):
        return tensors
    return {name if name in ("lm_head.weight", _BIAS) else f"model.{name}": tensors[name] for name in tensors}


def has_output_bias(tensors: Mapping[str, Any]) -> bool:
    return _BIAS in tensors and bool(np.any(np.asarray(tensors[_BIAS])))


# Importing transformers takes seconds, so `open_model` imports it. A missing package is reported here.
for _package in ("torch", "transformers"):
    if importlib.util.find_spec(_package) is None:
        raise ModuleNotFoundError(f"No module named {_package!r}", name=_package)


def open_model(path: Path, overrides: ImportOverrides | None = None) -> Outputs:
    import torch
    from transformers import AutoModelForSeq2SeqLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # our own lines say what is done
    logging.set_verbosity_error()
    folder = path if path.is_dir() else path.parent
    # Always "eager": other attention kernels round differently or may not be installed.
    model, report = AutoModelForSeq2SeqLM.from_pretrained(
        folder,
        output_loading_info=True,
        dtype=torch.float32,
        local_files_only=True,
        attn_implementation="eager",
        key_mapping={WRAPPERS: ""},
    )
    del report["unexpected_keys"]  # such as tables that the class computes; `read` checks all names
    if mismatches := {kind: sorted(map(str, names)) for kind, names in report.items() if names}:
        raise UserError(f"{folder}: transformers reports missing or wrong arrays: {mismatches}")
    model.eval()

    def outputs(batch: Batch) -> np.ndarray:
        with torch.no_grad():
            return model(
                input_ids=torch.from_numpy(np.asarray(batch.source, np.int64)),
                attention_mask=torch.from_numpy(np.asarray(batch.source_mask, np.int64)),
                decoder_input_ids=torch.from_numpy(np.asarray(batch.target_in, np.int64)),
            ).logits.numpy()

    return outputs


_FIELDS = (*BART_FIELDS, *any_value("norm_affine", "attention_bias", "ffn_bias"))
_FORMAT_OF_NORM_POSITION = {"pre": "hf-pre-norm", "post": "marian"}


@dataclass(frozen=True)
class HuggingFaceFormat:
    """A format that `from_pretrained` of transformers loads as an object of class `class_name`."""

    name: str
    model_type: str
    class_name: str
    fields: Fields

    def make_format(self) -> Format:
        return Format(
            self.name,
            self.problems,
            self._write,
            open_model,
            self._read,
            lost_options=lost_options,
            more_problems=find_symbol_problem,
        )

    def problems(self, config: Config) -> list[str]:
        other = _FORMAT_OF_NORM_POSITION[config.model.norm_position]
        return [
            f"{line} (for {config.model.norm_position}: --format={other})"
            if "norm_position" in line
            else line
            for line in find_problems(self.fields, config)
        ]

    # ---- files ----

    def _write(self, weights: Weights, folder: Path, quantization: str) -> None:
        config, vocabs = weights.config, weights.vocabs
        table = make_bart_table(config, vocabs, what=self.name, positions=num_positions(config))
        # If only the embeddings are tied, the class stores copies.
        tensors = table.to_foreign(weights.leaves, tied=config.model.tying == "embeddings")
        write_tokenizer(vocabs, config, folder)
        write_generation(config, vocabs.target, folder, longest_target=longest_target(config))
        class_fields = {"architectures": [self.class_name], "model_type": self.model_type}
        formats.write_config_json(
            weights, folder, self.name, class_fields | make_model_fields(self.fields, config, vocabs)
        )
        save_safetensors(tensors, folder / WEIGHTS_NAME)

    def _read(self, path: Path, overrides: ImportOverrides) -> Weights:
        folder = path if path.is_dir() else path.parent
        stored = formats.read_config_json(folder)
        if stored.get("model_type") != self.model_type:
            raise UserError(
                f"{folder} has model_type {stored.get('model_type')}; {self.name} reads {self.model_type}"
            )
        tensors = open_bart_tensors(folder)
        fields, network = read_model_fields(self.fields, folder)
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
            network = dataclasses.replace(network, output_bias=has_output_bias(tensors))
            config = make_config(folder, fields, network, vocabs)
        check_network(config, folder)
        if problems := self.problems(config):
            raise UserError("\n".join(f"{self.name} cannot express this config: {line}" for line in problems))
        table = make_bart_table(config, vocabs, what=self.name, positions=network.max_positions or 0)
        return formats.read_weights(table, tensors, config, vocabs, path, may_omit_tied=True)


_TIES = "share_encoder_decoder_embeddings & tie_word_embeddings"
MARIAN = HuggingFaceFormat(
    "marian",
    "marian",
    "MarianMTModel",
    (Field("tying", _TIES, TYING, default=True), Field("norm_position", values="post"), *_FIELDS),
).make_format()
PEGASUS = HuggingFaceFormat(
    "hf-pre-norm",
    "pegasus",
    "PegasusForConditionalGeneration",
    (
        Field("tying", _TIES, {(True, True): "all", (True, False): "embeddings"}, default=True),
        Field("norm_position", values="pre"),
        *_FIELDS,
    ),
).make_format()
