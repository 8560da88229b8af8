"""Reads the new languages that a user requests for a pretrained model, and chooses their language tags."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flaxformer_mt.config.directions import LANGUAGE_CODE
from flaxformer_mt.config.tag_styles import TagStyle, spell_tag
from flaxformer_mt.convert.formats import Weights
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import PretrainedVocab, Vocab
from flaxformer_mt.vocab.symbols import is_one_piece


class NewVocabulary(NamedTuple):
    """Changes to the vocabulary of a pretrained model.

    text: text files. Subwords that occur in no file are removed; with new languages, only if every known
      language has a file, named like corpus.ru.
    languages: new languages, each with a related language whose tag's embedding row is copied, as in
      tyv_Cyrl:kaz_Cyrl.
    pieces: number of new subwords to learn. None: learn frequent subwords of words that are split too finely.
    """

    text: Sequence[str | Path] = ()
    languages: Sequence[str] = ()
    pieces: int | None = None


class NewTag(NamedTuple):
    """A new language tag, and the existing tag (`relative`) whose embedding row is copied.

    If `relative` is "", the row is the mean of the rows of the subwords that spell the tag.
    """

    name: str
    relative: str


def read_new_tags(weights: Weights, request: NewVocabulary, languages: Sequence[str]) -> list[NewTag]:
    """Check the request, and return its new tags; for T5 without tags, those of all `languages`."""
    style, vocab = weights.config.data.tag_style, weights.vocabs.target
    if request.pieces is not None and not request.languages:
        raise UserError(f"--new_pieces is {request.pieces} without --new_language; name the language too")
    if request.pieces is not None and request.pieces < 0:
        raise UserError(f"--new_pieces is {request.pieces}; it must be at least 0")
    if not isinstance(vocab, PretrainedVocab):
        flag = f"--vocab_text is {request.text[0]}" if request.text else "--new_language is given"
        raise UserError(f"{flag}, but this model has no vocabulary that can be changed")
    if not request.languages:
        return []
    metadata = vocab.metadata
    by_text = style == "opus" and metadata.family in ("t5", "mt5") and metadata.kind != "bytes"
    try:
        if not request.text:
            raise UserError("there is no --vocab_text; give a file of text in this language")
        if not vocab.tags and not by_text:
            raise UserError(
                f"this {metadata.family} model has no tags of languages; give an NLLB-200, M2M100, mBART-50, "
                "MADLAD-400 or mT5 model"
            )
        tags = [_read_new_tag(text, languages, style, vocab) for text in request.languages]
    except UserError as error:
        raise UserError(f"--new_language is {','.join(request.languages)}, but {error}") from error
    if by_text:
        spelled = [NewTag(spell_tag("opus", language), "") for language in languages]
        tags = [tag for tag in spelled if not is_one_piece(vocab, tag.name)]
    return tags


def _read_new_tag(text: str, languages: Sequence[str], style: TagStyle, vocab: Vocab) -> NewTag:
    language, _, relative = text.partition(":")
    if language not in languages or not re.fullmatch(LANGUAGE_CODE, language):
        raise UserError(
            f"--languages is {','.join(languages) or 'not given'}; name {language} there too, a code as tyv"
        )
    tag, other = (spell_tag(style, code) if code else "" for code in (language, relative))
    if tag in vocab.tags or (not vocab.tags and is_one_piece(vocab, tag)):
        raise UserError(f"the model has the tag {tag}; leave --new_language out, or choose another code")
    if bool(other) != bool(vocab.tags):
        remedy = f"give {language} alone" if other else f"give {language}:RELATIVE, whose tag's row is copied"
        raise UserError(f"the model has {len(vocab.tags)} language tags; {remedy}")
    if other and other not in vocab.tags:
        near = difflib.get_close_matches(other, vocab.tags, n=3, cutoff=0.3) or list(vocab.tags)[:3]
        raise UserError(f"the model has no language tag {other}; near: {', '.join(near)}")
    return NewTag(tag, other)
