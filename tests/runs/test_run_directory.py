"""A run directory belongs to one config: what may change between sittings, and what is refused by name."""

import json

import pytest

from flaxformer_mt.config import Config
from flaxformer_mt.config.files import flatten, from_dict, read_config, to_dict
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.run_directory import open_run, read_report, write_report


def change(config: Config, name: str, value: object) -> Config:
    """The config with one field, by its dotted name, set anew."""
    values = to_dict(config)
    *path, last = name.split(".")
    section = values
    for part in path:
        section = section[part]
    assert last in section
    section[last] = value
    return from_dict(json.loads(json.dumps(values)))


def test_a_new_directory_gets_the_config(tmp_path):
    config = change(Config(), "seed", 7)
    open_run(tmp_path / "a" / "b", config)
    assert read_config(tmp_path / "a" / "b" / "config.json") == config
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["config.json"]
    open_run(tmp_path / "a" / "b", config)  # the same again is no contradiction


def test_another_config_is_refused_with_every_difference(tmp_path):
    open_run(tmp_path, Config())
    other = change(change(Config(), "model.ffn_dim", 1024), "optim.b2", 0.999)
    with pytest.raises(UserError) as error:
        open_run(tmp_path, other)
    lines = str(error.value).split("\n")
    assert str(tmp_path) in lines[0]
    assert [line.strip() for line in lines[1:-1]] == [
        "model.ffn_dim: 2048 -> 1024",
        "optim.b2: 0.98 -> 0.999",
    ]
    assert "--run=" in lines[-1]
    assert read_config(tmp_path / "config.json") == Config()  # nothing was written


FREE = {
    "data.cache_dir": "/elsewhere",
    "data.tfds_data_dir": "/elsewhere",
    "data.loader_threads": 5,
    "data.prefetch": 1,
    "parallel.backend": "mesh",
    "parallel.devices": 3,
    "parallel.data": 2,
    "parallel.fsdp": 2,
    "parallel.tensor": 2,
    "train.peak_flops": 1e12,
    "train.bleu_tokenize": "char",
    "train.log_every": 7,
    "train.tensorboard": False,
    "train.keep_checkpoints": 9,
}


@pytest.mark.parametrize("name", flatten(Config()))
def test_only_what_changes_no_number_may_change(name, tmp_path):
    """Every field of the config, one by one: free or refused by its name."""
    old = flatten(Config())[name]
    if name in FREE:
        value = FREE[name]
    elif isinstance(old, bool):
        value = not old
    elif isinstance(old, int | float):
        value = old + 1
    elif old is None:
        value = 0.25 if name.endswith("rate") else True if name.endswith("norm") else 32
    elif isinstance(old, tuple):
        value = ["a"] if name == "search.suppress" else [1.0]
    else:
        value = another_word(name, old)
    new = change(Config(), name, value)
    open_run(tmp_path, Config())
    if name in FREE or name == "train.steps":  # the default schedule does not look at train.steps
        open_run(tmp_path, new)
        assert read_config(tmp_path / "config.json") == new
    else:
        with pytest.raises(UserError, match=rf"\n  {name}: "):
            open_run(tmp_path, new)


def another_word(name: str, old: str) -> str:
    """A text that the field allows, other than `old`."""
    words = ["text", "keep", "drop", "pack", "char", "identity", "gelu", "post", "rms", "learned", "none"]
    words += ["decoder_only", "convolution", "both", "torch"]
    words += [
        "normal",
        "bfloat16",
        "full",
        "lion",
        "constant",
        "average",
        "threefry",
        "intl",
        "chrf",
        "greedy",
    ]
    for word in words:
        try:
            change(Config(), name, word)
        except UserError:
            continue
        if word != old:
            return word
    return pytest.skip(f"{name} has one value only")


@pytest.mark.parametrize(
    ("schedule", "steps", "allowed"),
    [
        ("noam", 200, True),
        ("inverse_sqrt", 200, True),
        ("constant", 200, True),
        ("cosine", 200, False),  # its learning rates would have been others all along
        ("linear", 200, False),
        ("inverse_sqrt", 50, False),  # steps that were made cannot be unmade
    ],
)
def test_a_run_may_be_made_longer_where_its_schedule_has_no_end(schedule, steps, allowed, tmp_path):
    config = change(change(Config(), "optim.schedule", schedule), "train.steps", 100)
    open_run(tmp_path, config)
    longer = change(config, "train.steps", steps)
    if allowed:
        open_run(tmp_path, longer)
        assert read_config(tmp_path / "config.json").train.steps == steps
    else:
        with pytest.raises(UserError, match=f"train.steps: 100 -> {steps}"):
            open_run(tmp_path, longer)


def test_places_that_cannot_be_a_run(tmp_path):
    file = tmp_path / "file"
    file.write_text("not a directory", encoding="utf-8")
    with pytest.raises(UserError, match="is a file, not a directory"):
        open_run(file, Config())
    with pytest.raises(UserError, match=r"cannot write to the run directory .*file/below"):
        open_run(file / "below", Config())
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="config.json is damaged"):
        open_run(tmp_path, Config())


def test_a_report_is_written_whole_and_read_back(tmp_path):
    assert read_report(tmp_path) is None
    report = {"step": 3, "stopped_early": False, "test": {"bleu": 1.5, "signature": "nrefs:1|ü"}}
    write_report(tmp_path, report)
    write_report(tmp_path, report | {"step": 4})
    assert read_report(tmp_path) == report | {"step": 4}
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("content", [b'{"step": 3', b"\xff\xfe", b"[]", b'{"step": 3}', b""])
def test_a_damaged_report_is_named_with_the_remedy(content, tmp_path):
    (tmp_path / "report.json").write_bytes(content)
    with pytest.raises(UserError, match=r"report\.json is damaged .*delete it"):
        read_report(tmp_path)


def test_every_free_field_is_a_field_and_is_tried_above():
    from flaxformer_mt.runs.run_directory import _CHANGEABLE_FIELDS

    assert set(_CHANGEABLE_FIELDS) == set(FREE)
    assert set(FREE) <= set(flatten(Config()))
