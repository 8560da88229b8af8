"""The search for the settings nearest to a config whose update fits into the memory of its devices.

Pure functions: what an update needs is measured by a function given to them.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from flaxformer_mt.config import Config

# Names and values of fields: {"model.remat": "dots"}.
Changes = dict[str, Any]

# How often the batch is halved.
_HALVINGS = 3
# The loss computes the logits of this share of the tokens at a time.
_LOSS_CHUNKS = 8
# At most this many pairs of changes are measured, each of which takes a compilation.
MOST_PAIRS = 8

# What changes cost, of which a distance is the sum: the more, the more of the speed of an update depends on
# them. The loss in chunks costs next to nothing; remat computes some or all activations twice; a layout that
# splits parameters sends them; a smaller batch leaves devices with less to do at a time, and halving it again
# with still less.
_LOSS_COST = 1
_REMAT_COSTS = {"none": 0, "dots": 2, "full": 4}
_LAYOUT_COST = 6
_BATCH_COST, _HALF_COST = 6, 3


class Attempt(NamedTuple):
    """Settings that were tried, the bytes that an update then needs on a device, and whether they fit.

    distance: how far the settings are from those of the config, see `distance_of`.
    """

    changes: Changes
    needed: int
    fits: bool
    distance: int


class FitSearch(NamedTuple):
    """The settings that were tried, in this order.

    pairs_left_out: number of pairs of changes that the limit left out, and that might have been the nearest.
    """

    attempts: list[Attempt]
    pairs_left_out: int


def replace_fields(config: Config, changes: Changes) -> Config:
    """Return the config with other values of some fields, named as in `model.remat`."""
    for name, value in changes.items():
        section, field = name.split(".")
        changed = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def distance_of(config: Config, changes: Changes) -> int:
    """How far settings are from those of a config: the sum of what the changes cost.

    1 for the loss in chunks; 2 for `model.remat=dots`, 4 for `full`; 6 for another layout; 9, 12 and 15 for a
    half, a fourth and an eighth of the batch. So the loss in chunks with `dots` (3) is nearer than `full`,
    and both with another layout (9) are as near as half of the batch.
    """
    cost = _LOSS_COST if "train.loss_chunk_tokens" in changes else 0
    cost += _REMAT_COSTS[changes.get("model.remat", config.model.remat)] - _REMAT_COSTS[config.model.remat]
    cost += _LAYOUT_COST if "parallel.fsdp" in changes else 0
    if "data.batch_tokens" in changes:
        parts = changes["optim.accumulation"] // config.optim.accumulation
        cost += _BATCH_COST + _HALF_COST * (parts.bit_length() - 1)
    return cost


def list_ladders(config: Config, *, device_count: int, loss_tokens: int) -> list[list[Changes]]:
    """List what can save memory: for each kind of change, its steps, each of which saves more than the last.

    All of them leave the result of training as it is, up to rounding and the random numbers of dropout.

    Args:
      loss_tokens: tokens of a batch on one device whose logits the loss computes.
    """
    ladders: list[list[Changes]] = []
    if not config.train.loss_chunk_tokens:
        chunk = max(256, loss_tokens // _LOSS_CHUNKS // 256 * 256)
        ladders.append([{"train.loss_chunk_tokens": chunk}] if chunk < loss_tokens else [])
    steps = ["none", "dots", "full"]
    ladders.append([{"model.remat": step} for step in steps[steps.index(config.model.remat) + 1 :]])
    parallel = config.parallel
    split = device_count // parallel.tensor
    if parallel.fsdp < split and config.model.model_dim % split == 0 and parallel.backend != "pmap":
        ladders.append([{"parallel.fsdp": split, "parallel.data": 1}])
    longest = max(config.data.max_source_length, config.data.max_target_length)
    least = longest * config.data.row_multiple
    halves: list[Changes] = [
        {
            "data.batch_tokens": config.data.batch_tokens >> power,
            "optim.accumulation": config.optim.accumulation << power,
        }
        for power in range(1, _HALVINGS + 1)
    ]
    ladders.append([half for half in halves if half["data.batch_tokens"] >= least])
    return [ladder for ladder in ladders if ladder]


def find_settings(
    config: Config,
    ladders: list[list[Changes]],
    *,
    measure: Callable[[Config], int],
    memory: int,
    report: Callable[[Attempt], object] = lambda attempt: None,
) -> FitSearch:
    """Try changes until they fit, the nearest first.

    First each kind of change alone, step by step until one fits, so that a user can choose between kinds.
    Then pairs of steps of different kinds, by their distance, as long as they are nearer than what fits
    already, until one fits; at most `MOST_PAIRS`. If nothing fits, the last steps of three and more kinds
    together, one kind more in each attempt; the last kind, the batch, step by step.

    Args:
      measure: bytes that an update of a config needs on a device.
      memory: bytes that a device has.
      report: receives each attempt when it has been measured.
    """
    attempts: list[Attempt] = []

    def fits(changes: Changes) -> bool:
        needed = measure(replace_fields(config, changes))
        attempts.append(Attempt(changes, needed, needed <= memory, distance_of(config, changes)))
        report(attempts[-1])
        return attempts[-1].fits

    for ladder in ladders:
        any(fits(changes) for changes in ladder)  # until one fits
    nearest = min((attempt.distance for attempt in attempts if attempt.fits), default=None)
    pairs = [
        pair
        for pair in _list_pairs(config, ladders)
        if nearest is None or distance_of(config, pair) < nearest
    ]
    if any(fits(pair) for pair in pairs[:MOST_PAIRS]):
        return FitSearch(attempts, 0)
    if nearest is None:
        any(fits(changes) for changes in _list_combinations(ladders))
    return FitSearch(attempts, len(pairs[MOST_PAIRS:]))


def count_most_attempts(ladders: list[list[Changes]]) -> int:
    """Return the largest number of attempts that `find_settings` makes."""
    pairs = sum(len(one) * len(other) for one, other in itertools.combinations(ladders, 2))
    return sum(map(len, ladders)) + min(MOST_PAIRS, pairs) + len(_list_combinations(ladders))


def _list_pairs(config: Config, ladders: list[list[Changes]]) -> list[Changes]:
    """All pairs of steps of different kinds, the nearest first."""
    pairs = [
        one | other
        for first, second in itertools.combinations(ladders, 2)
        for one, other in itertools.product(first, second)
    ]
    return sorted(pairs, key=lambda pair: distance_of(config, pair))


def _list_combinations(ladders: list[list[Changes]]) -> list[Changes]:
    """Return the last steps of three and more kinds together, one kind more in each; the last kind step by
    step.
    """
    combinations: list[Changes] = []
    together: Changes = {}
    for number, ladder in enumerate(ladders):
        if number >= 2:
            steps = ladder if number == len(ladders) - 1 else ladder[-1:]
            combinations += [together | changes for changes in steps]
        together = together | ladder[-1]
    return combinations
