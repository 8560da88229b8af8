"""New pieces for a language that a vocabulary splits badly: characters that it lacks, and longer pieces.

Longer pieces are learned by BPE (Sennrich et al. 2016) that begins with the pieces of the vocabulary, in
place of characters.
"""

import itertools
import json
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from flaxformer_mt.vocab.model_file import SPACE
from flaxformer_mt.vocab.tokenizer_json import NewPiece, TokenizerJson

# The share of a text's characters that the vocabulary must have, the rarest left out, as in SentencePiece.
_COVERAGE = 0.9995
# Words are split badly if their pieces have fewer characters than this on average.
_CHARACTERS_A_PIECE = 4
# Without a number of new pieces, neighbors that become one are as frequent as this in words that are split
# badly: in number, and as a share of their parts.
_FEWEST, _SHARE = 10, 1e-5
# The most pieces of the vocabulary that become one.
_LONGEST = 12
# BPE is run on strings with a character for each piece.
_FIRST = 0x10000


def find_missing_characters(model: TokenizerJson, words: Mapping[str, int]) -> list[NewPiece]:
    """Return characters of words that are no piece, and stand for the unknown symbol."""
    known, counts = set(model.names.values()) | {SPACE}, Counter[str]()
    for word, count in words.items():
        counts.update(dict.fromkeys(word, count))
    spare = (1 - _COVERAGE) * counts.total()
    missing = [(character, count) for character, count in counts.most_common() if character not in known]
    while missing and (spare := spare - missing[-1][1]) >= 0:
        missing.pop()
    return [NewPiece(character, (model.unknown,)) for character, _ in missing]


def learn_pieces(
    model: TokenizerJson, words: Mapping[str, int], others: Iterable[str], *, most: int | None
) -> list[NewPiece]:
    """Return new pieces for words of a new language, each made of pieces that the model has.

    Args:
      others: words of other languages, whose pieces must stay as they are.
      most: number of pieces. None: all that are frequent enough.
    """
    blocked = {pair for word in others for pair in itertools.pairwise(model.split(word))}
    names, runs = set(model.names.values()), Counter[str]()
    for word, count in words.items():
        ids = model.split(word)
        if len(word.removeprefix(SPACE)) < _CHARACTERS_A_PIECE * len(ids):
            for run in _find_runs([(number, model.names[number]) for number in ids], blocked, names):
                runs[run] += count
    new: dict[str, NewPiece] = {}
    for pair in _train_bpe(runs, most):
        first, second = ("".join(model.names[ord(letter) - _FIRST] for letter in half) for half in pair)
        parts = tuple(ord(letter) - _FIRST for letter in "".join(pair))
        if first + second not in names:
            new.setdefault(first + second, NewPiece(first + second, parts, (first, second)))
    return list(new.values())


def _find_runs(
    pieces: Iterable[tuple[int, str]], blocked: Collection[tuple[int, int]], names: Collection[str]
) -> Iterator[str]:
    """Yield the runs of a word's pieces that may become one, of letters, each piece as one character."""
    run, last = "", (-1, "")
    for number, name in pieces:
        is_text = all(unicodedata.category(letter)[0] in "LM" for letter in name.removeprefix(SPACE))
        if run and not (is_text and (last[0], number) not in blocked and last[1] + name not in names):
            yield run
            run = ""
        run, last = run + chr(_FIRST + number) if is_text else "", (number, name)
    yield run


def _train_bpe(runs: Mapping[str, int], most: int | None) -> list[tuple[str, str]]:
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=len(set("".join(runs))) + (_FIRST if most is None else most),
        min_frequency=2 if most is not None else max(_FEWEST, round(_SHARE * sum(runs.values()))),
        max_token_length=_LONGEST,
        show_progress=False,
    )
    repeated = itertools.chain.from_iterable(map(itertools.repeat, runs, runs.values()))
    bpe.train_from_iterator(repeated, trainer)
    return [(first, second) for first, second in json.loads(bpe.to_str())["model"]["merges"]]
