"""Confidence intervals and paired significance tests of corpus scores, computed by sacreBLEU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from flaxformer_mt.config.directions import Direction
from flaxformer_mt.errors import UserError
from flaxformer_mt.scoring.metrics import METRICS, check_lines, make_metrics
from flaxformer_mt.scoring.outside_scorers import UNKNOWN


@dataclass(frozen=True)
class ResamplingOptions:
    """Options of resampling for confidence intervals and significance tests."""

    # Number of bootstrap samples, for confidence intervals and for the paired bootstrap test; 0: none.
    samples: int = 0
    # Test of the difference between two systems: bootstrap resampling, or approximate randomization.
    paired: Literal["bootstrap", "approximate"] = "bootstrap"
    # Number of trials of approximate randomization.
    trials: int = 10_000

    def __post_init__(self) -> None:
        if self.samples != 0 and self.samples < 2:
            raise UserError(f"--bootstrap is {self.samples}; it must be 0 for no intervals, or at least 2")
        if self.trials < 1:
            raise UserError(f"--trials is {self.trials}; it must be at least 1")


class ResampledScore(NamedTuple):
    """A system's score on a set of sentences, and on resampled sets of the same sentences.

    mean: the mean over the samples. ci: half the width of the 95% confidence interval around this mean.
    p_value: the probability of a difference this large from the first system if both were equally good.
    """

    score: float
    mean: float | None
    ci: float | None
    p_value: float | None


class Resampling(NamedTuple):
    """Scores of several systems, and signatures of the metrics with and without resampling parameters."""

    # One dict per system, in the given order.
    systems: tuple[dict[str, ResampledScore], ...]
    signatures: dict[str, str]
    plain_signatures: dict[str, str]


def resample_scores(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str] | None,
    options: ResamplingOptions,
    *,
    lowercase: bool = False,
    tokenize: str = "13a",
    sources: Sequence[str] = (),
    only: Sequence[str] = tuple(METRICS),
    direction: Direction = UNKNOWN,
) -> Resampling:
    """Return all systems' scores with confidence intervals; test the first system against the others.

    sacreBLEU uses the seed 12345, or the value of SACREBLEU_SEED. Equal scores get the p-value 1: sacreBLEU
    counts only differences larger than the observed one, and would report its smallest p-value if no sample
    has a larger one. Without samples, there are no intervals. External scorers need the sources, and scorers
    that are runs need the languages; both work without references.
    """
    from sacrebleu.significance import PairedTest

    samples = options.samples
    if samples == 0 and options.paired == "bootstrap" and len(systems) > 1:
        raise ValueError("the paired bootstrap needs samples")
    for hypotheses in systems.values():
        check_lines(hypotheses, references)
    metrics = make_metrics(only, lowercase, tokenize, sources, references, direction)
    # Randomization without a second system has nothing to swap: the scores remain. sacreBLEU replaces a count
    # of 0 by a default of its own; -1 means none.
    bootstrap = samples > 0 and (options.paired == "bootstrap" or len(systems) == 1)
    rows, signatures = [dict[str, ResampledScore]() for _ in systems], {}
    for metric, scorer in metrics.items():  # apart, since spBLEU is called BLEU too
        test = PairedTest(
            list(systems.items()),
            {metric: scorer},
            None if references is None else [references],
            test_type="bs" if bootstrap else "ar",
            n_samples=samples if bootstrap else options.trials,
            n_ar_confidence=-1 if bootstrap else samples or -1,
        )
        signed, columns = test()
        ((title, signature),) = signed.items()
        signatures[metric] = str(signature)
        for row, result in zip(rows, columns[title], strict=True):
            row[metric] = _read_result(result, columns[title][0])
    plain = {metric: str(scorer.get_signature()) for metric, scorer in metrics.items()}
    return Resampling(tuple(rows), signatures, plain)


def _read_result(result: Any, first: Any) -> ResampledScore:
    mean, ci, p_value = (None if x is None else float(x) for x in (result.mean, result.ci, result.p_value))
    if p_value is not None and result.score == first.score:
        p_value = 1.0
    return ResampledScore(float(result.score), mean, ci, p_value)
