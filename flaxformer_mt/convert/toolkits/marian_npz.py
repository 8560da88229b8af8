"""Format marian-npz: a Transformer that Marian has trained, as Marian itself writes it; import only.

    model.npz                  the arrays, and under special:model.yml the options (else in model.npz.yml)
    model.npz.decoder.yml      names the vocabularies; without it, they are found by their names
    vocab.spm, or vocab.yml    one for both sides, or two; with vocab.yml also source.spm and target.spm

Translations begin with a vector of zeros: that of <pad>, which Marian does not have, and which gets the first
id after those of both vocabularies. Needs numpy alone; nothing of a file is unpickled.
"""

import contextlib
import functools
import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.convert.foreign_files import StoredArray, check_unpacked_size, read_bytes
from flaxformer_mt.convert.formats import Format, ImportOverrides, Weights, refuse_overrides
from flaxformer_mt.convert.name_table import FLAT_ROWS, LINEAR, SAME, Constant, Layout, Rule, read_names
from flaxformer_mt.convert.network_fields import (
    COUNT,
    FFN_WIDTH,
    RATE,
    TYING,
    WIDTH,
    Field,
    read_network,
)
from flaxformer_mt.convert.sentencepiece_file import Specials
from flaxformer_mt.convert.toolkits import toolkit_model as toolkit
from flaxformer_mt.errors import UserError, first_line
from flaxformer_mt.vocab import Vocabs
from flaxformer_mt.vocab.model_file import read_pieces

_NAME = "marian-npz"
_OPTIONS = "special:model.yml"
_OPTIONS_BYTES = 1 << 20
# Symbols of vocab.yml, and their ids in the vocabularies of Nematus, which have other names for them.
_EOS, _UNK = ("</s>", 0), ("<unk>", 1)
# The logit of entries that Marian does not have: low enough to take no probability from the others.
_NEVER = -100.0
_EMBEDDINGS = ("Wemb", "encoder_Wemb", "decoder_Wemb")
_OUTPUT = "decoder_ff_logit_out"

_FIELDS = (
    Field("num_encoder_layers", "enc-depth", bounds=COUNT),
    Field("num_decoder_layers", "dec-depth", bounds=COUNT),
    Field(
        "decoder_self_attention",
        "transformer-decoder-autoreg",
        {"self-attention": "attention", "rnn": "ssru"},
        default="self-attention",
    ),
    Field("model_dim", "dim-emb", bounds=WIDTH),
    Field("num_heads", "transformer-heads", bounds=WIDTH),
    Field("ffn_dim", "transformer-dim-ffn", bounds=FFN_WIDTH),
    Field("activation", "transformer-ffn-activation", {"relu": "relu", "swish": "silu"}, default="swish"),
    Field(
        "norm_position",
        "transformer-preprocess & transformer-postprocess",
        {("n", "a"): "pre", ("", "an"): "post"},
        default="",
    ),
    Field("norm_epsilon", values=1e-6),
    Field("final_norm", "transformer-postprocess-top", {"n": True, "": False}, default=""),
    Field("embedding_norm", "transformer-postprocess-emb", {"n": True, "": False}, default=""),
    Field("positions", values="sinusoidal_halves"),
    Field("output_bias", values=True),
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
    Field("dropout_rate", "transformer-dropout", bounds=RATE, default=0.0),
    Field("attention_dropout_rate", "transformer-dropout-attention", bounds=RATE, default=0.0),
    Field("ffn_dropout_rate", "transformer-dropout-ffn", bounds=RATE, default=0.0),
)
# Options of networks that this package does not have.
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


def _read(path: Path, overrides: ImportOverrides) -> Weights:
    folder = path if path.is_dir() else path.parent
    refuse_overrides(overrides, folder)
    file = toolkit.find_file(path, ("model.npz", "*.npz"), what="a Marian model", without=".optimizer.npz")
    with _open_arrays(file) as arrays:
        options = _read_options(arrays, file)
        network = _read_network(options, file)
        vocabs = _read_vocabs(folder, file)
        sizes = {"source": vocabs.source.size, "target": vocabs.target.size}
        tensors = dict(_pad_arrays(arrays, network, sizes))
        return toolkit.make_weights(
            network,
            vocabs,
            tensors,
            _make_rules(network, old_output=f"{_OUTPUT}_W" in tensors),
            path=file,
            what=_NAME,
        )


# ---- options ----


def _read_options(arrays: Mapping[str, Any], file: Path) -> dict[str, Any]:
    beside = file.with_name(f"{file.name}.yml")
    if _OPTIONS in arrays:
        stored = arrays[_OPTIONS]
        if math.prod(stored.shape) > _OPTIONS_BYTES:
            raise UserError(f"{file}: {_OPTIONS} has more than {_OPTIONS_BYTES} bytes; copy the file again")
        content = np.asarray(stored).astype(np.uint8).tobytes().rstrip(b"\0")
        options = toolkit.parse_yaml(content.decode(errors="replace"), f"{file}: {_OPTIONS}")
    elif beside.is_file():
        options = toolkit.read_yaml(beside)
    else:
        raise UserError(f"{file} has no {_OPTIONS}, and {beside.name} is not beside it; copy that file too")
    return options


def _read_network(options: Mapping[str, Any], file: Path) -> ModelConfig:
    options = dict(options)
    for end in ("preprocess", "postprocess", "postprocess-top", "postprocess-emb"):
        options[f"transformer-{end}"] = str(options.get(f"transformer-{end}") or "").replace(
            "d", ""
        )  # dropout
    others = _OTHERS | {"transformer-decoder-dim-ffn": (0, options.get("transformer-dim-ffn"))}
    if options.get("transformer-decoder-autoreg") == "rnn":
        others["dec-cell"] = ("ssru",)
    return read_network(_FIELDS, options, file, others=others)


# ---- arrays ----


@contextlib.contextmanager
def _open_arrays(file: Path) -> Iterator[dict[str, StoredArray]]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            check_unpacked_size(file)
            arrays = {}
            for entry in archive.zip.infolist():
                name, shape = entry.filename.removesuffix(".npy"), _read_shape(archive.zip, entry, file)
                arrays[name] = StoredArray(functools.partial(archive.__getitem__, name), shape)
            yield arrays
    except UserError:
        raise
    except Exception as error:  # a damaged file raises zip, zlib and value errors of many types
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{file} is not an .npz that can be read: {reason}") from error


def _read_shape(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, file: Path) -> tuple[int, ...]:
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else None
        read = read or np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    if dtype.kind != "f" and not entry.filename.startswith(_OPTIONS):
        raise UserError(
            f"{file}: {entry.filename} has the type {dtype}; quantised models are not read: give the model "
            "that Marian has trained, in float32"
        )
    if math.prod(shape) * dtype.itemsize > entry.file_size:
        raise UserError(f"{file}: {entry.filename} claims the shape {list(shape)}, but the file is smaller")
    return shape


def _pad_arrays(
    arrays: Mapping[str, StoredArray], network: ModelConfig, sizes: Mapping[str, int]
) -> Iterator[tuple[str, StoredArray]]:
    """Yield the arrays of a network, with entries for the symbols that Marian does not have."""
    target = sizes["target"]
    for name, array in arrays.items():
        if name in _EMBEDDINGS:
            yield name, _extend(array, 0, sizes["source" if name.startswith("encoder") else "target"])
        elif name in (f"{_OUTPUT}_Wt", f"{_OUTPUT}_W"):
            yield name, _extend(array, 1 if name.endswith("W") else 0, target)
        elif name == f"{_OUTPUT}_b":
            yield name, _extend(array, 1, target, value=_NEVER)
        elif name != _OPTIONS:
            yield name, array
    if f"{_OUTPUT}_b" not in arrays:  # output-omit-bias
        table = next((arrays[name] for name in ("decoder_Wemb", "Wemb") if name in arrays), None)
        rows = table.shape[0] if table is not None and table.shape else target
        none = StoredArray(lambda: np.zeros((1, rows), np.float32), (1, rows))
        yield f"{_OUTPUT}_b", _extend(none, 1, target, value=_NEVER)


def _extend(array: StoredArray, axis: int, size: int, *, value: float = 0.0) -> StoredArray:
    """Return an array with entries of one value at the end of an axis; as it is if it has no room for one."""
    if axis >= len(array.shape) or not 0 < size - array.shape[axis] <= size:
        return array
    widths = [(0, size - array.shape[axis] if number == axis else 0) for number in range(len(array.shape))]
    shape = tuple(length + after for length, (_, after) in zip(array.shape, widths, strict=True))
    return StoredArray(lambda: np.pad(np.asarray(array), widths, constant_values=value), shape)


# Matrices from inputs to outputs, and rows.
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
# Norms of sublayers; before a recurrence, and there alone, the norm has the name of the sublayer.
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
        rules.remove(next(rule for rule in rules if rule.theirs == f"{_OUTPUT}_Wt"))
        rules.append(Rule("output_kernel", f"{_OUTPUT}_W"))
    return rules


# ---- vocabulary ----


def _read_vocabs(folder: Path, file: Path) -> Vocabs:
    files = _find_vocab_files(folder, file)
    names = {side: _read_names(path) for side, path in files.items()}
    size = max(map(len, names.values()))
    models = files if all(path.suffix == ".spm" for path in files.values()) else None
    lists = [_make_list(names[side], size, files[side]) for side in ("source", "target")]
    return toolkit.read_vocabs(folder, lists, toolkit.Languages(), models=models)


def _find_vocab_files(folder: Path, file: Path) -> dict[str, Path]:
    for name in (f"{file.name}.decoder.yml", "decoder.yml"):
        if (folder / name).is_file():
            listed = toolkit.read_yaml(folder / name).get("vocabs")
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
    """Return a list of pieces with that for padding at the place `size`, the same one on both sides."""
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


FORMAT = Format.read_only(_NAME, _read)
