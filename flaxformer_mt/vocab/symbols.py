"""Checks of user-defined symbols: strings that a vocabulary must not split, such as tags of sources."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab.model_file import SPACE
from flaxformer_mt.vocab.sentencepiece_vocab import Vocab


def is_one_piece(vocab: Vocab, symbol: str) -> bool:
    """Return whether a symbol is a single subword, not counting a separate one for the space before it."""
    pieces = vocab.pieces(vocab.tokenize(symbol)[:-1])
    return [piece.removeprefix(SPACE) for piece in pieces if piece != SPACE] == [symbol]


def check_symbols(vocab: Vocab, symbols: Sequence[str], *, name: str) -> None:
    if missing := [symbol for symbol in symbols if not is_one_piece(vocab, symbol)]:
        raise UserError(
            f"vocab.symbols has {missing[0]}, but {name} splits it into several subwords; leave it out, or "
            f"train the model with --user_defined_symbols={','.join(symbols)}"
        )


def check_tags(vocab: Vocab, parts: Iterable[Mapping[str, Any]]) -> None:
    """Raise UserError if the source vocabulary splits a data set's tag; `parts`: reports of data sets."""
    for part in parts:
        tag = part.get("tag", "")
        if tag and not is_one_piece(vocab, tag):
            raise UserError(
                f"the sources of {part['name']} begin with the tag {tag}, which the vocabulary splits into "
                f"several subwords; train a vocabulary with --config.vocab.symbols={tag}, or make the pairs "
                "anew with --tag= for none"
            )


def check_language_tags(vocab: Vocab, tags: Iterable[str]) -> None:
    for tag in tags:
        if tag in vocab.tags or " " in tag:  # a tag with spaces is text: `translate English to German:`
            continue
        if vocab.tags:
            raise UserError(
                f"the pretrained vocabulary has no language tag {tag}; it has {len(vocab.tags)}, such as "
                f"{', '.join(list(vocab.tags)[:6])}: train with languages that the model knows, add one with "
                "`import --new_language`, or set data.target_tags=never"
            )
        ids = vocab.tokenize(tag)[:-1]
        if len(ids) != 1 or ids[0] == vocab.unk_id:
            raise UserError(
                f"the source vocabulary has no piece for the language tag {tag}, but spells it "
                f"{' '.join(vocab.pieces(ids))}: make a new vocabulary (leave out vocab.source_model; with "
                "--init, give --new_vocab), with vocab.normalization other than nmt_nfkc_cf if the tag has "
                "capital letters; or use no tags (data.target_tags, data.source_tags)"
            )
