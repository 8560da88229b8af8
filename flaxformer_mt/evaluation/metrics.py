"""Scores of translations, by sacreBLEU: row 10 of the data path."""

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.errors import UserError, install_command
from flaxformer_mt.unicode_text import lacks_spaces

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


@dataclass(frozen=True)
class Scores:
    """Corpus scores from 0 to 100, with the signatures that make them comparable."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str
    # Precisions of 1- to 4-grams, brevity penalty and length ratio, as sacreBLEU prints them.
    bleu_detail: str


def score_translations(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False, tokenize: str = "13a"
) -> Scores:
    """Corpus BLEU, with sacreBLEU's tokenizer `tokenize`, and chrF of detokenized hypotheses."""
    _check_lines(hypotheses, references)
    bleu, chrf = _make_bleu(lowercase, tokenize), _make_chrf(lowercase)
    bleu_score = bleu.corpus_score(hypotheses, [references])
    chrf_score = chrf.corpus_score(hypotheses, [references])
    return Scores(
        bleu=float(bleu_score.score),
        chrf=float(chrf_score.score),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
        bleu_detail=str(bleu_score),
    )


def score_sentences_chrf(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False
) -> list[float]:
    """chrF of each sentence, from 0 to 100."""
    chrf = _make_chrf(lowercase)
    pairs = zip(hypotheses, references, strict=True)
    return [float(chrf.sentence_score(hypothesis, [reference]).score) for hypothesis, reference in pairs]


def score_sentences_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> list[float]:
    """BLEU of each sentence, from 0 to 100, with effective order.

    The tokenizer is 13a, or char for references without spaces between words.
    """
    from sacrebleu.metrics.bleu import BLEU

    bleu = BLEU(effective_order=True, tokenize="char" if lacks_spaces(references) else "13a")
    pairs = zip(hypotheses, references, strict=True)
    return [float(bleu.sentence_score(hypothesis, [reference]).score) for hypothesis, reference in pairs]


class ResampledScore(NamedTuple):
    """A system's score on a set of sentences, and on resampled sets of the same sentences.

    mean: over the samples. ci: half the width of the 95% confidence interval around this mean. p_value: the
    probability of a difference this large from the first system if both were equally good.
    """

    score: float
    mean: float | None
    ci: float | None
    p_value: float | None


@dataclass(frozen=True)
class Resampling:
    """Scores of several systems, with the results of resampling, by metric: bleu, chrf, ter."""

    # One dict per system, in the given order.
    systems: tuple[dict[str, ResampledScore], ...]
    # Signatures that include the number of samples and the seed.
    signatures: dict[str, str]
    # Signatures of the scores without resampling.
    plain_signatures: dict[str, str]


def resample_scores(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    *,
    samples: int,
    paired: Literal["bootstrap", "approximate"] = "bootstrap",
    trials: int = 10_000,
    lowercase: bool = False,
    tokenize: str = "13a",
    only: Sequence[str] = ("bleu", "chrf", "ter"),
) -> Resampling:
    """Scores and confidence intervals of all systems, and paired tests of the first against each other one.

    Uses sacreBLEU's implementations, with its seed 12345 or that of SACREBLEU_SEED. Scores that are exactly
    equal get the p-value 1: sacreBLEU counts only differences larger than the observed one, and would report
    its smallest p-value if no sample has a larger one. `samples` is 0 for no intervals, of a single system or
    with approximate randomization, which has `trials`. TER always ignores case, and takes most time.
    """
    from sacrebleu.metrics.ter import TER
    from sacrebleu.significance import PairedTest

    if samples < 2 and (samples != 0 or (paired == "bootstrap" and len(systems) > 1)):
        raise ValueError(f"samples is {samples}; {paired} needs at least 2")
    for hypotheses in systems.values():
        _check_lines(hypotheses, references)
    metrics = {"bleu": _make_bleu(lowercase, tokenize), "chrf": _make_chrf(lowercase), "ter": TER()}
    metrics = {name: metrics[name] for name in only}
    # Randomization without a second system has nothing to swap: the scores remain. sacreBLEU replaces a count
    # of 0 by a default of its own; -1 means none.
    bootstrap = samples > 0 and (paired == "bootstrap" or len(systems) == 1)
    test = PairedTest(
        list(systems.items()),
        metrics,
        [references],
        test_type="bs" if bootstrap else "ar",
        n_samples=samples if bootstrap else trials,
        n_ar_confidence=-1 if bootstrap else samples or -1,
    )
    signatures, columns = test()
    # sacreBLEU returns names of its own, such as chrF2, in the order of the metrics.
    own_names = dict(zip(metrics, signatures, strict=True))
    rows = [
        {metric: _read_result(columns[name][row], columns[name][0]) for metric, name in own_names.items()}
        for row in range(len(systems))
    ]
    return Resampling(
        systems=tuple(rows),
        signatures={metric: str(signatures[name]) for metric, name in own_names.items()},
        plain_signatures={metric: str(scorer.get_signature()) for metric, scorer in metrics.items()},
    )


def _read_result(result: Any, first: Any) -> ResampledScore:
    mean, ci, p_value = (None if x is None else float(x) for x in (result.mean, result.ci, result.p_value))
    if p_value is not None and result.score == first.score:
        p_value = 1.0
    return ResampledScore(float(result.score), mean, ci, p_value)


def _check_lines(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references):
        raise UserError(
            f"{len(hypotheses)} translations cannot be scored against {len(references)} references; "
            "give exactly one reference line for each translation"
        )
    if not hypotheses:
        raise UserError(
            "there are no translations to score (0 lines); give at least one line and its reference"
        )


def choose_score_options(
    train: TrainConfig, language: str, references: Sequence[str], *, warn: Callable[[str], None]
) -> dict[str, Any]:
    tokenize = choose_tokenizer(language, train.bleu_tokenize, references=references, warn=warn)
    return {"lowercase": train.lowercase, "tokenize": tokenize}


def choose_tokenizer(
    language: str, tokenize: str, *, references: Sequence[str] = (), warn: Callable[[str], None]
) -> str:
    """The tokenizer for BLEU of translations into a language, such as "zh" for "auto" and "zh_CN".

    auto: 13a for languages that are written with spaces between words, else sacreBLEU's own for the language,
    or char if that is not installed. The first 200 references show whether a language has spaces if its code
    does not. Warns of a tokenizer that is absent or does not suit the language.
    """
    fitting = _find_fitting(language)
    is_unknown = fitting == "13a" and lacks_spaces(references[:SCRIPT_SAMPLE])
    fitting = "char" if is_unknown else fitting
    if tokenize == "auto":
        if is_unknown:
            warn(
                f"BLEU of target language {language} compares characters (char), because the references have "
                "no spaces between words; chrF does so for all languages"
            )
        try:
            _make_bleu(False, fitting)
        except UserError as error:
            warn(f"BLEU of target language {language} compares characters (char): {error}")
            return "char"
        return fitting
    _make_bleu(False, tokenize)
    if fitting != "13a" and tokenize in ("13a", "intl"):
        warn(
            f"the BLEU tokenizer is {tokenize}, which splits text at spaces, but the target language is "
            f"{language}; give train.bleu_tokenize=auto (evaluate: --bleu_tokenize=auto), which is {fitting}"
        )
    return tokenize


def _find_fitting(language: str) -> str:
    """The tokenizer by the script in a language's code, if there is one, else by the language."""
    base, *rest = language.lower().replace("-", "_").split("_")
    scripts = [part for part in rest if len(part) == 4 and part.isalpha()]
    found = (name for name, codes in _TOKENIZERS.items() if (*scripts, base)[0] in codes.split())
    return next(found, "13a")


def _make_bleu(lowercase: bool, tokenize: str) -> Any:
    from sacrebleu.metrics.bleu import BLEU

    names = typing.get_args(typing.get_type_hints(TrainConfig)["bleu_tokenize"])
    known = [name for name in names if name != "auto"]
    if tokenize not in known:
        raise UserError(f"unknown BLEU tokenizer {tokenize!r}; known: {', '.join(known)}")
    try:
        # `force` only silences a warning about text that looks tokenized; it changes no score.
        return BLEU(lowercase=lowercase, tokenize=tokenize, force=True)
    except (RuntimeError, ImportError) as error:  # a tokenizer whose libraries are an extra of sacreBLEU
        extra = tokenize.removesuffix("-mecab")
        raise UserError(
            f"BLEU tokenizer {tokenize} is not installed; get it with: "
            f"{install_command(f'sacrebleu[{extra}]')}"
        ) from error


def _make_chrf(lowercase: bool) -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(lowercase=lowercase)
