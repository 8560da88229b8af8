"""Vocabularies of pretrained models with other pieces: what texts lack goes, what a new language needs comes.

The tokenizer is written as tokenizer.json, and so transformers has the ids of the run. Rows of embeddings are
copied, and those of new pieces are the mean of the rows of the pieces that they stand for.
"""

import dataclasses
import json
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.config.directions import find_directions
from flaxformer_mt.config.tag_styles import find_codes
from flaxformer_mt.convert.formats import CONFIG_NAME, OUR_KEY, Weights
from flaxformer_mt.convert.huggingface.new_languages import NewTag, NewVocabulary
from flaxformer_mt.convert.huggingface.tokenizer_files import SETTINGS
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.lines import open_input, read_lines
from flaxformer_mt.vocab import PretrainedVocab, Vocabs
from flaxformer_mt.vocab.model_file import SPACE, parse_model
from flaxformer_mt.vocab.new_pieces import find_missing_characters, learn_pieces
from flaxformer_mt.vocab.pretrained_tokenizers import BYTE_SPACE, SENTENCEPIECE_NAMES, TOKENIZER_JSON
from flaxformer_mt.vocab.pretrained_vocab import choose_pieces
from flaxformer_mt.vocab.tokenizer_json import NewPiece, TokenizerJson

_GENERATION = "generation_config.json"
# The entry in tokenizer.json of a tag that is text.
_TEXT_TAG = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
# The mark of a changed vocabulary, in config.json.
_MARK = "vocabulary"


def change_vocabulary(
    weights: Weights, request: NewVocabulary, tags: Collection[str] | None, new_tags: Sequence[NewTag]
) -> tuple[Weights, dict[str, Any]]:
    """Return a model with the pieces that texts need, and a report; `tags` stay, or None: all."""
    vocab = weights.vocabs.target
    assert isinstance(vocab, PretrainedVocab)
    files = _convert(vocab)
    model = TokenizerJson(files[TOKENIZER_JSON], silent=(vocab.pad_id, vocab.eos_id))
    words = {str(text): _count_words(model, str(text)) for text in request.text}
    known = set(words) if not new_tags else _choose_known_texts(list(words), weights, request.languages)
    others = {word for text in known for word in words[text]}
    new_words = sum((words[text] for text in words if text not in known), Counter[str]())
    kept = [number for number in sorted(model.names) if number < vocab.size]
    new = _make_new_pieces(model, kept, new_words, others, vocab.unk_id, request.pieces) if new_words else []
    if known:
        _refuse_second_cut(vocab)
        extended = TokenizerJson(model.rebuild(kept, new))
        used = {kept[number] for number in extended.list_used(others | set(new_words)) if number < len(kept)}
        kept = _choose_kept(model, vocab, used, tags)
    new += [_make_tag(model, vocab, tag) for tag in new_tags]
    rebuilt = model.rebuild(kept, new)
    mark = {"vocab_size": len(kept) + len(new), OUR_KEY: {_MARK: "cut" if known else "extended"}}
    files = _change_files(
        files | {TOKENIZER_JSON: rebuilt}, {old: number for number, old in enumerate(kept)}, mark
    )
    numbers = {name: number for number, name in TokenizerJson(rebuilt).names.items()}
    names = [*vocab.tags, *(tag.name for tag in new_tags if tag.relative)]
    tags_left = {name: numbers[name] for name in names if name in numbers}
    metadata = dataclasses.replace(vocab.metadata, kind="json", size=len(numbers), tags=tags_left)
    changed = PretrainedVocab(metadata, files, name="the new vocabulary")
    report = _describe(weights, len(kept), len(new))
    models = model, TokenizerJson(rebuilt)
    report["pieces_per_word"] = {text: [_measure(one, words[text]) for one in models] for text in words}
    return _change_rows(weights, changed, kept, new), report


def _count_words(model: TokenizerJson, text: str) -> Counter[str]:
    with open_input(text, "--vocab_text") as stream:
        words = model.count_words(read_lines(stream, name=text, invalid_utf8="replace"))
    if not words:
        raise UserError(f"--vocab_text is {text}, which has no words; give a file of text")
    return words


def _choose_known_texts(texts: list[str], weights: Weights, new_languages: Sequence[str]) -> set[str]:
    """Return the files of the languages in use that the model has, if there is one for each."""
    new = {text.partition(":")[0] for text in new_languages}
    languages = {
        language for direction in find_directions(weights.config.data) for language in direction
    } - new
    by_language = {
        language: [text for text in texts if Path(text).suffix[1:] in {language, *find_codes(language)}]
        for language in sorted(languages)
    }
    found = {text for group in by_language.values() for text in group}
    if found and (lacking := [language for language, group in by_language.items() if not group]):
        raise UserError(
            f"--vocab_text has {min(found)}, but no file of {lacking[0]}, whose subwords would be removed; give "
            f"a file whose name ends in .{lacking[0]} too, or only text of the new language"
        )
    return found


def _refuse_second_cut(vocab: PretrainedVocab) -> None:
    mark = json.loads(vocab.files[CONFIG_NAME]).get(OUR_KEY)
    if isinstance(mark, dict) and mark.get(_MARK) == "cut":
        raise UserError(
            "--vocab_text removes subwords, but those of this model were removed at an earlier import, and do "
            "not come back; import the original model, or leave --vocab_text out"
        )


def _make_new_pieces(
    model: TokenizerJson,
    named: list[int],
    words: Counter[str],
    others: set[str],
    unknown: int,
    most: int | None,
) -> list[NewPiece]:
    characters = find_missing_characters(model, words, unknown)
    extended = TokenizerJson(model.rebuild(named, characters))
    parts = [*((number,) for number in named), *(piece.parts for piece in characters)]
    learned = learn_pieces(extended, words, others, most=most)
    return characters + [
        piece._replace(parts=tuple(old for number in piece.parts for old in parts[number]))
        for piece in learned
    ]


def _choose_kept(
    model: TokenizerJson, vocab: PretrainedVocab, used: set[int], tags: Collection[str] | None
) -> list[int]:
    """Return the ids of what is used and of special symbols, without those of other languages' tags."""
    if vocab.metadata.family == "mbart":
        tags = None  # transformers' class has all tags of its list
    gone = {number for tag, number in vocab.tags.items() if tags is not None and tag not in tags} - used
    always = {vocab.unk_id, *vocab.metadata.first_ids, *vocab.tags.values(), *model.added} - gone
    pieces = vocab.pieces(range(vocab.size))
    return [number for number in choose_pieces(pieces, used, always=always) if number < vocab.size]


def _make_tag(model: TokenizerJson, vocab: PretrainedVocab, tag: NewTag) -> NewPiece:
    if not tag.relative:
        return NewPiece(tag.name, tuple(vocab.tokenize(tag.name)[:-1]), entry=_TEXT_TAG)
    relative = vocab.tags[tag.relative]
    return NewPiece(tag.name, (relative,), entry=model.added.get(relative))


def _change_files(
    files: Mapping[str, bytes], numbers: Mapping[int, int], mark: Mapping[str, Any]
) -> dict[str, bytes]:
    """Return the files that stay beside tokenizer.json, with its special symbols and the new ids."""
    settings = json.loads(files[SETTINGS])
    added = json.loads(files[TOKENIZER_JSON])["added_tokens"]
    special = [token["content"] for token in added if token["special"]]
    settings["extra_special_tokens"] = [name for name in special if name not in settings.values()]
    settings["split_special_tokens"] = True  # names of symbols inside a text are text, as in this package
    changed = {TOKENIZER_JSON: files[TOKENIZER_JSON], SETTINGS: _dump(settings)}
    for name, more in ((CONFIG_NAME, mark), (_GENERATION, {})):
        stored = json.loads(files.get(name, b"{}"))
        ids = {
            key: numbers.get(old)
            for key, old in stored.items()
            if key.endswith("_token_id") and type(old) is int
        }
        stored = {
            key: ids.get(key, value) for key, value in stored.items() if ids.get(key, value) is not None
        }
        if stored:
            changed[name] = _dump(stored | more)
    return changed


def _dump(stored: Mapping[str, Any]) -> bytes:
    return (json.dumps(stored, indent=2, ensure_ascii=False) + "\n").encode()


def _list_matrices(weights: Weights) -> list[str]:
    """Return the paths of the parameters that have a row for each piece."""
    ends = ("_embedding/embedding", "output_bias", "output_kernel")
    return [path for path in weights.leaves if path.endswith(ends)]


def _change_rows(weights: Weights, vocab: PretrainedVocab, kept: list[int], new: list[NewPiece]) -> Weights:
    leaves = dict(weights.leaves)
    for path in _list_matrices(weights):
        rows = np.moveaxis(leaves[path], -1 if path == "output_kernel" else 0, 0)
        means = [rows[list(piece.parts)].mean(axis=0, keepdims=True) for piece in new]
        rows = np.concatenate([rows[kept], *means])
        leaves[path] = np.ascontiguousarray(np.moveaxis(rows, 0, -1 if path == "output_kernel" else 0))
    config = dataclasses.replace(
        weights.config, vocab=dataclasses.replace(weights.config.vocab, size=vocab.size)
    )
    return dataclasses.replace(weights, config=config, vocabs=Vocabs(vocab, vocab, joint=True), leaves=leaves)


def _describe(weights: Weights, kept: int, new: int) -> dict[str, Any]:
    old, paths = weights.vocabs.target.size, _list_matrices(weights)
    row = sum(weights.leaves[path].nbytes for path in paths) / old / 1e6
    report: dict[str, Any] = {}
    for what, number in (("removed", old - kept), ("added", new)):
        rows = {f"pieces_{what}": number, f"rows_{what}": number * len(paths)}
        report |= rows | {f"megabytes_{what}": round(number * row, 2)}
    return report


def _measure(model: TokenizerJson, words: Counter[str]) -> float:
    return round(sum(count * model.count_pieces(word) for word, count in words.items()) / words.total(), 2)


def _convert(vocab: PretrainedVocab) -> dict[str, bytes]:
    """Return the files of a tokenizer as transformers saves them, with a tokenizer.json, and of its model."""
    from transformers import AutoTokenizer

    if vocab.metadata.kind == "bytes":
        raise UserError("--vocab_text is given, but the pieces of this model are bytes; leave it out")
    with tempfile.TemporaryDirectory() as folder:
        for name, content in vocab.files.items():
            Path(folder, name).write_bytes(content)
        is_m2m_100 = vocab.metadata.kind == "m2m_100"
        tokenizer = _convert_m2m_100(vocab) if is_m2m_100 else AutoTokenizer.from_pretrained(folder)
        tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    names = TokenizerJson(files[TOKENIZER_JSON]).names
    for number, piece in enumerate(vocab.pieces(range(vocab.size))):
        other = names.get(number, piece).replace(BYTE_SPACE, SPACE)
        if other != piece and piece != f"<unnamed {number}>":
            raise UserError(
                f"transformers gives the id {number} to {other}, and the files of the model to {piece}; "
                "update transformers, or import a model whose files have a tokenizer.json"
            )
    return files


def _convert_m2m_100(vocab: PretrainedVocab) -> Any:
    """Make a tokenizer of NLLB's class, as M2M100's own has a fixed list of languages."""
    from transformers import NllbTokenizer
    from transformers.convert_slow_tokenizer import generate_merges

    proto = parse_model(next(vocab.files[name] for name in SENTENCEPIECE_NAMES if name in vocab.files))
    ids = json.loads(vocab.files["vocab.json"])
    scores = [(piece.piece, piece.score) for piece in proto.pieces if piece.piece in ids]
    return NllbTokenizer(
        vocab=ids | dict(vocab.tags),
        merges=generate_merges(ids, scores),
        extra_special_tokens=list(vocab.tags),
        src_lang=next(iter(vocab.tags)),
        _spm_precompiled_charsmap=proto.normalizer_spec.precompiled_charsmap or None,
    )
