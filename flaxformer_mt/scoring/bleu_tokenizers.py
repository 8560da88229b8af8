"""sacreBLEU's tokenizers for BLEU: chooses the one that a language, or the script of a text, needs."""

import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.errors import UserError, install_command, warn_user
from flaxformer_mt.unicode_text import count_scripts, lacks_spaces

# sacreBLEU's tokenizers, and the codes of the languages (ISO 639) and scripts (ISO 15924) that need them.
# char is for languages that are written without spaces between words and have no tokenizer of their own.
_TOKENIZERS = {
    "zh": "zh zho chi cmn yue wuu lzh gan hak hsn cdo hans hant hani",
    "ja-mecab": "ja jpn jp jpan",
    "ko-mecab": "ko kor kore hang",
    "char": (
        "th tha tts nod sou lo lao km khm kxm my mya bur rki shn mnw ksw pwo kjp blk kht khb tdd blt ahm "
        "bo bod tib dz dzo adx khg lbj sip ii iii thai laoo khmr mymr tale talu lana tavt ahom tibt "
        "java bali yiii"
    ),
}
# References whose script is looked at.
SCRIPT_SAMPLE = 200


def choose_tokenizer(
    language: str, tokenize: str, *, references: Sequence[str] = (), warn: Callable[[str], None]
) -> str:
    """Return the BLEU tokenizer for a target language; `tokenize` auto gives, for example, zh for zh_CN.

    auto: 13a for languages that are written with spaces between words; for other languages sacreBLEU's
    tokenizer for the language, or char if it is not installed. If the language code does not decide, the
    script of the first 200 references does. Warns if a tokenizer is absent or does not suit the language.
    """
    fitting = _find_fitting(language)
    is_unknown = fitting == "13a" and (fitting := find_tokenizer(references[:SCRIPT_SAMPLE])) != "13a"
    if tokenize == "auto":
        if is_unknown:
            warn(
                f"BLEU of target language {language} has the tokenizer {fitting}, because the references are "
                "in a script that needs it; chrF compares characters of all languages"
            )
        try:
            make_bleu(False, fitting)
        except UserError as error:
            warn(f"BLEU of target language {language} compares characters (char): {error}")
            return "char"
        return fitting
    make_bleu(False, tokenize)
    if fitting != "13a" and tokenize in ("13a", "intl"):
        warn(
            f"the BLEU tokenizer is {tokenize}, which splits text at spaces, but the target language is "
            f"{language}; give train.bleu_tokenize=auto (evaluate: --bleu_tokenize=auto), which is {fitting}"
        )
    return tokenize


def _find_fitting(language: str) -> str:
    """Return the tokenizer for the script named in a language code, else for the language."""
    base, *rest = language.lower().replace("-", "_").split("_")
    scripts = [part for part in rest if len(part) == 4 and part.isalpha()]
    found = (name for name, codes in _TOKENIZERS.items() if (*scripts, base)[0] in codes.split())
    return next(found, "13a")


def find_tokenizer(texts: Sequence[str]) -> str:
    """Return the tokenizer for the script of most letters in the texts; kana indicate Japanese."""
    counts = count_scripts(texts)
    if 2 * counts["HANGUL"] > counts.total():
        return "ko-mecab"
    if not lacks_spaces(texts):
        return "13a"
    if 10 * (counts["HIRAGANA"] + counts["KATAKANA"]) > counts.total():
        return "ja-mecab"
    return "zh" if 2 * counts["CJK"] > counts.total() else "char"


def choose_sentence_tokenizer(texts: Sequence[str]) -> str:
    """Return the tokenizer for sentence-level BLEU that suits the script of the texts."""
    return _replace_missing(find_tokenizer(texts))


@functools.cache
def _replace_missing(tokenize: str) -> str:
    """Return the tokenizer; if it is not installed, warn once and return char."""
    try:
        make_bleu(False, tokenize)
    except UserError as error:
        warn_user(f"BLEU of sentences compares characters (char): {error}")
        return "char"
    return tokenize


def make_bleu(lowercase: bool, tokenize: str, **options: Any) -> Any:
    from sacrebleu.metrics.bleu import BLEU

    names = typing.get_args(typing.get_type_hints(TrainConfig)["bleu_tokenize"])
    known = [name for name in names if name != "auto"]
    if tokenize not in known:
        raise UserError(f"unknown BLEU tokenizer {tokenize!r}; known: {', '.join(known)}")
    try:
        # `force` only silences a warning about text that looks tokenized; it changes no score.
        return BLEU(lowercase=lowercase, tokenize=tokenize, force=True, **options)
    except (RuntimeError, ImportError) as error:  # a tokenizer whose libraries are an extra of sacreBLEU
        extra = tokenize.removesuffix("-mecab")
        raise UserError(
            f"BLEU tokenizer {tokenize} is not installed; get it with: "
            f"{install_command(f'sacrebleu[{extra}]')}"
        ) from error
