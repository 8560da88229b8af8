"""From strings to strings: tokenize, batch, search, detokenize.

Row 12 of the data path. Owns how sentences of unlike length share a few compiled shapes, and that every
line gives exactly one line, in order. Knows nothing of how a network or a search works, nor of scores
against references.
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import Config, SearchConfig
from flaxformer_mt.config_files import read_config
from flaxformer_mt.corpus.prepared import cache_dir
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import make_model
from flaxformer_mt.parallel import enable_compilation_cache
from flaxformer_mt.search import SearchResult, beam_search, greedy_search
from flaxformer_mt.search.batches import SearchBatch, plan_batches, round_down
from flaxformer_mt.shapes import Array, Cache
from flaxformer_mt.trained import Warn, load_trained
from flaxformer_mt.vocab import Vocabs

# Everything that some program takes for the end of a line. A translation is one line for all of them.
_LINE_ENDS = dict.fromkeys(map(ord, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")

# How many line numbers a warning names.
_NAMED_LINES = 10


@dataclass(frozen=True)
class Translation:
    """One line's translation, and what the search thought of it."""

    text: str
    # Log-probability over the length penalty, by which hypotheses are ranked.
    score: float
    log_prob: float
    # Of the target vocabulary; they end in eos unless the length limit cut them off.
    tokens: tuple[int, ...]
    # The source was longer than data.max_source_length, and only its beginning was translated.
    truncated: bool = False
    # The next best hypotheses, best first.
    alternatives: tuple["Translation", ...] = ()

    @property
    def n_best(self) -> tuple["Translation", ...]:
        """This translation and its alternatives, best first."""
        return (self, *self.alternatives)


# Of a line without words, and of one for which the model gave no numbers.
_EMPTY = Translation(text="", score=0.0, log_prob=0.0, tokens=())
_FAILED = Translation(text="", score=-math.inf, log_prob=-math.inf, tokens=())


def warn_on_stderr(message: str) -> None:
    """Prints a warning for the human."""
    print(f"warning: {message}", file=sys.stderr)


class Translator:
    """Translates lines with one set of vocabularies, search options and (unless overridden) parameters.

    Compiles once for each shape of batch; other parameters of the same shapes need no compilation.
    """

    def __init__(
        self,
        config: Config,
        params: Any,
        vocabs: Vocabs,
        *,
        checkpoint: str = "",
        warn: Warn = warn_on_stderr,
    ) -> None:
        """Takes search options from `config.search`.

        Args:
          params: None if every call brings its own.
          checkpoint: the name of what the parameters come from, for reports.
          warn: is told, once a call or window, of lines that were cut.

        Raises:
          UserError: search options that cannot be.
        """
        check_search(config.search)
        self.config = config
        self.vocabs = vocabs
        self.checkpoint = checkpoint
        self.warn = warn
        self._params = None if params is None else jax.device_put(params)
        self._model = make_model(config.model, source_size=vocabs.source.size, target_size=vocabs.target.size)
        self._search = jax.jit(self._search_ids, static_argnames=("max_length", "n_best"))

    @classmethod
    def load(
        cls,
        run_dir: Path,
        *,
        checkpoint: str | None = None,
        search: SearchConfig | None = None,
        warn: Warn = warn_on_stderr,
    ) -> "Translator":
        """Loads what a run directory holds.

        Args:
          checkpoint: best, last, average or a step. None: train.final_checkpoint of the run's config, or,
            where there is none yet (training goes on, or was cut short), best or last, with a warning.
          search: options instead of those of the run's config.

        Raises:
          UserError: no run directory, no such checkpoint, or parameters that do not fit the config.
        """
        config = read_config(run_dir / "config.json")
        if not config.data.source_language:
            raise UserError(
                f"{run_dir} is a language model (its data.source_language is empty) and has nothing to "
                f"translate; evaluate measures its perplexity: evaluate --run={run_dir} --reference=FILE"
            )
        enable_compilation_cache(cache_dir(config.data) / "compiled")
        if search is not None:
            check_search(search)
        trained = load_trained(run_dir, checkpoint=checkpoint, warn=warn)
        config = trained.config if search is None else dataclasses.replace(trained.config, search=search)
        return cls(config, trained.params, trained.vocabs, checkpoint=trained.checkpoint, warn=warn)

    def translate(self, lines: Sequence[str], *, n_best: int = 1, params: Any = None) -> list[Translation]:
        """Translates lines: one translation each, in the same order.

        Args:
          n_best: how many hypotheses each translation offers at most, itself included.
          params: parameters to use instead of this translator's own.

        Raises:
          UserError: n_best is more than the search's hypotheses, or `lines` is not a sequence of strings.
        """
        return self._translate_window(lines, first_line=1, n_best=n_best, params=params)

    def translate_stream(
        self, lines: Iterable[str], *, n_best: int = 1, params: Any = None, window: int = 2048
    ) -> Iterator[Translation]:
        """Translates lines as they come, `window` of them at a time: memory is bounded and order kept.

        Sentences share batches within a window, so a wide one is faster, and a narrow one answers sooner.
        """
        if window < 1:
            raise UserError(f"window is {window}; it must be at least 1")
        lines, first_line = iter(lines), 1
        while chunk := list(itertools.islice(lines, window)):
            yield from self._translate_window(chunk, first_line=first_line, n_best=n_best, params=params)
            first_line += len(chunk)

    # ---- lines ----

    def _translate_window(
        self, lines: Sequence[str], *, first_line: int, n_best: int, params: Any
    ) -> list[Translation]:
        self._check_call(lines, first_line, n_best)
        params = self._params if params is None else params
        if params is None:
            raise ValueError("this translator has no parameters of its own; call it with params=...")
        ids, cut = self._tokenize(lines, first_line)
        results = [_EMPTY] * len(lines)
        failed = []
        for index, found in self._search_all(ids, n_best, params):
            if found.lengths[0] == 0:
                failed.append(first_line + index)
            hypotheses = [
                self._read(found, rank, index in cut) for rank in range(n_best) if found.lengths[rank]
            ]
            best, *others = hypotheses or [_FAILED]
            results[index] = dataclasses.replace(best, alternatives=tuple(others))
        if failed:
            self.warn(
                f"{_name_lines(failed)}: the model's scores are not numbers, so the translation is empty; "
                "try an earlier checkpoint"
            )
        return results

    def _check_call(self, lines: Sequence[str], first_line: int, n_best: int) -> None:
        search = self.config.search
        width = _width(search)
        if not 1 <= n_best <= width:
            raise UserError(
                f"n_best is {n_best}, but {search.method} search keeps {width} hypotheses; "
                f"ask for 1 to {width}, or use beam search with beam_size {max(n_best, 1)}"
            )
        if isinstance(lines, str):
            raise UserError("translate takes a list of lines, but got one string; put it in a list")
        for number, line in enumerate(lines, start=first_line):
            if not isinstance(line, str):
                raise UserError(f"line {number} is {type(line).__name__}, not str; decode it first")

    def _tokenize(self, lines: Sequence[str], first_line: int) -> tuple[dict[int, np.ndarray], set[int]]:
        """Ids by index, without lines that have no words; and the indices of those that were cut."""
        vocab, longest = self.vocabs.source, self.config.data.max_source_length
        worded = [index for index, line in enumerate(lines) if line.strip()]
        tokenized = vocab.tokenize_all([lines[index] for index in worded])
        # A line of nothing but characters that the normalisation removes is blank too: it is eos alone.
        ids = {index: tokens for index, tokens in zip(worded, tokenized, strict=True) if len(tokens) > 1}
        cut = {index for index, tokens in ids.items() if len(tokens) > longest}
        for index in cut:
            ids[index] = np.append(ids[index][: longest - 1], vocab.eos_id)
        if cut:
            named = _name_lines([first_line + index for index in sorted(cut)])
            self.warn(
                f"{named}: longer than data.max_source_length {longest} tokens, so only the beginning was "
                "translated; split long lines into sentences"
            )
        return ids, cut

    def _read(self, found: SearchResult, rank: int, truncated: bool) -> Translation:
        tokens = tuple(found.tokens[rank, : found.lengths[rank]].tolist())
        text = self.vocabs.target.detokenize(tokens).translate(_LINE_ENDS)
        return Translation(text, float(found.scores[rank]), float(found.log_probs[rank]), tokens, truncated)

    # ---- batches ----

    def _search_all(
        self, ids: dict[int, np.ndarray], n_best: int, params: Any
    ) -> Iterator[tuple[int, SearchResult]]:
        """Every sentence's index and its hypotheses, in the order of batches."""
        indices = list(ids)
        lengths = [len(ids[index]) for index in indices]
        longest = self.config.data.max_source_length
        waiting: tuple[list[int], SearchResult] | None = None
        for batch in plan_batches(lengths, longest=longest, rows_of=self._rows_of):
            own = [indices[i] for i in batch.indices]
            started = own, self._start_search([ids[index] for index in own], batch, n_best, params)
            # The device works on this batch while the host reads the one before.
            if waiting is not None:
                yield from _by_sentence(*waiting)
            waiting = started
        if waiting is not None:
            yield from _by_sentence(*waiting)

    def _start_search(
        self, sentences: list[np.ndarray], batch: SearchBatch, n_best: int, params: Any
    ) -> SearchResult:
        source = np.full((batch.rows, batch.source_length), self.vocabs.source.pad_id, np.int32)
        source_mask = np.zeros(source.shape, bool)
        limits = np.zeros(batch.rows, np.int32)  # rows without a sentence stay at 0: they are not searched
        for row, tokens in enumerate(sentences):
            source[row, : len(tokens)] = tokens
            source_mask[row, : len(tokens)] = True
            limits[row] = self._limit_of(len(tokens))
        source_mask[len(sentences) :, 0] = True  # attention needs something to attend to
        return self._search(
            params, source, source_mask, limits, max_length=self._limit_of(batch.source_length), n_best=n_best
        )

    def _limit_of(self, source_length: int) -> int:
        """The longest translation of a source, both counted with eos."""
        search, longest = self.config.search, self.config.model.longest_input
        limit = max(1, int(search.max_length_ratio * source_length + search.max_length_offset))
        if longest is None:
            return limit
        if self.config.model.architecture == "decoder_only":  # source and target share the positions
            longest = max(1, longest - self.config.data.max_source_length)
        return min(limit, longest)

    def _rows_of(self, source_length: int) -> int:
        """How many sentences batch_tokens hold, with their sources and their beams, down to the ladder."""
        beam_tokens = _width(self.config.search) * self._limit_of(source_length)
        return round_down(max(1, self.config.search.batch_tokens // (source_length + beam_tokens)))

    def _search_ids(
        self, params: Any, source: Array, source_mask: Array, limits: Array, *, max_length: int, n_best: int
    ) -> SearchResult:
        """The traced part: encodes sources [B, S] and searches; `limits` [B]."""
        search, vocab, width = self.config.search, self.vocabs.target, _width(self.config.search)
        variables = {"params": params}
        cache = self._model.apply(variables, source, source_mask, width, max_length, method="start_decoding")

        def next_logits(tokens: Array, cache: Cache) -> tuple[Array, Cache]:
            return self._model.apply(variables, tokens, cache, method="decode_step")

        common: dict[str, Any] = {
            "batch_size": source.shape[0],
            "length_penalty": search.length_penalty,
            "max_lengths": jnp.asarray(limits),
            "max_length": max_length,
            "bos_id": vocab.bos_id,
            "eos_id": vocab.eos_id,
            "pad_id": vocab.pad_id,
        }
        if search.method == "greedy":
            return greedy_search(next_logits, cache, **common)
        return beam_search(next_logits, cache, beam_size=search.beam_size, n_best=n_best, **common)


def check_search(search: SearchConfig) -> None:
    """Raises UserError if the options of a search cannot be, naming all that is wrong."""
    bounds = [
        ("beam_size", 1),
        ("length_penalty", 0),
        ("max_length_ratio", 0),
        ("max_length_offset", 0),
        ("batch_tokens", 1),
    ]
    problems = [
        f"search.{name} is {getattr(search, name)}; it must be a finite number of at least {bound}"
        for name, bound in bounds
        if not bound <= getattr(search, name) < math.inf  # so that NaN is refused too
    ]
    if problems:
        raise UserError("\n".join(problems))


def _width(search: SearchConfig) -> int:
    return 1 if search.method == "greedy" else search.beam_size


def _by_sentence(indices: list[int], result: SearchResult) -> Iterator[tuple[int, SearchResult]]:
    host = jax.tree.map(np.asarray, result)  # waits for the device
    for row, index in enumerate(indices):
        yield index, SearchResult(*(leaf[row] for leaf in host))


def _name_lines(numbers: list[int]) -> str:
    """[3] gives "line 3", [3, 5] gives "lines 3, 5"; only the first ten are named."""
    named = ", ".join(map(str, numbers[:_NAMED_LINES]))
    more = len(numbers) - _NAMED_LINES
    return f"line{'s' * (len(numbers) > 1)} {named}" + (f" and {more} more" if more > 0 else "")
