"""Bounds: every number of the config has some, and nonsense is refused by the field's name."""

import dataclasses
import itertools
import math
import typing

import pytest

from flaxformer_mt.config import (
    Config,
    DataConfig,
    ModelConfig,
    NoiseConfig,
    OptimConfig,
    SearchConfig,
    StageConfig,
    TrainConfig,
)
from flaxformer_mt.config.checks import check_search, validate
from flaxformer_mt.config.field_values import Bounds, above, at_least, between, find_wrong_values, share
from flaxformer_mt.errors import UserError


def fields_of(section: type, where: str = "") -> dict[str, object]:
    """All fields of a section and the sections in it: their annotations by dotted name."""
    found: dict[str, object] = {}
    for name, hint in typing.get_type_hints(section, include_extras=True).items():
        inner = dataclasses.is_dataclass(hint)
        found |= fields_of(hint, f"{where}{name}.") if inner else {f"{where}{name}": hint}
    return found


# Fields that take -1, 0 or 1e30; every other number of the config refuses it.
NEGATIVE = {"search.coverage_layer", "model.alignment.layer"}
ZERO = {
    "data.clean.min_script_share",
    "data.clean.min_language_probability",
    *("data.valid_pairs", "data.test_pairs"),
    *("data.batch_pairs", "data.loader_threads", "data.prefetch", "vocab.sampling"),
    *(f"data.noise.{name}" for name in fields_of(NoiseConfig)),
    *("model.alignment.weight", "model.alignment.layer", "model.alignment.head"),
    *("vocab.pad_id", "vocab.bos_id", "vocab.eos_id", "vocab.unk_id"),
    *("model.num_encoder_layers", "model.norm_epsilon", "model.first_position", "model.dropout_rate"),
    *(f"model.{name}_dropout_rate" for name in ("embedding", "attention", "ffn")),
    *(f"optim.{name}" for name in ("warmup_steps", "final_fraction", "b1", "b2", "weight_decay")),
    *("optim.clip_norm", "optim.ema_decay", "optim.lora.rank"),
    *("optim.lora.embedding_rank", "optim.lora.tokens"),
    *(f"train.{name}" for name in ("label_smoothing", "loss_chunk_tokens", "patience", "average_last")),
    *(
        "train.teacher_weight",
        "train.peak_flops",
        "parallel.devices",
        "parallel.data",
        "vocab.size",
        "vocab.source_size",
    ),
    *(f"search.{name}" for name in ("length_penalty", "coverage_penalty", "diversity_strength", "top_k")),
    *(f"search.{name}" for name in ("min_p", "seed", "no_repeat_ngram")),
    *(f"search.{side}_length_{kind}" for side in ("min", "max") for kind in ("ratio", "offset")),
}
HUGE = {
    *("data.clean.max_length_ratio", "optim.clip_norm", "train.peak_flops"),
    *("search.coverage_penalty", "search.diversity_strength", "search.temperature"),
}


def replace(section, path: str, value):
    name, _, rest = path.partition(".")
    return dataclasses.replace(
        section, **{name: replace(getattr(section, name), rest, value) if rest else value}
    )


def has_number(hint: object) -> bool:
    return hint in (int, float) or any(map(has_number, typing.get_args(hint)))


def test_every_number_has_bounds():
    hints = fields_of(Config)
    numbers = {name for name, hint in hints.items() if has_number(hint)}
    assert numbers == {name for name, hint in hints.items() if typing.get_origin(hint) is typing.Annotated}
    assert len(numbers) > 70 and {*NEGATIVE, *ZERO, *HUGE} <= numbers


def test_every_number_is_held_to_its_bounds():
    """Each value in each field: taken, or refused with a line that names the field and the value."""
    for name, hint in fields_of(Config).items():
        if typing.get_origin(hint) is not typing.Annotated:
            continue
        kind = typing.get_args(hint)[0]
        whole = kind in (int, int | None)
        values = [
            *((value, False) for value in (math.nan, math.inf, -math.inf, "1", True)),
            *((-1, name in NEGATIVE), (0, name in {"seed", "search.coverage_layer"} | ZERO)),
            *((1e30, name in HUGE), (10**30, name in HUGE), (0.5, None if not whole else False)),
        ]
        for value, taken in values:
            if taken is None:
                continue
            given = (value,) if name == "data.weights" else value
            problems = dict(find_wrong_values(replace(Config(), name, given)))
            assert problems.keys() == (set() if taken else {name}), (name, value)
            assert taken or problems[name].startswith(f"{name} is {given}; ")
            if not taken:  # other checks neither fail on the value nor repeat it
                with pytest.raises(UserError) as error:
                    validate(replace(Config(), name, given))
                assert str(error.value) == problems[name]


def test_whole_numbers_beyond_all_floats_are_refused():
    """As a file of another system may hold them; Python converts them neither to floats nor to text."""
    for name, value in itertools.product(("model.num_heads", "optim.clip_norm"), (10**400, -(10**5000))):
        ((found, problem),) = find_wrong_values(replace(Config(), name, value))
        assert found == name and f"{name} is a number of {value.bit_length()} bits; it must" in problem


def test_choices_are_checked_as_well():
    with pytest.raises(UserError, match=r"model.norm is 'leyer'; did you mean layer\? \(allowed: layer,"):
        validate(Config(model=ModelConfig(norm="leyer")))
    with pytest.raises(UserError, match=r"^--method is 'bean'; .* \(allowed: beam, greedy, sample, mbr\)$"):
        check_search(SearchConfig(method="bean"), where="--")


def test_values_of_wrong_types_are_named_whoever_made_the_config():
    """In Python, a dataclass takes whatever it is given."""
    wrong = {
        "weights": 2.0,
        "dataset": 3,
        "stages": StageConfig(),
        "alignments": "train.align",
        "source_tags": "yes",
        "clean": None,
    }
    for name, value in wrong.items():
        with pytest.raises(UserError, match=rf"^data\.{name} (is|should be) ") as caught:
            validate(Config(data=DataConfig(**{name: value})))
        assert "\n" not in str(caught.value), name


def test_a_wrong_value_hides_no_other_problem():
    config = Config(
        data=DataConfig(row_multiple=0, batch_pairs=3),
        model=ModelConfig(num_heads=0, max_positions=100),
        optim=OptimConfig(b2=1.5),
        train=TrainConfig(max_nonfinite_steps=0, average_last=9),
    )
    with pytest.raises(UserError) as error:
        validate(config)
    lines = str(error.value).split("\n")
    assert [line.partition(";")[0] for line in lines[:4]] == [
        "data.row_multiple is 0",
        "model.num_heads is 0",
        "optim.b2 is 1.5",
        "train.max_nonfinite_steps is 0",
    ]
    assert [line.split()[0] for line in lines[4:]] == ["model.max_positions", "train.average_last"]


def test_bounds_say_what_they_hold():
    cases: list[tuple[Bounds, str, list[float], list[float]]] = [
        (at_least(1), "at least 1", [1, 1e30], [0.999]),
        (above(0), "above 0", [1e-30, 5], [0, -1]),
        (above(0, at_most=1), "above 0 and at most 1", [0.1, 1], [0, 1.1]),
        (between(0, 1), "from 0 to 1", [0, 1], [-0.1, 1.1]),
        (share(), "at least 0 and below 1", [0, 0.99], [-0.1, 1]),
    ]
    for bounds, words, inside, outside in cases:
        assert bounds.describe() == words
        assert all(map(bounds.contain, inside)) and not any(map(bounds.contain, outside))
