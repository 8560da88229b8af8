"""From sentences of ids to hypotheses of ids: batches of few shapes, one compiled search for each.

Row 12 of the data path. Owns the lengths that a search may reach, what a batch holds, and how models and
search meet. Knows nothing of text, of files, or of how a network or a search works.
"""

import dataclasses
import itertools
import operator
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import make_model
from flaxformer_mt.model.layer_layout import unstack_layers
from flaxformer_mt.parallel import compile_by_rows, local_device_count
from flaxformer_mt.search import (
    NO_TOKEN,
    OUTGROWN,
    Lines,
    NextLogits,
    Search,
    SearchResult,
    Symbols,
    ensemble,
    ensemble_caches,
    search_queue,
    search_width,
)
from flaxformer_mt.search.batches import Queue, deal_rows, plan_queues, round_down, round_up
from flaxformer_mt.shapes import Array, Cache

# Limits are for the worst case. At first there is room for this share of one, or for a few tokens more than
# the source has, and so for more rows at a time; the few lines that need more are searched again with all.
_USUAL_SHARE, _USUAL_EXTRA = 0.6, 8


@dataclass(frozen=True)
class Sentence:
    """A source, and what its translation has to be like; all ids without bos."""

    # Ends in eos.
    source: np.ndarray
    # What the translation starts with, without eos.
    prefix: tuple[int, ...] = ()
    # What it contains, without eos.
    required: tuple[tuple[int, ...], ...] = ()
    # How many tokens it has at least, with eos, whatever the options say.
    least: int = 1

    @property
    def shortest(self) -> int:
        """How many tokens a translation needs that does as it is told, with eos."""
        return max(self.least, len(self.prefix) + sum(map(len, self.required)) + 1)


class SentenceSearch:
    """Searches translations of sentences with one model, or with several of one vocabulary.

    Compiles once for each shape of batch; other parameters of the same shapes need no compilation.
    """

    def __init__(
        self,
        models: Sequence[ModelConfig],
        options: SearchConfig,
        symbols: Symbols,
        *,
        sizes: tuple[int, int],
        source_pad_id: int,
        longest_source: int,
        spread: bool = False,
    ) -> None:
        """Makes the networks.

        Args:
          models: one, or the members of an ensemble.
          symbols: of the target vocabulary.
          sizes: of the source and the target vocabulary.
          longest_source: in tokens, with eos; none is longer.
          spread: every local device searches a part of each batch, as large as if it were alone; parameters
            come from `place_locally`.
        """
        self.options = options
        self._parts = local_device_count() if spread else 1
        self._symbols = symbols
        self._source_pad_id = source_pad_id
        self._longest_source = longest_source
        self._configs = tuple(dataclasses.replace(model, scan_layers=False) for model in models)
        self._models = [make_model(c, source_size=sizes[0], target_size=sizes[1]) for c in self._configs]
        self.compile()

    def compile(self, **options: Any) -> None:
        """Compiles anew when next called, with options of `jax.jit`, as compiler_options={...}."""
        static = ("max_length", "n_best", "rows", "refill")
        if self._parts > 1:
            if options:
                raise ValueError(f"{sorted(options)} cannot be chosen for a search over several devices")
            self.run = compile_by_rows(self.search_ids, static_argnames=static)
        else:
            self.run = jax.jit(self.search_ids, static_argnames=static, **options)

    def plan(self, lengths: Sequence[int], n_best: int, *, whole: bool = False) -> list[Queue]:
        """Which sentences of these source lengths `search_all` searches in one program.

        Args:
          whole: there is to be room for all tokens that a translation may have, not for the usual number.
        """

        def rows_of(source_length: int) -> int:
            """How many sentences batch_tokens of each part hold, with their beams, down to the ladder."""
            beam_tokens = search_width(self.options, n_best) * self._room_of(source_length, whole=whole)
            return round_down(max(1, self.options.batch_tokens // (source_length + beam_tokens)))

        return plan_queues(lengths, longest=self._longest_source, rows_of=rows_of, parts=self._parts)

    def search_all(
        self, sentences: Sequence[Sentence], *, n_best: int, params: Sequence[Any]
    ) -> Iterator[tuple[int, SearchResult]]:
        """Each sentence's index and its hypotheses [N, ...], in the order of queues.

        Args:
          params: of each model.
        """
        again = []
        for index, found in self._search(sentences, n_best, params, whole=False):
            if found.lengths[0] == OUTGROWN:
                again.append(index)
            else:
                yield index, found
        rest = [sentences[index] for index in again]
        for place, found in self._search(rest, n_best, params, whole=True):
            yield again[place], found

    def _search(
        self, sentences: Sequence[Sentence], n_best: int, params: Sequence[Any], *, whole: bool
    ) -> Iterator[tuple[int, SearchResult]]:
        """`search_all`, with OUTGROWN lengths for what needs more than the usual room."""
        waiting: tuple[Queue, SearchResult] | None = None
        for queue in self.plan([len(sentence.source) for sentence in sentences], n_best, whole=whole):
            some = [sentences[index] for index in queue.indices]
            started = self._start(some, queue, n_best, tuple(params), whole=whole)
            # The device works on this queue while the host reads the one before.
            if waiting is not None:
                yield from _by_sentence(*waiting, self._parts)
            waiting = queue, started
        if waiting is not None:
            yield from _by_sentence(*waiting, self._parts)

    def limit_of(self, source_length: int, needed: int = 0) -> int:
        """The longest translation of a source, both counted with eos, where it `needed` is no more."""
        limit = int(self.options.max_length_ratio * source_length + self.options.max_length_offset)
        limit = max(1, needed, limit)
        return limit if self.longest_target is None else min(limit, self.longest_target)

    def _room_of(self, source_length: int, needed: int = 0, *, whole: bool) -> int:
        """For how many tokens of a translation there is room."""
        limit = self.limit_of(source_length, needed)
        if whole:
            return limit
        return min(limit, max(needed, int(_USUAL_SHARE * limit), source_length + _USUAL_EXTRA))

    @property
    def longest_target(self) -> int | None:
        """The most tokens that every model has positions for; None: no bound."""
        longest = []
        for config in self._configs:
            if config.longest_input is not None:
                shared = config.architecture == "decoder_only"  # source and target share the positions
                longest.append(max(1, config.longest_input - self._longest_source * shared))
        return min(longest, default=None)

    def check(self, sentence: Sentence, name: str) -> None:
        """Raises UserError if a sentence asks for what its translation cannot have; `name` is its own."""
        if self.longest_target is not None and sentence.shortest > self.longest_target:
            raise UserError(
                f"{name} has {sentence.shortest - 1} tokens of prefix and required phrases, but the model "
                f"has positions for {self.longest_target}, end symbol included; ask for less"
            )
        if suppressed := set(self._symbols.never) & set(itertools.chain(*sentence.required)):
            raise UserError(
                f"{name} requires a phrase with the suppressed token {min(suppressed)}; leave out the one or "
                "the other"
            )

    def _start(
        self, sentences: list[Sentence], queue: Queue, n_best: int, params: tuple[Any, ...], *, whole: bool
    ) -> SearchResult:
        rows = queue.num_lines
        source = np.full((rows, queue.source_length), self._source_pad_id, np.int32)
        source_mask = np.zeros(source.shape, bool)
        limits = np.zeros(rows, np.int32)  # rows without a sentence stay at 0: they are not searched
        for row, sentence in enumerate(sentences):
            length = len(sentence.source)
            source[row, :length] = sentence.source
            source_mask[row, :length] = True
            limits[row] = self.limit_of(length, sentence.shortest)
        source_mask[len(sentences) :, 0] = True  # attention needs something to attend to
        needed = max(sentence.shortest for sentence in sentences)
        room = self._room_of(queue.source_length, round_up(needed), whole=whole)
        arrays = (source, source_mask, self._make_lines(sentences, limits))
        if self._parts > 1:
            arrays = jax.tree.map(operator.itemgetter(deal_rows(rows, self._parts)), arrays)
        sizes = {"rows": queue.rows // self._parts, "refill": queue.refill}
        return self.run(params, *arrays, max_length=room, n_best=n_best, **sizes)

    def _make_lines(self, sentences: list[Sentence], limits: np.ndarray) -> Lines:
        """What is asked of each row; what no sentence asks for is not in the compiled program."""
        options, rows = self.options, len(limits)
        lines = Lines(max_lengths=limits)
        ratio, offset = options.min_length_ratio, options.min_length_offset
        if ratio or offset or any(sentence.least > 1 for sentence in sentences):
            least = np.zeros(rows, np.int32)
            for row, sentence in enumerate(sentences):
                least[row] = max(sentence.least, int(ratio * len(sentence.source) + offset))
            lines = lines._replace(min_lengths=least)
        if options.method == "sample":
            seeds = np.zeros(rows, np.uint32)
            for row, sentence in enumerate(sentences):  # of the sentence, not of its place in the file
                seeds[row] = zlib.crc32(np.asarray(sentence.source, np.int32).tobytes(), options.seed)
            lines = lines._replace(seeds=seeds)
        if longest := max(len(sentence.prefix) for sentence in sentences):
            prefixes = np.full((rows, round_up(longest)), NO_TOKEN, np.int32)
            for row, sentence in enumerate(sentences):
                prefixes[row, : len(sentence.prefix)] = sentence.prefix
            lines = lines._replace(prefixes=prefixes)
        if phrases := [phrase for sentence in sentences for phrase in sentence.required]:
            most = max(len(sentence.required) for sentence in sentences)
            shape = (rows, round_up(most), round_up(max(map(len, phrases))))
            required = np.full(shape, NO_TOKEN, np.int32)
            for row, sentence in enumerate(sentences):
                for number, phrase in enumerate(sentence.required):
                    required[row, number, : len(phrase)] = phrase
            lines = lines._replace(required=required)
        return lines

    def search_ids(
        self,
        params: tuple[Any, ...],
        source: Array,
        source_mask: Array,
        lines: Lines,
        *,
        max_length: int,
        n_best: int,
        rows: int,
        refill: int,
    ) -> SearchResult:
        """The traced part: encodes sources [B, S] with every model and searches, `rows` of them at a time."""
        options, several = self.options, len(self._models) > 1
        width = search_width(options, n_best)
        variables = [{"params": unstack_layers(own)} for own in params]
        covers = options.method == "beam" and options.coverage_penalty > 0
        members = [
            _watch_attention(model, own, options.coverage_layer % config.num_decoder_layers)
            if covers
            else _next_logits(model, own)
            for model, own, config in zip(self._models, variables, self._configs, strict=True)
        ]
        if covers:
            lines = lines._replace(source_mask=source_mask)

        def encode(source: Array, source_mask: Array) -> Cache:
            caches = []
            for model, own in zip(self._models, variables, strict=True):
                cache = model.apply(own, source, source_mask, width, max_length, method="start_decoding")
                if covers:
                    nothing = jnp.zeros((source.shape[0], width, source.shape[1]), jnp.float32)
                    cache = cache._replace(per_beam={"model": cache.per_beam, "attention": nothing})
                caches.append(cache)
            return ensemble_caches(caches) if several else caches[0]

        def load(numbers: Array) -> tuple[Cache, Lines]:
            own_source, own_mask, own_lines = jax.tree.map(
                lambda leaf: jnp.asarray(leaf)[numbers], (source, source_mask, lines)
            )
            return encode(own_source, own_mask), own_lines

        next_logits = ensemble(members, mean=options.ensemble_mean) if several else members[0]
        attention_of = _mean_attention if several else _attention
        task = Search(next_logits, options, self._symbols, max_length, n_best, attention_of)
        count = (lines.max_lengths > 0).sum()
        return search_queue(task, load, count, num_lines=source.shape[0], rows=rows, refill=refill)


def _next_logits(model: Any, variables: Any) -> NextLogits:
    def next_logits(tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        return model.apply(variables, tokens, cache, method="decode_step")

    return next_logits


def _watch_attention(model: Any, variables: Any, layer: int) -> NextLogits:
    """The same, keeping the weights [B, W, S] of a layer's cross-attention, mean over heads, in the cache."""

    def next_logits(tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        inner = cache._replace(per_beam=cache.per_beam["model"])
        (logits, after), kept = model.apply(
            variables, tokens, inner, method="decode_step", mutable=["intermediates"]
        )
        block = kept["intermediates"]["decoder"][f"layers_{layer}"]
        (weights,) = block["cross_attention"]["attention_weights"]  # [B, H, W, S]
        per_beam = {"model": after.per_beam, "attention": weights.mean(axis=1)}
        return logits, after._replace(per_beam=per_beam)

    return next_logits


def _attention(cache: Cache) -> Array:
    return cache.per_beam["attention"]


def _mean_attention(cache: Cache) -> Array:
    return jnp.stack([member["attention"] for member in cache.per_beam]).mean(axis=0)


def _by_sentence(queue: Queue, result: SearchResult, parts: int) -> Iterator[tuple[int, SearchResult]]:
    host = jax.tree.map(np.asarray, result)  # waits for the device
    places = np.argsort(deal_rows(len(host.lengths), parts))
    for row, index in zip(places, queue.indices, strict=False):  # the other rows are empty
        yield index, jax.tree.map(operator.itemgetter(row), host)
