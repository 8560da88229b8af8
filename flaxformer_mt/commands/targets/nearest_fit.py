"""The search for settings near to a config whose update fits into the memory of its devices.

Pure functions: what an update needs is measured by a function given to them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from flaxformer_mt.config import Config

# Names and values of fields: {"model.remat": "dots"}.
Changes = dict[str, Any]

# How often the batch is halved.
_HALVINGS = 3
# The loss computes the logits of this share of the tokens at a time.
_LOSS_CHUNKS = 8

# What steps cost: the more, the more of the speed of an update depends on them. The loss in chunks costs next
# to nothing; remat computes some or all activations twice; a layout that splits parameters sends them; a
# smaller batch leaves devices with less to do at a time, and halving it again with still less.
_LOSS_COST = 1
_REMAT_COSTS = {"none": 0, "dots": 2, "full": 4}
_LAYOUT_COST = 6
_BATCH_COST, _HALF_COST = 6, 3


class Step(NamedTuple):
    """A change that saves memory, and what it costs."""

    changes: Changes
    cost: int


# Steps of one kind, of which a config takes one or none; each saves more than the one before, and costs more.
Ladder = list[Step]


class Attempt(NamedTuple):
    """Settings that were tried, the bytes that an update then needs on a device, and whether they fit.

    distance: how far the settings are from those of the config: the sum of what their steps cost. 1 for the
    loss in chunks; 2 for `model.remat=dots`, 4 for `full`; 6 for another layout; 9, 12 and 15 for a half, a
    fourth and an eighth of the batch.
    """

    changes: Changes
    needed: int
    fits: bool
    distance: int


def list_ladders(config: Config, *, device_count: int, loss_tokens: int) -> list[Ladder]:
    """List what can save memory, by kind, the cheapest kind first.

    All of them leave the result of training as it is, up to rounding and the random numbers of dropout.

    Args:
      loss_tokens: tokens of a batch on one device whose logits the loss computes.
    """
    chunk = max(256, loss_tokens // _LOSS_CHUNKS // 256 * 256)
    loss = [Step({"train.loss_chunk_tokens": chunk}, _LOSS_COST)]
    if config.train.loss_chunk_tokens or chunk >= loss_tokens:
        loss = []
    spent = _REMAT_COSTS[config.model.remat]
    remat = [Step({"model.remat": to}, cost - spent) for to, cost in _REMAT_COSTS.items() if cost > spent]
    parallel = config.parallel
    split = device_count // parallel.tensor
    layout = [Step({"parallel.fsdp": split, "parallel.data": 1}, _LAYOUT_COST)]
    if parallel.fsdp >= split or config.model.model_dim % split or parallel.backend == "pmap":
        layout = []
    least = max(config.data.max_source_length, config.data.max_target_length) * config.data.row_multiple
    batch = [
        Step(
            {
                "data.batch_tokens": config.data.batch_tokens >> power,
                "optim.accumulation": config.optim.accumulation << power,
            },
            _BATCH_COST + _HALF_COST * power,
        )
        for power in range(1, _HALVINGS + 1)
        if config.data.batch_tokens >> power >= least
    ]
    return [ladder for ladder in (loss, remat, layout, batch) if ladder]


def find_settings(
    config: Config,
    ladders: list[Ladder],
    *,
    measure: Callable[[Config], int],
    memory: int,
    report: Callable[[Attempt], object] = lambda attempt: None,
) -> list[Attempt]:
    """Find settings that fit and of which none can be taken back; return all that were tried, in order.

    Step after step is added, the cheapest kind first, until the update fits. Then the steps of each kind, the
    dearest first, are taken back as far as it still fits.

    Args:
      measure: bytes that an update of a config needs on a device.
      memory: bytes that a device has; the config itself needs more.
      report: receives each attempt when it has been measured.
    """
    # Settings are told by how many steps they climb on each ladder.
    nothing = (0,) * len(ladders)
    attempts: dict[tuple[int, ...], Attempt] = {}

    def fits(heights: tuple[int, ...]) -> bool:
        if heights == nothing:
            return False
        if heights not in attempts:
            steps = [ladder[height - 1] for ladder, height in zip(ladders, heights, strict=True) if height]
            changes = {name: value for step in steps for name, value in step.changes.items()}
            needed, distance = measure(config.replace(changes)), sum(step.cost for step in steps)
            attempts[heights] = Attempt(changes, needed, needed <= memory, distance)
            report(attempts[heights])
        return attempts[heights].fits

    found = nothing
    for kind, ladder in enumerate(ladders):
        for height in range(1, len(ladder) + 1):
            if not fits(found):
                found = (*found[:kind], height, *nothing[kind + 1 :])
    if fits(found):
        for kind in reversed(range(len(ladders))):
            lower = [(*found[:kind], height, *found[kind + 1 :]) for height in range(found[kind])]
            found = next(filter(fits, lower), found)
    return list(attempts.values())


def count_most_attempts(ladders: list[Ladder]) -> int:
    """Return the largest number of attempts that `find_settings` makes."""
    # All steps up, and down again from all ladders but the last, whose lower steps were tried on the way up.
    return sum(map(len, [*ladders, *ladders[:-1]]))
