"""Converts between vocabularies and the tokenizer files of Hugging Face's MarianTokenizer.

MarianTokenizer segments text with one SentencePiece model per language, then looks up the subwords in
vocab.json, whose ids may differ from SentencePiece's. An import renumbers the subwords of the SentencePiece
models to the ids of vocab.json.

For an export of this package, both tokenizers give the same ids for any text that does not begin with >>,
where MarianTokenizer expects a language code (>>fr<<). Models of other projects have three differences:
 * Names of special symbols inside a text (</s>) are symbols in MarianTokenizer, plain text in this package.
 * SentencePiece subwords that vocab.json lacks are unknown in MarianTokenizer; this package segments the text
   into smaller subwords.
 * A run of characters that the SentencePiece model lacks is looked up as a whole by MarianTokenizer, so that
   it is mostly unknown; in this package, the characters that vocab.json has keep their ids.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flaxformer_mt.config import Config
from flaxformer_mt.config.directions import find_directions
from flaxformer_mt.config.files import read_file, read_json_object
from flaxformer_mt.convert.formats import Weights, read_config_json, write_json
from flaxformer_mt.convert.sentencepiece_file import Specials, name_of, renumber
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocab, Vocabs
from flaxformer_mt.vocab.model_file import Settings, read_settings

_SPM = {"source": "source.spm", "target": "target.spm"}
_ID_FILES = {"source": "vocab.json", "target": "target_vocab.json"}
SETTINGS = "tokenizer_config.json"

_DEFAULT_TOKENS = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}


def find_symbol_problem(weights: Weights) -> list[str]:
    source, target = (_specials_of(vocab) for vocab in (weights.vocabs.source, weights.vocabs.target))
    if source == target:
        return []
    return [
        "Hugging Face's tokenizer has one set of special symbols, but the source vocabulary has "
        f"{source} and the target vocabulary {target}; train both with the same symbols and ids"
    ]


def write_tokenizer(vocabs: Vocabs, config: Config, folder: Path) -> None:
    vocabs.source.save(folder / _SPM["source"])
    vocabs.target.save(folder / _SPM["target"])
    write_json(_ids_of(vocabs.source), folder / _ID_FILES["source"])
    if not vocabs.joint:
        write_json(_ids_of(vocabs.target), folder / _ID_FILES["target"])
    tokens = {f"{symbol}_token": name for symbol, (_, name) in _specials_of(vocabs.target).items()}
    directions = find_directions(config.data)
    settings = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": "+".join(dict.fromkeys(direction.source for direction in directions)),
        "target_lang": "+".join(dict.fromkeys(direction.target for direction in directions)),
        **tokens,
        "model_max_length": config.data.max_source_length,
        "separate_vocabs": not vocabs.joint,
        "sp_model_kwargs": {},
        # "<s>" inside a text is plain text, not a symbol.
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    write_json(settings, folder / SETTINGS)
    write_json(tokens, folder / "special_tokens_map.json")


def read_exported_tokenizer(folder: Path, *, joint: bool) -> Vocabs:
    """Read the vocabularies that `write_tokenizer` wrote; they equal those of the exported run."""
    source, target = (Vocab.load(folder / _SPM[side]) for side in ("source", "target"))
    is_shared = joint and source.fingerprint == target.fingerprint
    return Vocabs(source, source if is_shared else target, joint=joint)


def read_tokenizer(folder: Path, fields: dict[str, Any]) -> Vocabs:
    """Read the vocabularies of a folder that another system wrote; ids are row numbers of the embedding."""
    tokenizer_config = read_tokenizer_config(folder)
    joint = not tokenizer_config.get("separate_vocabs", False)
    ids = {"source": _read_ids(folder / _ID_FILES["source"])}
    ids["target"] = ids["source"] if joint else _read_ids(folder / _ID_FILES["target"])
    sizes = {
        "source": fields["vocab_size"],
        "target": fields.get("decoder_vocab_size") or fields["vocab_size"],
    }
    unk, eos, pad = (_token(tokenizer_config, name, default) for name, default in _DEFAULT_TOKENS.items())
    for name, token, wanted in [("eos", eos, fields["eos_token_id"]), ("pad", pad, fields["pad_token_id"])]:
        if ids["target"].get(token) != wanted:
            raise UserError(
                f"{folder / 'config.json'} says {name}_token_id {wanted}, but the vocabulary has {token} at "
                f"{ids['target'].get(token)}; the files belong to different models"
            )
    names = {
        side: _names(ids[side], sizes[side], folder / _ID_FILES["source" if joint else side])
        for side in ("target", "source")
    }
    start = fields["decoder_start_token_id"]
    bos = None if start == fields["pad_token_id"] else names["target"][start]
    vocabs = {}
    for side, pieces in names.items():
        origin = folder / _SPM[side]
        specials = Specials(unk, eos, pad, bos if bos in pieces else None)
        model = renumber(_read_bytes(origin), pieces, specials, origin=str(origin))
        vocabs[side] = Vocab(model, name=str(origin))
    is_shared = joint and vocabs["source"].fingerprint == vocabs["target"].fingerprint
    return Vocabs(vocabs["source"], vocabs["source"] if is_shared else vocabs["target"], joint=joint)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    return read_config_json(folder, SETTINGS)


def read_tokenizer_settings(folder: Path, side: str) -> Settings:
    """Read the training settings of a side's SentencePiece model, or OPUS-MT's if the model is missing."""
    path = folder / _SPM[side]
    if not path.is_file():
        return Settings("unigram", False, "nmt_nfkc")
    return read_settings(_read_bytes(path), origin=str(path))


def _token(tokenizer_config: dict[str, Any], name: str, default: str) -> str:
    token = tokenizer_config.get(name, default)
    return token["content"] if isinstance(token, dict) else token


def _specials_of(vocab: Vocab) -> dict[str, tuple[int, str]]:
    """Return the id and name of each special symbol, without bos if padding starts the targets."""
    ids = {"unk": vocab.unk_id, "bos": vocab.bos_id, "eos": vocab.eos_id, "pad": vocab.pad_id}
    if vocab.bos_id == vocab.pad_id:
        del ids["bos"]
    return {symbol: (number, vocab.pieces([number])[0]) for symbol, number in ids.items()}


def _ids_of(vocab: Vocab) -> dict[str, int]:
    return {name_of(piece): number for number, piece in enumerate(vocab.pieces(range(vocab.size)))}


def _names(ids: dict[str, int], size: int, path: Path) -> list[str]:
    """Return the name of each id; ids without a subword get a name that occurs in no text."""
    outside = [name for name, number in ids.items() if not 0 <= number < size]
    if outside:
        raise UserError(
            f"{path} gives {', '.join(outside[:3])} ids outside the {size} rows of the model's embedding"
        )
    by_id = {number: name for name, number in ids.items()}
    if len(by_id) < len(ids):
        raise UserError(f"{path} gives several subwords the same id; each subword needs an id of its own")
    return [by_id.get(number) or f"<unnamed {number}>" for number in range(size)]


def _read_ids(path: Path) -> dict[str, int]:
    with _naming(path):
        ids = read_json_object(path)
    if not all(isinstance(number, int) for number in ids.values()):
        raise UserError(f"{path} is damaged: it must contain an id for each piece")
    return ids


def _read_bytes(path: Path) -> bytes:
    with _naming(path):
        return read_file(path, most=1 << 30)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}; the folder needs {', '.join(_SPM.values())} and "
            f"{_ID_FILES['source']}, or give --vocab=DIR"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
