"""What a model thinks of translations that are given to it: the score by which its search would rank them.

Owns the way from pairs of lines to scores, one for each, in order, and the rules for empty and for overlong
lines. Knows nothing of search, nor of scores against references.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from flaxformer_mt.config import Config, ModelConfig, SearchConfig
from flaxformer_mt.config.checks import check_search
from flaxformer_mt.corpus.tfds_cache import cache_dir
from flaxformer_mt.decoding.forced_decoding import UNBOUNDED, ForcedDecoder, Pair, Reading, Watched
from flaxformer_mt.decoding.memory_backoff import TokenBudget
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.parallel import enable_compilation_cache
from flaxformer_mt.runs.load_run import Warn, load_trained
from flaxformer_mt.search.penalties import coverage_penalty, length_penalty
from flaxformer_mt.text_io.lines import name_lines
from flaxformer_mt.vocab import Vocab, Vocabs


@dataclass(frozen=True)
class PairScore:
    """What a model thinks of one translation."""

    # Log-probability over the length penalty, less the coverage penalty, by which hypotheses are ranked.
    score: float
    log_prob: float
    # Of each token; they add up to log_prob.
    token_log_probs: tuple[float, ...]
    # Of the target vocabulary.
    tokens: tuple[int, ...]
    # The source or the target was too long, and only the beginning was scored.
    truncated: bool = False


class TokenScorer:
    """Scores pairs of ids with one model, or with several of one vocabulary, as the search does."""

    def __init__(
        self,
        models: Sequence[ModelConfig],
        search: SearchConfig,
        vocabs: Vocabs,
        *,
        longest: tuple[int, int],
        warn: Warn,
    ) -> None:
        """Makes the networks.

        Args:
          longest: source and target, in tokens with eos; none is longer.
          warn: is told when batches had to be made smaller than search.batch_tokens.
        """
        self.options = search
        self.decoder = ForcedDecoder(
            models,
            sizes=(vocabs.source.size, vocabs.target.size),
            pad_id=vocabs.target.pad_id,
            bos_id=vocabs.target.bos_id,
            longest=longest,
            ensemble_mean=search.ensemble_mean,
        )
        self._budget = TokenBudget(search.batch_tokens, warn=warn)
        covers = search.method == "beam" and search.coverage_penalty > 0
        self._coverage = (Watched(search.coverage_layer),) if covers else ()

    def read_all(
        self, pairs: Sequence[Pair], *, params: Sequence[Any], watched: Sequence[Watched] = ()
    ) -> list[Reading]:
        """The readings of pairs, in order; see `ForcedDecoder.read_all`. Too little memory halves batches."""

        def work(indices: Sequence[int], batch_tokens: int) -> Iterator[tuple[int, Reading]]:
            chosen = [pairs[index] for index in indices]
            return self.decoder.read_all(
                chosen, params=params, batch_tokens=batch_tokens, watched=tuple(watched)
            )

        found = dict(self._budget.run_all(work, len(pairs)))
        return [found[index] for index in range(len(pairs))]

    def score_all(self, pairs: Sequence[Pair], *, params: Sequence[Any]) -> list[PairScore]:
        """The scores of pairs, in order; a target without any token scores 0."""
        readings = self.read_all(pairs, params=params, watched=self._coverage)
        log_probs = np.array([reading.log_probs.sum(dtype=np.float64) for reading in readings])
        scores = log_probs / self._penalties(pairs)
        if self._coverage:
            scores = scores + self._coverage_penalties(readings)
        return [
            PairScore(
                score=float(score) if len(pair.target) else 0.0,
                log_prob=float(log_prob),
                token_log_probs=tuple(reading.log_probs.tolist()),
                tokens=tuple(map(int, pair.target)),
            )
            for pair, reading, score, log_prob in zip(pairs, readings, scores, log_probs, strict=True)
        ]

    def _penalties(self, pairs: Sequence[Pair]) -> np.ndarray:
        lengths = np.array([max(1, len(pair.target)) for pair in pairs], np.int32)
        return np.asarray(length_penalty(lengths, self.options))

    def _coverage_penalties(self, readings: Sequence[Reading]) -> np.ndarray:
        """Of attention summed over target tokens, all sources side by side."""
        sums = [reading.attention[0].sum(axis=0) for reading in readings]
        coverage = np.zeros((len(sums), 1, max(map(len, sums), default=0)), np.float32)
        mask = np.zeros((len(sums), coverage.shape[2]), bool)
        for row, attention in enumerate(sums):
            coverage[row, 0, : len(attention)], mask[row, : len(attention)] = attention, True
        return np.asarray(coverage_penalty(coverage, mask, self.options))[:, 0]


class Scorer:
    """Scores translations, or the text of a language model, with one set of vocabularies and parameters."""

    def __init__(
        self,
        config: Config,
        params: Any,
        vocabs: Vocabs,
        *,
        checkpoint: str = "",
        long_lines: Literal["refuse", "cut"] = "refuse",
        warn: Warn = warn_user,
    ) -> None:
        """Takes the length penalty, and what else a score is made of, from `config.search`.

        Args:
          checkpoint: the name of what the parameters come from, for reports.
          long_lines: whether a line that is too long ends the work, or only its beginning is scored.
          warn: is told, once a call or window, of lines that were cut.

        Raises:
          UserError: search options that cannot be.
        """
        check_search(config.search, model=config.model)
        self.config, self.vocabs, self.checkpoint, self.warn = config, vocabs, checkpoint, warn
        self.is_language_model = not config.data.source_language
        self._long_lines = long_lines
        self._params = jax.device_put(params)
        self._longest = find_longest(config)
        self.tokens = TokenScorer([config.model], config.search, vocabs, longest=self._longest, warn=warn)

    @classmethod
    def load(
        cls,
        run_dir: str | Path,
        *,
        checkpoint: str | None = None,
        search: SearchConfig | None = None,
        long_lines: Literal["refuse", "cut"] = "refuse",
        warn: Warn = warn_user,
    ) -> "Scorer":
        """Loads what a run directory holds, a translator's or a language model's; see `Translator.load`."""
        trained = load_trained(Path(run_dir).expanduser(), checkpoint=checkpoint, warn=warn)
        config = trained.config
        enable_compilation_cache(cache_dir(config.data) / "compiled")
        return cls(
            config if search is None else dataclasses.replace(config, search=search),
            trained.params,
            trained.vocabs,
            checkpoint=trained.checkpoint,
            long_lines=long_lines,
            warn=warn,
        )

    def score(self, sources: Sequence[str] | None, targets: Sequence[str]) -> list[PairScore]:
        """Scores each line of targets as the translation of its source, in order.

        Text is cut into pieces as the vocabulary does it. A search may spell the same text in other pieces,
        which have another probability: `score_tokens` scores them.

        Args:
          sources: None for a language model, which reads the targets alone.

        Raises:
          UserError: not as many sources as targets, none where the model needs them, or lines that are too
            long while `long_lines` is refuse.
        """
        self._check_sources(sources)
        return self._score_window(sources, targets, first_line=1)

    def score_stream(
        self, sources: Iterable[str] | None, targets: Iterable[str], *, window: int = 2048
    ) -> Iterator[PairScore]:
        """Scores lines as they come, `window` of them at a time: memory is bounded and order kept.

        Raises:
          UserError: as `score`; where one side has more lines, all that have a partner are scored before.
        """
        self._check_sources(sources)
        read, written = None if sources is None else iter(sources), iter(targets)
        done, full = 0, True
        while full:
            theirs = list(itertools.islice(written, window))
            ours = None if read is None else list(itertools.islice(read, window))
            both = len(theirs) if ours is None else min(len(ours), len(theirs))
            chosen = None if ours is None else ours[:both]
            yield from self._score_window(chosen, theirs[:both], first_line=done + 1)
            if read is not None and ours is not None and len(ours) != len(theirs):
                _refuse_counts(done + len(ours) + _count(read), done + len(theirs) + _count(written))
            done, full = done + both, both == window

    def score_tokens(
        self, sources: Sequence[Sequence[int]] | None, targets: Sequence[Sequence[int]]
    ) -> list[PairScore]:
        """Scores ids, as `Translation.tokens` has them: without bos, with the eos that is part of a source.

        Scores and log-probabilities of a search's own translations are those that the search found.
        """
        self._check_sources(sources)
        sources = [()] * len(targets) if sources is None else sources
        if len(sources) != len(targets):
            _refuse_counts(len(sources), len(targets))
        pairs = [Pair(source, target) for source, target in zip(sources, targets, strict=True)]
        for side, longest in zip(Pair._fields, self._longest, strict=True):
            long = [n for n, pair in enumerate(pairs, start=1) if len(getattr(pair, side)) > longest]
            if long:
                raise UserError(_too_long(side, long, longest))
        return self.tokens.score_all(pairs, params=(self._params,))

    def _score_window(
        self, sources: Sequence[str] | None, targets: Sequence[str], *, first_line: int
    ) -> list[PairScore]:
        cut: set[int] = set()
        written = self._tokenize("target", self.vocabs.target, targets, first_line, cut)
        read: list[Any] = [()] * len(targets)
        if sources is not None:
            read = self._tokenize("source", self.vocabs.source, sources, first_line, cut)
        if len(read) != len(written):
            _refuse_counts(len(read), len(written))
        pairs = [Pair(source, target) for source, target in zip(read, written, strict=True)]
        found = self.tokens.score_all(pairs, params=(self._params,))
        return [
            dataclasses.replace(one, truncated=True) if index in cut else one
            for index, one in enumerate(found)
        ]

    def _tokenize(
        self, side: str, vocab: Vocab, lines: Sequence[str], first_line: int, cut: set[int]
    ) -> list[np.ndarray]:
        """The ids of lines; those that are too long are cut and added to `cut`, or refused."""
        longest = self._longest[Pair._fields.index(side)]
        ids = vocab.tokenize_all(lines)
        long = [index for index, tokens in enumerate(ids) if len(tokens) > longest]
        if long:
            numbers = [first_line + index for index in long]
            if self._long_lines == "refuse":
                raise UserError(_too_long(side, numbers, longest) + ", or give --long_lines=cut")
            self.warn(
                f"{side} {name_lines(numbers)}: longer than {longest} tokens; only the beginning is scored"
            )
        for index in long:
            ids[index] = np.append(ids[index][: longest - 1], vocab.eos_id)
        cut.update(long)
        return ids

    def _check_sources(self, sources: object) -> None:
        if self.is_language_model and sources is not None:
            raise UserError("a language model scores text alone; leave out the source")
        if not self.is_language_model and sources is None:
            raise UserError("the score of a translation needs its source; give it with --source=FILE")


def find_longest(config: Config) -> tuple[int, int]:
    """The longest source and target, in tokens with eos, that a run's model is asked to score.

    Sources as for translation; targets that a search could produce or training saw; a language model's text
    is bounded by the model's positions alone.
    """
    source, bound = config.data.max_source_length, config.model.longest_input or UNBOUNDED
    if not config.data.source_language:
        return 0, bound
    if config.model.architecture == "decoder_only":  # source and target share the positions
        bound = max(1, bound - source)
    searched = int(config.search.max_length_ratio * source + config.search.max_length_offset)
    return source, min(bound, max(searched, config.data.max_target_length, 1))


def _count(lines: Iterator[str]) -> int:
    return sum(1 for _ in lines)


def _too_long(side: str, numbers: list[int], longest: int) -> str:
    return f"{side} {name_lines(numbers)} is longer than {longest} tokens; split it into sentences"


def _refuse_counts(sources: int, targets: int) -> None:
    raise UserError(
        f"there are {sources} source lines and {targets} target lines; give one translation for each line"
    )
