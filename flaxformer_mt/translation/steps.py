"""The list of steps that lines go through before translation, in order; a new step is added here."""

from collections.abc import Callable

from flaxformer_mt.config import Config
from flaxformer_mt.decoding.search_inputs import Sentence
from flaxformer_mt.translation.constraints import Constraints
from flaxformer_mt.translation.context import LinesBefore
from flaxformer_mt.translation.copied_text import CopiedText
from flaxformer_mt.translation.inline_markup import InlineMarkup
from flaxformer_mt.translation.language_tags import LanguageTags
from flaxformer_mt.translation.letter_case import LetterCase
from flaxformer_mt.translation.segments import Step
from flaxformer_mt.translation.sentences import Sentences
from flaxformer_mt.translation.tokenization import LongLines, Tokenization
from flaxformer_mt.vocab import Vocabs


def make_steps(
    config: Config,
    vocabs: Vocabs,
    check: Callable[[Sentence, str], None],
    *,
    apart: bool,
    long_lines: LongLines = "split",
    changed_cases: frozenset[str] = frozenset(),
    limited: bool = False,
    lines_have_tags: bool = False,
) -> list[Step]:
    """Return the steps in order; for a language model, `Constraints` is the only one.

    `apart`: whether lines are divided into sentences.
    """
    data, constraints = config.data, Constraints(vocabs.target, config.search, check, limited=limited)
    if not data.source_language:
        return [constraints]
    return [
        InlineMarkup(),
        LanguageTags(data, vocabs, lines_have_tags=lines_have_tags),
        Sentences(apart=apart),
        CopiedText(vocabs.source),
        LetterCase(changed_cases, vocabs.source),
        Tokenization(vocabs.source, longest=data.max_source_length, long_lines=long_lines),
        LinesBefore(data, vocabs.source, apart=apart),
        constraints,
    ]
