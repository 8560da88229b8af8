"""Learns subwords for a language that a vocabulary splits too finely: missing characters, longer subwords.

Longer subwords are learned by BPE (Sennrich et al. 2016), which starts from the subwords of the vocabulary
instead of characters.
"""

import itertools
import json
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from flaxformer_mt.vocab.model_file import SPACE
from flaxformer_mt.vocab.tokenizer_json import NewPiece, TokenizerJson

# The share of a text's characters that the vocabulary must cover, as in SentencePiece.
_COVERAGE = 0.9995
# Words are split too finely if their subwords have fewer characters than this on average.
_CHARACTERS_A_PIECE = 4
# Without a number of new subwords, subwords are merged if they are at least this frequent in words that are
# split too finely: as a number, and as a share of the runs of subwords.
_FEWEST, _SHARE = 10, 1e-5
# Maximum number of subwords of the vocabulary in a new subword.
_LONGEST = 12
# BPE is run on strings with one character per subword.
_FIRST = 0x10000


def find_missing_characters(model: TokenizerJson, words: Mapping[str, int]) -> list[NewPiece]:
    """Return the characters in `words` that are missing from the vocabulary, except for very rare ones."""
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
    """Learn new subwords for a new language; each new subword is a merge of existing subwords.

    `words`: words of the new language, with their counts. `others`: words of other languages, whose
    segmentation must not change. `most`: maximum number of new subwords; None: all that are frequent enough.
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
    """Yield the runs of a word's subwords that may be merged, as strings with one character per subword.

    Such subwords consist of letters and combining marks.
    """
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
