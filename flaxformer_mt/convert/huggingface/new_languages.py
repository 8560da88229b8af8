"""The languages that a pretrained model is to learn, as the user names them, and the tags that they get."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flaxformer_mt.config.directions import LANGUAGE_CODE
from flaxformer_mt.config.tag_styles import TagStyle, spell_tag
from flaxformer_mt.convert.formats import Weights
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import PretrainedVocab
from flaxformer_mt.vocab.symbols import is_one_piece


class NewVocabulary(NamedTuple):
    """What the vocabulary of a pretrained model is to have.

    text: files; pieces stay that occur in them. With new languages, files of the known languages are told by
      the ends of their names, as corpus.ru, and the others are of the new ones; pieces are removed only if each
      known language in use has a file.
    languages: new ones, each with a related one whose tag's row is copied, as in tyv_Cyrl:kaz_Cyrl.
    pieces: number of pieces that are learned for them. None: until words are split into long enough ones.
    """

    text: Sequence[str | Path] = ()
    languages: Sequence[str] = ()
    pieces: int | None = None


class NewTag(NamedTuple):
    """A tag that the vocabulary gets, and the one whose row it copies; "": the mean of its spelling."""

    name: str
    relative: str


def read_new_tags(weights: Weights, request: NewVocabulary, languages: Sequence[str]) -> list[NewTag]:
    """Return the tags that the vocabulary gets: T5 models without tags get one for each language."""
    data, vocab = weights.config.data, weights.vocabs.target
    if request.languages and not request.text:
        raise UserError(
            f"--new_language is {request.languages[0]} without --vocab_text; give a file of text in this language"
        )
    if not isinstance(vocab, PretrainedVocab) and request.text:
        raise UserError(
            f"--vocab_text is {request.text[0]}, but this model has no vocabulary that can be cut"
        )
    if not request.languages:
        return []
    family = vocab.metadata.family if isinstance(vocab, PretrainedVocab) else "Marian or Pegasus"
    by_text = family in ("t5", "mt5") and data.tag_style == "opus"
    if (
        not isinstance(vocab, PretrainedVocab)
        or vocab.metadata.kind == "bytes"
        or not (vocab.tags or by_text)
    ):
        raise UserError(
            f"--new_language is {request.languages[0]}, but this {family} model has no tags of languages to which "
            "one can be added; give an NLLB-200, M2M100, mBART-50, MADLAD-400 or mT5 model"
        )
    tags = []
    for text in request.languages:
        language, _, relative = text.partition(":")
        if language not in languages:
            raise UserError(
                f"--new_language is {text}, but --languages is {','.join(languages) or 'not given'}; name "
                f"{language} there too"
            )
        tags.append(_read_new_tag(text, language, relative, data.tag_style, vocab))
    if by_text:
        spelled = [NewTag(spell_tag("opus", language), "") for language in languages]
        tags = [tag for tag in spelled if not is_one_piece(vocab, tag.name)]
    return tags


def _read_new_tag(text: str, language: str, relative: str, style: TagStyle, vocab: PretrainedVocab) -> NewTag:
    try:
        tag, other = (spell_tag(style, code) if code else "" for code in (language, relative))
    except UserError as error:
        raise UserError(f"--new_language is {text}: {error}") from error
    if not re.fullmatch(LANGUAGE_CODE, language):
        raise UserError(
            f"--new_language is {text}, but {language!r:.20} is no code of a language, such as tyv"
        )
    if tag in vocab.tags or (not vocab.tags and is_one_piece(vocab, tag)):
        raise UserError(
            f"--new_language is {text}, but the model has the tag {tag}; leave --new_language out, or give the "
            "new language another code"
        )
    if bool(other) != bool(vocab.tags):
        remedy = f"give {language} alone" if other else f"give {language}:RELATIVE, whose tag's row is copied"
        raise UserError(
            f"--new_language is {text}, but this model has {len(vocab.tags)} language tags; {remedy}"
        )
    if other and other not in vocab.tags:
        near = difflib.get_close_matches(other, vocab.tags, n=3, cutoff=0.3) or list(vocab.tags)[:3]
        raise UserError(
            f"--new_language is {text}, but this model has no language tag {other}; near: {', '.join(near)}"
        )
    return NewTag(tag, other)
