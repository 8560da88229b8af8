"""Format marian-npz: exports a Transformer to the files of Marian, and imports models trained with Marian.

    model.npz                  the arrays, and under special:model.yml the options (else in model.npz.yml)
    decoder.yml                names the vocabularies, and has the search options (or model.npz.decoder.yml)
    vocab.spm, or vocab.yml    one for both sides, or two; with vocab.yml also source.spm and target.spm

In Marian, the decoder starts with a vector of zeros, so an exported model must have model.target_start=zeros
or a start symbol whose embedding is zero. A model imported from model.npz starts with <pad>, whose embedding
is zero; Marian does not have this symbol, so its id is the first one after the ids of both vocabularies. Only
numpy is needed; nothing in a file is unpickled.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from flaxformer_mt.config import Config, ModelConfig, SearchConfig
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.foreign_files import check_network, check_unpacked_size, read_bytes
from flaxformer_mt.convert.formats import Format, ImportOverrides, Outputs, Weights, refuse_overrides
from flaxformer_mt.convert.huggingface.generation_options import length_power
from flaxformer_mt.convert.name_table import (
    FLAT_ROWS,
    LINEAR,
    SAME,
    Constant,
    Layout,
    Rule,
    Table,
    read_names,
)
from flaxformer_mt.convert.network_fields import (
    TYING,
    Field,
    any_value,
    find_problems,
    read_network,
    write_options,
)
from flaxformer_mt.convert.sentencepiece_file import Specials, add_fillers, drop_fillers
from flaxformer_mt.convert.toolkits import marian_binary
from flaxformer_mt.convert.toolkits import toolkit_model as toolkit
from flaxformer_mt.convert.toolkits.marian_network import OUTPUT, compute_log_probs
from flaxformer_mt.errors import UserError, describe_error
from flaxformer_mt.shapes import Batch
from flaxformer_mt.translation.constraints import make_symbols
from flaxformer_mt.vocab import Vocabs
from flaxformer_mt.vocab.model_file import read_pieces

_NAME = "marian-npz"
OPTIONS = "special:model.yml"
_OPTIONS_BYTES = 1 << 20
# Symbols of vocab.yml, and their ids in vocabularies of Nematus, where they have other names.
_EOS, _UNK = ("</s>", 0), ("<unk>", 1)
# The logit bias of symbols that Marian does not have: so low that they get no probability.
_NEVER = -100.0
_MODEL = "model.npz"
_FILES = (_MODEL, "*.npz")
_EMBEDDINGS = ("Wemb", "encoder_Wemb", "decoder_Wemb")

_FIELDS = (
    Field("num_encoder_layers", "enc-depth"),
    Field("num_decoder_layers", "dec-depth"),
    Field(
        "decoder_self_attention",
        "transformer-decoder-autoreg",
        {"self-attention": "attention", "rnn": "ssru"},
        default="self-attention",
    ),
    Field("model_dim", "dim-emb"),
    Field("num_heads", "transformer-heads"),
    Field("ffn_dim", "transformer-dim-ffn"),
    Field("activation", "transformer-ffn-activation", {"relu": "relu", "swish": "silu"}, default="swish"),
    Field(
        "norm_position",
        "transformer-preprocess & transformer-postprocess",
        {("n", "a"): "pre", ("", "an"): "post"},
        default="",
    ),
    Field("norm_epsilon", values=1e-6),
    Field("padding_mask", values=("source", "both")),
    Field("target_start", values=("symbol", "zeros")),
    *any_value("norm_affine", "attention_bias", "ffn_bias"),
    Field("final_norm", "transformer-postprocess-top", {"n": True, "": False}, default=""),
    Field("embedding_norm", "transformer-postprocess-emb", {"n": True, "": False}, default=""),
    Field("positions", values="sinusoidal_halves"),
    Field("output_bias", values=(True, False)),
    Field(
        "tying",
        "tied-embeddings-all & tied-embeddings-src & tied-embeddings",
        {
            (every, source, target): TYING[every or source, every or target]
            for every in (True, False)
            for source in (False, True)
            for target in (False, True)
        },
        default=False,
    ),
    Field("dropout_rate", "transformer-dropout", default=0.0),
    Field("attention_dropout_rate", "transformer-dropout-attention", default=0.0),
    Field("ffn_dropout_rate", "transformer-dropout-ffn", default=0.0),
)
# Fields whose parameters Marian always has; if a network lacks them, they are 0, or 1 for scales.
_ALWAYS = ("norm_affine", "attention_bias", "ffn_bias", "output_bias")
# Options that Marian requires in every file, even if the network does not depend on them.
_CONSTANTS: dict[str, Any] = {
    "version": "v1.12.0",
    "dec-cell": "gru",
    "enc-cell": "gru",
    "enc-type": "bidirectional",
    **{"dec-cell-base-depth": 2, "dec-cell-high-depth": 1, "enc-cell-depth": 1, "dim-rnn": 1024},
    **{"input-types": [], "skip": False, "output-omit-bias": False, "separator-symbol": "[eos]"},
    **{"lemma-dependency": "", "factors-dim-emb": 0, "ulr-dim-emb": 0, "ulr-trainable-transformation": False},
    **{"bert-train-type-embeddings": True, "bert-type-vocab-size": 2, "transformer-decoder-dim-ffn": 0},
    **{"transformer-dim-aan": 2048, "transformer-aan-depth": 2, "transformer-aan-nogate": False},
    **{"transformer-aan-activation": "swish", "transformer-guided-alignment-layer": "last"},
    **{"transformer-alibi-shift": False, "transformer-alibi-trainable": False},
}
# Options of networks that this package does not support.
_OFF = [
    *("layer-normalization", "right-left", "ulr", "transformer-disable-position-embeddings"),
    *(f"transformer-no-{name}" for name in ("affine", "bias", "projection")),
    *("transformer-pool", "transformer-rnn-projection", "transformer-train-position-embeddings"),
    "transformer-train-positions",
]
_OTHERS: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-attention-mask": ("default",),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-ffn-depth": (2,),
    "transformer-tied-layers": ([],),
    "lemma-dim-emb": (0,),
    "factors-combine": ("sum",),
    **dict.fromkeys(_OFF, (False,)),
}


def read_model(
    path: Path, overrides: ImportOverrides, *, what: str = _NAME, patterns: Sequence[str] = _FILES
) -> Weights:
    folder = path if path.is_dir() else path.parent
    refuse_overrides(overrides, folder)
    file = _find_model(path, patterns)
    own = formats.OUR_KEY in formats.read_config_json(folder)
    arrays = _read_arrays(file)
    network = _read_network(_read_options(arrays, file), file)
    vocabs = formats.find_vocabs(folder, overrides) if own else _read_vocabs(folder, file)
    sizes = {"source": vocabs.source.size, "target": vocabs.target.size}
    tensors = dict(_fit_arrays(arrays, sizes, cut=own))
    old_output = f"{OUTPUT}_W" in tensors
    if not own:
        rules = _make_rules(network, old_output=old_output)
        codes = re.match(r"model\.([a-z]{2})([a-z]{2})\.", file.name)  # in file names of Bergamot
        if what != _NAME:  # training would change the embedding of <pad>, which no other format needs
            network = replace(network, target_start="zeros")
        languages = toolkit.languages_of(codes.groups() if codes else (None, None))
        weights = toolkit.make_weights(
            network, vocabs, tensors, rules, path=file, what=what, languages=languages
        )
        # Firefox, whose files come without decoder.yml, uses greedy search.
        usual = SearchConfig.beam_size if what == _NAME else 1
        beam_size = _read_decoder(folder, file).get("beam-size", usual)
        search = SearchConfig(method="greedy") if beam_size == 1 else SearchConfig(beam_size=beam_size)
        return replace(weights, config=replace(weights.config, search=search))
    config = formats.find_config(folder, overrides)
    check_network(config, folder)
    table = _make_table(config.model, vocabs, old_output=old_output)
    return formats.read_weights(table, tensors, config, vocabs, file)


def _make_table(network: ModelConfig, vocabs: Vocabs, *, old_output: bool = False) -> Table:
    rules = _make_rules(network, old_output=old_output)
    return formats.make_table(network, vocabs, rules, what=_NAME, absent=_ALWAYS)


# ---- export ----


class Files(NamedTuple):
    """The content of Marian's files: arrays by name, options, and one SentencePiece model or one per side."""

    arrays: dict[str, np.ndarray]
    options: dict[str, Any]
    vocabs: list[bytes]


def make_files(weights: Weights, *, multiple: int = 1) -> Files:
    """Make the content of Marian's files; vocabularies are padded to a multiple of `multiple` subwords."""
    config, vocabs = weights.config, weights.vocabs
    tensors = _make_table(config.model, vocabs).to_foreign(weights.leaves)
    models, rows = [], {}
    for side, stack, vocab in (("source", "encoder", vocabs.source), ("target", "decoder", vocabs.target)):
        model, size = drop_fillers(vocab.model)
        rows_left = tensors["Wemb" if "Wemb" in tensors else f"{stack}_Wemb"][size:]
        # If targets start with zeros, these rows were only trained by label smoothing.
        if config.model.target_start == "symbol" and rows_left.any():
            model = vocab.model
        model, rows[side] = add_fillers(model, multiple)
        models.append(model)
    arrays = dict(_fit_arrays(tensors, rows, cut=True))
    # Vocabularies that only differ in normalization are written once: the target model only detokenizes.
    same = read_pieces(vocabs.source.model) == read_pieces(vocabs.target.model)
    options = _CONSTANTS | {name: values[0] for name, values in _OTHERS.items()}
    options |= write_options(_FIELDS, config.model) | {"dim-vocabs": [rows["source"], rows["target"]]}
    if config.model.decoder_self_attention == "ssru":
        options["dec-cell"] = "ssru"
    return Files(arrays, options, models[: 1 if same else 2])


def write_own(weights: Weights, folder: Path, what: str) -> None:
    """Write the run's config and vocabularies, so that an import can read them."""
    (folder / formats.VOCAB_NAME).mkdir(exist_ok=True)
    weights.vocabs.save(folder / formats.VOCAB_NAME)
    formats.write_config_json(weights, folder, what, {})


def encode_options(options: Mapping[str, Any]) -> np.ndarray:
    return np.frombuffer(yaml.safe_dump(dict(options)).encode() + b"\0", np.int8)


def _write(weights: Weights, folder: Path, quantization: str) -> None:
    files = make_files(weights)
    names = ["vocab.spm"] * 2 if len(files.vocabs) == 1 else ["vocab.source.spm", "vocab.target.spm"]
    for name, model in zip(names, files.vocabs, strict=False):
        (folder / name).write_bytes(model)
    arrays: dict[str, Any] = {**files.arrays, OPTIONS: encode_options(files.options)}
    np.savez(folder / _MODEL, **arrays)
    search = {"relative-paths": True, "models": [_MODEL], "vocabs": names} | make_search(weights)
    (folder / "decoder.yml").write_text(yaml.safe_dump(search, sort_keys=False))
    write_own(weights, folder, _NAME)


def find_marian_problems(config: Config) -> list[str]:
    problems, model = find_problems(_FIELDS, config), config.model
    if model.norm_position == "pre" and model.decoder_self_attention == "attention":
        # Seen with Marian 1.12.42: from the second token on, keys and values of earlier tokens lack the norm.
        problems.append(
            "model.norm_position is pre; supported with model.decoder_self_attention=attention: post, since "
            "Marian translates with other keys than it trains with; use ssru or post"
        )
    return problems


def find_start_problem(weights: Weights) -> list[str]:
    """Return a problem if the model starts targets with a symbol whose embedding is not zero."""
    tables = [leaf for path, leaf in weights.leaves.items() if re.match("(shared|target)_embedding/", path)]
    start = weights.vocabs.target.bos_id
    if weights.config.model.target_start == "zeros" or not any(table[start].any() for table in tables):
        return []
    return [
        "model.target_start is symbol, whose embedding is not zero as in Marian; train with "
        "--config.model.target_start=zeros"
    ]


def make_search(weights: Weights) -> dict[str, Any]:
    """Return the search options for Marian, which divides log-probabilities by a power of the length.

    Marian's length limit is a multiple of the source length, so large that it is not below this package's
    limit for sources of four or more tokens.
    """
    search, vocab = weights.config.search, weights.vocabs.target
    return {
        "beam-size": search.beam_size if search.method == "beam" else 1,
        "normalize": round(length_power(search), 6),
        "word-penalty": 0,
        "max-length-factor": math.ceil(search.max_length_ratio + search.max_length_offset / 4),
        "allow-unk": vocab.unk_id not in make_symbols(vocab, search).never,
    }


def list_lost(search: SearchConfig) -> list[str]:
    others = tuple(name for name in search.suppress if name != _UNK[0])  # the unknown symbol is in the files
    lost = formats.constraining_options(replace(search, suppress=others))
    lost += formats.changed_options(search, ("rerank", "mbr"))
    return lost + ["search.method=sample"] * (search.method == "sample")


def open_model(
    path: Path, overrides: ImportOverrides | None = None, *, patterns: Sequence[str] = _FILES
) -> Outputs:
    file = _find_model(path, patterns)
    arrays = _read_arrays(file)
    network = _read_network(_read_options(arrays, file), file)
    # An import has converted 8-bit matrices to float32, so inputs of products are only rounded for exports.
    rounds = overrides is None and marian_binary.is_quantized(file)
    inputs = marian_binary.rounding(arrays) if rounds else None

    def outputs(batch: Batch) -> np.ndarray:
        source, target = np.asarray(batch.source), np.asarray(batch.target_out)
        # Ids that Marian does not have select rows that are appended here.
        sizes = {"source": int(source.max(initial=0)) + 1, "target": int(target.max(initial=0)) + 1}
        padded = dict(_fit_arrays(arrays, sizes))
        mask = np.asarray(batch.source_mask)
        return compute_log_probs(padded, write_options(_FIELDS, network), source, mask, target, inputs)

    return outputs


def _find_model(path: Path, patterns: Sequence[str]) -> Path:
    return toolkit.find_file(path, patterns, what="a Marian model", without=".optimizer.npz")


# ---- options ----


def _read_options(arrays: Mapping[str, Any], file: Path) -> dict[str, Any]:
    beside = file.with_name(f"{file.name}.yml")
    if OPTIONS in arrays:
        stored = arrays[OPTIONS]
        if stored.size > _OPTIONS_BYTES:
            raise UserError(f"{file}: {OPTIONS} has more than {_OPTIONS_BYTES} bytes; copy the file again")
        content = stored.astype(np.uint8).tobytes().rstrip(b"\0")
        options = toolkit.parse_yaml(content.decode(errors="replace"), f"{file}: {OPTIONS}")
    elif beside.is_file():
        options = toolkit.read_yaml(beside)
    else:
        raise UserError(f"{file} has no {OPTIONS}, and {beside.name} is not beside it; copy that file too")
    return options


def _read_network(options: Mapping[str, Any], file: Path) -> ModelConfig:
    options = dict(options)
    for name in (f"transformer-{end}process{top}" for end in ("pre", "post") for top in ("", "-top", "-emb")):
        options[name] = str(options.get(name) or "").replace("d", "")  # which is dropout
    others = _OTHERS | {"transformer-decoder-dim-ffn": (0, options.get("transformer-dim-ffn"))}
    if options.get("transformer-decoder-autoreg") == "rnn":
        others["dec-cell"] = ("ssru",)
    return read_network(_FIELDS, options, file, others=others)


# ---- arrays ----


def _read_arrays(file: Path) -> dict[str, np.ndarray]:
    if file.suffix == ".bin":
        return marian_binary.read_arrays(file)
    if not file.is_file():  # reading a pipe would block
        raise UserError(f"{file} is no file; copy it again")
    try:
        with np.load(file, allow_pickle=False) as archive:
            check_unpacked_size(file)
            arrays = dict(archive)
    except UserError:
        raise
    except Exception as error:  # a damaged file raises zip, zlib and value errors of many types
        reason = describe_error(error)
        raise UserError(f"{file} is not an .npz that can be read: {reason}") from error
    for name, array in arrays.items():
        if array.dtype.kind != "f" and name != OPTIONS:
            raise UserError(
                f"{file}: {name} has the type {array.dtype}; quantized models are not read: give the model "
                "that Marian has trained, in float32"
            )
    return arrays


def _fit_arrays(
    arrays: Mapping[str, np.ndarray], sizes: Mapping[str, int], *, cut: bool = False
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a network's arrays with rows for symbols that Marian lacks; `cut` removes unused rows."""
    target = sizes["target"]
    for name, array in arrays.items():
        if name in _EMBEDDINGS:
            yield name, _fit(array, 0, sizes["source" if name.startswith("encoder") else "target"], cut=cut)
        elif name in (f"{OUTPUT}_Wt", f"{OUTPUT}_W"):
            yield name, _fit(array, 1 if name.endswith("W") else 0, target, cut=cut)
        elif name == f"{OUTPUT}_b":
            yield name, _fit(array, 1, target, value=_NEVER, cut=cut)
        elif name != OPTIONS and not name.endswith(marian_binary.ALPHA):
            yield name, array
    if f"{OUTPUT}_b" not in arrays:  # output-omit-bias
        table = next((arrays[name] for name in ("decoder_Wemb", "Wemb") if name in arrays), None)
        rows = table.shape[0] if table is not None and table.shape else target
        none = np.zeros((1, rows), np.float32)
        yield f"{OUTPUT}_b", _fit(none, 1, target, value=_NEVER, cut=cut)


def _fit(array: np.ndarray, axis: int, size: int, *, value: float = 0.0, cut: bool = False) -> np.ndarray:
    """Pad the end of an axis with `value` up to `size` entries; with `cut`, also truncate a longer axis."""
    length = array.shape[axis] if axis < array.ndim else size
    if not 0 < size - length <= size and not (cut and size < length):
        return array
    kept = (slice(None),) * axis + (slice(size),)
    widths = [(0, max(0, size - length) if number == axis else 0) for number in range(array.ndim)]
    return np.pad(array[kept], widths, constant_values=value)


# Matrices are [in, out]; vectors are rows.
_LAYOUTS = {
    "_attention/(query|key|value)/kernel": Layout(
        lambda a: a.reshape(a.shape[0], -1), lambda a, shape: a.reshape(shape)
    ),
    "_attention/output/kernel": FLAT_ROWS,
    "bias|scale": Layout(lambda a: a.reshape(1, -1), lambda a, shape: a.reshape(shape)),
    "output_kernel": LINEAR,
    "": SAME,
}
_NAMES = """
shared_embedding/embedding            Wemb
(source|target)_embedding/embedding   (encoder|decoder)_Wemb
output_kernel                         decoder_ff_logit_out_Wt
output_bias                           decoder_ff_logit_out_b
(encoder|decoder)/layers_{n}/self_attention/(query|key|value|output)/kernel  (encoder|decoder)_l{n+1}_self_W(q|k|v|o)
(encoder|decoder)/layers_{n}/self_attention/(query|key|value|output)/bias    (encoder|decoder)_l{n+1}_self_b(q|k|v|o)
decoder/layers_{n}/recurrence/(input|forget)/kernel                          decoder_l{n+1}_rnn_(W|Wf)
decoder/layers_{n}/recurrence/forget/bias                                    decoder_l{n+1}_rnn_bf
decoder/layers_{n}/cross_attention/(query|key|value|output)/kernel           decoder_l{n+1}_context_W(q|k|v|o)
decoder/layers_{n}/cross_attention/(query|key|value|output)/bias             decoder_l{n+1}_context_b(q|k|v|o)
(encoder|decoder)/layers_{n}/feedforward/(input|output)/kernel               (encoder|decoder)_l{n+1}_ffn_W(1|2)
(encoder|decoder)/layers_{n}/feedforward/(input|output)/bias                 (encoder|decoder)_l{n+1}_ffn_b(1|2)
(encoder|decoder)/final_norm/(scale|bias)                                    (encoder|decoder)_top_ln_(scale|bias)
(encoder|decoder)/embedding_norm/(scale|bias)                                (encoder|decoder)_emb_ln_(scale|bias)_pre
"""  # noqa: E501
# Norms of sublayers. Only a norm before a recurrence has the name of its sublayer.
_NORMS = """
(encoder|decoder)/layers_{n}/self_attention_residual/norm  (encoder|decoder)_l{n+1}_self_Wo
decoder/layers_{n}/cross_attention_residual/norm           decoder_l{n+1}_context_Wo
(encoder|decoder)/layers_{n}/feedforward_residual/norm     (encoder|decoder)_l{n+1}_ffn_ffn
"""


def _make_rules(network: ModelConfig, *, old_output: bool = False) -> list[Rule | Constant]:
    pre = network.norm_position == "pre"
    end = "_pre" if pre else ""
    norms = (
        _NORMS + f"decoder/layers_{{n}}/recurrence_residual/norm decoder_l{{n+1}}_rnn{'' if pre else '_ffn'}"
    )
    rules = read_names(_NAMES, layouts=_LAYOUTS)
    rules += read_names(
        norms, parameters={"scale": f"_ln_scale{end}", "bias": f"_ln_bias{end}"}, layouts=_LAYOUTS
    )
    if old_output:
        rules.remove(next(rule for rule in rules if rule.theirs == f"{OUTPUT}_Wt"))
        rules.append(Rule("output_kernel", f"{OUTPUT}_W"))
    return rules


# ---- vocabulary ----


def _read_vocabs(folder: Path, file: Path) -> Vocabs:
    files = _find_vocab_files(folder, file)
    names = {side: _read_names(path) for side, path in files.items()}
    size = max(map(len, names.values()))
    models = files if all(path.suffix == ".spm" for path in files.values()) else None
    lists = [_make_list(names[side], size, files[side]) for side in ("source", "target")]
    return toolkit.read_vocabs(folder, lists, toolkit.Languages(), models=models)


def _read_decoder(folder: Path, file: Path) -> dict[str, Any]:
    """Return the translation options in a folder: decoder.yml of Marian or config.yml of Bergamot."""
    names = (f"{file.name}.decoder.yml", "decoder.yml", "config.yml")
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    return {} if path is None else toolkit.read_yaml(path)


def _find_vocab_files(folder: Path, file: Path) -> dict[str, Path]:
    listed = _read_decoder(folder, file).get("vocabs")
    files = [folder / Path(str(entry)).name for entry in listed] if isinstance(listed, list) else []
    if len(files) in (1, 2) and all(path.is_file() for path in files):
        return {"source": files[0], "target": files[-1]}
    for pattern in ("*vocab*.spm", "*vocab*.yml", "*vocab*.yaml", "*vocab*.json"):
        if files := sorted(folder.glob(pattern)):
            return toolkit.choose_sides(files, toolkit.Languages(), what="vocabularies", folder=folder)
    raise UserError(
        f"{folder} has no vocabulary, such as vocab.spm or vocab.yml; copy what --vocabs of Marian named"
    )


def _read_names(path: Path) -> list[str]:
    if path.suffix == ".spm":
        return [piece.text for piece in read_pieces(read_bytes(path), origin=str(path))]
    ids = toolkit.read_yaml(path, as_text=True)
    numbers = {}
    for name, number in ids.items():
        if not isinstance(number, str) or not number.strip().isdecimal() or int(number) > 1 << 24:
            raise UserError(f"{path} gives {name!r:.40} the id {number!r:.40}; each piece has a whole number")
        numbers[int(number)] = name
    if len(numbers) < len(ids) or not numbers or max(numbers) > 2 * len(ids):
        raise UserError(f"{path} is no vocabulary: each piece needs an id of its own, from 0 on")
    return [numbers.get(number, f"<unnamed {number}>") for number in range(max(numbers) + 1)]


def _make_list(names: list[str], size: int, path: Path) -> toolkit.PieceList:
    """Return the subwords of one side, with the padding symbol at id `size`, as on the other side."""
    eos, unk = (
        symbol if symbol in names else names[number] if number < len(names) else ""
        for symbol, number in (_EOS, _UNK)
    )
    if not eos or not unk or path.suffix == ".spm" and (_EOS[0] not in names or _UNK[0] not in names):
        raise UserError(f"{path} has no </s> and <unk>; give the vocabulary that Marian was trained with")
    fillers = [f"<unnamed {number}>" for number in range(len(names), size)]
    pad = next(name for name in ("<pad>", "<padding>", "<nothing>") if name not in names)
    unused = {name for name in (*names, *fillers) if name.startswith("<unnamed ")}
    return toolkit.PieceList([*names, *fillers, pad], Specials(unk, eos, pad), unused)


FORMAT = Format(
    _NAME,
    find_marian_problems,
    _write,
    open_model,
    read_model,
    quantity="log_probs",
    lost_options=list_lost,
    more_problems=find_start_problem,
)
