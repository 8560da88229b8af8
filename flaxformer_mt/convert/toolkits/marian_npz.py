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
from flaxformer_mt.convert.formats import Format, ImportOverrides, Weights, find_tying, refuse_overrides
from flaxformer_mt.convert.name_table import SAME, TRANSPOSED, Layout, Rule, rules_for
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

_ACTIVATIONS: dict[str, Any] = {"relu": "relu", "swish": "silu"}
_REQUIRED = ("dim-emb", "enc-depth", "dec-depth", "transformer-heads", "transformer-dim-ffn")
_NUMBERS: dict[str, tuple[type, float, float]] = {
    **dict.fromkeys(("enc-depth", "dec-depth"), toolkit.COUNT),
    **dict.fromkeys(("dim-emb", "transformer-heads"), toolkit.WIDTH),
    "transformer-dim-ffn": toolkit.FFN_WIDTH,
    **{f"transformer-dropout{end}": toolkit.RATE for end in ("", "-attention", "-ffn")},
}
# Options of networks that this package does not have.
_OFF = [
    *("layer-normalization", "right-left", "ulr", "transformer-disable-position-embeddings"),
    *(f"transformer-no-{name}" for name in ("affine", "bias", "projection")),
    *("transformer-pool", "transformer-rnn-projection", "transformer-train-position-embeddings"),
    "transformer-train-positions",
]
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-attention-mask": ("default",),
    "transformer-decoder-autoreg": ("self-attention", "rnn"),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-ffn-activation": tuple(_ACTIVATIONS),
    "transformer-ffn-depth": (2,),
    "transformer-tied-layers": ([],),
    "lemma-dim-emb": (0,),
    "factors-combine": ("sum",),
    **{f"tied-embeddings{end}": (True, False) for end in ("", "-src", "-all")},
    **dict.fromkeys(_OFF, (False,)),
}


def _read(path: Path, overrides: ImportOverrides) -> Weights:
    folder = path if path.is_dir() else path.parent
    refuse_overrides(overrides, folder)
    file = toolkit.find_file(path, ("model.npz", "*.npz"), what="a Marian model", without=".optimizer.npz")
    with _open_arrays(file) as arrays:
        options = _read_options(arrays, file)
        network = _make_network(options, file)
        vocabs = _read_vocabs(folder, file)
        sizes = {"source": vocabs.source.size, "target": vocabs.target.size}
        tensors = dict(_pad_arrays(arrays, network, sizes))
        return toolkit.make_weights(
            network, vocabs, tensors, _make_rules(network, tensors), path=file, what=_NAME
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
    supported = dict(_SUPPORTED)
    if options.get("transformer-decoder-autoreg") == "rnn":
        supported["dec-cell"] = ("ssru",)
    supported["transformer-decoder-dim-ffn"] = (0, options.get("transformer-dim-ffn"))
    toolkit.check_options(options, file, required=_REQUIRED, numbers=_NUMBERS, supported=supported)
    return options


def _make_network(options: Mapping[str, Any], file: Path) -> ModelConfig:
    pre, post, top, embedding = (
        str(options.get(f"transformer-{name}") or "").replace("d", "")  # dropout
        for name in ("preprocess", "postprocess", "postprocess-top", "postprocess-emb")
    )
    norm_position: Any = {("n", "a"): "pre", ("", "an"): "post"}.get((pre, post))
    if norm_position is None or top not in ("", "n") or embedding not in ("", "n"):
        raise UserError(
            f"{file}: transformer-preprocess {pre!r}, transformer-postprocess {post!r}, "
            f"transformer-postprocess-top {top!r} and transformer-postprocess-emb {embedding!r} (without d); "
            "supported: 'n' and 'a' (pre-norm) or '' and 'an' (post-norm), with 'n' or '' at the top and for "
            "embeddings: other models are not imported"
        )
    every, source, target = (
        bool(options.get(f"tied-embeddings{end}", False)) for end in ("-all", "-src", "")
    )
    attention, ffn = (options.get(f"transformer-dropout-{name}") for name in ("attention", "ffn"))
    autoregression = options.get("transformer-decoder-autoreg", "self-attention")
    return ModelConfig(
        num_encoder_layers=options["enc-depth"],
        num_decoder_layers=options["dec-depth"],
        decoder_self_attention="ssru" if autoregression == "rnn" else "attention",
        model_dim=options["dim-emb"],
        num_heads=options["transformer-heads"],
        ffn_dim=options["transformer-dim-ffn"],
        activation=_ACTIVATIONS[options.get("transformer-ffn-activation") or "swish"],
        norm_position=norm_position,
        norm_epsilon=1e-6,
        final_norm=top == "n",
        embedding_norm=embedding == "n",
        positions="sinusoidal_halves",
        output_bias=True,
        tying=find_tying(embeddings=every or source, output=every or target),
        dropout_rate=float(options.get("transformer-dropout") or 0),
        attention_dropout_rate=float(attention or 0),
        ffn_dropout_rate=float(ffn or 0),
    )


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


# [D, H, K] -> [D, HK], [H, E, D] -> [HE, D]: matrices from inputs to outputs.
_HEADS_OUT = Layout(lambda a: a.reshape(a.shape[0], -1), lambda a, shape: a.reshape(shape))
_HEADS_IN = Layout(lambda a: a.reshape(-1, a.shape[-1]), lambda a, shape: a.reshape(shape))
# [D] or [H, K] -> [1, D].
_ROW = Layout(lambda a: a.reshape(1, -1), lambda a, shape: a.reshape(shape))
_ATTENTION = [
    *(Rule(f"/{name}/kernel", f"_W{name[0]}", _HEADS_OUT) for name in ("query", "key", "value")),
    *(Rule(f"/{name}/bias", f"_b{name[0]}", _ROW) for name in ("query", "key", "value")),
    Rule("/output/kernel", "_Wo", _HEADS_IN),
    Rule("/output/bias", "_bo", _ROW),
]
_RECURRENCE = [Rule("/input/kernel", "_W"), Rule("/forget/kernel", "_Wf"), Rule("/forget/bias", "_bf", _ROW)]
_FEEDFORWARD = [
    Rule("/input/kernel", "_W1"),
    Rule("/input/bias", "_b1", _ROW),
    Rule("/output/kernel", "_W2"),
    Rule("/output/bias", "_b2", _ROW),
]
# Stack -> sublayer -> the end of its name, and what precedes the names of its norm.
_SUBLAYERS = {
    "encoder": {"self_attention": ("self", "_Wo"), "feedforward": ("ffn", "_ffn")},
    "decoder": {
        "self_attention": ("self", "_Wo"),
        "recurrence": ("rnn", "_ffn"),
        "cross_attention": ("context", "_Wo"),
        "feedforward": ("ffn", "_ffn"),
    },
}
_RULES = {"feedforward": _FEEDFORWARD, "recurrence": _RECURRENCE}


def _make_rules(network: ModelConfig, tensors: Mapping[str, Any]) -> list[Rule]:
    """Return the rules of a network; layers are counted from 1 in Marian."""
    pre_norm = network.norm_position == "pre"
    rules = _make_embedding_rules(network, tensors)
    for stack, count in (("encoder", network.num_encoder_layers), ("decoder", network.num_decoder_layers)):
        for number in range(count):
            for sublayer, (name, norm) in _SUBLAYERS[stack].items():
                ours, theirs = f"{stack}/layers_{number}/{sublayer}", f"{stack}_l{number + 1}_{name}"
                rules += rules_for([(ours, theirs)], _RULES.get(sublayer, _ATTENTION))
                # Before a recurrence, and there alone, the norm has the name of the sublayer.
                before = "" if pre_norm and sublayer == "recurrence" else norm
                rules += _norm_rules(f"{ours}_residual/norm", theirs + before, pre=pre_norm)
        rules += _norm_rules(f"{stack}/final_norm", f"{stack}_top", pre=False)
        rules += _norm_rules(f"{stack}/embedding_norm", f"{stack}_emb", pre=True)
    return rules


def _norm_rules(ours: str, theirs: str, *, pre: bool) -> list[Rule]:
    end = "_pre" if pre else ""
    return [
        Rule(f"{ours}/scale", f"{theirs}_ln_scale{end}", _ROW),
        Rule(f"{ours}/bias", f"{theirs}_ln_bias{end}", _ROW),
    ]


def _make_embedding_rules(network: ModelConfig, tensors: Mapping[str, Any]) -> list[Rule]:
    rules = [
        Rule("shared_embedding/embedding", "Wemb"),
        Rule("source_embedding/embedding", "encoder_Wemb"),
        Rule("target_embedding/embedding", "decoder_Wemb"),
        Rule("output_bias", f"{_OUTPUT}_b", _ROW),
    ]
    if network.tying in ("none", "embeddings"):
        old = f"{_OUTPUT}_W" in tensors
        rules.append(Rule("output_kernel", f"{_OUTPUT}_W{'' if old else 't'}", SAME if old else TRANSPOSED))
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
