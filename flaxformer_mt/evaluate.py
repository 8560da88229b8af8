"""Scores of translations: of lines, of a split of a run's data, or of a user's files.

Owns what an evaluation reports, of a language model too, and the files under RUN/translations/. Knows nothing
of training, nor of how translations come about.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flaxformer_mt.config import Config, SearchConfig
from flaxformer_mt.config_files import read_config
from flaxformer_mt.corpus.reader import has_split, read_pairs
from flaxformer_mt.errors import UserError
from flaxformer_mt.likelihood import score_text
from flaxformer_mt.lines import STANDARD, open_input, read_lines
from flaxformer_mt.metrics import Scores, score_translations
from flaxformer_mt.translate import Translator, warn_on_stderr

# Fields of `Translations`, and what their files are called.
_KINDS = {"sources": "source", "references": "reference", "hypotheses": "hypothesis"}


@dataclass(frozen=True)
class Translations:
    """Translations beside their sources and references, sentence by sentence."""

    sources: tuple[str, ...]
    references: tuple[str, ...]
    hypotheses: tuple[str, ...]


@dataclass(frozen=True)
class Evaluation(Translations):
    """Translations, what they score, and how they were searched."""

    scores: Scores
    # Of translating alone, compilation included.
    seconds: float
    # Sources that were cut because they were longer than data.max_source_length.
    truncated: int
    method: str
    beam_size: int
    length_penalty: float


def evaluate_lines(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool,
    tokenize: str,
    params: Any = None,
) -> Evaluation:
    """Translates sources and scores the result against one reference each.

    Args:
      lowercase: score without regard to case.
      tokenize: sacreBLEU's tokenizer for BLEU.
      params: parameters instead of the translator's own.

    Raises:
      UserError: the counts differ, or there is nothing to score.
    """
    if len(sources) != len(references):
        raise UserError(
            f"{len(sources)} sources cannot be scored against {len(references)} references; give one for each"
        )
    start = time.monotonic()
    translations = translator.translate(sources, params=params)
    seconds = time.monotonic() - start
    hypotheses = tuple(translation.text for translation in translations)
    search = translator.config.search
    return Evaluation(
        sources=tuple(sources),
        references=tuple(references),
        hypotheses=hypotheses,
        scores=score_translations(hypotheses, references, lowercase=lowercase, tokenize=tokenize),
        seconds=seconds,
        truncated=sum(translation.truncated for translation in translations),
        method=search.method,
        beam_size=1 if search.method == "greedy" else search.beam_size,
        length_penalty=search.length_penalty,
    )


def evaluate_run(
    run_dir: Path,
    *,
    split: Literal["test", "valid"] = "test",
    source: str | None = None,
    reference: str | None = None,
    checkpoint: str | None = None,
    lowercase: bool | None = None,
    search: SearchConfig | None = None,
) -> dict[str, Any]:
    """Scores a run, keeps the translations in RUN/translations/, and returns what it found as JSON values.

    The result holds BLEU and chrF as configured and, beside them, cased and lower-cased BLEU, each with its
    signature: numbers of different papers are only comparable with the right one. Of a language model it
    holds, instead, loss (nats a token, end symbols included) and perplexity; nothing is kept.

    Args:
      split: of the run's data set, unless files are given.
      source: file of sentences, - for standard input; one a line, and `reference` with their translations.
        A language model scores the text of `reference` alone.
      checkpoint: best, last, average or a step. None: as the run's config says.
      lowercase: score translations without regard to case. None: as the run's config says.
      search: of translations, options instead of those of the run's config.

    Raises:
      UserError: no run, checkpoint, split or file of that name, or unequal numbers of lines.
    """
    config = read_config(run_dir / "config.json")
    if not config.data.source_language:
        if source is not None:
            raise UserError(
                f"{run_dir} is a language model of {config.data.target_language} (its data.source_language "
                f"is empty): it takes no source {source}, only the text to score; give --reference=FILE alone"
            )
        return _evaluate_language_model(run_dir, config, split, reference, checkpoint)
    name, sources, references = _read_set(config, split, source, reference)
    translator = Translator.load(run_dir, checkpoint=checkpoint, search=search)
    lowercase = config.train.lowercase if lowercase is None else lowercase
    tokenize = config.train.bleu_tokenize
    evaluation = evaluate_lines(translator, sources, references, lowercase=lowercase, tokenize=tokenize)
    save_translations(run_dir, name, evaluation)
    other = score_translations(evaluation.hypotheses, references, lowercase=not lowercase, tokenize=tokenize)
    cased, lowercased = (other, evaluation.scores) if lowercase else (evaluation.scores, other)
    return {
        "name": name,
        "checkpoint": translator.checkpoint,
        "sentences": len(sources),
        "bleu": evaluation.scores.bleu,
        "chrf": evaluation.scores.chrf,
        "signature": evaluation.scores.bleu_signature,
        "chrf_signature": evaluation.scores.chrf_signature,
        "bleu_detail": evaluation.scores.bleu_detail,
        "cased": {"bleu": cased.bleu, "signature": cased.bleu_signature},
        "lowercased": {"bleu": lowercased.bleu, "signature": lowercased.bleu_signature},
        "method": evaluation.method,
        "beam_size": evaluation.beam_size,
        "length_penalty": evaluation.length_penalty,
        "truncated": evaluation.truncated,
        "seconds": round(evaluation.seconds, 1),
    }


def _evaluate_language_model(
    run_dir: Path,
    config: Config,
    split: Literal["test", "valid"],
    reference: str | None,
    checkpoint: str | None,
) -> dict[str, Any]:
    if reference is None:
        _check_split(config, split, files="--reference=FILE")
        sentences = [pair.target for pair in read_pairs(config.data, split)]
    else:
        sentences = _read(reference)
    scored = score_text(run_dir, sentences, checkpoint=checkpoint, warn=warn_on_stderr)
    return {
        "name": split if reference is None else _name_of(reference),
        "checkpoint": scored.checkpoint,
        "sentences": len(sentences),
        "tokens": scored.likelihood.tokens,
        "loss": scored.likelihood.loss,
        "perplexity": scored.likelihood.perplexity,
    }


def save_translations(run_dir: Path, name: str, translations: Translations) -> None:
    """Writes RUN/translations/NAME.source, .reference and .hypothesis, line N of each being sentence N."""
    folder = run_dir / "translations"
    folder.mkdir(parents=True, exist_ok=True)
    for field, kind in _KINDS.items():
        lines = (_one_line(text) for text in getattr(translations, field))
        data = "".join(f"{line}\n" for line in lines).encode("utf-8", errors="replace")
        (folder / f"{name}.{kind}").write_bytes(data)


def load_translations(run_dir: Path, name: str) -> Translations:
    """Reads what `save_translations` wrote. Raises UserError if a file is absent."""
    files = {field: str(run_dir / "translations" / f"{name}.{kind}") for field, kind in _KINDS.items()}
    return Translations(**{field: tuple(_read(file)) for field, file in files.items()})


def side_by_side(translations: Translations, *, count: int = 10) -> str:
    """Source, translation and reference of up to `count` sentences, spread evenly over the set.

    source       ein Hund läuft .
    translation  a dog runs .
    reference    a dog is running .
    """
    total = len(translations.sources)
    count = min(count, total)
    shown = [index * total // count for index in range(count)]
    return "\n\n".join(
        f"source       {_one_line(translations.sources[index])}\n"
        f"translation  {_one_line(translations.hypotheses[index])}\n"
        f"reference    {_one_line(translations.references[index])}"
        for index in shown
    )


def _one_line(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")


def _read_set(
    config: Config, split: Literal["test", "valid"], source: str | None, reference: str | None
) -> tuple[str, list[str], list[str]]:
    """The name of what is scored, its sources and its references."""
    if (source is None) != (reference is None):
        missing = "a reference" if reference is None else "a source"
        raise UserError(f"{source or reference} is given without {missing}; files are scored in pairs")
    if source is None or reference is None:
        _check_split(config, split, files="--source=FILE --reference=FILE")
        pairs = read_pairs(config.data, split)
        return split, [pair.source for pair in pairs], [pair.target for pair in pairs]
    if source == reference:
        raise UserError(f"source and reference are both {source}; give two files")
    sources, references = _read(source), _read(reference)
    if len(sources) != len(references):
        raise UserError(
            f"{source} has {len(sources)} lines, but {reference} has {len(references)}; "
            "line N of the one must be the translation of line N of the other"
        )
    return _name_of(source), sources, references


def _check_split(config: Config, split: Literal["test", "valid"], *, files: str) -> None:
    if not has_split(config.data, split):
        raise UserError(f"{config.data.dataset} has no {split} split; score files with {files}")


def _name_of(path: str) -> str:
    return "stdin" if path == STANDARD else Path(path).name


def _read(path: str) -> list[str]:
    with open_input(path) as stream:
        return list(read_lines(stream, name=path))
