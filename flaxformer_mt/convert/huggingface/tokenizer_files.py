"""The tokenizer files of Hugging Face's MarianTokenizer, from our vocabularies and back.

Owns source.spm, target.spm, vocab.json, target_vocab.json, tokenizer_config.json, special_tokens_map.json.
Knows nothing of weights. MarianTokenizer cuts text with a SentencePiece model of each side, then looks pieces
up in vocab.json, whose numbers need not be SentencePiece's own: on the way in they become so.

Ids agree for any text that does not begin with >>, from which the tokenizer takes language codes (>>fr<<).
With the models of others three things differ, where the tokenizer looks up what SentencePiece cut. Names of
special symbols inside a text (</s>) are symbols there and text here. SentencePiece pieces that vocab.json
lacks are unknown there, while here the text is cut into smaller ones. And a run of characters that the side's
own model does not know is looked up as a whole there, so that it is mostly unknown, while here those of them
that vocab.json has keep their ids.
"""

import json
from pathlib import Path
from typing import Any

from flaxformer_mt.config import Config
from flaxformer_mt.convert.huggingface.sentencepiece_file import (
    Settings,
    Specials,
    name_of,
    read_settings,
    renumber,
)
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocab, Vocabs

_SPM = {"source": "source.spm", "target": "target.spm"}
_NUMBERS = {"source": "vocab.json", "target": "target_vocab.json"}
_FACTS = "tokenizer_config.json"


def write_tokenizer(vocabs: Vocabs, config: Config, folder: Path) -> None:
    """Writes all files of the tokenizer.

    Raises:
      UserError: two vocabularies that number their special symbols differently: the tokenizer has one set.
    """
    specials = [_specials_of(vocab) for vocab in (vocabs.source, vocabs.target)]
    if specials[0] != specials[1]:
        raise UserError(
            "Hugging Face's tokenizer has one set of special symbols, but the source vocabulary has "
            f"{specials[0]} and the target vocabulary {specials[1]}; train both with the same ids"
        )
    vocabs.source.save(folder / _SPM["source"])
    vocabs.target.save(folder / _SPM["target"])
    _write_json(_numbers_of(vocabs.source), folder / _NUMBERS["source"])
    if not vocabs.joint:
        _write_json(_numbers_of(vocabs.target), folder / _NUMBERS["target"])
    tokens = {f"{symbol}_token": name for symbol, (_, name) in specials[0].items()}
    facts = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": config.data.source_language,
        "target_lang": config.data.target_language,
        **tokens,
        "model_max_length": config.data.max_source_length,
        "separate_vocabs": not vocabs.joint,
        "sp_model_kwargs": {},
        # "<s>" in a text is three characters, not a symbol.
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(facts, folder / _FACTS)
    _write_json(tokens, folder / "special_tokens_map.json")


def read_own_tokenizer(folder: Path, *, joint: bool) -> Vocabs:
    """The vocabularies of a folder that `write_tokenizer` wrote, byte for byte."""
    source, target = (Vocab.load(folder / _SPM[side]) for side in ("source", "target"))
    one = joint and source.fingerprint == target.fingerprint
    return Vocabs(source, source if one else target, joint=joint)


def read_tokenizer(folder: Path, facts: dict[str, Any]) -> Vocabs:
    """The vocabularies of anybody's folder, their pieces numbered as the model's rows are.

    Args:
      facts: config.json's: sizes and the ids of special symbols.

    Raises:
      UserError: files that are missing or damaged, ids that the model has no row for, special symbols that
        the two do not agree on.
    """
    told = read_tokenizer_facts(folder)
    joint = not told.get("separate_vocabs", False)
    numbers = {"source": _read_numbers(folder / _NUMBERS["source"])}
    numbers["target"] = numbers["source"] if joint else _read_numbers(folder / _NUMBERS["target"])
    sizes = {"source": facts["vocab_size"], "target": facts["decoder_vocab_size"] or facts["vocab_size"]}
    unk, eos, pad = (_token(told, name, default) for name, default in _DEFAULT_TOKENS.items())
    for name, token, wanted in [("eos", eos, facts["eos_token_id"]), ("pad", pad, facts["pad_token_id"])]:
        if numbers["target"].get(token) != wanted:
            raise UserError(
                f"{folder / 'config.json'} says {name}_token_id {wanted}, but the vocabulary has {token} at "
                f"{numbers['target'].get(token)}; one of the two is of another model"
            )
    names = {
        side: _names(numbers[side], sizes[side], folder / _NUMBERS["source" if joint else side])
        for side in ("target", "source")
    }
    start = facts["decoder_start_token_id"]
    bos = None if start == facts["pad_token_id"] else names["target"][start]
    made = {}
    for side, own in names.items():
        origin = folder / _SPM[side]
        specials = Specials(unk, eos, pad, bos if bos in own else None)
        made[side] = Vocab(renumber(_read_bytes(origin), own, specials, origin=str(origin)), name=str(origin))
    one = joint and made["source"].fingerprint == made["target"].fingerprint
    return Vocabs(made["source"], made["source"] if one else made["target"], joint=joint)


def read_tokenizer_facts(folder: Path) -> dict[str, Any]:
    """What tokenizer_config.json says; {} if there is none."""
    if not (folder / _FACTS).is_file():
        return {}
    return _read_json(folder / _FACTS)


def read_tokenizer_settings(folder: Path) -> Settings:
    """How the target's SentencePiece model was trained; as OPUS-MT trains them if the folder has none."""
    path = folder / _SPM["target"]
    return read_settings(path.read_bytes()) if path.is_file() else Settings("unigram", False, "nmt_nfkc")


_DEFAULT_TOKENS = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}


def _token(told: dict[str, Any], name: str, default: str) -> str:
    token = told.get(name, default)
    return token["content"] if isinstance(token, dict) else token


def _specials_of(vocab: Vocab) -> dict[str, tuple[int, str]]:
    """Id and name of each special symbol; where pad starts targets, bos has none of its own."""
    ids = {"unk": vocab.unk_id, "bos": vocab.bos_id, "eos": vocab.eos_id, "pad": vocab.pad_id}
    if vocab.bos_id == vocab.pad_id:
        del ids["bos"]
    return {symbol: (number, vocab.pieces([number])[0]) for symbol, number in ids.items()}


def _numbers_of(vocab: Vocab) -> dict[str, int]:
    return {name_of(piece): number for number, piece in enumerate(vocab.pieces(range(vocab.size)))}


def _names(numbers: dict[str, int], size: int, path: Path) -> list[str]:
    """The name of each id; a row of the model that has none gets one that no text gives."""
    outside = [name for name, number in numbers.items() if not 0 <= number < size]
    if outside:
        raise UserError(
            f"{path} numbers {', '.join(outside[:3])} outside the {size} rows of the model's embedding"
        )
    by_id = {number: name for name, number in numbers.items()}
    if len(by_id) < len(numbers):
        raise UserError(f"{path} gives several pieces one number; each needs its own")
    return [by_id.get(number) or f"<unnamed {number}>" for number in range(size)]


def _read_numbers(path: Path) -> dict[str, int]:
    numbers = _read_json(path)
    if not all(isinstance(number, int) for number in numbers.values()):
        raise UserError(f"{path} is damaged: it should hold a number for each piece")
    return numbers


def _read_json(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(_read_bytes(path).decode("utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(held, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    return held


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}; the folder should hold {', '.join(_SPM.values())} and "
            f"{_NUMBERS['source']}, or give --vocab=DIR"
        ) from error


def _write_json(held: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(held, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
