"""Records a run for TensorBoard, in RUN/tensorboard."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter
from tensorboardX.summary import hparams

from flaxformer_mt.tracking.progress_display import Sample
from flaxformer_mt.tracking.tracking_services import Service

# Values that TensorBoard compares runs by, and the types of hyperparameters that it knows.
_HPARAM_METRICS = ("train/loss", "valid/loss", "valid/bleu", "valid/chrf")
_SCALAR = (bool, int, float, str)


class Run(Service):
    def __init__(self, run_dir: Path, start_step: int) -> None:
        """Open an event file that overrides records of steps after `start_step`."""
        self._start_step = start_step
        self._end_of_session: Any = None
        # the suffix prevents a run that is resumed within a second from overwriting its earlier file
        self._board = SummaryWriter(
            str(run_dir / "tensorboard"),
            purge_step=start_step + 1 if start_step else 0,
            filename_suffix=f".from-{start_step}",
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def log_config(self, fields: Mapping[str, Any]) -> None:
        plain = {
            name: value if isinstance(value, _SCALAR) else _spell(value) for name, value in fields.items()
        }
        rows = [f"| {name} | {_escape(_spell(value))} |" for name, value in fields.items()]
        self._board.add_text("config", "\n".join(["| field | value |", "|---|---|", *rows]), self._start_step)
        *begin, self._end_of_session = hparams(plain, dict.fromkeys(_HPARAM_METRICS))
        for summary in begin:
            self._board.file_writer.add_summary(summary, self._start_step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [f"| {' | '.join(map(_escape, sample))} |" for sample in samples]
        table = ["| source | reference | translation |", "|---|---|---|", *rows]
        self._board.add_text("valid/translations", "\n".join(table), step)

    def close(self, *, failed: bool) -> None:
        if self._end_of_session is not None:
            self._board.file_writer.add_summary(self._end_of_session)
        self._board.close()


def _spell(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
