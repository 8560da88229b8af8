"""Scores of translations by name: sacreBLEU's metrics, and external scorers.

All metrics are sacreBLEU classes; an external scorer's corpus score is the mean over sentences.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.config.directions import Direction
from flaxformer_mt.errors import UserError, first_line, suggest
from flaxformer_mt.scoring.bleu_tokenizers import choose_sentence_tokenizer, choose_tokenizer, make_bleu
from flaxformer_mt.scoring.outside_scorers import UNKNOWN, OutsideScorer, ScorerProgram


class Metric(NamedTuple):
    """A corpus metric: its display title, a function that creates it, and whether it is quick to compute."""

    title: str
    # Takes `lowercase` and `tokenize` (for BLEU); with effective_order=True, the metric is for sentences.
    make: Callable[..., Any]
    is_quick: bool = True
    lower_is_better: bool = False
    # For an external scorer: scores sentences, given their sources and perhaps references.
    scorer: OutsideScorer | None = None


def _make_chrf(lowercase: bool, tokenize: str, *, word_order: int = 0, **options: Any) -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(lowercase=lowercase, word_order=word_order)


def _make_ter(lowercase: bool, tokenize: str, **options: Any) -> Any:
    """Make TER, the slowest metric; it always ignores case and counts characters in Chinese and Japanese."""
    from sacrebleu.metrics.ter import TER

    by_character = tokenize in ("zh", "ja-mecab", "char")  # sacreBLEU separates them only with both options
    return TER(normalized=by_character, asian_support=by_character)


# The metrics of evaluations, reports and model cards, by their names in JSON.
METRICS = {
    "bleu": Metric("BLEU", make_bleu),
    "chrf": Metric("chrF", _make_chrf),
    "ter": Metric("TER", _make_ter, is_quick=False, lower_is_better=True),
}
# The metrics of validation during training, and of parts of a test set.
QUICK = tuple(name for name, metric in METRICS.items() if metric.is_quick)
# Metrics that are computed only on request, and scorers of `define_scorer`.
_OTHERS = {"chrf++": Metric("chrF++", functools.partial(_make_chrf, word_order=2))}
# Names that evaluations and the training log use for other values.
_RESERVED = frozenset(
    "loss accuracy perplexity seconds step time split name checkpoint method beam_size length_penalty cased "
    "lowercased sentences truncated bleu_detail signature by_length confidence against paired directions "
    "scorers mbr".split()
)


def all_metrics() -> dict[str, Metric]:
    return METRICS | _OTHERS


def find_metric(name: str, where: str) -> Metric:
    """Return a metric by its name; `where` is the option that error messages name, such as "--rerank"."""
    known = all_metrics()
    if name not in known:
        hint = suggest(name, known, otherwise=f"built in: {', '.join(known)}")
        raise UserError(
            f"{where} names the score {name!r}, which is not defined{hint}; define it with "
            + ("--scorer=spbleu:FILE" if name == "spbleu" else f"--scorer={name}=COMMAND")
        )
    return known[name]


def add_scorer(scorer: OutsideScorer) -> str:
    """Add a scorer to the metrics, in place of any scorer with the same name; return the name."""
    name, old = scorer.name, _OTHERS.get(scorer.name)
    if name in METRICS or name in _RESERVED or (old is not None and old.scorer is None):
        raise UserError(
            f"a scorer cannot be called {name}, which has another meaning; give it as "
            f"--scorer=NAME={scorer.definition}"
        )
    if old is not None and old.scorer is not None and isinstance(old.scorer.function, ScorerProgram):
        old.scorer.function.close()
    _OTHERS[name] = Metric(name, functools.partial(_make_mean, scorer), scorer=scorer)
    return name


def add_spbleu(file: str) -> None:
    """Add spBLEU: BLEU of texts that the SentencePiece model in `file` splits into subwords."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    try:
        model = Path(file).expanduser().read_bytes()
        processor.LoadFromSerializedProto(model)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"--scorer=spbleu:{file} names no SentencePiece model ({first_line(error)}); give that of "
            "FLORES-200, which sacrebleu --tokenize=flores200 stores in ~/.sacrebleu/models"
        ) from error

    def make(lowercase: bool, tokenize: str, **options: Any) -> Any:
        bleu = make_bleu(lowercase, "none", **options)
        bleu.tokenizer = lambda text: " ".join(processor.encode_as_pieces(text))
        bleu.tokenizer_signature = f"spm.{blake2b(model, digest_size=4).hexdigest()}"
        return bleu

    _OTHERS["spbleu"] = Metric("spBLEU", make)


def _make_mean(scorer: OutsideScorer, lowercase: bool, tokenize: str) -> Any:
    """Make a sacreBLEU metric of a scorer's mean over sentences; it supports intervals and tests."""
    from sacrebleu.metrics.base import Metric as SacreMetric
    from sacrebleu.metrics.base import Score

    class Mean(SacreMetric):
        # The sources and languages of the hypotheses, which sacreBLEU does not pass on.
        sources: Sequence[str] = ()
        direction = UNKNOWN

        def _extract_corpus_statistics(self, hypotheses: Sequence[str], references: Any) -> Any:
            self.num_refs = 0 if references is None else 1
            only = None if references is None else references[0]
            scores = scorer(self.sources, hypotheses, only, self.direction)
            return [[score, 1.0] for score in scores]

        def _aggregate_and_compute(self, stats: Any) -> Any:
            return self._compute_score_from_stats([sum(column) for column in zip(*stats, strict=True)])

        def _compute_score_from_stats(self, stats: Any) -> Any:
            return Score(scorer.name, float(stats[0] / stats[1]))

        def get_signature(self) -> Any:
            signature = super().get_signature()
            signature.update("scorer", scorer.definition)
            return signature

        _preprocess_segment = _extract_reference_info = _compute_segment_statistics = None  # type: ignore

    return Mean()


def make_metrics(
    names: Sequence[str],
    lowercase: bool,
    tokenize: str,
    sources: Sequence[str],
    references: Sequence[str] | None,
    direction: Direction,
) -> dict[str, Any]:
    made = {}
    for name in names:
        metric = find_metric(name, "--scorer")
        if references is None:
            need_no_references(name, metric, "the evaluation")
        made[name] = metric.make(lowercase, tokenize)
        if metric.scorer is not None:
            made[name].sources, made[name].direction = sources, direction
    return made


def need_no_references(name: str, metric: Metric, where: str) -> None:
    if metric.scorer is None:
        raise UserError(
            f"{where} has no references, with which {name} compares; give a scorer of sources and "
            "translations alone, as --scorer=NAME=COMMAND"
        )


class Scores(dict[str, float]):
    """Corpus scores by metric, with sacreBLEU's signatures, which tell whether scores are comparable."""

    signatures: dict[str, str]
    # Precisions of 1- to 4-grams, brevity penalty and length ratio, as sacreBLEU prints them.
    bleu_detail: str


def score_translations(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: str = "13a",
    sources: Sequence[str] = (),
    only: Sequence[str] = QUICK,
    direction: Direction = UNKNOWN,
) -> Scores:
    """Score detokenized hypotheses with the metrics that `only` names; `tokenize` is the BLEU tokenizer.

    External scorers need the sources; scorers that are runs also need the languages in `direction`.
    """
    check_lines(hypotheses, references)
    metrics = make_metrics(only, lowercase, tokenize, sources, references, direction)
    results = {name: metric.corpus_score(hypotheses, [references]) for name, metric in metrics.items()}
    scores = Scores({name: float(result.score) for name, result in results.items()})
    scores.signatures = {name: str(metric.get_signature()) for name, metric in metrics.items()}
    scores.bleu_detail = str(results.get("bleu", ""))
    return scores


def score_sentences(
    name: str,
    sources: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[str] | None,
    *,
    lowercase: bool = False,
    where: str = "score_sentences",
    direction: Direction = UNKNOWN,
) -> list[float]:
    """Return the score of each sentence; higher is always better, so TER is negated.

    BLEU uses the tokenizer for the script of the references. `where` names the caller in errors. Scorers that
    are runs need the languages in `direction`.
    """
    metric = find_metric(name, where)
    if metric.scorer is not None:
        return metric.scorer(sources, hypotheses, references, direction)
    if references is None:
        need_no_references(name, metric, where)
    assert references is not None
    made = metric.make(lowercase, choose_sentence_tokenizer(references), effective_order=True)
    sign = -1 if metric.lower_is_better else 1
    pairs = zip(hypotheses, references, strict=True)
    return [
        sign * float(made.sentence_score(hypothesis, [reference]).score) for hypothesis, reference in pairs
    ]


def try_scorers(
    names: Iterable[str], where: str, *, with_references: bool = True, direction: Direction = UNKNOWN
) -> None:
    """Score one text with each external scorer, so that a broken scorer fails before the work begins."""
    for name in names:
        if find_metric(name, where).scorer is not None or not with_references:
            references = ["1"] if with_references else None
            score_sentences(name, ["1"], ["1"], references, where=where, direction=direction)


def check_lines(hypotheses: Sequence[str], references: Sequence[str] | None) -> None:
    if references is not None and len(hypotheses) != len(references):
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
