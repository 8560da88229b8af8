"""The attention of chosen sentences."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.translation_files import Translations
from flaxformer_mt.translation.annotation import Notes
from flaxformer_mt.translation.translator import Translator


class Attention(NamedTuple):
    """The weights [T][S] of a translation's pieces over the pieces of its source, without end symbols."""

    number: int
    source: Sequence[str]
    target: Sequence[str]
    weights: Sequence[Sequence[float]]


def find_attention(run_dir: Path, translations: Translations, numbers: Sequence[int]) -> list[Attention]:
    """Translate the sentences of these numbers, from 1, and return the weights that alignments use.

    Raises:
      UserError: there is no such sentence, or the model cannot be loaded.
    """
    count = len(translations.sources)
    for number in numbers:
        if not 1 <= number <= count:
            raise UserError(f"--attention names sentence {number}, but there are {count}; give 1 to {count}")
    translator = Translator.load(run_dir, long_lines="cut", split_sentences="never")
    lines = [translations.sources[number - 1] for number in numbers]
    found = []
    translated = translator.translate(lines, notes=Notes(attention=True))
    for number, line, one in zip(numbers, lines, translated, strict=True):
        if one.attention is None:  # a blank line
            continue
        source = translator.vocabs.source.pieces(translator.vocabs.source.tokenize(line)[:-1])
        eos = translator.vocabs.target.eos_id
        target = translator.pieces([token for token in one.tokens if token != eos])
        found.append(Attention(number, source[: len(one.attention[0])], target, one.attention))
    return found
