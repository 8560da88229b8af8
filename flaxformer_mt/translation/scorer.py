"""Scores existing translations by forced decoding, and scores and generates text with language models.

A search with the same model would rank the translations by the same scores. Scores against references are in
scoring/metrics.py.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config import Config, SearchConfig
from flaxformer_mt.config.checks import check_n_best
from flaxformer_mt.config.load_options import LoadOptions
from flaxformer_mt.decoding.forced_decoding import UNBOUNDED, Pair, PairScore
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.runs.load_run import Warn
from flaxformer_mt.text_io.lines import format_line_numbers, take_windows
from flaxformer_mt.translation.language_tags import LineTags, choose_line_tags
from flaxformer_mt.translation.requests import Request, check_lines
from flaxformer_mt.translation.result import Translation
from flaxformer_mt.translation.translator import Translator, load_translator


class Scorer:
    """Scores existing translations with a translation model, or text with a language model."""

    def __init__(self, model: Translator, *, cuts_lines: bool = False) -> None:
        """`cuts_lines`: whether to cut and score a line that is too long; otherwise, it raises UserError."""
        self._model, self._cuts_lines = model, cuts_lines

    config = property(lambda self: self._model.config, doc="The config that the model was trained with.")
    checkpoint = property(lambda self: self._model.checkpoint)
    step = property(lambda self: self._model.step)
    vocabs = property(lambda self: self._model.vocabs)
    tokens = property(lambda self: self._model.scorer)

    def __repr__(self) -> str:
        data = self.config.data
        languages = " -> ".join(filter(None, (data.source_language, data.target_language)))
        return f"<Scorer {languages}, checkpoint {self.checkpoint!r}>"

    @classmethod
    def load(
        cls,
        run_dir: str | Path,
        options: LoadOptions | None = None,
        *,
        warn: Warn = warn_user,
        **changes: Any,
    ) -> "Scorer":
        """Load the translation model or the language model of a run directory; see `Translator.load`.

        Args:
          options, changes: see `Translator.load`; scoring uses one device. With long_lines="cut", only the
            beginning of a line that is too long is scored; otherwise such a line raises UserError.
        """
        options = dataclasses.replace(options or LoadOptions(), **{**changes, "use_all_devices": False})
        return cls(load_translator(run_dir, options, warn), cuts_lines=options.long_lines == "cut")

    def score(
        self,
        sources: Sequence[str] | None,
        targets: Sequence[str],
        *,
        source_language: str | None = None,
        target_language: str | None = None,
    ) -> list[Translation]:
        """Score each line of `targets` as the translation of its source, in order.

        The text is tokenized again. If a search produced the same text with different subwords, its
        probability differs; `score_tokens` scores the subwords of the search.

        Args:
          sources: None for a language model, which scores the targets alone.
          source_language, target_language: see `Translator.translate`.

        Raises:
          UserError: the numbers of sources and targets differ, a translation model has no sources, a language
            model has sources, or a line is too long and `long_lines` is not cut.
        """
        if isinstance(sources, str) or isinstance(targets, str):
            raise UserError("score takes lists of lines, but got one string; put the string in a list")
        if sources is not None and len(sources) != len(targets):
            _refuse_counts(len(sources), len(targets))
        languages: dict[str, Any] = {"source_language": source_language, "target_language": target_language}
        return list(self.score_stream(sources, targets, window=max(1, len(targets)), **languages))

    def score_stream(
        self,
        sources: Iterable[str] | None,
        targets: Iterable[str],
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        window: int = 2048,
        is_ready: Callable[[], bool] | None = None,
    ) -> Iterator[Translation]:
        """Score lines in order as they arrive, `window` lines at a time to limit memory use.

        Args:
          is_ready: called before each pair except the first of a window; if it returns False, the pairs
            collected so far are scored. None: windows are always full.

        Raises:
          UserError: see `score`. If one side has more lines, all complete pairs are scored before the error.
        """
        self._check_sources(sources)
        tags = choose_line_tags(
            self.config.data, source_language, target_language, vocab_tags=self.vocabs.target.tags
        )
        first_line = 1
        for pairs in take_windows(_pair_lines(sources, targets), window, is_ready):
            yield from self._score_window(pairs, tags, first_line)
            first_line += len(pairs)

    def _score_window(
        self, lines: Sequence[tuple[str, str]], tags: LineTags, first_line: int
    ) -> list[Translation]:
        """Score pairs of lines; `tags` are the language tags that a translation of the sources would get."""
        sources, targets = map(list, zip(*lines, strict=True))
        check_lines([*sources, *targets], first_line=first_line)
        ids: dict[str, list[Any]] = {"source": [()] * len(lines)}
        cut: dict[str, list[int]] = {}
        if self.config.data.source_language:
            added = tags.find(sources, first_line=first_line) or [""] * len(lines)
            tagged = [tag + source for tag, source in zip(added, sources, strict=True)]
            ids["source"] = self.vocabs.source.tokenize_all(tagged)
        ids["target"] = self.vocabs.target.tokenize_all([tags.lead + target for target in targets])
        for (side, own), longest in zip(ids.items(), find_longest(self.config), strict=True):
            cut[side] = [index for index, tokens in enumerate(own) if len(tokens) > longest]
            numbers = [first_line + index for index in cut[side]]
            if numbers and not self._cuts_lines:
                remedy = " (the command score has --long_lines=cut for its beginning)"
                raise UserError(too_long(side, numbers, longest) + remedy)
            for index in cut[side]:
                own[index] = own[index][:longest]
                if side == "source":  # ends in eos; a cut target has not ended, so it is scored without
                    own[index] = np.append(own[index][:-1], self.vocabs.source.eos_id)
            if numbers:
                named = format_line_numbers(numbers)
                self._model.warn(
                    f"{side} {named}: longer than {longest} tokens; only the beginning is scored"
                )
        pairs = list(map(Pair, ids["source"], ids["target"]))
        truncated = {*cut["source"], *cut["target"]}
        return [
            Translation(text=target, truncated=index in truncated, **score._asdict())
            for index, (target, score) in enumerate(
                zip(targets, self.tokens.score_all(pairs, params=self._model.all_params), strict=True)
            )
        ]

    def score_tokens(
        self, sources: Sequence[Sequence[int]] | None, targets: Sequence[Sequence[int]]
    ) -> list[PairScore]:
        """Score token ids without bos, as in `Translation.tokens`; sources end in eos.

        For results of a search with this model, scores and log-probabilities equal the search's values.

        Raises:
          UserError: the numbers of sources and targets differ, or a source or target is too long.
        """
        self._check_sources(sources)
        sources = [()] * len(targets) if sources is None else sources
        if len(sources) != len(targets):
            _refuse_counts(len(sources), len(targets))
        for side, lines, longest in zip(
            Pair._fields, (sources, targets), find_longest(self.config), strict=True
        ):
            if numbers := [n for n, line in enumerate(lines, start=1) if len(line) > longest]:
                raise UserError(too_long(side, numbers, longest))
        pairs = [Pair(source, target) for source, target in zip(sources, targets, strict=True)]
        return self.tokens.score_all(pairs, params=self._model.all_params)

    def _check_sources(self, sources: object) -> None:
        is_language_model = not self.config.data.source_language
        if is_language_model and sources is not None:
            raise UserError("a language model scores text alone; leave out the source")
        if not is_language_model and sources is None:
            raise UserError("scoring a translation needs its source; give it with --source=FILE")


def _pair_lines(sources: Iterable[str] | None, targets: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of source and target lines; sources are "" for a language model."""
    # None stands for the lines of a side that has ended.
    pairs = itertools.zip_longest(itertools.repeat("") if sources is None else sources, targets)
    for number, (source, target) in enumerate(pairs, start=1):
        if target is None and sources is None:
            return
        if source is None or target is None:
            longer = number + sum(1 for _ in pairs)
            _refuse_counts(*((number - 1, longer) if source is None else (longer, number - 1)))
        yield source, target


def find_longest(config: Config) -> tuple[int, int]:
    """Return the maximum source and target length for scoring, in tokens with eos.

    Sources have the same limit as in translation. Targets may be as long as in search or in training,
    whichever is longer. The text of a language model is limited only by the model's positions.
    """
    source, bound = config.data.max_source_length, config.model.longest_input or UNBOUNDED
    if not config.data.source_language:
        return 0, bound
    if config.model.architecture == "decoder_only":  # source and target share the positions
        bound = max(1, bound - source)
    searched = int(config.search.max_length_ratio * source + config.search.max_length_offset)
    return source, min(bound, max(searched, config.data.max_target_length, 1))


def too_long(side: str, numbers: Sequence[int], longest: int) -> str:
    """Return the error message for source or target lines that are too long to be scored."""
    verb, them = ("is", "it") if len(numbers) == 1 else ("are", "them")
    named = format_line_numbers(numbers)
    return f"{side} {named} {verb} longer than {longest} tokens; split {them} into sentences"


def _refuse_counts(sources: int, targets: int) -> None:
    raise UserError(
        f"there are {sources} source lines and {targets} target lines; give one translation for each line"
    )


class GeneratedText(NamedTuple):
    """A text with its prompt, its log-probability, and whether it ends in eos."""

    text: str
    log_prob: float
    is_finished: bool


def generate_text(
    run_dir: str | Path,
    *,
    prompt: str = "",
    n_best: int = 1,
    length: int | None = None,
    search: SearchConfig | None = None,
    checkpoint: str | None = None,
    warn: Warn = warn_user,
) -> list[GeneratedText]:
    """Continue a prompt with the language model of a run directory; return the best texts first.

    Args:
      prompt: the beginning of every text; empty: no prompt.
      n_best: the number of texts.
      length: the maximum number of tokens of a text, including the prompt and eos. None:
        data.max_target_length of the run's config.
      search: search options that override the run's config; max_length_* have no effect.
      checkpoint: best, last, average or a step. None: train.final_checkpoint of the run's config.

    Raises:
      UserError: the run is not a language model, the checkpoint is absent, the options are invalid, the
        prompt is not shorter than `length`, or the model has too few positions for `length`.
    """
    options = LoadOptions(checkpoint=checkpoint, search=search, use_all_devices=False)
    model = load_translator(run_dir, options, warn)
    data = model.config.data
    if data.source_language:
        raise UserError(
            f"{run_dir} is a translation model (data.source_language is {data.source_language}), not a "
            f"language model; use translate --run={run_dir}"
        )
    check_n_best(model.config.search, n_best, where="--")
    length = data.max_target_length if length is None else length
    longest, vocab = model.config.model.longest_input, model.vocabs.target
    if longest is not None and length > longest:
        raise UserError(f"--length is {length}, but the model has positions for {longest} tokens; lower it")
    if (size := len(vocab.tokenize(prompt)) - 1) >= length:
        raise UserError(
            f"the prompt has {size} tokens and the text at most {length}, with its end symbol; "
            "shorten the prompt, or raise --length"
        )
    engine = model.with_search(max_length_ratio=0.0, max_length_offset=length).engine()
    ((best,),) = engine.run([[Request("", prefix=prompt, n_best=n_best)]], warn=warn)
    return [GeneratedText(one.text, one.log_prob, one.tokens[-1] == vocab.eos_id) for one in best.n_best]
