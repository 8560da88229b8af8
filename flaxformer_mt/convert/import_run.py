"""Imports a foreign model as a run directory, for translation, evaluation and further training.

Detects the format of the files, reads vocabularies that the user gives, and selects the languages of a
multilingual model.
"""

import dataclasses
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np

from flaxformer_mt.atomic_folder import new_folder
from flaxformer_mt.config import Config, DataConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.directions import choose_tags, choose_target_tag, find_directions
from flaxformer_mt.config.files import read_file
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.export_run import TOLERANCE
from flaxformer_mt.convert.formats import Format, ImportOverrides, Weights, find_format
from flaxformer_mt.convert.hub_store import fetch_model, find_hub_name
from flaxformer_mt.convert.huggingface.new_languages import NewTag, NewVocabulary, read_new_tags
from flaxformer_mt.convert.parity_check import OwnOutputs, Parity, check_tolerance, compare, compute_own
from flaxformer_mt.convert.sentencepiece_file import Specials, make_word_model
from flaxformer_mt.errors import UserError, describe_error, importing
from flaxformer_mt.object_store.remote_runs import fetch_input, open_copy, publish
from flaxformer_mt.parameter_trees import nest_leaves
from flaxformer_mt.runs.load_run import write_new_run
from flaxformer_mt.translation.language_tags import check_language
from flaxformer_mt.vocab import Vocab, Vocabs, load_vocabs
from flaxformer_mt.vocab.model_file import SPACE

# model_type of config.json, as transformers writes it -> format.
_MODEL_TYPES = {
    "marian": "marian",
    "pegasus": "hf-pre-norm",
    **dict.fromkeys(("bart", "mbart", "m2m_100", "t5", "mt5"), "hf"),
}
# Format -> patterns of names (of tensors or other entries of a checkpoint) by which its files are detected.
_STORED_NAMES: dict[str, tuple[str, ...]] = {
    "torch": (r"(en|de)coder\.layers\.0\.(self_attention\.query|recurrence\.forget)\.weight",),
    "torch-nn": (r"transformer\.encoder\.layers\.0\.self_attn\.in_proj_weight",),
    "handbuilt": (r"encoder\.layers\.0\.enc_self_attn\.W_Q\.weight",),
    "kokoyi": (r".*\.Wq",),
    "decoder-only": (r"blocks\.0\.attention\.heads\.0\..*",),
    "aiayn": (r"encoder\.layer_stack\.0\.slf_attn\.w_qs\.weight",),
    "fairseq": ("model", "args|cfg"),
    "opennmt-py": ("opt", "vocab"),
    "joeynmt": ("model_state",),
}
# Files with tensors.
_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt")

# Spellings of the special symbols.
_SPECIALS = {
    "pad": ("<pad>", "<blank>", "[PAD]"),
    "bos": ("<bos>", "<s>", "<sos>", "[BOS]"),
    "eos": ("<eos>", "</s>", "[EOS]"),
    "unk": ("<unk>", "[UNK]"),
}


def find_format_name(path: Path) -> str:
    if not path.exists():
        raise UserError(f"{path} does not exist; give the folder of the model as --input=PATH")
    folder = path if path.is_dir() else path.parent
    stored = formats.read_config_json(folder)
    ours = stored.get(formats.OUR_KEY)
    if isinstance(ours, dict) and ours.get("format") in formats.NAMES:
        return str(ours["format"])
    if (kind := stored.get("model_type")) is not None:
        if str(kind) in _MODEL_TYPES:
            return _MODEL_TYPES[str(kind)]
        raise _refuse(path, f"its config.json has model_type {kind}; known: {', '.join(_MODEL_TYPES)}")
    if isinstance(stored.get("model"), dict) and "decoder" in stored["model"]:
        return "eole"
    if path.suffix == ".chkpt":
        return "aiayn"
    if path.suffix == ".npz" or (path.is_dir() and any(path.glob("*.npz"))):
        return "marian-npz"
    if any(path.glob("model.*.bin")) if path.is_dir() else path.match("model.*.bin"):
        return "bergamot"
    files = [path] if path.is_file() else sorted(folder.iterdir())
    names = [_read_names(file) for file in files if file.suffix in _SUFFIXES]
    matches = [name for name in _STORED_NAMES if any(_has_names(name, group) for group in names)]
    if len(matches) != 1:
        reason = (
            f"the tensors are those of {' and '.join(matches)}"
            if matches
            else "no format is known that has its tensors"
        )
        raise _refuse(path, reason if any(names) else "its files have no tensors that can be read")
    return matches[0]


def _has_names(format_name: str, names: list[str]) -> bool:
    patterns = _STORED_NAMES[format_name]
    return all(any(re.fullmatch(pattern, name) for name in names) for pattern in patterns)


def _refuse(path: Path, reason: str) -> UserError:
    return UserError(
        f"the files of {path} do not say their format ({reason}); give --format={'|'.join(formats.NAMES)}"
    )


def _read_names(file: Path) -> list[str]:
    with importing("torch", what=str(file)):
        if file.suffix != ".safetensors":
            from flaxformer_mt.convert.stored_tensors import load_checkpoint

            return list(load_checkpoint(file))
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(file, "numpy") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read as safetensors: {error}") from error


def read_user_vocabs(path: Path) -> Vocabs:
    """Read the vocabularies that the user gives: a file for both languages, or a folder.

    The folder has joint.model, or source.model and target.model, or lists of words with the suffix .txt.
    """
    if path.is_file():
        vocab = _read_vocab(path)
        return Vocabs(vocab, vocab, joint=True)
    joint, source, target = (path / f"{name}.txt" for name in ("joint", "source", "target"))
    if joint.is_file():
        return read_user_vocabs(joint)
    if source.is_file() and target.is_file():
        return Vocabs(_read_vocab(source), _read_vocab(target), joint=False)
    return load_vocabs(path)


def _read_vocab(path: Path) -> Vocab:
    return Vocab.load(path) if path.suffix == ".model" else _read_words(path)


def _read_words(path: Path) -> Vocab:
    try:
        text = read_file(path, most=1 << 30).decode().replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a list of words that can be read: {error}") from error
    words = text.removesuffix("\n").split("\n")
    numbers: dict[str, int] = {}
    for number, word in enumerate(words):
        if not word or SPACE in word:
            what = f"contains {SPACE!r}, the symbol for a space" if word else "is empty"
            raise UserError(f"line {number + 1} of {path} {what}; each line is one word, in the order of ids")
        if word in numbers:
            raise UserError(f"lines {numbers[word] + 1} and {number + 1} of {path} are both {word!r}")
        numbers[word] = number
    symbols = {
        name: next((word for word in spellings if word in numbers), None)
        for name, spellings in _SPECIALS.items()
    }
    if missing := [
        f"{name} ({', '.join(_SPECIALS[name])})" for name, word in symbols.items() if word is None
    ]:
        raise UserError(
            f"{path} lacks {' and '.join(missing)}; each special symbol needs a line, and so an id"
        )
    return Vocab(make_word_model(words, Specials(**symbols)), name=str(path))  # type: ignore[arg-type]


def choose_languages(weights: Weights, languages: Sequence[str], new_tags: Collection[str] = ()) -> Config:
    """Return the config of a multilingual model for all directions between `languages`.

    For a model without language tags, `languages` are the source and the target language. `new_tags` are tags
    that will be added to the vocabulary.
    """
    data, tags = weights.config.data, dict.fromkeys((*weights.vocabs.target.tags, *new_tags), 0)
    if len(set(languages)) < 2 or len(set(languages)) < len(languages):
        raise UserError(f"--languages is {','.join(languages)}; give two different ones, as de,en")
    if data.tag_style == "opus" and new_tags:
        data = dataclasses.replace(data, target_tags="always")
    elif data.tag_style == "opus" and len(languages) > 2:
        raise UserError(
            f"--languages is {','.join(languages)}, but this model has no tags of languages; give the two "
            "that it translates between, as de,en"
        )
    source, target = languages[:2]
    data = dataclasses.replace(data, source_language=source, target_language=target)
    if len(languages) > 2:
        pairs = itertools.permutations(languages, 2)
        data = dataclasses.replace(data, dataset=",".join(f"parallel_text:{a}-{b}" for a, b in pairs))
    if data.tag_style == "t5":
        _list_tags(data)  # raises UserError for a language whose name T5 does not know
    elif tags and data.tag_style != "opus":
        for language in languages:
            check_language(language, "--languages", data, tags)
    return dataclasses.replace(weights.config, data=data)


def _list_tags(data: DataConfig) -> list[str]:
    tags = [
        tag
        for direction in find_directions(data)
        for tag in (*choose_tags(data, direction), choose_target_tag(data, direction))
    ]
    return [tag for tag in dict.fromkeys(tags) if tag]


class ImportResult(TypedDict, total=False):
    """The result of `import_run`."""

    # Format of the foreign model.
    format: str
    # The new run directory.
    run: str
    # Number of parameters.
    parameters: int
    # Number of parameter arrays.
    arrays: int
    # Number of subwords in the target vocabulary.
    pieces: int
    # With `new_vocabulary`: number of subwords removed from the vocabulary.
    pieces_removed: int
    # With `new_vocabulary`: number of subwords added to the vocabulary.
    pieces_added: int
    # Number of rows removed from the embedding and output arrays.
    rows_removed: int
    # Number of rows added to the embedding and output arrays.
    rows_added: int
    # Size of the removed rows.
    megabytes_removed: float
    # Size of the added rows.
    megabytes_added: float
    # Text file -> subwords per word before and after the change. An unknown character counts as one subword.
    pieces_per_word: dict[str, list[float]]
    # Largest absolute difference between the outputs of the foreign and of the imported model.
    largest_difference: float
    # Largest absolute output.
    largest_output: float
    # Compared outputs: logits or log_probs.
    quantity: str
    # Number of compared target tokens.
    tokens: int
    # Compared sentences; if none, the reason, and the four keys above are missing.
    checked_on: str


def import_run(
    path: str | Path,
    *,
    format_name: str | None = None,
    run_dir: str | Path,
    config: Config | None = None,
    vocab: str | Path | None = None,
    tolerance: float = TOLERANCE,
    languages: Sequence[str] | None = None,
    new_vocabulary: NewVocabulary | None = None,
) -> ImportResult:
    """Write a foreign model as checkpoint 0 of a new run directory; return a summary of the import.

    Args:
      path: the folder that `export` or the foreign system wrote, or the weights file in it; or hf:OWNER/NAME,
        a model on the Hugging Face Hub, which is downloaded.
      format_name: name of the format. None: detect it from the files.
      config: config of a model whose files do not contain one. None: read it from the files.
      vocab: folder of the vocabularies, if the model's files have none: SentencePiece models (joint.model, or
        source.model and target.model), or lists of words in the order of their ids (joint.txt, or source.txt
        and target.txt); or one such file. None: read them from the model's folder.
      tolerance: largest accepted absolute difference of outputs between the foreign and the imported model.
        If the largest absolute output exceeds 1, the tolerance is multiplied by that output.
      languages: the languages to translate between, for a multilingual pretrained model. None: the languages
        in the model's files, or de and en if the files name none.
      new_vocabulary: changes to the vocabulary of a pretrained model: subwords to remove and to add, and new
        languages. None: no changes.

    Raises:
      UserError: an unknown or export-only format, a run directory that is not empty, files that are missing,
        damaged or do not fit the config, or a difference above the tolerance. A failed import leaves no
        files.
    """
    check_tolerance(tolerance)
    origin, run_dir = str(path), open_copy(run_dir)
    if run_dir.exists() and not (run_dir.is_dir() and not any(run_dir.iterdir())):
        raise UserError(f"{run_dir} exists and is not an empty folder; give another --run=DIR")
    path = _fetch(path)
    source = find_format(format_name or find_format_name(path), formats.IMPORTED)
    overrides = ImportOverrides(config, None if vocab is None else read_user_vocabs(Path(vocab).expanduser()))
    weights, new_tags = _read(source, path, overrides, languages, new_vocabulary)
    if run_dir.is_symlink():
        run_dir = run_dir.resolve()  # the finished run is renamed, and must not replace the link
    with new_folder(run_dir) as partial:
        ours = None
        if source.open is not None:
            ours = compute_own(weights, quantity=source.quantity, read_data=False)
        changes: Mapping[str, Any] = {}
        if new_vocabulary is not None:
            from flaxformer_mt.convert.huggingface.vocabulary_changes import change_vocabulary

            tags = None if languages is None else _list_tags(weights.config.data)
            weights, changes = change_vocabulary(weights, new_vocabulary, tags, new_tags)
        leaves = nest_leaves(weights.leaves)
        written = {"format": source.name, "path": origin}
        write_new_run(partial, weights.config, weights.vocabs, leaves, origin=written)
        counts = {
            "parameters": sum(leaf.size for leaf in weights.leaves.values()),
            "arrays": len(weights.leaves),
            "pieces": weights.vocabs.target.size,
            **changes,
        }
        del weights, leaves  # so that only one of the two models is in memory
        checked: Mapping[str, Any] = {
            "checked_on": f"nothing: {source.name} files are read without their toolkit"
        }
        if ours is not None:
            checked = dataclasses.asdict(_compare(source, ours, path, overrides, tolerance))
    publish(run_dir)
    return cast(ImportResult, {"format": source.name, "run": str(run_dir), **counts, **checked})


def _fetch(path: str | Path) -> Path:
    """Return the local path of a model, which is downloaded from an object store or the Hub if necessary."""
    hub_name = find_hub_name(path)
    local = fetch_input(path) if hub_name is None else fetch_model(hub_name)
    if not local.exists():
        like_hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(@\w+)?", str(path))
        hint = f", or --input=hf:{path} for the model of Hugging Face's Hub" if like_hub_name else ""
        raise UserError(f"{local} does not exist; give the folder of the model as --input=PATH{hint}")
    return local


def _read(
    source: Format,
    path: Path,
    overrides: ImportOverrides,
    languages: Sequence[str] | None,
    new_vocabulary: NewVocabulary | None,
) -> tuple[Weights, list[NewTag]]:
    """Read and check a model, and select its languages; return it and the tags to add to its vocabulary."""
    if source.read is None:
        raise UserError(f"format {source.name} is export-only: its files do not contain the complete model")
    weights = source.read(path, overrides)
    if overrides.vocabs is not None:
        config = formats.fit_vocabulary(weights.config, overrides.vocabs)
        weights = dataclasses.replace(weights, config=config)
    new_tags = [] if new_vocabulary is None else read_new_tags(weights, new_vocabulary, languages or ())
    if languages is not None:
        config = choose_languages(weights, languages, [tag.name for tag in new_tags])
        weights = dataclasses.replace(weights, config=config)
    validate(weights.config)
    if bad := [name for name, leaf in weights.leaves.items() if not np.isfinite(leaf).all()]:
        raise UserError(f"the imported model has non-finite values in {', '.join(bad)}")
    return weights, new_tags


def _compare(
    source: Format, ours: OwnOutputs, path: Path, overrides: ImportOverrides, tolerance: float
) -> Parity:
    assert source.open is not None
    try:
        parity = compare(ours, source.open(path, overrides))
    except UserError:
        raise
    except Exception as error:  # the foreign system can fail with any exception
        reason = describe_error(error)
        raise UserError(f"{path} cannot be opened as a {source.name} model: {reason}") from error
    if not parity.is_within(tolerance):
        raise UserError(
            f"the imported model differs from {path} by {parity.largest_difference:.3g} in "
            f"{parity.quantity}, more than --tolerance={tolerance:g}; nothing was written"
        )
    return parity
