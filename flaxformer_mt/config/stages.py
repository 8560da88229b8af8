"""Config of a stage of training: which data sets are mixed, for how long, and with which noise.

The strings have the form of OpusTrainer's lines. `stage_mixes` reads them against the names in data.dataset.
"""

from dataclasses import dataclass

from flaxformer_mt.config.noise import NoiseConfig


@dataclass(frozen=True)
class StageConfig:
    """One stage, as in StageConfig("mid", mix=("clean 0.6", "medium 0.4"), until="medium 2")."""

    # Name of the stage in messages.
    name: str = ""
    # Data sets and their shares of the pairs, "NAME SHARE"; only ratios count. A set is named as in
    # data.dataset, or by the last part of its folder or name.
    mix: tuple[str, ...] = ()
    # End of the stage: "NAME N" when the set NAME has been seen N times in it, "steps N" after N updates.
    # Empty or "NAME inf", for the last stage: until train.steps.
    until: str = ""
    # Noise in this stage. None: data.noise.
    noise: NoiseConfig | None = None

    def __str__(self) -> str:
        """The name, as messages and help texts show the stage."""
        return self.name
