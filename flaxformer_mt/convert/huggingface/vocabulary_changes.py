"""Vocabularies of pretrained models with other pieces: what texts lack goes, what a new language needs comes.

The files of the tokenizer are written anew, as tokenizer.json, and so transformers has the ids of the run. Each
row of the embeddings is copied, or the mean of the rows of the pieces that a new piece stands for.
"""

import dataclasses
import json
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config.directions import find_directions
from flaxformer_mt.config.tag_styles import find_codes
from flaxformer_mt.convert.formats import CONFIG_NAME, OUR_KEY, Weights
from flaxformer_mt.convert.huggingface.new_languages import NewTag, NewVocabulary
from flaxformer_mt.convert.huggingface.tokenizer_files import SETTINGS
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.lines import open_input, read_lines
from flaxformer_mt.vocab import PretrainedVocab, Vocabs
from flaxformer_mt.vocab.model_file import parse_model
from flaxformer_mt.vocab.new_pieces import find_missing_characters, learn_pieces
from flaxformer_mt.vocab.pretrained_tokenizers import SENTENCEPIECE_NAMES, TOKENIZER_JSON
from flaxformer_mt.vocab.pretrained_vocab import choose_pieces
from flaxformer_mt.vocab.tokenizer_json import NewPiece, TokenizerJson

# Files of the vocabulary that are left out, since tokenizer.json says the same.
_REPLACED = (*SENTENCEPIECE_NAMES, "vocab.json", "merges.txt")
_JSON_FILES = (SETTINGS, "special_tokens_map.json", CONFIG_NAME, "generation_config.json")
# Names of values in JSON files that are ids, or lists of ids.
_IDS = re.compile(r"\w+_token_ids?|suppress_tokens|begin_suppress_tokens|bad_words_ids")
_EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")
# The entry in tokenizer.json of a tag that is text.
_TEXT_TAG = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
# What transformers puts into any tokenizer of the class: it stays.
_FIXED_TAGS = ("mbart",)
_MARK = "vocabulary"
_SPECIAL_IDS = ("pad_id", "bos_id", "eos_id", "unk_id")


class Change(NamedTuple):
    """Ids of the pieces that stay, and what is new."""

    kept: list[int]
    new: list[NewPiece]


def change_vocabulary(
    weights: Weights, request: NewVocabulary, tags: Collection[str] | None, new_tags: Sequence[NewTag]
) -> tuple[Weights, dict[str, Any]]:
    """Return a model with the pieces that texts need, and a report; `tags` are those that stay, or None: all."""
    vocab = weights.vocabs.target
    assert isinstance(vocab, PretrainedVocab)
    files = make_tokenizer_json(vocab)
    model = TokenizerJson(files[TOKENIZER_JSON], silent=(vocab.pad_id, vocab.eos_id))
    texts = list(map(str, request.text))
    known = _choose_known_texts(texts, weights, request.languages) if new_tags else texts
    words = {text: _count_words(model, text) for text in texts}
    new_words = sum((words[text] for text in texts if text not in known), Counter[str]())
    others = {word for text in texts if text in known for word in words[text]}
    new = _make_new_pieces(model, vocab, new_words, others, most=request.pieces) if new_tags else []
    kept = [number for number in sorted(model.names) if number < vocab.size]
    if known:
        refuse_second_cut(vocab)
        kept = _choose_kept(model, vocab, kept, new, others | set(new_words), tags)
    new += [_make_tag(vocab, tag) for tag in new_tags]
    change = Change(kept, new)
    files = _change_files(files, model, vocab, change, new_tags)
    mark = {"vocab_size": len(kept) + len(new), OUR_KEY: {_MARK: "cut" if known else "extended"}}
    files[CONFIG_NAME] = dump(json.loads(files[CONFIG_NAME]) | mark)
    # Names of symbols inside a text are text, as in this package.
    files[SETTINGS] = dump(json.loads(files.get(SETTINGS, b"{}")) | {"split_special_tokens": True})
    changed = _make_vocab(files, vocab, change, new_tags)
    models = model, TokenizerJson(files[TOKENIZER_JSON])
    report = _describe(weights, change, models, words)
    return _change_rows(weights, changed, change), report


def refuse_second_cut(vocab: PretrainedVocab) -> None:
    mark = json.loads(vocab.files[CONFIG_NAME]).get(OUR_KEY)
    if isinstance(mark, dict) and mark.get(_MARK) == "cut":
        raise UserError(
            "--vocab_text removes subwords, but those of this model were removed at an earlier import, and do "
            "not come back; import the original model, or leave --vocab_text out"
        )


def _choose_known_texts(texts: Sequence[str], weights: Weights, new_languages: Sequence[str]) -> list[str]:
    """Return the files of the languages in use that the model has, if there is one for each."""
    new = {text.partition(":")[0] for text in new_languages}
    directions = find_directions(weights.config.data)
    languages = dict.fromkeys(language for direction in directions for language in direction)
    by_language = {
        language: [text for text in texts if Path(text).suffix[1:] in {language, *find_codes(language)}]
        for language in languages
        if language not in new
    }
    found = [text for group in by_language.values() for text in group]
    if found and not all(by_language.values()):
        lacking = next(language for language, group in by_language.items() if not group)
        raise UserError(
            f"--vocab_text has {found[0]}, but no file of {lacking}, whose subwords would be removed; give a "
            f"file whose name ends in .{lacking} too, or only text of the new language"
        )
    return found


def _count_words(model: TokenizerJson, text: str) -> Counter[str]:
    with open_input(text, "--vocab_text") as stream:
        words = model.count_words(read_lines(stream, name=text, invalid_utf8="replace"))
    if not words:
        raise UserError(f"--vocab_text is {text}, which has no words; give a file of text")
    return words


def _make_new_pieces(
    model: TokenizerJson,
    vocab: PretrainedVocab,
    words: Counter[str],
    others: Collection[str],
    *,
    most: int | None,
) -> list[NewPiece]:
    named = sorted(model.names)
    new = find_missing_characters(model, words, unknown=vocab.unk_id)
    extended = TokenizerJson(model.rebuild(named, new, {}))
    parts = {name: (number,) for number, name in model.names.items()} | {one.name: one.parts for one in new}
    for pair in learn_pieces(extended, words, others, most=most):
        name = "".join(pair)
        parts[name] = parts[pair[0]] + parts[pair[1]]
        new.append(NewPiece(name, parts[name], pair))
    return new


def _choose_kept(
    model: TokenizerJson,
    vocab: PretrainedVocab,
    named: list[int],
    new: list[NewPiece],
    words: Collection[str],
    tags: Collection[str] | None,
) -> list[int]:
    """Return the ids of what is used in words by a tokenizer with the new pieces, and of special symbols."""
    extended = TokenizerJson(model.rebuild(named, new, {}))
    used = {named[number] for number in extended.list_used(words) if number < len(named)}
    if vocab.metadata.family in _FIXED_TAGS:
        tags = None
    gone = {number for tag, number in vocab.tags.items() if tags is not None and tag not in tags}
    always = {vocab.pad_id, vocab.bos_id, vocab.eos_id, vocab.unk_id, *vocab.metadata.first_ids}
    always |= {number for number in (*vocab.tags.values(), *model.added) if number not in gone}
    always |= set(_list_ids(vocab.files))
    pieces = [model.names.get(number, "") for number in range(vocab.size)]
    return [
        one
        for one in choose_pieces(pieces, used, always=always)
        if one < vocab.size and one not in gone - used
    ]


def _list_ids(files: Mapping[str, bytes]) -> Iterator[int]:
    """Yield the ids that the JSON files name."""
    for file in _JSON_FILES:
        stored = json.loads(files.get(file, b"{}"))
        for name in filter(_IDS.fullmatch, stored):
            yield from (
                np.ravel(stored[name] or []).tolist() if not isinstance(stored[name], int) else [stored[name]]
            )


def _make_tag(vocab: PretrainedVocab, tag: NewTag) -> NewPiece:
    if tag.relative:
        return NewPiece(tag.name, (vocab.tags[tag.relative],))
    return NewPiece(tag.name, tuple(vocab.tokenize(tag.name)[:-1]))


def _change_files(
    files: Mapping[str, bytes],
    model: TokenizerJson,
    vocab: PretrainedVocab,
    change: Change,
    new_tags: Sequence[NewTag],
) -> dict[str, bytes]:
    """Return the files of the tokenizer with the pieces that stay and the new ones."""
    numbers = {old: number for number, old in enumerate(change.kept)}
    entries = {
        tag.name: model.added.get(vocab.tags[tag.relative]) if tag.relative else _TEXT_TAG for tag in new_tags
    }
    added = {name: entry for name, entry in entries.items() if entry is not None}
    special = [name for name, entry in added.items() if entry["special"]]
    changed = {name: content for name, content in files.items() if name not in _REPLACED}
    for file in _JSON_FILES:
        stored = _renumber(json.loads(files.get(file, b"{}")), model, numbers, special)
        if stored:
            changed[file] = dump(stored)
    changed[TOKENIZER_JSON] = model.rebuild(change.kept, change.new, added)
    if "added_tokens.json" in files:
        tokens = json.loads(changed[TOKENIZER_JSON])["added_tokens"]
        changed["added_tokens.json"] = dump({token["content"]: token["id"] for token in tokens})
    return changed


def dump(stored: Mapping[str, Any]) -> bytes:
    return (json.dumps(stored, indent=2, ensure_ascii=False) + "\n").encode()


def _make_vocab(
    files: dict[str, bytes], vocab: PretrainedVocab, change: Change, new_tags: Sequence[NewTag]
) -> PretrainedVocab:
    numbers = {old: number for number, old in enumerate(change.kept)}
    new = {piece.name: len(numbers) + number for number, piece in enumerate(change.new)}
    tags = {tag: numbers[number] for tag, number in vocab.tags.items() if number in numbers}
    metadata = dataclasses.replace(
        vocab.metadata,
        kind="json",
        size=len(numbers) + len(new),
        first_ids=tuple(numbers[number] for number in vocab.metadata.first_ids),
        tags=tags | {tag.name: new[tag.name] for tag in new_tags if tag.relative},
        **{name: numbers[getattr(vocab, name)] for name in _SPECIAL_IDS},
    )
    return PretrainedVocab(metadata, files, name="the new vocabulary")


def _renumber(
    stored: dict[str, Any], model: TokenizerJson, numbers: Mapping[int, int], new: Sequence[str]
) -> dict[str, Any]:
    """Return a JSON file of a tokenizer or a model with the new ids, and without tokens that went."""
    gone = {token["content"] for old, token in model.added.items() if old not in numbers}
    for name in filter(_IDS.fullmatch, stored):
        stored[name] = _map_ids(stored[name], numbers)
    for name in _EXTRA_TOKENS:
        if isinstance(stored.get(name), list):
            tokens = [
                one for one in stored[name] if (one["content"] if isinstance(one, dict) else one) not in gone
            ]
            stored[name] = [*tokens, *new]
    if "added_tokens_decoder" in stored:
        decoder = {int(old): token for old, token in stored["added_tokens_decoder"].items()}
        stored["added_tokens_decoder"] = {
            str(numbers[old]): decoder[old] for old in decoder if old in numbers
        }
    return stored


def _map_ids(value: Any, numbers: Mapping[int, int]) -> Any:
    if isinstance(value, list):
        return [_map_ids(one, numbers) for one in value]
    return numbers[value] if isinstance(value, int) else value


def _change_rows(weights: Weights, vocab: PretrainedVocab, change: Change) -> Weights:
    """Return the model with the rows of the new vocabulary."""
    leaves = dict(weights.leaves)
    for path in _list_matrices(weights):
        rows = leaves[path].T if path == "output_kernel" else leaves[path]
        means = [rows[list(piece.parts)].mean(axis=0, keepdims=True) for piece in change.new]
        rows = np.concatenate([rows[change.kept], *means])
        leaves[path] = np.ascontiguousarray(rows.T) if path == "output_kernel" else rows
    ids = {name: getattr(vocab, name) for name in _SPECIAL_IDS}
    section = dataclasses.replace(weights.config.vocab, size=vocab.size, **ids)
    config = dataclasses.replace(weights.config, vocab=section)
    return dataclasses.replace(weights, config=config, vocabs=Vocabs(vocab, vocab, joint=True), leaves=leaves)


def _list_matrices(weights: Weights) -> list[str]:
    """Return the paths of the parameters that have a row for each piece."""
    ends = ("_embedding/embedding", "output_bias", "output_kernel")
    return [path for path in weights.leaves if path.endswith(ends)]


def _describe(
    weights: Weights,
    change: Change,
    models: Sequence[TokenizerJson],
    words: Mapping[str, Counter[str]],
) -> dict[str, Any]:
    old = weights.vocabs.target
    splits = {text: [_measure(model, counts) for model in models] for text, counts in words.items()}
    matrices = [weights.leaves[path] for path in _list_matrices(weights)]
    row = sum(matrix.nbytes for matrix in matrices) / old.size / 1e6
    return {
        "pieces_removed": len(models[0].names) - len(change.kept),
        "pieces_added": len(change.new),
        "rows_removed": (old.size - len(change.kept)) * len(matrices),
        "rows_added": len(change.new) * len(matrices),
        "megabytes_removed": round((old.size - len(change.kept)) * row, 2),
        "megabytes_added": round(len(change.new) * row, 2),
        "pieces_per_word": {text: [round(pieces, 2) for pieces, _ in pair] for text, pair in splits.items()},
        "unknown": {text: [round(unknown, 4) for _, unknown in pair] for text, pair in splits.items()},
    }


def _measure(model: TokenizerJson, words: Counter[str]) -> tuple[float, float]:
    """Return how many pieces a word has, and the share of words with unknown characters."""
    pieces, unknown = 0, 0
    for word, count in words.items():
        ids = [number for _, number in model.split(word)]
        pieces += count * len(ids)
        unknown += count * (model.unknown in ids)
    return pieces / words.total(), unknown / words.total()


def make_tokenizer_json(vocab: PretrainedVocab) -> dict[str, bytes]:
    """Return files of a vocabulary's tokenizer with a tokenizer.json, as transformers makes it."""
    if vocab.metadata.kind == "json":
        return dict(vocab.files)
    if vocab.metadata.kind == "bytes":
        raise UserError("--vocab_text is given, but the pieces of this model are bytes; leave it out")
    with tempfile.TemporaryDirectory() as folder:
        for name, content in vocab.files.items():
            Path(folder, name).write_bytes(content)
        tokenizer = _load_m2m_100(vocab) if vocab.metadata.kind == "m2m_100" else _load_tokenizer(folder)
        tokenizer.save_pretrained(folder)
        names = (TOKENIZER_JSON, *_JSON_FILES)
        files = {name: Path(folder, name).read_bytes() for name in names if Path(folder, name).is_file()}
    names = TokenizerJson(files[TOKENIZER_JSON]).names
    pieces = enumerate(vocab.pieces(range(vocab.size)))
    for number, piece in pieces:
        if names.get(number, piece) == piece or piece == f"<unnamed {number}>":
            continue
        raise UserError(
            f"transformers gives the piece {names[number]} the id {number}, which is that of {piece} in the "
            "files of the tokenizer; import a model whose files have a tokenizer.json"
        )
    return files


def _load_tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _load_m2m_100(vocab: PretrainedVocab) -> Any:
    """Make a tokenizer of NLLB's class, as M2M100's own has a fixed list of languages."""
    from transformers import NllbTokenizer

    proto = parse_model(next(vocab.files[name] for name in SENTENCEPIECE_NAMES if name in vocab.files))
    ids = json.loads(vocab.files["vocab.json"])
    known = {piece.piece for piece in proto.pieces} & ids.keys()
    pieces = sorted((piece for piece in proto.pieces if piece.piece in known), key=lambda piece: -piece.score)
    merges = [
        (name[:size], name[size:])
        for name in (piece.piece for piece in pieces)
        for size in range(1, len(name))
        if {name[:size], name[size:]} <= known
    ]
    return NllbTokenizer(
        vocab=ids | dict(vocab.tags),
        merges=merges,
        extra_special_tokens=list(vocab.tags),
        src_lang=next(iter(vocab.tags)),
        _spm_precompiled_charsmap=proto.normalizer_spec.precompiled_charsmap or None,
    )
