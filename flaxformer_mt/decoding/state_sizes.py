"""Length limits of translations, and the sizes of search states: few sizes, as each has its own programs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.parallel import default_platform
from flaxformer_mt.parallel.devices import device_memory
from flaxformer_mt.processor import host_memory
from flaxformer_mt.search import Size

# Maximum number of candidates of a shortlist for each source token, besides those of all sentences.
CANDIDATES_PER_TOKEN = 16

# Length limits are for the worst case. The default capacity is the likely length, so that more rows fit; the
# few sentences that exceed it are searched again. Where nothing is known of likely lengths, it is this share
# of the limit, or the source length plus this many tokens, whichever is more.
_DEFAULT_SHARE, _DEFAULT_EXTRA = 0.6, 8

# Source lengths of the states for many sentences, and of those for a few; a last one of each is for the
# longest sources that the model was trained for.
_MANY_LENGTHS, _FEW_LENGTHS = (16, 32, 64, 128), (32, 64)

# A state for a few sentences has this many hypotheses: a step then still takes hardly more time than reading
# the parameters.
_FEW_HYPOTHESES = 16

# Sentences that fill a state for a few at most this many times are searched there, not in one for many.
_FEW_FILLS = 4


def round_up_coarsely(size: int) -> int:
    """Round up to a power of two: 13 gives 16."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True)
class LengthRule:
    """The maximum length of translations as a function of the source length; all lengths include eos.

    longest_source: the maximum source length. longest_target: the maximum number of target tokens for which
    all models have positions; None: unlimited. learned: ratio and offset of a length that few translations of
    the training set exceed; None: unknown.
    """

    max_length_ratio: float
    max_length_offset: float
    longest_source: int
    longest_target: int | None
    learned: tuple[float, float] | None = None

    def limit(self, source_length: int, needed: int = 0) -> int:
        """Return the maximum number of tokens of a translation for this source length; at least `needed`."""
        limit = max(1, needed, int(self.max_length_ratio * source_length + self.max_length_offset))
        return self.within_positions(limit)

    def likely(self, source_length: int, needed: int = 0) -> int:
        """Return the length that few translations of a source this long exceed; at most the limit."""
        limit = self.limit(source_length, needed)
        if self.learned is None:
            return limit
        ratio, offset = self.learned
        return min(limit, max(1, needed, int(ratio * source_length + offset)))

    def expected(self, source_length: int, needed: int = 0) -> int:
        """Return the target length for a first search: the likely length or, if it is unknown, a guess.

        `needed`: the minimum number of tokens, due to a prefix or to required phrases.
        """
        if self.learned is not None:
            return self.likely(source_length, needed)
        limit = self.limit(source_length, needed)
        return min(limit, max(needed, int(_DEFAULT_SHARE * limit), source_length + _DEFAULT_EXTRA))

    def within_positions(self, length: int) -> int:
        """Return the smaller of `length` and the models' number of positions."""
        return length if self.longest_target is None else min(length, self.longest_target)


def make_length_rule(
    search: SearchConfig,
    models: Sequence[ModelConfig],
    longest_source: int,
    learned: tuple[float, float] | None = None,
) -> LengthRule:
    """Make the rule from the search options and the models' maximum lengths; `learned`: see LengthRule."""
    limits = []
    for model in models:
        if model.longest_input is not None:
            shared = model.architecture == "decoder_only"  # source and target share the positions
            limits.append(max(1, model.longest_input - longest_source * shared))
    return LengthRule(
        search.max_length_ratio,
        search.max_length_offset,
        longest_source,
        min(limits, default=None),
        learned if search.length_bound == "learned" else None,
    )


# Tokens per batch on CPUs, and the most that are chosen for an accelerator, which gains nothing from more.
_CPU_TOKENS, MOST_TOKENS = 8192, 131_072
# Share of an accelerator's memory that a search may take; tokens per hypothesis (each has logits only once).
_MEMORY_SHARE, _TYPICAL_LENGTH = 0.25, 16
# Assumed memory in bytes of a device that does not report it.
_USUAL_MEMORY = 16 * 2**30


def choose_batch_tokens(search: SearchConfig, models: Sequence[ModelConfig], target_size: int) -> int:
    """Return search.batch_tokens; if it is None, a power of two that suits the device and the models.

    The estimate counts the keys and values of a token in each decoder layer, and four copies of a
    hypothesis's logits, divided among its tokens.
    """
    if search.batch_tokens is not None:
        return search.batch_tokens
    if default_platform() == "cpu":
        return _CPU_TOKENS
    memory, _ = device_memory(jax.local_devices()[0]) or (_USUAL_MEMORY, 0)
    bytes_each = 4 * 4 * target_size / _TYPICAL_LENGTH * len(models)
    bytes_each += sum(2 * 4 * model.num_decoder_layers * model.model_dim for model in models)
    tokens = max(_CPU_TOKENS, min(MOST_TOKENS, int(_MEMORY_SHARE * memory / bytes_each)))
    return 1 << (tokens.bit_length() - 1)


def check_memory(size: Size, width: int, models: Sequence[ModelConfig], target_size: int) -> None:
    """Raise UserError if the device has too little memory to search even a single sentence."""
    memory, _ = device_memory(jax.local_devices()[0]) or (host_memory(), 0)
    # Each beam has scores for the tokens of all beams, which are in memory about five times.
    scores = sum(5 * model.num_heads for model in models) * width
    cache = sum(2 * model.num_decoder_layers * model.model_dim for model in models)
    needed = 4 * width * (size.capacity * (scores + cache) + 4 * target_size)
    if 0 < memory < needed:
        raise UserError(
            f"search.beam_size {width} needs about {needed / 2**30:.1f} GiB for a sentence of "
            f"{size.source_length} tokens, but the device has {memory / 2**30:.1f}; give a smaller beam"
        )


@dataclass(frozen=True)
class StateSizes:
    """The sizes of states: up to five for many sentences, up to three for a few, one for a single sentence.

    A state for many sentences has room for the likely lengths of translations, and as many rows as
    batch_tokens allow. A state for a few has room up to the length limits, so no sentence exceeds it. width:
    number of hypotheses per row. batch_tokens: maximum number of tokens on one device, counting sources,
    hypotheses and padding. parts: number of devices that search separate rows. single: whether there is a
    size for one sentence: on CPUs, the free rows of a larger state would take longer than the sentence
    itself.
    """

    lengths: LengthRule
    width: int
    batch_tokens: int
    parts: int = 1
    single: bool = False

    def many(self) -> list[Size]:
        """Return the sizes for many sentences, the smallest first."""
        return [self._fit(length, self.lengths.expected(length)) for length in self._lengths(_MANY_LENGTHS)]

    def few(self) -> list[Size]:
        """Return the sizes for a few sentences, the smallest first."""
        return [self._fit_few(length, self.lengths.limit(length)) for length in self._lengths(_FEW_LENGTHS)]

    def one(self) -> list[Size]:
        """Return the size for one sentence, if any: the smallest size for a few, with a single row."""
        return [self.few()[0]._replace(rows=1)] if self.single else []

    def describe(self) -> list[dict[str, Any]]:
        """Return the sizes and their programs as JSON values, for display."""
        kinds = {"one": self.one(), "a few": self.few(), "many": self.many()}
        return [
            {
                "sentences": kind,
                "slots_of_a_device": size.rows,
                "source_tokens": size.source_length,
                "target_tokens": size.capacity,
                "programs": ["empty", "prefill", "generate"],
            }
            for kind, sizes in kinds.items()
            for size in sizes
        ]

    def choose(self, source_length: int, needed: int) -> Size:
        """Return the size to try first for one of many sentences; `needed`: see `LengthRule.expected`."""
        capacity = self.lengths.expected(source_length, needed)
        return _first(self.many(), source_length, capacity) or self.choose_few(source_length, needed)

    def choose_few(self, source_length: int, needed: int, *, count: int | None = None) -> Size:
        """Return the size for a few sentences of up to this length; `count`: how many (None: unknown)."""
        limit, alone = self.lengths.limit(source_length, needed), count is not None and count <= self.parts
        found = _first([*(self.one() if alone else []), *self.few()], source_length, limit)
        if found is None:  # for a long prefix, or many required phrases
            longest, capacity = self.lengths.longest_source, round_up_coarsely(limit)
            found = self._fit_few(longest, self.lengths.within_positions(capacity))
        return found

    def fits_few(self, count: int, small: Size) -> bool:
        """Return whether `count` sentences are few enough for `small`, a size for a few sentences."""
        return count <= _FEW_FILLS * small.rows * self.parts

    def choose_again(self, source_length: int, needed: int, *, others: Iterable[Size]) -> Size:
        """Return a size for a second search, with room for the length limit; preferably one of `others`."""
        found = [*sorted(others, key=lambda size: size.capacity), self.few()[-1]]
        limit = self.lengths.limit(source_length, needed)
        return _first(found, source_length, limit) or self.choose_few(source_length, needed)

    def _lengths(self, preferred: Sequence[int]) -> list[int]:
        longest = self.lengths.longest_source
        return [length for length in preferred if 3 * length <= 2 * longest] + [longest]

    def _fit(self, source_length: int, capacity: int) -> Size:
        rows = max(1, self.batch_tokens // (source_length + self.width * capacity))
        return Size(rows - rows % 8 if rows > 8 else rows, source_length, capacity)

    def _fit_few(self, source_length: int, capacity: int) -> Size:
        size = self._fit(source_length, capacity)
        return size._replace(rows=min(size.rows, max(1, _FEW_HYPOTHESES // self.width)))


def _first(sizes: Iterable[Size], source_length: int, capacity: int) -> Size | None:
    """Return the first size with room for a source and its translations."""
    fitting = (size for size in sizes if size.source_length >= source_length and size.capacity >= capacity)
    return next(fitting, None)
