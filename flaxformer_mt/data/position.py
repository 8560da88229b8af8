"""The place of a batch in training: in which epoch, and in which stage of a curriculum."""

from typing import NamedTuple


class Position(NamedTuple):
    """A position in the sequence of batches: the next batch is number `index` of `epoch`.

    epoch: counted over all stages. stage: the stage of the epoch. stage_epoch, stage_batches: the epochs and
    batches of this stage before the epoch; 0 without stages.
    """

    epoch: int
    index: int  # type: ignore[assignment]  # shadows tuple.index, which is unused
    stage: int = 0
    stage_epoch: int = 0
    stage_batches: int = 0


BEGINNING = Position(epoch=0, index=0)
