"""The search for the settings nearest to a config whose update fits into the memory of its devices.

Pure functions: what an update needs is measured by a function given to them.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from flaxformer_mt.config import Config

# Names and values of fields: {"model.remat": "dots"}.
Changes = dict[str, Any]

# How often the batch is halved.
_HALVINGS = 3
# The loss computes the logits of this share of the tokens at a time.
_LOSS_CHUNKS = 8


class Attempt(NamedTuple):
    """Settings that were tried, the bytes that an update then needs on a device, and whether they fit."""

    changes: Changes
    needed: int
    fits: bool


def replace_fields(config: Config, changes: Changes) -> Config:
    """Returns the config with other values of some fields, named as in `model.remat`."""
    for name, value in changes.items():
        section, field = name.split(".")
        changed = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def list_ladders(config: Config, *, device_count: int, loss_tokens: int) -> list[list[Changes]]:
    """Lists what can save memory: for each kind of change, its steps, each of which saves more than the last.

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
    config: Config, ladders: list[list[Changes]], *, measure: Callable[[Config], int], memory: int
) -> Iterator[Attempt]:
    """Tries changes until they fit, and yields each attempt.

    First each kind of change alone, step by step until one fits. If none does, the last steps of all kinds
    together, one kind more in each attempt; the last kind, the batch, step by step.

    Args:
      measure: bytes that an update of a config needs on a device.
      memory: bytes that a device has.
    """

    def attempt(changes: Changes) -> Attempt:
        needed = measure(replace_fields(config, changes))
        return Attempt(changes, needed, needed <= memory)

    found = False
    for ladder in ladders:
        for changes in ladder:
            tried = attempt(changes)
            yield tried
            if tried.fits:
                found = True
                break
    if found or not ladders:
        return
    together = dict(ladders[0][-1])
    for ladder in ladders[1:]:
        for changes in [ladder[-1]] if ladder is not ladders[-1] else ladder:
            tried = attempt(together | changes)
            yield tried
            if tried.fits:
                return
        together |= ladder[-1]
