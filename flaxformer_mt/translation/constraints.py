"""The step that sets prefixes, required phrases and glossary terms; also finds the suppressed subwords."""

from collections.abc import Callable, Sequence

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.corpus.sentence_split import split_sentences
from flaxformer_mt.decoding.search_inputs import Sentence
from flaxformer_mt.errors import UserError, suggest
from flaxformer_mt.search import Symbols
from flaxformer_mt.translation.result import Translation, check_phrases
from flaxformer_mt.translation.segments import Segment, Step, group_by_line
from flaxformer_mt.vocab import Vocab

# Limits of a server: required phrases per sentence, and tokens per phrase.
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


class Constraints(Step):
    """Adds to each segment the input of the search: source ids and the constraints on the translation."""

    def __init__(
        self, vocab: Vocab, search: SearchConfig, check: Callable[[Sentence, str], None], *, limited: bool
    ) -> None:
        """Store the target vocabulary and the function that checks constraints.

        `check` raises UserError if constraints cannot be met. `limited`: whether a server's limits apply.
        """
        self._vocab, self._search, self._check, self._limited = vocab, search, check, limited

    def before(self, segments: list[Segment]) -> list[Segment]:
        for line, parts in group_by_line(segments):
            request = line.request
            if request.phrases or request.glossary is not None:
                check_constraints(self._search)
            prefixes = share_prefix(request.prefix, len(parts), language=line.target_language)
            targets, divided = [list[str]() for _ in parts], list[str]()
            if request.glossary is not None:
                targets, divided = request.glossary.share_targets(line.line, [part.text for part in parts])
            for number, part in enumerate(parts):
                part.number = number
                part.sentence = self._constrain(part, prefixes[number], [*targets[number], *request.phrases])
            if divided:
                line.memory[self] = divided
        return segments

    def after(self, segment: Segment, translation: Translation) -> Translation:
        return check_phrases(translation, segment.memory[self])

    def _constrain(self, part: Segment, prefix: str, phrases: Sequence[str]) -> Sentence:
        name, tokens = f"line {part.request.seed}", tuple[int, ...]()
        if prefix.strip() or self._vocab.num_forced:
            (ids,) = self._vocab.tokenize_all([part.lead + prefix.rstrip()])
            tokens = tuple(ids[:-1].tolist())
        sentence = Sentence(
            part.ids,
            tokens,
            self._tokenize(phrases, part.lead, name) if phrases else (),
            prefix_ends_word=bool(tokens) and prefix[-1:].isspace(),
            stream=(part.request.seed, part.number),
        )
        if part.request.prefix or phrases:
            self._check(sentence, name)
        return sentence

    def _tokenize(self, phrases: Sequence[str], lead: str, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of phrases as they follow a language tag; a tag in a phrase is plain text."""
        silent = self._vocab.silent_ids
        tokenized = [
            tuple(token for token in tokens[:-1].tolist() if token not in silent)
            for tokens in self._vocab.tokenize_all([lead + phrase for phrase in phrases])
        ]
        for phrase, tokens in zip(phrases, tokenized, strict=True):
            if not tokens:
                raise UserError(
                    f"{name} requires {phrase!r}, which has no tokens in the target vocabulary; remove it"
                )
        longest = max(map(len, tokenized))
        if self._limited and (len(phrases) > _MOST_PHRASES or longest > _MOST_TOKENS):
            raise UserError(
                f"{name} requires {len(phrases)} phrases of up to {longest} tokens in a sentence; the server "
                f"takes at most {_MOST_PHRASES} of {_MOST_TOKENS}: give fewer or shorter ones"
            )
        return tuple(tokenized)


def share_prefix(prefix: str, count: int, *, language: str) -> list[str]:
    """Divide a prefix into sentences, one for each part of a line; parts that get no sentence get "".

    The last part gets all remaining sentences. White space is kept only at the end of the whole prefix, where
    it marks the end of a word.
    """
    if count == 1:
        return [prefix]
    sentences = split_sentences(prefix, language=language)
    shared = [one for one in (*sentences[: count - 1], "".join(sentences[count - 1 :])) if one]
    return [*map(str.rstrip, shared[:-1]), *shared[-1:], *[""] * (count - len(shared))]


def make_symbols(vocab: Vocab, search: SearchConfig) -> Symbols:
    """Return the special tokens of a search, with the ids that search.suppress excludes."""
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
    """Return the id of the subword `name`, or else the id that `name` gives in digits."""
    if name in pieces:
        return pieces.index(name)
    if name.isascii() and name.isdigit() and int(name) < len(pieces):
        return int(name)
    hint = suggest(name, pieces, otherwise=f"give one of its subwords, or an id below {len(pieces)}")
    raise UserError(f"search.suppress contains {name!r}, which is not in the target vocabulary{hint}")
