"""Constraints on translations, from text to ids: suppressed pieces, forced prefixes and required phrases."""

import collections
import dataclasses
import difflib
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.corpus.sentence_split import split_sentences
from flaxformer_mt.decoding.sentences import Sentence
from flaxformer_mt.errors import UserError
from flaxformer_mt.search import Symbols
from flaxformer_mt.translation.result import Translation, check_phrases
from flaxformer_mt.translation.segmentation import SourcePart
from flaxformer_mt.unicode_text import is_blank
from flaxformer_mt.vocab import Vocab


class Constraints(NamedTuple):
    """The number of hypotheses and the constraints of one call; None: no constraint of this kind."""

    n_best: int = 1
    # The prefix of each line's translation; "": none.
    prefixes: Sequence[str] | None = None
    # The phrases that each line's translation contains.
    required: Sequence[Sequence[str]] | None = None
    # What every translation begins with as it is tokenized: the tag of its language, and a space.
    lead: str = ""

    def check(self, search: SearchConfig, num_lines: int, first_line: int) -> None:
        """Raise UserError unless each line has one constraint of each kind, and the search supports them."""
        for what, given in (("prefixes", self.prefixes), ("lists of required phrases", self.required)):
            if given is not None and len(given) != num_lines:
                before = first_line - 1
                raise UserError(
                    f"there are {before + len(given)} {what} for {before + num_lines} lines; give one for "
                    "each line, an empty one for a line without constraint"
                )
        if self.required is not None and (search.method != "beam" or search.diversity_groups > 1):
            raise UserError(
                f"required phrases need plain beam search, but search.method is {search.method} with "
                f"search.diversity_groups {search.diversity_groups}; set them to beam and 1"
            )

    def phrases(self, index: int) -> list[str]:
        """Return the required phrases of a line, without blank ones."""
        return [phrase for phrase in self.required[index] if not is_blank(phrase)] if self.required else []

    def make_sentences(
        self, parts: Sequence[SourcePart], *, vocab: Vocab, first_line: int, language: str = ""
    ) -> list[Sentence]:
        """Add constraints to parts: the sentences of a line's prefix to its parts, phrases to an only part.

        The phrases of a line in several parts are left to `require_in_parts`.

        Args:
          language: that of the prefixes, see `split_sentences`.

        Raises:
          UserError: a phrase has no tokens; the message names the line, counted from `first_line`.
        """
        sentences: list[Sentence] = []
        for line, group in itertools.groupby(parts, key=lambda part: part.line):
            own, prefix = list(group), self.prefixes[line] if self.prefixes else ""
            prefixes, phrases = share_prefix(prefix, len(own), language=language), self.phrases(line)
            for number, part in enumerate(own):
                sentence = make_sentence(part.ids, prefixes[number], vocab=vocab, lead=self.lead)
                if phrases and len(own) == 1:
                    sentence = require(sentence, phrases, vocab=vocab, name=f"line {first_line + line}")
                sentences.append(dataclasses.replace(sentence, stream=(first_line + line, number)))
        return sentences


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
      lead: see `Constraints`.
    """
    if not prefix.strip() and not vocab.num_forced:
        return Sentence(source)
    (tokens,) = vocab.tokenize_all([lead + prefix.rstrip()])
    ids = tuple(tokens[:-1].tolist())
    return Sentence(source, ids, prefix_ends_word=bool(ids) and prefix[-1:].isspace())


def require(sentence: Sentence, phrases: Sequence[str], *, vocab: Vocab, name: str) -> Sentence:
    """Add required phrases to a sentence.

    Raises:
      UserError: a phrase has no tokens; the message begins with `name`.
    """
    tokenized = [
        tuple(token for token in tokens[:-1].tolist() if token not in vocab.silent_ids)
        for tokens in vocab.tokenize_all(phrases)
    ]
    for phrase, tokens in zip(phrases, tokenized, strict=True):
        if not tokens:
            raise UserError(
                f"{name} requires {phrase!r}, which has no tokens in the target vocabulary; remove it"
            )
    return dataclasses.replace(sentence, required=(*sentence.required, *tokenized))


# Returns the translations of sentences, which belong to these parts.
SearchParts = Callable[[list[SourcePart], list[Sentence]], list[Translation]]


def require_in_parts(
    constraints: Constraints,
    parts: Sequence[SourcePart],
    sentences: Sequence[Sentence],
    translations: Sequence[Translation],
    *,
    vocab: Vocab,
    first_line: int,
    search: SearchParts,
) -> list[Translation]:
    """Return translations with the required phrases that lines in several parts lack, where they can be.

    Which part a phrase belongs to is found by searching each part of the line with it: the part whose score
    falls least has it from then on. One phrase follows the other, those of all lines together.
    """
    found, sentences = list(translations), list(sentences)
    members: dict[int, list[int]] = collections.defaultdict(list)
    for number, part in enumerate(parts):
        members[part.line].append(number)
    waiting = {line: constraints.phrases(line) for line, own in members.items() if len(own) > 1}
    while True:
        for line in waiting:
            texts = [found[number].text for number in members[line]]
            waiting[line] = [one for one in waiting[line] if not any(one.strip() in text for text in texts)]
        waiting = {line: phrases for line, phrases in waiting.items() if phrases}
        if not waiting:
            return found
        tried = {
            number: require(sentences[number], phrases[:1], vocab=vocab, name=f"line {first_line + line}")
            for line, phrases in waiting.items()
            for number in members[line]
        }
        results = dict(zip(tried, search([parts[n] for n in tried], [*tried.values()]), strict=True))
        for line, phrases in waiting.items():
            satisfied = [number for number in members[line] if results[number].satisfied]
            if satisfied:
                best = max(satisfied, key=lambda number: results[number].score - found[number].score)
                found[best], sentences[best] = results[best], tried[best]
            waiting[line] = phrases[1:]


def mark_unsatisfied(
    results: Sequence[Translation], constraints: Constraints, part_lines: Sequence[int]
) -> tuple[list[Translation], list[int]]:
    """Mark translations, and their alternatives, that lack required phrases as not satisfied.

    Args:
      part_lines: the index of the line of each part. Of a line in several parts (or in none, if it is blank),
        no search knows all phrases, so that its translations are searched for them here.

    Returns:
      The translations, and the indices of the lines whose best translation lacks a phrase.
    """
    marked, count = list(results), collections.Counter(part_lines)
    for index, result in enumerate(results):
        phrases = constraints.phrases(index)
        if phrases and count[index] != 1:
            marked[index] = check_phrases(result, phrases)
    return marked, [index for index, result in enumerate(marked) if not result.satisfied]


def make_symbols(vocab: Vocab, search: SearchConfig) -> Symbols:
    """Return the symbols of a search, with the ids that search.suppress and allow_unknown exclude.

    Raises:
      UserError: search.suppress contains eos, or a piece that is absent from the vocabulary.
    """
    pieces = vocab.pieces(range(vocab.size))
    suppressed = {_find_token(pieces, name) for name in search.suppress}
    if vocab.eos_id in suppressed:
        raise UserError(
            f"search.suppress contains the end symbol (id {vocab.eos_id}), which ends every translation; "
            "remove it, or raise search.min_length_offset for longer translations"
        )
    if not search.allow_unknown and vocab.unk_id >= 0:
        suppressed.add(vocab.unk_id)
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
    near = difflib.get_close_matches(name, pieces, n=1)
    hint = f"did you mean {near[0]}?" if near else f"give one of its pieces, or an id below {len(pieces)}"
    raise UserError(f"search.suppress contains {name!r}, which is not in the target vocabulary; {hint}")
