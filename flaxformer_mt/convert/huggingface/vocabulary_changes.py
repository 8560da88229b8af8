"""Changes the vocabulary of a pretrained model: removes unused subwords, adds subwords for new languages.

The changed tokenizer is a tokenizer.json, so that transformers gives the same ids as the run. Embedding rows
of remaining subwords are copied; the row of a new subword is the mean of the rows of the subwords that it
replaces.
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
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.formats import CONFIG_NAME, OUR_KEY, Weights
from flaxformer_mt.convert.huggingface.new_languages import NewTag, NewVocabulary
from flaxformer_mt.convert.huggingface.pretrained_config import read_family, read_vocab
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
# The entry in tokenizer.json for a tag that is part of the text.
_TEXT_TAG = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
# The key in config.json that marks a changed vocabulary.
_MARK = "vocabulary"


def change_vocabulary(
    weights: Weights, request: NewVocabulary, tags: Collection[str] | None, new_tags: Sequence[NewTag]
) -> tuple[Weights, dict[str, Any]]:
    """Return the changed model, and entries for `ImportResult`; `tags`: language tags to keep (None: all)."""
    vocab = weights.vocabs.target
    assert isinstance(vocab, PretrainedVocab)
    files = _convert(vocab)
    model = TokenizerJson(files[TOKENIZER_JSON], silent=(vocab.pad_id, vocab.eos_id))
    words = {str(text): _count_words(model, str(text)) for text in request.text}
    known = set(words) if not new_tags else _choose_known_texts(list(words), weights, request.languages)
    others = {word for text in known for word in words[text]}
    new_words = sum((words[text] for text in words if text not in known), Counter[str]())
    old_ids = [number for number in sorted(model.names) if number < vocab.size]
    new = _make_new_pieces(model, old_ids, new_words, others, request.pieces) if new_words else []
    was_cut = f'"{_MARK}": "cut"'.encode() in vocab.files[CONFIG_NAME]
    if known:
        if was_cut:
            raise UserError(
                "--vocab_text removes subwords, but the vocabulary of this model was cut before, and they do "
                "not come back; import the original model, or leave --vocab_text out"
            )
        extended = TokenizerJson(model.rebuild(old_ids, new))
        used = {
            old_ids[number] for number in extended.list_used(others | set(new_words)) if number < len(old_ids)
        }
        old_ids = _choose_old_ids(model, vocab, used, tags)
    new += [_make_tag(model, vocab, tag) for tag in new_tags]
    rebuilt = model.rebuild(old_ids, new)
    mark = {
        "vocab_size": len(old_ids) + len(new),
        OUR_KEY: {_MARK: "cut" if known or was_cut else "extended"},
    }
    changed = _read_changed(files | {TOKENIZER_JSON: rebuilt}, old_ids, mark)
    report = _describe(weights, len(old_ids), len(new), (model, TokenizerJson(rebuilt)), words)
    return _change_rows(weights, changed, old_ids, new), report


def _count_words(model: TokenizerJson, text: str) -> Counter[str]:
    with open_input(text, "--vocab_text") as stream:
        words = model.count_words(read_lines(stream, name=text, invalid_utf8="replace"))
    if not words:
        raise UserError(f"--vocab_text is {text}, which has no words; give a file of text")
    return words


def _choose_known_texts(texts: list[str], weights: Weights, new_languages: Sequence[str]) -> set[str]:
    """Return the text files of the run's known languages; raise UserError if only some of them have files."""
    new = {text.partition(":")[0] for text in new_languages}
    languages = set[str]().union(*find_directions(weights.config.data)) - new
    by_language = {
        language: [text for text in texts if Path(text).suffix[1:] in {language, *find_codes(language)}]
        for language in sorted(languages)
    }
    matching = {text for group in by_language.values() for text in group}
    if matching and (lacking := [language for language, group in by_language.items() if not group]):
        raise UserError(
            f"--vocab_text has {min(matching)}, but none of {lacking[0]}, whose subwords would be removed; "
            f"give a file named like text.{lacking[0]} too, or only text of the new language"
        )
    return matching


def _make_new_pieces(
    model: TokenizerJson, named: list[int], words: Counter[str], others: set[str], most: int | None
) -> list[NewPiece]:
    """Return missing characters, and new subwords made of the model's subwords and these characters."""
    characters = find_missing_characters(model, words)
    extended = TokenizerJson(model.rebuild(named, characters))
    parts = [*((number,) for number in named), *(piece.parts for piece in characters)]
    learned = learn_pieces(extended, words, others, most=most)
    return characters + [
        piece._replace(parts=sum((parts[one] for one in piece.parts), ())) for piece in learned
    ]


def _choose_old_ids(
    model: TokenizerJson, vocab: PretrainedVocab, used: set[int], tags: Collection[str] | None
) -> list[int]:
    """Return the ids to keep: used subwords and special symbols, but only `tags` of the language tags."""
    if vocab.metadata.family == "mbart":
        tags = None  # the class in transformers always has all tags of its list
    gone = {number for tag, number in vocab.tags.items() if tags is not None and tag not in tags} - used
    special = (vocab.pad_id, vocab.bos_id, vocab.eos_id, vocab.unk_id, *vocab.metadata.first_ids)
    always = {*special, *vocab.tags.values(), *model.added} - gone
    pieces = vocab.pieces(range(vocab.size))
    return [number for number in choose_pieces(pieces, used, always=always) if number < vocab.size]


def _make_tag(model: TokenizerJson, vocab: PretrainedVocab, tag: NewTag) -> NewPiece:
    if not tag.relative:
        return NewPiece(tag.name, tuple(vocab.tokenize(tag.name)[:-1]), entry=_TEXT_TAG)
    relative = vocab.tags[tag.relative]
    return NewPiece(tag.name, (relative,), entry=model.added.get(relative))


def _read_changed(
    files: dict[str, bytes], old_ids: Sequence[int], mark: Mapping[str, Any]
) -> PretrainedVocab:
    """Make the vocabulary of a changed tokenizer.json, with changed settings and special ids."""
    stored = {name: json.loads(files[name]) for name in (SETTINGS, CONFIG_NAME, _GENERATION) if name in files}
    settings, added = stored[SETTINGS], json.loads(files[TOKENIZER_JSON])["added_tokens"]
    named = [token for name, token in settings.items() if name.endswith("_token")]
    special = [token["content"] for token in added if token["special"]]
    settings["extra_special_tokens"] = [token for token in special if token not in named]
    settings["split_special_tokens"] = True  # names of symbols in a text are plain text, as in this package
    numbers = {old: number for number, old in enumerate(old_ids)}
    for fields in stored.values():
        ids = [name for name, old in fields.items() if name.endswith("_token_id") and isinstance(old, int)]
        fields |= {name: numbers.get(fields[name]) for name in ids}
    stored[CONFIG_NAME] |= mark
    with tempfile.TemporaryDirectory() as folder:
        for name, fields in stored.items():
            formats.write_json(fields, Path(folder, name))
        Path(folder, TOKENIZER_JSON).write_bytes(files[TOKENIZER_JSON])
        return read_vocab(Path(folder), read_family(Path(folder), stored[CONFIG_NAME]))[0]


def _list_matrices(weights: Weights) -> list[str]:
    """Return the paths of the parameters that have a row per subword."""
    ends = ("_embedding/embedding", "output_bias", "output_kernel")
    return [path for path in weights.leaves if path.endswith(ends)]


def _change_rows(
    weights: Weights, vocab: PretrainedVocab, old_ids: list[int], new: list[NewPiece]
) -> Weights:
    leaves = dict(weights.leaves)
    for path in _list_matrices(weights):
        rows = np.moveaxis(leaves[path], -1 if path == "output_kernel" else 0, 0)
        means = [rows[list(piece.parts)].mean(axis=0, keepdims=True) for piece in new]
        rows = np.concatenate([rows[old_ids], *means])
        leaves[path] = np.ascontiguousarray(np.moveaxis(rows, 0, -1 if path == "output_kernel" else 0))
    ids = {name: getattr(vocab, name) for name in ("pad_id", "bos_id", "eos_id", "unk_id")}
    section = dataclasses.replace(weights.config.vocab, size=vocab.size, **ids)
    config = dataclasses.replace(weights.config, vocab=section)
    return dataclasses.replace(weights, config=config, vocabs=Vocabs(vocab, vocab, joint=True), leaves=leaves)


def _describe(
    weights: Weights,
    remaining: int,
    new: int,
    models: Sequence[TokenizerJson],
    words: Mapping[str, Counter[str]],
) -> dict[str, Any]:
    """Return the entries of `ImportResult` about a change of the vocabulary."""
    old, paths = weights.vocabs.target.size, _list_matrices(weights)
    row = sum(weights.leaves[path].nbytes for path in paths) / old / 1e6
    report: dict[str, Any] = {}
    for what, number in (("removed", old - remaining), ("added", new)):
        rows = {f"pieces_{what}": number, f"rows_{what}": number * len(paths)}
        report |= rows | {f"megabytes_{what}": round(number * row, 2)}
    pieces = {
        text: [sum(count * model.count_pieces(word) for word, count in counts.items()) for model in models]
        for text, counts in words.items()
    }
    averages = {text: [round(one / words[text].total(), 2) for one in pair] for text, pair in pieces.items()}
    return report | {"pieces_per_word": averages}


def _convert(vocab: PretrainedVocab) -> dict[str, bytes]:
    """Return the files of the model, with the tokenizer files that transformers saves (tokenizer.json)."""
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
                "import a model whose files have a tokenizer.json"
            )
    return files


def _convert_m2m_100(vocab: PretrainedVocab) -> Any:
    """Make a tokenizer of NLLB's class, because M2M100's class has a fixed list of languages."""
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
