"""Directions of mixtures, their tags, and the problems of both."""

import dataclasses

import pytest

from flaxformer_mt.config import Config, DataConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.directions import Direction, choose_tags, find_directions, read_members
from flaxformer_mt.errors import UserError


def test_members_name_their_directions_and_others_have_that_of_the_config():
    names = [
        "parallel_text@a/b:en-fr",
        " wmt14_translate/de-en:1.0.0",
        "wmt14_translate/de-en:1.0.0:zh_Hant-en",
        "parallel_text@c:d/e",
        "toy_de_en",
    ]
    members = read_members(DataConfig(dataset=",".join(names)))
    assert [tuple(member.direction) for member in members] == [
        ("en", "fr"),
        ("de", "en"),
        ("zh_Hant", "en"),
        ("de", "en"),
        ("de", "en"),
    ]
    datasets = ["parallel_text@a/b", *["wmt14_translate/de-en:1.0.0"] * 2, "parallel_text@c:d/e", "toy_de_en"]
    assert [member.dataset for member in members] == datasets
    assert [member.name for member in members] == [name.strip() for name in names]
    data = DataConfig(dataset=",".join(names))
    assert [one.name for one in find_directions(data)] == ["en-fr", "de-en", "zh_Hant-en"]


def test_tags_are_added_for_several_targets_or_as_told():
    one, many = DataConfig(dataset="a:de-en,b:fr-en"), DataConfig(dataset="a:de-en,a:en-de")
    there = Direction("de", "en")
    found = [
        choose_tags(dataclasses.replace(data, target_tags=tags, source_tags=own), there)
        for data in (one, many)
        for tags in ("auto", "always", "never")
        for own in (False, True)
    ]
    target, source = ">>en<<", "<from:de>"
    assert found[:6] == [(), (source,), (target,), (target, source), (), (source,)]
    assert found[6:] == [(target,), (target, source), (target,), (target, source), (), (source,)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"dataset": "a:de-de"}, "a:de-de translates from de to itself"),
        (
            {"dataset": "a:de-en", "source_language": ""},
            "a:de-en names a direction, but data.source_language",
        ),
        (
            {"source_language": "", "source_tags": True},
            "data.source_tags is True, but a language model has no",
        ),
        (
            {"source_language": "", "target_tags": "always"},
            "data.target_tags is always, but a language model",
        ),
        ({"dataset": "a:de-en,b:de-french"}, "'french' cannot be the language of a tag"),
        ({"temperature": 0.5}, "data.temperature is 0.5; it must be from 1 to 1000"),
    ],
)
def test_what_cannot_be_is_named(data, expected):
    with pytest.raises(UserError) as refused:
        validate(Config(data=DataConfig(**data)))
    assert expected in str(refused.value)
