"""Scores of translations: a set of lines, or a split of a run's data.

Owns what an evaluation reports and the files under RUN/translations/. Knows nothing of training.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.corpus.reader import has_split, read_pairs
from flaxformer_mt.errors import UserError
from flaxformer_mt.lines import read_lines
from flaxformer_mt.metrics import Scores, score_translations
from flaxformer_mt.translate import Translator


@dataclass(frozen=True)
class Evaluation:
    """Hypotheses beside their sources and references, and what they score."""

    sources: tuple[str, ...]
    references: tuple[str, ...]
    hypotheses: tuple[str, ...]
    scores: Scores
    seconds: float


def evaluate_lines(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool,
    tokenize: str,
    params: Any = None,
) -> Evaluation:
    """Translates the sources and scores them against the references.

    Raises:
      UserError: the counts differ, or there is nothing to score.
    """
    if len(sources) != len(references):
        raise UserError(f"there are {len(sources)} sources but {len(references)} references; give one for each")
    start = time.monotonic()
    hypotheses = [translation.text for translation in translator.translate(sources, params=params)]
    seconds = time.monotonic() - start
    scores = score_translations(hypotheses, references, lowercase=lowercase, tokenize=tokenize)
    return Evaluation(tuple(sources), tuple(references), tuple(hypotheses), scores, seconds)


def evaluate_run(
    run_dir: Path,
    *,
    split: str = "test",
    source: str | None = None,
    reference: str | None = None,
    checkpoint: str | None = None,
    lowercase: bool | None = None,
    search: SearchConfig | None = None,
) -> dict[str, Any]:
    """Scores a run on a split of its data, or on files; writes RUN/translations/NAME.{source,reference,hypothesis}.

    The result holds BLEU and chrF as configured and, beside them, cased and lower-cased BLEU.
    """
    translator = Translator.load(run_dir, checkpoint=checkpoint, search=search)
    config = translator.config
    if source is not None and reference is not None:
        name = Path(source).name
        sources, references = _read(source), _read(reference)
    else:
        name = split
        if not has_split(config.data, split):
            raise UserError(f"{config.data.dataset} has no {split} split; give --source=FILE and --reference=FILE")
        pairs = read_pairs(config.data, split)
        sources, references = [p.source for p in pairs], [p.target for p in pairs]
    lowercase = config.train.lowercase if lowercase is None else lowercase
    evaluation = evaluate_lines(
        translator, sources, references, lowercase=lowercase, tokenize=config.train.bleu_tokenize
    )
    folder = run_dir / "translations"
    folder.mkdir(parents=True, exist_ok=True)
    for kind, lines in [
        ("source", evaluation.sources),
        ("reference", evaluation.references),
        ("hypothesis", evaluation.hypotheses),
    ]:
        (folder / f"{name}.{kind}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    beside = {}
    for label, lower in (("cased", False), ("lowercased", True)):
        scores = score_translations(
            evaluation.hypotheses, references, lowercase=lower, tokenize=config.train.bleu_tokenize
        )
        beside[label] = {"bleu": scores.bleu, "signature": scores.bleu_signature}
    return {
        "name": name,
        "checkpoint": translator.checkpoint,
        "sentences": len(sources),
        "bleu": evaluation.scores.bleu,
        "chrf": evaluation.scores.chrf,
        "signature": evaluation.scores.bleu_signature,
        "chrf_signature": evaluation.scores.chrf_signature,
        "bleu_detail": evaluation.scores.bleu_detail,
        **beside,
        "method": config.search.method,
        "beam_size": config.search.beam_size,
        "length_penalty": config.search.length_penalty,
        "seconds": round(evaluation.seconds, 1),
    }


def _read(path: str) -> list[str]:
    with open(path, "rb") as stream:
        return list(read_lines(stream, name=path))
