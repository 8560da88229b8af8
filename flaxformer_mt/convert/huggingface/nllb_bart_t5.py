"""Format hf: exports and imports pretrained models in the layout of their classes in transformers.

    bart                BART
    mbart               mBART-50
    m2m_100             M2M100 and NLLB-200
    t5, mt5             T5, T5 1.1, mT5, MADLAD-400, ByT5
    marian, pegasus     the formats marian and hf-pre-norm

The model_type in config.json determines the kind of model. An export writes the arrays under the names of the
class, and all other files as the import read or changed them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.config import Config, VocabConfig
from flaxformer_mt.config.directions import choose_tags, choose_target_tag, find_directions
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.foreign_files import check_network
from flaxformer_mt.convert.formats import Format, ImportOverrides, Weights
from flaxformer_mt.convert.huggingface import marian_pegasus
from flaxformer_mt.convert.huggingface.generation_options import read_search
from flaxformer_mt.convert.huggingface.model_config import make_data_config
from flaxformer_mt.convert.huggingface.pretrained_config import (
    BART_FIELDS,
    T5_FIELDS,
    Family,
    list_codes,
    make_model_config,
    read_family,
    read_vocab,
    write_vocab,
)
from flaxformer_mt.convert.huggingface.tokenizer_files import SETTINGS, find_symbol_problem
from flaxformer_mt.convert.name_table import Table, read_names
from flaxformer_mt.convert.network_fields import find_problems
from flaxformer_mt.convert.stored_tensors import WEIGHTS_NAME, open_tensors, save_safetensors
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.vocab import PretrainedVocab, Vocabs

# Suffixes of array names that occur in early files but that no version of transformers uses.
UNUSED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", "coder.version")

_T5_NAMES = """
shared_embedding                                                       shared
(source|target)_embedding                                              (encoder|decoder).embed_tokens
output                                                                 lm_head
(encoder|decoder)/layers_{n}/self_attention/(query|key|value|output)   (encoder|decoder).block.{n}.layer.0.SelfAttention.(q|k|v|o)
(encoder|decoder)/layers_{n}/self_attention_residual/norm              (encoder|decoder).block.{n}.layer.0.layer_norm
decoder/layers_{n}/cross_attention/(query|key|value|output)            decoder.block.{n}.layer.1.EncDecAttention.(q|k|v|o)
decoder/layers_{n}/cross_attention_residual/norm                       decoder.block.{n}.layer.1.layer_norm
(encoder|decoder)/layers_{n}/feedforward_residual/norm                 (encoder.block.{n}.layer.1|decoder.block.{n}.layer.2).layer_norm
(encoder|decoder)/relative_positions                                   (encoder|decoder).block.0.layer.0.SelfAttention.relative_attention_bias
(encoder|decoder)/final_norm                                           (encoder|decoder).final_layer_norm
"""  # noqa: E501
_T5_FEEDFORWARD = (
    "(encoder|decoder)/layers_{n}/feedforward/%s "
    "(encoder.block.{n}.layer.1|decoder.block.{n}.layer.2).DenseReluDense.%s"
)


def _make_t5_table(config: Config, vocabs: Vocabs) -> Table:
    # Of two input matrices, the gate is the first one.
    gated = config.model.activation in ("swiglu", "geglu_tanh")
    layers = ("(gate|input|output)", "(wi_0|wi_1|wo)") if gated else ("(input|output)", "(wi|wo)")
    rules = [*read_names(_T5_NAMES), *read_names(_T5_FEEDFORWARD % layers)]
    return formats.make_table(config.model, vocabs, rules, what=_NAME)


_NAME = "hf"
# Number of lines on which tokenizers are compared.
_LINES = 1000
# The formats for models with a vocabulary of this package, by model_type.
_WITH_OUR_VOCABULARY = {"marian": marian_pegasus.MARIAN, "pegasus": marian_pegasus.PEGASUS}


def _problems(config: Config) -> list[str]:
    if config.vocab.kind != "pretrained":
        return _format_with_our_vocabulary(config).problems(config)
    return find_problems(T5_FIELDS if _is_t5(config) else BART_FIELDS, config)


def _find_more_problems(weights: Weights) -> list[str]:
    vocab = weights.vocabs.target
    return [] if isinstance(vocab, PretrainedVocab) else find_symbol_problem(weights)


def _format_with_our_vocabulary(config: Config) -> Format:
    return _WITH_OUR_VOCABULARY["marian" if config.model.norm_position == "post" else "pegasus"]


def _is_t5(config: Config) -> bool:
    return config.model.positions == "relative"


def _make_table(config: Config, vocabs: Vocabs) -> Table:
    if _is_t5(config):
        return _make_t5_table(config, vocabs)
    positions = (config.model.longest_input or 0) + config.model.first_position
    return marian_pegasus.make_bart_table(config, vocabs, what=_NAME, positions=positions)


def _write(weights: Weights, folder: Path, quantization: str) -> None:
    config, vocab = weights.config, weights.vocabs.target
    if not isinstance(vocab, PretrainedVocab):
        write = _format_with_our_vocabulary(config).write
        assert write is not None
        write(weights, folder, quantization)
        return
    tensors = _make_table(config, weights.vocabs).to_foreign(weights.leaves, tied=False)
    for name in [name for name in tensors if name.endswith("embed_positions.weights")]:
        del tensors[name]  # computed by the class
    changes = {"vocab_size": vocab.size} | {
        field: "float32"
        for field in ("dtype", "torch_dtype")
        if f'"{field}"'.encode() in vocab.files["config.json"]
    }
    write_vocab(vocab, folder, {"config.json": changes, SETTINGS: _name_languages(config, vocab)})
    save_safetensors(tensors, folder / WEIGHTS_NAME)


def _name_languages(config: Config, vocab: PretrainedVocab) -> dict[str, str]:
    """Return the run's languages for the settings of the tokenizer; {} if the settings name no languages."""
    settings = vocab.files.get(SETTINGS, b"")
    direction = find_directions(config.data)[0]
    target = choose_target_tag(config.data, direction)
    if not target or b'"src_lang": "' not in settings:
        return {}
    tags = (*choose_tags(config.data, direction), target)
    if vocab.metadata.kind == "m2m_100":  # its class uses language codes without the underscores around tags
        tags = tuple(tag.strip("_") for tag in tags)
    if b"MBart50Tokenizer" in settings and tags[0] not in list_codes("mbart_50", {}):
        return {}  # the class only accepts source languages of its list
    return {"src_lang": tags[0], "tgt_lang": tags[1]}


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
    stored_tensors = (open_tensors if family.is_t5 else marian_pegasus.open_bart_tensors)(folder)
    tensors = {name: tensor for name, tensor in stored_tensors.items() if not name.endswith(UNUSED)}
    vocab, data = read_vocab(folder, family)
    vocabs = Vocabs(vocab, vocab, joint=True)
    tied, bias = _is_tied(family, tensors), marian_pegasus.has_output_bias(tensors)
    model = make_model_config(family, tied=tied, output_bias=bias)
    ids = {name: getattr(vocab, name) for name in ("pad_id", "bos_id", "eos_id", "unk_id")}
    config = Config(
        data=make_data_config(model.longest_input, **data),
        vocab=VocabConfig(kind="pretrained", size=vocab.size, **ids),
        model=model,
        search=read_search(folder, family.fields, vocab),
    )
    try:
        check_network(config, folder)
    except UserError as error:
        raise UserError(f"{folder}: its config.json makes this config: {error}") from error
    return formats.read_weights(
        _make_table(config, vocabs), tensors, config, vocabs, folder, may_omit_tied=True
    )


def _is_tied(family: Family, tensors: Mapping[str, Any]) -> bool:
    """Return whether the output matrix is tied to the embedding, which depends on the arrays in the file."""
    shared = "shared.weight" if family.is_t5 else "model.shared.weight"
    if "lm_head.weight" not in tensors or shared not in tensors:
        return True
    output, embedding = tensors["lm_head.weight"], tensors[shared]
    return output.shape == embedding.shape and np.array_equal(np.asarray(output), np.asarray(embedding))


def _compare_ids(weights: Weights, folder: Path) -> dict[str, Any]:
    """Compare the ids of transformers' tokenizer with the run's, on random lines and on all tags."""
    from transformers import AutoTokenizer

    vocab = weights.vocabs.target
    if not isinstance(vocab, PretrainedVocab):
        return {}
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = np.random.default_rng(0).integers(0, vocab.size, (_LINES, 12)).tolist()
    special = tokenizer.all_special_tokens  # in a text, symbols for transformers, and text for this package
    lines = [line for line in vocab.detokenize_all(ids) if not any(name in line for name in special)]
    start = int(vocab.metadata.target_tags)  # their ids begin with a tag
    pairs = zip(lines, vocab.tokenize_all(lines), tokenizer(lines)["input_ids"], strict=True)
    differing = [line for line, ours, theirs in pairs if list(ours) != theirs[start:]]
    differing += [tag for tag, number in vocab.tags.items() if tokenizer.convert_tokens_to_ids(tag) != number]
    if differing:
        problem = (
            f"the tokenizer of transformers gives other ids than the run for {len(differing)} of "
            f"{len(lines)} lines, such as {differing[0][:60]!r}"
        )
        if len(differing) > _LINES // 100:
            raise UserError(f"{problem}; nothing was written: import the model again with this version")
        warn_user(problem)
    return {"lines": len(lines), "differing_lines": len(differing)}


FORMAT = Format(
    _NAME,
    _problems,
    _write,
    marian_pegasus.open_model,
    _read,
    more_problems=_find_more_problems,
    compare_ids=_compare_ids,
)
