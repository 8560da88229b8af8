"""Scores of given translations: the scores by which a search with the same model would rank them.

decoding/forced_decoding.py scores token ids; scores against references are in evaluation/metrics.py.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import Config, Dtype, SearchConfig
from flaxformer_mt.config.checks import check_n_best, check_search
from flaxformer_mt.corpus.tfds_cache import compiled_dir
from flaxformer_mt.decoding.forced_decoding import UNBOUNDED, Pair, PairScore, TokenScorer
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.kernels.bfloat16 import cast_kernels
from flaxformer_mt.object_store.remote_runs import open_copy
from flaxformer_mt.parallel import enable_compilation_cache
from flaxformer_mt.runs.load_run import TrainedModel, Warn, load_trained
from flaxformer_mt.search import Lines, SearchResult, search_width
from flaxformer_mt.search import search as run_search
from flaxformer_mt.shapes import Array, Cache
from flaxformer_mt.text_io.lines import format_line_numbers, take_window
from flaxformer_mt.translation.constraints import make_symbols
from flaxformer_mt.translation.language_tags import LineTags, choose_line_tags
from flaxformer_mt.vocab import Vocabs


class Scorer:
    """Scores translations, or the text of a language model, with one model and its vocabularies."""

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
        """Place the parameters on the device; `config.search` gives the length and coverage penalties.

        Args:
          checkpoint: name of the checkpoint that the parameters come from, for reports.
          long_lines: refuse: a line that is too long raises UserError; cut: only its beginning is scored.
          warn: receives one warning per call or window that names the lines that were cut.

        Raises:
          UserError: invalid search options.
        """
        check_search(config.search, model=config.model)
        self.config, self.vocabs, self.checkpoint, self.warn = config, vocabs, checkpoint, warn
        self.is_language_model = not config.data.source_language
        self._long_lines = long_lines
        self._params = jax.device_put(cast_kernels(params, config.model.dtype))
        self._longest = find_longest(config)
        self.tokens = TokenScorer([config.model], config.search, vocabs, longest=self._longest, warn=warn)

    def __repr__(self) -> str:
        data = self.config.data
        languages = " -> ".join(filter(None, (data.source_language, data.target_language)))
        return f"<Scorer {languages}, checkpoint {self.checkpoint!r}>"

    @classmethod
    def load(
        cls,
        run_dir: str | Path,
        *,
        checkpoint: str | None = None,
        search: SearchConfig | None = None,
        long_lines: Literal["refuse", "cut"] = "refuse",
        dtype: Dtype | None = None,
        allow_nonfinite: bool = False,
        warn: Warn = warn_user,
    ) -> "Scorer":
        """Load the translation model or the language model of a run directory; see `Translator.load`."""
        load: dict[str, Any] = {"dtype": dtype, "allow_nonfinite": allow_nonfinite, "warn": warn}
        trained = load_trained(open_copy(run_dir), checkpoint=checkpoint, **load)
        config = trained.config
        enable_compilation_cache(compiled_dir())
        return cls(
            config if search is None else dataclasses.replace(config, search=search),
            trained.params,
            trained.vocabs,
            checkpoint=trained.checkpoint,
            long_lines=long_lines,
            warn=warn,
        )

    def score(
        self,
        sources: Sequence[str] | None,
        targets: Sequence[str],
        *,
        source_language: str | None = None,
        target_language: str | None = None,
    ) -> list[PairScore]:
        """Score each line of `targets` as the translation of its source, in order.

        The vocabulary determines the pieces of the text. A search may write the same text with other pieces,
        which have another probability; `score_tokens` scores these pieces.

        Args:
          sources: None for a language model, which scores the targets alone.
          source_language: see `Translator.translate`.
          target_language: likewise.

        Raises:
          UserError: the numbers of sources and targets differ, a translation model has no sources, a language
            model has sources, or a line is too long and `long_lines` is refuse.
        """
        self._check_sources(sources)
        if isinstance(sources, str) or isinstance(targets, str):
            raise UserError("score takes lists of lines, but got one string; put the string in a list")
        tags = self._choose_tags(source_language, target_language)
        return self._score_window(sources, targets, tags, first_line=1)

    def score_stream(
        self,
        sources: Iterable[str] | None,
        targets: Iterable[str],
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        window: int = 2048,
        is_ready: Callable[[], bool] | None = None,
    ) -> Iterator[PairScore]:
        """Score lines in order as they arrive, `window` lines at a time, so that memory is bounded.

        Args:
          is_ready: asked before each pair but the first of a window; False scores the pairs so far. None: a
            window is always full.

        Raises:
          UserError: as `score`; if one side has more lines, all complete pairs are scored first.
        """
        self._check_sources(sources)
        tags = self._choose_tags(source_language, target_language)
        # None stands for the lines of a side that has ended, and for the sources of a language model.
        pairs: Iterator[Any] = itertools.zip_longest(sources or (), targets)
        done = 0
        while chunk := take_window(pairs, window, is_ready):
            complete = [pair for pair in chunk if sources is None or None not in pair]
            source_window = None if sources is None else [source for source, _ in complete]
            target_window = [target for _, target in complete]
            yield from self._score_window(source_window, target_window, tags, first_line=done + 1)
            done += len(complete)
            if len(complete) < len(chunk):
                longer = done + len(chunk) - len(complete) + sum(1 for _ in pairs)
                _refuse_counts(*((done, longer) if chunk[-1][0] is None else (longer, done)))

    def score_tokens(
        self, sources: Sequence[Sequence[int]] | None, targets: Sequence[Sequence[int]]
    ) -> list[PairScore]:
        """Score token ids in the form of `Translation.tokens`: without bos; sources end in eos.

        For the result of a search with this model, scores and log-probabilities equal those of the search.

        Raises:
          UserError: the numbers of sources and targets differ, or a source or target is too long.
        """
        self._check_sources(sources)
        sources = [()] * len(targets) if sources is None else sources
        if len(sources) != len(targets):
            _refuse_counts(len(sources), len(targets))
        pairs = [Pair(source, target) for source, target in zip(sources, targets, strict=True)]
        for side, longest in zip(Pair._fields, self._longest, strict=True):
            too_long = [n for n, pair in enumerate(pairs, start=1) if len(getattr(pair, side)) > longest]
            if too_long:
                raise UserError(_too_long(side, too_long, longest))
        return self.tokens.score_all(pairs, params=(self._params,))

    def _choose_tags(self, source_language: str | None, target_language: str | None) -> LineTags:
        known = self.vocabs.target.tags
        return choose_line_tags(self.config.data, source_language, target_language, vocab_tags=known)

    def _score_window(
        self, sources: Sequence[str] | None, targets: Sequence[str], tags: LineTags, *, first_line: int
    ) -> list[PairScore]:
        if sources is not None and len(sources) != len(targets):
            _refuse_counts(len(sources), len(targets))
        pairs, cut = tokenize_pairs(
            sources,
            targets,
            tags,
            self.vocabs,
            self.config,
            first_line=first_line,
            refuse=self._long_lines == "refuse",
            warn=self.warn,
        )
        scores = self.tokens.score_all(pairs, params=(self._params,))
        return [
            dataclasses.replace(score, truncated=True) if index in cut else score
            for index, score in enumerate(scores)
        ]

    def _check_sources(self, sources: object) -> None:
        if self.is_language_model and sources is not None:
            raise UserError("a language model scores text alone; leave out the source")
        if not self.is_language_model and sources is None:
            raise UserError("scoring a translation needs its source; give it with --source=FILE")


def tokenize_pairs(
    sources: Sequence[str] | None,
    targets: Sequence[str],
    tags: LineTags,
    vocabs: Vocabs,
    config: Config,
    *,
    first_line: int,
    refuse: bool = True,
    warn: Warn = warn_user,
) -> tuple[list[Pair], set[int]]:
    """Return the ids of sources and their translations, and the indices of those that were cut.

    Args:
      sources: None for a language model.
      refuse: whether lines that are too long raise UserError; if not, their beginnings are kept.
    """
    cut: set[int] = set()
    ids: dict[str, list[Any]] = {"source": [()] * len(targets)}
    texts = {"target": [tags.lead + line for line in targets] if tags.lead else targets}
    if sources is not None:
        added = tags.find(sources, first_line=first_line) or [""] * len(sources)
        texts["source"] = [tag + line for tag, line in zip(added, sources, strict=True)]
    for side, lines in texts.items():
        longest, vocab = find_longest(config)[Pair._fields.index(side)], getattr(vocabs, side)
        found: list[Any] = vocab.tokenize_all(lines)
        too_long = [index for index, tokens in enumerate(found) if len(tokens) > longest]
        numbers = [first_line + index for index in too_long]
        if too_long and refuse:
            raise UserError(_too_long(side, numbers, longest) + ", or give --long_lines=cut")
        if too_long:
            named = format_line_numbers(numbers)
            warn(f"{side} {named}: longer than {longest} tokens; only the beginning is scored")
        for index in too_long:  # a source ends in eos; a cut target has not ended, so it is scored without
            beginning = found[index][: longest - (side == "source")]
            found[index] = np.append(beginning, vocab.eos_id) if side == "source" else beginning
        cut.update(too_long)
        ids[side] = found
    return [Pair(*pair) for pair in zip(ids["source"], ids["target"], strict=True)], cut


def find_longest(config: Config) -> tuple[int, int]:
    """Return the maximum source and target length, in tokens with eos, for the scores of a run's model.

    Sources have the limit of translation. Targets may be as long as those of a search or of training. The
    text of a language model is limited by the model's positions alone.
    """
    source, bound = config.data.max_source_length, config.model.longest_input or UNBOUNDED
    if not config.data.source_language:
        return 0, bound
    if config.model.architecture == "decoder_only":  # source and target share the positions
        bound = max(1, bound - source)
    searched = int(config.search.max_length_ratio * source + config.search.max_length_offset)
    return source, min(bound, max(searched, config.data.max_target_length, 1))


def _too_long(side: str, numbers: list[int], longest: int) -> str:
    return f"{side} {format_line_numbers(numbers)} is longer than {longest} tokens; split it into sentences"


def _refuse_counts(sources: int, targets: int) -> None:
    raise UserError(
        f"there are {sources} source lines and {targets} target lines; give one translation for each line"
    )


class GeneratedText(NamedTuple):
    """One continuation: the text with its prompt, its log-probability, and whether it came to its end."""

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
    """Continue a prompt with the language model of a run directory; the best texts first.

    Args:
      prompt: the beginning of every text; empty: texts from their beginning.
      n_best: the number of texts.
      length: the maximum number of tokens of a text, with the prompt and the end symbol. None:
        data.max_target_length of the run's config.
      search: search options that replace those of the run's config; max_length_* have no effect.
      checkpoint: best, last, average or a step. None: as the run's config says.

    Raises:
      UserError: the run is not a language model, the checkpoint is absent, the options are invalid, or the
        prompt is not shorter than the length or the length is more than the model has positions for.
    """
    run_dir = open_copy(run_dir)
    trained = load_trained(run_dir, checkpoint=checkpoint, warn=warn)
    if trained.config.data.source_language:
        raise UserError(
            f"{run_dir} is a translation model (data.source_language is "
            f"{trained.config.data.source_language}), not a language model; use translate --run={run_dir}"
        )
    options = trained.config.search if search is None else search
    check_search(options, model=trained.config.model)
    check_n_best(options, n_best, where="--")
    length = trained.config.data.max_target_length if length is None else length
    prefix = trained.vocabs.target.tokenize(prompt)[:-1]
    longest = trained.config.model.longest_input
    if longest is not None and length > longest:
        raise UserError(f"--length is {length}, but the model has positions for {longest} tokens; lower it")
    if len(prefix) >= length:
        raise UserError(
            f"the prompt has {len(prefix)} tokens and the text at most {length}, with its end symbol; "
            "shorten the prompt, or raise --length"
        )
    enable_compilation_cache(compiled_dir())
    result = _search(trained, options, prefix, length, n_best)
    return _read(result, trained)


def _search(
    trained: TrainedModel, options: SearchConfig, prefix: list[int], length: int, n_best: int
) -> SearchResult:
    # The padding mask concerns sources, of which there are none.
    model = trained.make_model(padding_mask="source")
    symbols = make_symbols(trained.vocabs.target, options)
    width = search_width(options, n_best)

    def run(params: dict, lines: Lines) -> SearchResult:
        params = cast_kernels(params, model.config.dtype)  # once, not in each step
        no_source = jnp.zeros((1, 0), jnp.int32), jnp.zeros((1, 0), bool)
        cache = model.apply({"params": params}, *no_source, width, length, method="start_decoding")

        def next_logits(tokens: Array, cache: Cache) -> tuple[Array, Cache]:
            return model.apply({"params": params}, tokens, cache, method="decode_step")

        return run_search(
            next_logits, cache, lines, options=options, symbols=symbols, max_length=length, n_best=n_best
        )

    lines = Lines(
        max_lengths=np.array([length], np.int32),
        min_lengths=np.array([options.min_length_offset], np.int32) if options.min_length_offset else None,
        prefixes=np.array([prefix], np.int32) if prefix else None,
        seeds=np.array([options.seed], np.uint32) if options.method == "sample" else None,
    )
    return jax.device_get(jax.jit(run)(trained.params, lines))


def _read(result: SearchResult, trained: TrainedModel) -> list[GeneratedText]:
    vocab, texts = trained.vocabs.target, []
    for tokens, size, log_prob in zip(result.tokens[0], result.lengths[0], result.log_probs[0], strict=True):
        if size:  # 0: there are fewer hypotheses
            kept = tokens[:size]
            texts.append(GeneratedText(vocab.detokenize(kept), float(log_prob), kept[-1] == vocab.eos_id))
    return texts
