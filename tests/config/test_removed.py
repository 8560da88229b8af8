"""Removed fields, values and flags: silent at their defaults, else one message that names what to use."""

import json
import warnings

import pytest

from flaxformer_mt.commands.flag_parser import parse_flags
from flaxformer_mt.commands.options import TrainOptions
from flaxformer_mt.config import Config, DataConfig, NoiseConfig, SearchConfig, TrainConfig
from flaxformer_mt.config.files import flatten, from_dict, load_config, read_config, to_dict
from flaxformer_mt.config.removed import _TABLE, refuse_removed_flag, take_out
from flaxformer_mt.errors import FlaxformerWarning, UserError


def set_value(values: dict, name: str, value: object) -> None:
    *sections, last = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[last] = value


# A config of version 0.2 in which every removed field has its default.
OLD: dict = {"data": {"noise": {"typos": 0.5}}}
for _name, _removed in _TABLE.items():
    if _name[0].islower() and "=" not in _name:
        set_value(OLD, _name, 3 if _removed.default is ... else _removed.default)
OLD["data"]["stages"] = [{"name": "a", "noise": {"prefix": 0.0, "upper_case": 0.5}}]


def test_no_field_of_today_is_in_the_table():
    assert not [name for name in flatten(Config()) if take_out({name: "another"})[1]]


def test_fields_at_their_defaults_load_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = from_dict(json.loads(json.dumps(OLD)))
        made = Config(
            train=TrainConfig(rdrop_weight=0.0),  # type: ignore[call-arg]
            data=DataConfig(teacher_scores=(), noise=NoiseConfig(typos=0.5, merge=0.0)),  # type: ignore[call-arg]
        )
    assert config.data.noise == made.data.noise == NoiseConfig(typos=0.5)
    assert config.data.stages[0].noise == NoiseConfig(upper_case=0.5)
    assert config.train == made.train == TrainConfig() and config.search == SearchConfig()
    assert Config().replace({"train.rdrop_weight": 0}) == Config()


@pytest.mark.parametrize("field", [name for name in _TABLE if name[0].islower()])
def test_a_field_at_another_value_is_one_message(tmp_path, field):
    """A warning for a run, which is then usable as far as its network allows; an error for a new config."""
    removed = _TABLE[field]
    name, _, value = field.partition("=")
    value = value or "another"
    if removed.default is ...:
        assert take_out({name: value}) == ({}, {})
        return
    values = to_dict(Config())
    set_value(values, name, value)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    if removed.needed:
        with pytest.raises(UserError, match=f"^{path}: {name}={value} was removed .* use version 0.2"):
            read_config(path)
    else:
        with pytest.warns(FlaxformerWarning, match=f"{name}={value} was removed in version 0.3") as caught:
            assert read_config(path) == read_config(path) == Config()
        assert len(caught) == 1
    for refuse in (
        lambda: Config().replace({name: value}),
        lambda: refuse_removed_flag(f"--config.{name}", value),
    ):
        with pytest.raises(UserError, match=f"{name}={value} was removed in version 0.3: .*; leave it out$"):
            refuse()


def test_flags_of_commands():
    for flag, text in (("--repetitions", "keep"), ("--mbr_utility", "chrf"), ("--comet", "none")):
        assert refuse_removed_flag(flag, text)
    assert not refuse_removed_flag("--method", "beam") and not refuse_removed_flag("--unknown", "1")
    for flag, text in (("--repetitions", "search_again"), ("--mbr_candidates", "beam"), ("--method", "mbr")):
        with pytest.raises(UserError, match=f"^{flag}={text} was removed"):
            refuse_removed_flag(flag, text)
    for field in ("train.rdrop_weight=0", "data.teacher_scores=", "data.noise.typo_kinds.unichar=0.1"):
        options = parse_flags(TrainOptions, [f"--config.{field}"], prog="train")
        assert options.config == load_config("toy_de_en")


def test_a_config_file_says_what_was_removed(tmp_path):
    path = tmp_path / "old.py"
    text = "from flaxformer_mt.config import *\ndef get_config():\n    return Config(train=TrainConfig({}))\n"
    path.write_text(text.format("rdrop_weight=0.0"))
    assert load_config(path) == Config()
    path.write_text("from flaxformer_mt.config import TypoConfig\n")
    with pytest.raises(UserError, match=r"^TypoConfig was removed in version 0.3: data.noise.typos makes"):
        load_config(path)
    path.write_text(text.format("rdrop_weight=5"))
    with pytest.raises(
        UserError, match=r"^train.rdrop_weight=5 was removed in version 0.3: R-Drop .* leave it"
    ):
        load_config(path)
