"""Constraints on translations, from text to ids: suppressed pieces, forced prefixes and required phrases."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.corpus.sentence_split import split_sentences
from flaxformer_mt.decoding.sentences import Sentence
from flaxformer_mt.errors import UserError, suggest
from flaxformer_mt.search import Symbols
from flaxformer_mt.translation.language_tags import LineTags
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.segmentation import SourcePart
from flaxformer_mt.vocab import Vocab

# Required phrases of a sentence, and tokens of each, that a server takes.
_MOST_PHRASES, _MOST_TOKENS = 16, 32


def check_constraints(search: SearchConfig) -> None:
    """Raise UserError unless the search supports required phrases."""
    if search.method != "beam" or search.diversity_groups > 1:
        raise UserError(
            f"required phrases need plain beam search, but search.method is {search.method} with "
            f"search.diversity_groups {search.diversity_groups}; set them to beam and 1"
        )
    if search.mbr:
        raise UserError(
            f"required phrases need plain beam search, but search.mbr is {search.mbr}; leave out search.mbr"
        )


def make_sentences(
    request: Request, parts: Sequence[SourcePart], *, vocab: Vocab, tags: LineTags
) -> tuple[list[Sentence], list[str]]:
    """Add constraints to the parts of a line: the sentences of its prefix, and its phrases to an only part.

    Returns also the phrases of a line in several parts: which part has which is found by searching. A target
    of the glossary belongs to the part that has its term, unless the term is divided.
    """
    prefixes = share_prefix(request.prefix, len(parts), language=tags.target_language) if parts else []
    sentences = [
        dataclasses.replace(
            make_sentence(part.ids, prefixes[number], vocab=vocab, lead=tags.lead),
            stream=(request.seed, number),
        )
        for number, part in enumerate(parts)
    ]
    name = f"line {request.seed}"
    phrases = request.phrases
    if request.glossary is not None:
        whole, *targets = (
            dict.fromkeys(term.target for term in request.glossary.find(text))
            for text in ("".join(part.content for part in parts), *(part.content for part in parts))
        )
        sentences = [
            require(sentence, [*own], vocab=vocab, lead=tags.lead, name=name)
            for sentence, own in zip(sentences, targets, strict=True)
        ]
        known = set[str]().union(*targets)
        phrases += [target for target in whole if target not in known]
    if len(sentences) == 1 and phrases:
        return [require(sentences[0], phrases, vocab=vocab, lead=tags.lead, name=name)], []
    return sentences, phrases


def share_prefix(prefix: str, count: int, *, language: str) -> list[str]:
    """Return the prefix of each part of a line: a sentence of the prefix, or "" after its end.

    With more sentences than parts, the last part has all that are left. Only what ends the whole prefix may
    have white space at its end, which says that a word ends there.
    """
    if count == 1:
        return [prefix]
    sentences = split_sentences(prefix, language=language)
    shared = [one for one in (*sentences[: count - 1], "".join(sentences[count - 1 :])) if one]
    return [*map(str.rstrip, shared[:-1]), *shared[-1:], *[""] * (count - len(shared))]


def make_sentence(source: np.ndarray, prefix: str, *, vocab: Vocab, lead: str) -> Sentence:
    """Combine source ids with the prefix of the translation as ids of the target vocabulary.

    Args:
      lead: what every translation begins with as it is tokenized: the tag of its language, and a space.
    """
    if not prefix.strip() and not vocab.num_forced:
        return Sentence(source)
    (tokens,) = vocab.tokenize_all([lead + prefix.rstrip()])
    ids = tuple(tokens[:-1].tolist())
    return Sentence(source, ids, prefix_ends_word=bool(ids) and prefix[-1:].isspace())


def require(
    sentence: Sentence, phrases: Sequence[str], *, vocab: Vocab, name: str, lead: str = ""
) -> Sentence:
    """Add required phrases to a sentence; `lead` as in `make_sentence`: a tag in a phrase is text."""
    tokenized = [
        tuple(token for token in tokens[:-1].tolist() if token not in vocab.silent_ids)
        for tokens in vocab.tokenize_all([lead + phrase for phrase in phrases])
    ]
    for phrase, tokens in zip(phrases, tokenized, strict=True):
        if not tokens:
            raise UserError(
                f"{name} requires {phrase!r}, which has no tokens in the target vocabulary; remove it"
            )
    return dataclasses.replace(sentence, required=(*sentence.required, *tokenized))


def check_size(name: str, count: int, longest: int = 0) -> None:
    """Raise UserError for more, or longer, phrases than a server takes, for which programs are compiled."""
    if count > _MOST_PHRASES or longest > _MOST_TOKENS:
        raise UserError(
            f"{name} requires {count} phrases of up to {longest} tokens in a sentence; the server takes "
            f"at most {_MOST_PHRASES} of {_MOST_TOKENS}: give fewer or shorter ones"
        )


def make_symbols(vocab: Vocab, search: SearchConfig) -> Symbols:
    """Return the symbols of a search, with the ids that search.suppress excludes."""
    pieces = vocab.pieces(range(vocab.size))
    suppressed = {_find_token(pieces, name) for name in search.suppress}
    if vocab.eos_id in suppressed:
        raise UserError(
            f"search.suppress contains the end symbol (id {vocab.eos_id}), which ends every translation; "
            "remove it, or raise search.min_length_offset for longer translations"
        )
    # Pieces that begin a word contain the space before it.
    word_starts = tuple(number for number, piece in enumerate(pieces) if piece.startswith("\u2581"))
    never = tuple(sorted(suppressed))
    return Symbols(vocab.pad_id, vocab.bos_id, vocab.eos_id, never, word_starts, vocab.num_forced)


def _find_token(pieces: list[str], name: str) -> int:
    """Return the id of a piece, or the id that `name` spells in digits; a piece takes precedence."""
    if name in pieces:
        return pieces.index(name)
    if name.isascii() and name.isdigit() and int(name) < len(pieces):
        return int(name)
    hint = suggest(name, pieces, otherwise=f"give one of its pieces, or an id below {len(pieces)}")
    raise UserError(f"search.suppress contains {name!r}, which is not in the target vocabulary{hint}")
