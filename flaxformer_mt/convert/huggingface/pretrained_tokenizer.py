"""From the tokenizer files of a pretrained model to its vocabulary, and back.

Every file is kept as it is, config.json and generation_config.json included, so that an export gives it back.
Contains which families tokenize how, and where the ids of their language tags come from.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flaxformer_mt.config.files import read_file
from flaxformer_mt.config.tag_styles import BOTH_SIDES, TagStyle, find_language, looks_like_tag
from flaxformer_mt.convert.huggingface.pretrained_config import Facts
from flaxformer_mt.convert.huggingface.tokenizer_files import read_tokenizer_config
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import PretrainedFacts, PretrainedVocab
from flaxformer_mt.vocab.segmenters import SENTENCEPIECE_NAMES, TOKENIZER_JSON, Kind, make_segmenter

_SETTINGS = "tokenizer_config.json"
# The files that are kept, of those that exist.
_KEPT = (
    TOKENIZER_JSON,
    _SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "config.json",
    "generation_config.json",
    *SENTENCEPIECE_NAMES,
)
_FILE_BYTES = 1 << 30


def read_vocab(folder: Path, facts: Facts) -> tuple[PretrainedVocab, dict[str, Any]]:
    """Read the vocabulary of a folder; return it with the fields of the section `data` that belong to it.

    Raises:
      UserError: a file is missing or damaged, or a tokenizer is of a kind that this package does not have.
    """
    files = {name: _read(folder / name) for name in _KEPT if (folder / name).is_file()}
    settings = read_tokenizer_config(folder)
    tokenizer = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    if tokenizer == "MBartTokenizer":
        raise UserError(
            f"{folder / _SETTINGS}: tokenizer_class is MBartTokenizer, which puts languages after sentences, "
            "as mBART-25 does; give an mBART-50 model"
        )
    kind = _choose_kind(facts, files, tokenizer, folder)
    pieces = make_segmenter(kind, files, name=str(folder)).pieces
    style, tags = _find_tags(facts, kind, pieces, settings)
    fields = facts.fields
    ids = {piece: number for number, piece in enumerate(pieces)}
    own = PretrainedFacts(
        kind=kind,
        size=fields["vocab_size"],
        pad_id=fields["pad_token_id"],
        bos_id=fields["decoder_start_token_id"],
        eos_id=fields["eos_token_id"],
        unk_id=ids.get("<unk>", fields["pad_token_id"]),
        first_ids=(ids["<s>"],) if facts.model_type == "bart" and "<s>" in ids else (),
        tags=tags,
        target_tags=style in BOTH_SIDES,
        family=facts.model_type,
    )
    vocab = PretrainedVocab(own, files, name=str(folder))
    _check_end(vocab, pieces, folder)
    return vocab, _make_data_fields(facts, style, settings)


def _choose_kind(facts: Facts, files: Mapping[str, bytes], tokenizer: str, folder: Path) -> Kind:
    if tokenizer == "ByT5Tokenizer":
        return "bytes"
    if TOKENIZER_JSON in files:
        return "json"
    if facts.model_type == "m2m_100" and "vocab.json" in files:
        return "m2m_100"
    if any(name in files for name in SENTENCEPIECE_NAMES):
        return "sentencepiece" if facts.is_t5 else "fairseq"
    raise UserError(
        f"{folder} has no {TOKENIZER_JSON} and no {' or '.join(SENTENCEPIECE_NAMES[:2])}; copy or download "
        "the files of the model's tokenizer"
    )


def _find_tags(
    facts: Facts, kind: Kind, pieces: list[str], settings: Mapping[str, Any]
) -> tuple[TagStyle, dict[str, int]]:
    """Return the style of the family's language tags, and the id of each."""
    if facts.is_t5:
        return _find_t5_tags(facts, pieces)
    if facts.model_type == "bart":
        return "opus", {}
    style: TagStyle = "mbart_50"
    if facts.model_type == "m2m_100":
        style = "m2m_100" if kind == "m2m_100" else "nllb"
    if kind == "json":
        return style, _find_pieces(pieces, style)
    # Without tokenizer.json, the class of the tokenizer puts the tags after all pieces.
    codes = _list_codes(style, settings)
    return style, {code: len(pieces) + number for number, code in enumerate(codes)}


def _find_t5_tags(facts: Facts, pieces: list[str]) -> tuple[TagStyle, dict[str, int]]:
    if found := _find_pieces(pieces, "madlad"):
        return "madlad", found
    tasks = facts.fields.get("task_specific_params")
    has_tasks = isinstance(tasks, dict) and any(str(task).startswith("translation") for task in tasks)
    return ("t5" if has_tasks else "opus"), {}


def _find_pieces(pieces: list[str], style: TagStyle) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(pieces) if looks_like_tag(style, piece)}


def _list_codes(style: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the tags of a tokenizer of transformers, in the order of their ids."""
    if style == "m2m_100":
        from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES as codes

        name = settings.get("language_codes", "m2m100")
        if not isinstance(name, str) or name not in codes:
            raise UserError(f"{_SETTINGS}: language_codes is {str(name)[:40]}; known: {', '.join(codes)}")
        return [f"__{code}__" for code in codes[name]]
    if style == "nllb":
        from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES as nllb_codes

        return list(nllb_codes)
    from transformers.models.mbart50.tokenization_mbart50 import FAIRSEQ_LANGUAGE_CODES as mbart_codes

    return list(mbart_codes)


def _check_end(vocab: PretrainedVocab, pieces: list[str], folder: Path) -> None:
    """Raise UserError if config.json and the tokenizer disagree about the end symbol."""
    if "</s>" in pieces and pieces.index("</s>") != vocab.eos_id:
        raise UserError(
            f"{folder / 'config.json'} says eos_token_id {vocab.eos_id}, but the vocabulary has </s> at "
            f"{pieces.index('</s>')}; the files belong to different models"
        )


def _make_data_fields(facts: Facts, style: TagStyle, settings: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"tag_style": style}
    for name, ours in (("src_lang", "source_language"), ("tgt_lang", "target_language")):
        code = settings.get(name)
        if isinstance(code, str) and code and settings.get("tgt_lang"):
            fields[ours] = find_language(style, code)
    if fields.get("source_language") == fields.get("target_language"):
        fields = {"tag_style": style}
    return fields


def write_vocab(vocab: PretrainedVocab, folder: Path, changes: Mapping[str, Any]) -> None:
    """Write the files of a tokenizer, and config.json with some fields changed if they differ."""
    for name, content in vocab.files.items():
        if name == "config.json":
            stored = json.loads(content)
            if any(stored.get(field) != value for field, value in changes.items()):
                content = (json.dumps(stored | dict(changes), indent=2) + "\n").encode()
        (folder / name).write_bytes(content)


def _read(path: Path) -> bytes:
    try:
        return read_file(path, most=_FILE_BYTES)
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}; copy or download it again") from error
