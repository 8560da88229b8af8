"""Format bergamot: a Transformer for the translation engine of Bergamot and Firefox, which runs in browsers.

    model.deen.bin                  float32, which the engine rounds to 8 bits on loading
    model.deen.intgemm.alphas.bin   8 bits (int8), with activation scales measured on validation sentences
    model.deen.intgemm8.bin         8 bits (int8_dynamic); activation scales are computed for each product
    lex.deen.s2t.bin                shortlist; has all subwords if none is given
    vocab.deen.spm                  for both sides, or srcvocab.deen.spm and trgvocab.deen.spm
    registry.json                   names, sizes and SHA-256 of these files, and search options

A model in 8 bits is imported as float32. Only numpy is needed; no code in a file is executed.
"""

import functools
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.config import Config
from flaxformer_mt.convert.formats import Format, Weights, write_json
from flaxformer_mt.convert.parity_check import make_batch, read_sample
from flaxformer_mt.convert.toolkits import marian_binary as binary
from flaxformer_mt.convert.toolkits import marian_npz as marian
from flaxformer_mt.convert.toolkits.marian_network import OUTPUT, compute_log_probs
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab.model_file import read_pieces
from flaxformer_mt.vocab.shortlist import Shortlist

_NAME = "bergamot"
_REGISTRY = "registry.json"
_PATTERNS = ("model.*.bin",)
_ENDINGS = {"none": "bin", "int8": "intgemm.alphas.bin", "int8_dynamic": "intgemm8.bin"}
# The engine requires matrices whose numbers of inputs and outputs are multiples of these.
_INPUTS, _OUTPUTS = 64, 8
# Number of sentences on which activations are measured. The scale covers the mean of their maxima plus this
# number of standard deviations; Firefox's pipeline uses 1.1, but for batches, whose maxima are larger.
_SENTENCES, _DEVIATIONS = 500, 2.0


def _find_problems(config: Config) -> list[str]:
    return marian.find_marian_problems(config) + [
        f"model.{name} is {size}; supported: multiples of {_INPUTS}"
        for name in ("model_dim", "ffn_dim")
        if (size := getattr(config.model, name)) % _INPUTS
    ]


def _write(weights: Weights, folder: Path, quantization: str) -> None:
    data = weights.config.data
    pair = f"{data.source_language}{data.target_language}"
    files = marian.make_files(weights, multiple=_OUTPUTS)
    arrays = dict(files.arrays)
    if f"{OUTPUT}_Wt" in arrays:  # in 8 bits, the engine would transpose it
        arrays[f"{OUTPUT}_W"] = arrays.pop(f"{OUTPUT}_Wt").T
    matrices = [name for name in arrays if re.search("Wemb|_W.?$", name)]
    if quantization == "int8":
        arrays |= _measure_scales(weights, arrays, files.options)
    model = folder / f"model.{pair}.{_ENDINGS[quantization]}"
    stored = {**arrays, marian.OPTIONS: marian.encode_options(files.options)}
    binary.write_arrays(model, stored, matrices if quantization != "none" else ())
    entry: dict[str, Any] = {"model": _describe(model)}
    kinds = ("vocab",) if len(files.vocabs) == 1 else ("srcvocab", "trgvocab")
    for kind, content in zip(kinds, files.vocabs, strict=True):
        path = folder / f"{kind}.{pair}.spm"
        path.write_bytes(content)
        entry[kind] = _describe(path)
    search = marian.make_search(weights)
    entry["config"] = {name: search[name] for name in ("beam-size", "normalize", "word-penalty", "allow-unk")}
    entry["config"] |= {
        "skip-cost": search["beam-size"] == 1,
        "gemm-precision": "int8shiftAlphaAll" if quantization == "int8" else "int8shiftAll",
    }
    write_json({pair: entry}, folder / _REGISTRY)
    _write_shortlist(Shortlist({}, np.arange(weights.vocabs.target.size), weights.vocabs), folder)
    marian.write_own(weights, folder, _NAME)


def _measure_scales(
    weights: Weights, arrays: Mapping[str, np.ndarray], options: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    largest: dict[str, list[float]] = defaultdict(list)

    def note(name: str, x: np.ndarray) -> np.ndarray:
        largest[name].append(float(np.abs(x).max()))
        return x

    try:
        sources, targets, _ = read_sample(weights, _SENTENCES)
    except UserError as error:
        raise UserError(
            f"--quantization=int8 measures activations on sentences of the run's data: {error}; or give "
            "--quantization=int8_dynamic, which needs none"
        ) from error
    for source, target in zip(sources, targets, strict=True):
        batch = make_batch([source], [target], weights.vocabs, config=weights.config)
        ids, mask = np.asarray(batch.source), np.asarray(batch.source_mask)
        compute_log_probs(arrays, options, ids, mask, np.asarray(batch.target_out), note)
    scales = {
        name: binary.find_scale(float(np.mean(values) + _DEVIATIONS * np.std(values)))
        for name, values in largest.items()
    }
    # The scale for the part of the output matrix that a shortlist selects.
    scales["none"] = scales[next(name for name in (f"{OUTPUT}_W", "Wemb", "decoder_Wemb") if name in scales)]
    return {f"{name}{binary.ALPHA}": scale.reshape(1, 1) for name, scale in scales.items()}


def _describe(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return {"name": path.name, "size": len(content), "expectedSha256Hash": digest}


def _write_shortlist(shortlist: Shortlist, folder: Path) -> None:
    registry = json.loads((folder / _REGISTRY).read_text(encoding="utf-8"))
    ((pair, entry),) = registry.items()
    rules, vocabs = shortlist.rules, shortlist.vocabs
    if longer := next((key for key in rules if len(key) > 1), None):
        raise UserError(
            f"a rule of the shortlist has {len(longer)} subwords, "
            f"{' '.join(vocabs.source.pieces(longer))!r}; those of bergamot have one: give a "
            "file of prepare --shortlist=FILE"
        )
    source, target = (
        len(read_pieces((folder / entry[kind if kind in entry else "vocab"]["name"]).read_bytes()))
        for kind in ("srcvocab", "trgvocab")
    )
    lists = [rules.get((number,), np.zeros(0, np.int32)) for number in range(source)]
    end = vocabs.source.eos_id  # occurs in every source
    lists[end] = np.union1d(lists[end], shortlist.common)
    lists = [one[one < target] for one in lists]
    if not len(lists[-1]):  # the engine rejects an empty list at the end
        lists[-1] = np.array([vocabs.target.eos_id])
    path = folder / f"lex.{pair}.s2t.bin"
    binary.write_shortlist(path, lists)
    entry["lex"] = _describe(path)
    write_json(registry, folder / _REGISTRY)


FORMAT = Format(
    _NAME,
    _find_problems,
    _write,
    functools.partial(marian.open_model, patterns=_PATTERNS),
    functools.partial(marian.read_model, what=_NAME, patterns=_PATTERNS),
    quantity="log_probs",
    quantizations=tuple(_ENDINGS),
    lost_options=marian.list_lost,
    write_shortlist=_write_shortlist,
    more_problems=marian.find_start_problem,
)
