"""Parses the strings of StageConfig into numbers: the shares of the data sets, and the end of each stage."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flaxformer_mt.config.directions import Member, read_members
from flaxformer_mt.config.field_values import LARGEST_COUNT, find_wrong_values
from flaxformer_mt.config.schema import DataConfig, NoiseConfig, StageConfig
from flaxformer_mt.errors import UserError


class Stage(NamedTuple):
    """A stage of training.

    shares: the share of each set in data.dataset; 0 for sets that are not in the stage. counted: index of the
    set whose passes are the epochs of the stage. epochs, steps: where the stage ends; both None: at the end
    of training.
    """

    name: str
    shares: tuple[float, ...]
    counted: int
    epochs: int | None
    steps: int | None
    noise: NoiseConfig


def read_stages(data: DataConfig) -> tuple[Stage, ...]:
    members = read_members(data)
    return tuple(_read_stage(stage, members, data.noise) for stage in data.stages)


def find_stage_problems(data: DataConfig) -> Iterator[str]:
    members, names = read_members(data), [stage.name for stage in data.stages]
    for number, stage in enumerate(data.stages):
        wrong = [] if stage.noise is None else list(find_wrong_values(stage.noise, "noise."))
        yield from (f"data.stages: stage {stage.name}: {problem}" for _, problem in wrong)
        if not stage.name or names.index(stage.name) < number:
            yield f"data.stages has the name {stage.name!r} twice or empty; give each stage a name of its own"
        try:
            read = _read_stage(stage, members, data.noise)
        except UserError as error:
            yield str(error)
            continue
        if read.epochs is None and read.steps is None and number + 1 < len(data.stages):
            yield (
                f"data.stages: stage {stage.name} has no end, so that {names[number + 1]} would never begin; "
                "write until as 'NAME N' or 'steps N'"
            )
    if data.stages and (data.weights or data.temperature != 1):
        field = "weights" if data.weights else "temperature"
        yield f"data.{field} has no effect with data.stages, which have shares of their own; leave it out"


def _read_stage(stage: StageConfig, members: Sequence[Member], noise: NoiseConfig) -> Stage:
    shares = [0.0] * len(members)
    for line in stage.mix:
        name, share = _read_pair(line)
        if not name or not 0 <= share < math.inf:
            raise UserError(
                f"data.stages: stage {stage.name} has {line!r} in its mix; write 'NAME SHARE', with a share "
                "of 0 or more"
            )
        shares[_find_member(name, members, stage)] += share
    if not any(shares):
        raise UserError(
            f"data.stages: stage {stage.name} mixes no data set; give one a share above 0, as in 'NAME 1'"
        )
    counted = next(index for index, share in enumerate(shares) if share)
    epochs = steps = None
    if stage.until:
        name, count = _read_pair(stage.until)
        endless = count == math.inf
        if not name or not (endless or (1 <= count <= LARGEST_COUNT and count.is_integer())):
            raise UserError(
                f"data.stages: stage {stage.name} ends until {stage.until!r}; write 'NAME N' for N passes "
                "over a data set, or 'steps N' for N steps, with a whole number N of 1 or more"
            )
        limit = None if endless else int(count)
        if name == "steps":
            steps = limit
        else:
            counted, epochs = _find_member(name, members, stage), limit
            if not shares[counted]:
                raise UserError(
                    f"data.stages: stage {stage.name} ends until {stage.until!r}, but its mix has no {name}; "
                    "name a set with a share above 0"
                )
    stage_noise = noise if stage.noise is None else stage.noise
    return Stage(stage.name, tuple(shares), counted, epochs, steps, stage_noise)


def _read_pair(text: str) -> tuple[str, float]:
    """Split `NAME NUMBER`; the number is NaN if it cannot be parsed."""
    name, _, number = text.strip().rpartition(" ")
    try:
        return name.strip(), float(number)
    except ValueError:
        return name.strip(), math.nan


def _find_member(name: str, members: Sequence[Member], stage: StageConfig) -> int:
    """Return the index of the set with this full name, name without direction, or last part of its folder."""
    for names in (
        [member.name for member in members],
        [member.dataset for member in members],
        [member.dataset.rpartition("@")[2].rstrip("/").rpartition("/")[2] for member in members],
    ):
        matches = [index for index, known in enumerate(names) if known == name]
        if len(matches) == 1:
            return matches[0]
        if matches:
            listed = " and ".join(members[index].name for index in matches)
            raise UserError(
                f"data.stages: stage {stage.name} names {name}, which may be {listed}; write the whole name"
            )
    listed = ", ".join(member.name for member in members)
    raise UserError(
        f"data.stages: stage {stage.name} names {name}, which is not in data.dataset ({listed}); name "
        "one of them, or the last folder of parallel_text@DIR"
    )
