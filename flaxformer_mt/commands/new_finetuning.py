"""`new --from=RUN`: config values from the pretrained model, and the share of old directions."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from flaxformer_mt.commands.new_sizing import Choice, Machine
from flaxformer_mt.commands.options import NewOptions
from flaxformer_mt.config import Config, DataConfig, LoraConfig
from flaxformer_mt.config.directions import Direction, read_members
from flaxformer_mt.config.files import read_config
from flaxformer_mt.errors import UserError, find_url
from flaxformer_mt.object_store.remote_runs import open_copy
from flaxformer_mt.vocab import Vocabs, load_vocabs

# Share of the training pairs that are of old directions, and the temperature that divides it among them.
_REPLAY, _TEMPERATURE = 0.5, 5
# Bytes of a trained parameter: itself, its gradient, two moments of Adam, and the moving average. If they
# need more than this share of the memory, too little is left for activations.
_BYTES, _MOST_MEMORY = 20, 0.6
# Factor of the learning rate for LoRA, which is also that of the embeddings.
_LORA_RATE = 3


class Parent(NamedTuple):
    """The run that training starts from, with its number of parameters."""

    name: str
    config: Config
    vocabs: Vocabs
    parameters: int

    @property
    def new_sets(self) -> int:
        """Number of training directions for the corpus: 2 if the model has language tags, else 1."""
        data = self.config.data
        return 2 if data.tag_style not in ("opus", "t5") or data.target_tags == "always" else 1


def read_parent(options: NewOptions) -> Parent | None:
    from flaxformer_mt.runs.checkpoints import Checkpoints

    if options.from_ is None:
        if options.replay is not None:
            raise UserError(f"--replay={options.replay} has no effect without --from=RUN; leave it out")
        return None
    name, run = find_url(options.from_) or str(options.from_), open_copy(options.from_)
    if options.for_ is not None:
        raise UserError(f"--from={name} and --for={options.for_} exclude each other; leave one out")
    if not (run / "checkpoints").is_dir():
        raise UserError(f"--from={name} is no run; make one with: import {name} --run=DIR --languages=A,B")
    checkpoints = Checkpoints(run)
    shapes = checkpoints.describe_params(checkpoints.resolve("last").name).values()
    vocabs = load_vocabs(run / "vocab")
    return Parent(name, read_config(run / "config.json"), vocabs, sum(leaf.size for leaf in shapes))


def list_changes(section: Any) -> dict[str, Any]:
    """Return the fields of a config section whose values are not the defaults."""
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return {name: value for name, value in values.items() if value != getattr(type(section)(), name)}


def copy_section(parent: Parent, section: str) -> list[Choice]:
    """Return the parent's non-default values in a section, except `dtype`, which depends on the machine."""
    values = list_changes(getattr(parent.config, section)).items()
    reasons = iter([f"as in {parent.name}"])
    return [Choice(f"{section}.{name}", v, next(reasons, "")) for name, v in values if name != "dtype"]


def choose_sets(parent: Parent, corpus: Direction, replay: str | None) -> list[Choice]:
    sets, reason = [("parallel_text", corpus)], "without --replay, the model forgets other languages"
    if replay is not None:
        reason = "the corpus, and old directions against forgetting"
        for name, dataset, direction in read_members(DataConfig(dataset=replay)):
            if name == dataset:
                raise UserError(f"--replay has {name} without a direction; write it as in {name}:ru-en")
            sets.append((dataset, direction))
    if parent.new_sets == 2:
        sets = [(name, each) for name, one in sets for each in (one, one.reverse)]
    names = ",".join(f"{name}:{one.name}" for name, one in dict.fromkeys(sets))
    data = parent.config.data
    style = Choice("data.tag_style", data.tag_style, f"as in {parent.name}")
    return [Choice("data.dataset", names, reason), style, Choice("data.target_tags", data.target_tags, "")]


def choose_weights(parent: Parent, sizes: Sequence[int]) -> Choice:
    """Choose data.weights; `sizes` are the numbers of pairs in the sets, the new corpus first."""
    new, old = sizes[: parent.new_sets], sizes[parent.new_sets :]
    shares = [size ** (1 / _TEMPERATURE) for size in old]
    unit = _REPLAY / (1 - _REPLAY) * sum(new) / sum(shares)
    weights = [float(f"{unit * share / size:.3g}") for share, size in zip(shares, old, strict=True)]
    reason = f"{_REPLAY:.0%} of all pairs are old, divided among several sets at temperature {_TEMPERATURE}"
    return Choice("data.weights", (*[1.0] * len(new), *weights), reason)


def adapt(parent: Parent, machine: Machine, choices: Sequence[Choice]) -> list[Choice]:
    """Copy the network and search fields of the parent; choose learning rate and trainable parameters."""
    needed, rate = parent.parameters * _BYTES, min(1e-3, round(0.1 / parent.config.model.model_dim, 6))
    size = f"{parent.parameters:,} parameters take {needed / (1 << 30):.1f} GiB in training"
    trained = Choice("optim.freeze", (), f"all are trained, embeddings too, as new rows must be: {size}")
    if machine.memory is not None and needed > _MOST_MEMORY * machine.memory:
        why = f"{size}, of {machine.memory / (1 << 30):.0f}; embeddings in full, as new rows must be"
        output = () if parent.config.model.tying in ("all", "target_output") else ("output_kernel",)
        trained = Choice("optim.lora", LoraConfig(rank=32, also_train=("*_embedding", *output)), why)
        rate *= _LORA_RATE
    changes = [
        Choice("optim.learning_rate", rate, "for a trained model of this width; it falls to 0 at the end"),
        Choice("optim.schedule", "linear", ""),
        trained,
        *copy_section(parent, "model"),
        *copy_section(parent, "search"),
    ]
    gone = ("model.", "search.", "optim.learning_rate")
    same = [one for one in choices if one.name == "model.dtype" or not one.name.startswith(gone)]
    return [*changes, *same]
