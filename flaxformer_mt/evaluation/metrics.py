"""Scores of translations, by sacreBLEU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.bleu_tokenizers import choose_sentence_tokenizer, choose_tokenizer, make_bleu


class Metric(NamedTuple):
    """A score of a corpus from 0 to 100: its name for people, sacreBLEU's metric, and whether it is quick."""

    title: str
    # From whether to ignore case, and the tokenizer for BLEU.
    make: Callable[[bool, str], Any]
    is_quick: bool = True


def _make_chrf(lowercase: bool, tokenize: str = "") -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(lowercase=lowercase)


def _make_ter(lowercase: bool, tokenize: str) -> Any:
    """TER always ignores case, and takes most time."""
    from sacrebleu.metrics.ter import TER

    return TER()


# All that evaluations, reports and model cards show, by the names in JSON.
METRICS = {
    "bleu": Metric("BLEU", make_bleu),
    "chrf": Metric("chrF", _make_chrf),
    "ter": Metric("TER", _make_ter, is_quick=False),
}
# Those of validation during training, and of parts of a set.
QUICK = tuple(name for name, metric in METRICS.items() if metric.is_quick)


class Scores(dict[str, float]):
    """Corpus scores by metric, with the signatures that make them comparable."""

    signatures: dict[str, str]
    # Precisions of 1- to 4-grams, brevity penalty and length ratio, as sacreBLEU prints them.
    bleu_detail: str


def score_translations(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False, tokenize: str = "13a"
) -> Scores:
    """The quick metrics of detokenized hypotheses, BLEU with sacreBLEU's tokenizer `tokenize`."""
    _check_lines(hypotheses, references)
    metrics = {name: METRICS[name].make(lowercase, tokenize) for name in QUICK}
    results = {name: metric.corpus_score(hypotheses, [references]) for name, metric in metrics.items()}
    scores = Scores({name: float(result.score) for name, result in results.items()})
    scores.signatures = {name: str(metric.get_signature()) for name, metric in metrics.items()}
    scores.bleu_detail = str(results["bleu"])
    return scores


def score_sentences_chrf(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False
) -> list[float]:
    """chrF of each sentence, from 0 to 100."""
    chrf = _make_chrf(lowercase)
    pairs = zip(hypotheses, references, strict=True)
    return [float(chrf.sentence_score(hypothesis, [reference]).score) for hypothesis, reference in pairs]


def score_sentences_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> list[float]:
    """BLEU of each sentence, from 0 to 100, with effective order.

    The tokenizer is the one for the script of the references.
    """
    bleu = make_bleu(False, choose_sentence_tokenizer(references), effective_order=True)
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
    """Scores of several systems, with the results of resampling, by metric."""

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
    only: Sequence[str] = tuple(METRICS),
) -> Resampling:
    """Scores and confidence intervals of all systems, and paired tests of the first against each other one.

    Uses sacreBLEU's implementations, with its seed 12345 or that of SACREBLEU_SEED. Scores that are exactly
    equal get the p-value 1: sacreBLEU counts only differences larger than the observed one, and would report
    its smallest p-value if no sample has a larger one. `samples` is 0 for no intervals, of a single system or
    with approximate randomization, which has `trials`.
    """
    from sacrebleu.significance import PairedTest

    if samples < 2 and (samples != 0 or (paired == "bootstrap" and len(systems) > 1)):
        raise ValueError(f"samples is {samples}; {paired} needs at least 2")
    for hypotheses in systems.values():
        _check_lines(hypotheses, references)
    metrics = {name: METRICS[name].make(lowercase, tokenize) for name in only}
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
