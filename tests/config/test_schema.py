"""Config: files, JSON, bounds, and the facts that span fields."""

import ast
import dataclasses
import inspect
import itertools
import json
import math
import os
import re
import typing

import pytest

from flaxformer_mt.config import (
    Config,
    DataConfig,
    GuidedAlignmentConfig,
    ModelConfig,
    NoiseConfig,
    OptimConfig,
    SearchConfig,
    StageConfig,
    TrainConfig,
    files,
    schema,
)
from flaxformer_mt.config.checks import check_search, validate
from flaxformer_mt.config.field_values import Bounds, find_wrong_values, show_value
from flaxformer_mt.config.files import from_dict, load_config, read_config, read_file, save_config, to_dict
from flaxformer_mt.errors import UserError

SECTIONS = [
    cls for _, cls in inspect.getmembers(schema, inspect.isclass) if cls.__module__ == schema.__name__
]


def test_fields_are_replaced_by_their_paths():
    config = Config().replace({"model.model_dim": 64, "data.clean.empty": "keep", "optim.learning_rate": 1})
    assert (config.model.model_dim, config.data.clean.empty, config.optim.learning_rate) == (64, "keep", 1.0)
    assert config.replace({"model": Config().model}).model == Config().model
    stages = (StageConfig("a", mix=("toy_de_en 1",), noise=NoiseConfig(typos=0.1)), StageConfig("b"))
    assert config.replace({"data.stages": stages}).data.stages == stages
    for path, value, message in (
        ("modle.model_dim", 3, "unknown config field config.modle; did you mean config.model"),
        ("model.norm", "leyer", "config.model.norm is 'leyer'; did you mean layer? (allowed: layer, rms)"),
        ("seed.x", 1, "config.seed is no section"),
        ("model", NoiseConfig(), "config.model is NoiseConfig("),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            Config().replace({path: value})


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def of_stages(*stages: StageConfig, **fields) -> Config:
    return Config(data=DataConfig(dataset="x@a/toy,x@b/toy", stages=stages, **fields))


def test_absent_fields_take_defaults_and_whole_numbers_do_for_floats():
    config = from_dict({"model": {"model_dim": 64}, "optim": {"learning_rate": 1}})
    assert config.model == ModelConfig(model_dim=64)
    assert isinstance(config.optim.learning_rate, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": {}}, "config.modle; did you mean config.model?"),
        ({"model": {"model_dmi": 3}}, "config.model.model_dmi; did you mean config.model.model_dim?"),
        ({"model": {"qqqq": 3}}, "config.model.qqqq; known: "),
        ({"model": {"model_dim": "64"}}, "config.model.model_dim is '64'; it must be a whole number"),
        ({"model": {"model_dim": True}}, "config.model.model_dim is True; it must be a whole number"),
        ({"model": {"norm": "leyer"}}, "config.model.norm is 'leyer'; did you mean layer?"),
        ({"model": 3}, "config.model is 3; it must be an object"),
        ({"data": {"weights": 3}}, "config.data.weights is 3; it must be a list"),
        ({"data": {"weights": ["x"]}}, "config.data.weights is 'x'; it must be a finite number"),
        ({"model": {"key_dim": 1.5}}, "config.model.key_dim is 1.5; it must be a whole number"),
    ],
)
def test_wrong_json_is_refused_by_name(values, message):
    with pytest.raises(UserError, match=re.escape(message)):
        from_dict(values)


def test_a_config_of_any_contents_is_one_message(tmp_path):
    """Not an object, not UTF-8, numbers that are none or endless, and nesting that overflows the stack."""
    path = tmp_path / "config.json"
    digits = "9" * 5000
    for content, words in [
        (b'{"seed": 1', "damaged"),
        (b"[]", "must contain a JSON object, not []"),
        (b'"text"', "must contain a JSON object, not 'text'"),
        (b"null", "must contain a JSON object, not None"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"seed":' * 100_000, "nested too deeply"),
        (b'{"seed": \xff}', "not UTF-8"),
        (b"\xff\xfe{}", "damaged"),
        (f'{{"seed": {digits}}}'.encode(), "not valid JSON: Exceeds the limit"),
        (
            f'{{"optim": {{"b2": {digits[:999]}}}}}'.encode(),
            "config.optim.b2 is a number of 3319 bits; it must be",
        ),
        (b'{"optim": {"learning_rate": NaN}}', "config.optim.learning_rate is nan; it must be a finite"),
        (b'{"optim": {"b2": -Infinity}}', "config.optim.b2 is -inf; it must be a finite number"),
        (b'{"optim": {"b2": 1e999}}', "config.optim.b2 is inf; it must be a finite number"),
        (b'{"data": {"weights": [1, NaN]}}', "config.data.weights is nan"),
        (b'{"seed": "' + b"a" * 10**6 + b'"}', "config.seed is 'aaa"),
        (b'{"model": {"norm": {}}}', "config.model.norm is {} (allowed: "),
    ]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=re.escape(words)) as error:
            read_config(path)
        assert len(str(error.value)) < 1000 + len(str(path))
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="has 1099511627776 bytes, more than"):
        read_config(path)


def test_a_config_that_was_changed_after_it_was_written_is_noticed(tmp_path):
    """A flipped bit can make another network of the same shapes; files of earlier versions have no digest."""
    path = tmp_path / "config.json"
    save_config(Config(), path)
    assert read_config(path) == Config()
    text = path.read_text()
    path.write_text(text.replace('"norm_epsilon": 1e-05', '"norm_epsilon": 1e-07'))
    assert path.read_text() != text
    with pytest.raises(UserError, match=re.escape(f"{path} has changed since it was written")):
        read_config(path)
    values = json.loads(path.read_text())
    del values["blake2b"]
    path.write_text(json.dumps(values))
    assert read_config(path).model.norm_epsilon == 1e-07


def test_pipes_and_devices_are_not_read_as_files(tmp_path):
    """A pipe would never answer, and a device never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "endless"):
        with pytest.raises(UserError, match="damaged; restore the file: it is not a file, but a pipe"):
            read_config(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)
    (tmp_path / "file").write_bytes(b"123")
    assert read_file(tmp_path / "file", most=3) == b"123"
    with pytest.raises(ValueError, match="it has 3 bytes, more than the accepted 2"):
        read_file(tmp_path / "file", most=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "fails: ZeroDivisionError"),
        ("def get_config(:", "fails: SyntaxError"),
        ("x = 1", "defines no get_config() -> Config"),
        (
            "from flaxformer_mt.config import ModelConfig as M\ndef get_config(): return M(model_dmi=3)",
            "model_dmi",
        ),
        ("def get_config(): return 3", "returns int, not flaxformer_mt.config.Config"),
    ],
)
def test_config_files_that_fail_say_so_in_one_line(tmp_path, text, message):
    with pytest.raises(UserError) as error:
        load_config(write(tmp_path / "mine.py", text))
    assert message in str(error.value) and str(tmp_path / "mine.py") in str(error.value)


def test_an_absent_config_file_is_answered_with_the_near_one(tmp_path):
    write(tmp_path / "mine.py", "")
    with pytest.raises(UserError, match=r"mime\.py does not exist; did you mean .*mine\.py\?"):
        load_config(tmp_path / "mime.py")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"model.model_dim": 100, "model.num_heads": 8}, ["model_dim 100", "num_heads 8", "96"]),
        ({"model.positions": "rotary", "model.key_dim": 3}, ["rotary", "3"]),
        ({"model.max_positions": 100}, ["100 is below the maximum sentence length, 128"]),
        (
            {"model.architecture": "decoder_only", "model.max_positions": 200},
            ["200 is below the maximum length of source plus target, 256"],
        ),
        ({"data.source_language": ""}, ["set model.architecture=decoder_only"]),
        (
            {"data.source_language": "", "model.architecture": "decoder_only"},
            ["best_metric is bleu", "set train.best_metric=loss"],
        ),
        ({"model.architecture": "decoder_only", "model.tying": "embeddings"}, ["use none or all"]),
        ({"vocab.joint": False, "model.architecture": "decoder_only"}, ["source and target as one sequence"]),
        ({"data.batching": "pack", "data.batch_pairs": 8}, ["batch_pairs 8 has no effect"]),
        ({"data.batch_pairs": 12}, ["12", "row_multiple 8"]),
        ({"data.batching": "pack", "model.padding_mask": "none"}, ["padding_mask none", "bucket"]),
        ({"vocab.joint": False, "model.tying": "embeddings"}, ["tying embeddings", "model.tying=none"]),
        ({"model.dropout_rate": 1.0}, ["model.dropout_rate is 1.0", "below 1"]),
        ({"data.batch_tokens": 1000}, ["batch_tokens 1000", "128", "1024"]),
        ({"data.dataset": "a,b", "data.weights": (1.0,)}, ["1 numbers for 2 data sets"]),
        (
            {"data.max_source_length": 600, "data.batch_tokens": 8000, "model.positions": "learned"},
            ["512", "600"],
        ),
        (
            {"data.source_language": "", "data.noise.lower_case": 0.1, "data.noise.typos": 0.2},
            ["data.noise.lower_case is 0.1", "data.noise.typos is 0.2", "language model"],
        ),
        ({"data.stages": (StageConfig("s", ("a 1",)),)}, ["stage s names a", "toy_de_en"]),
        (of_stages(StageConfig("s", ("toy 1",))), ["names toy, which may be x@a/toy and x@b/toy"]),
        (of_stages(StageConfig("s", ("x@a/toy",))), ["has 'x@a/toy' in its mix", "NAME SHARE"]),
        (of_stages(StageConfig("s", ("x@a/toy -1",))), ["has 'x@a/toy -1' in its mix"]),
        (of_stages(StageConfig("s", ("x@a/toy nan",))), ["has 'x@a/toy nan' in its mix"]),
        (of_stages(StageConfig("s", ("x@a/toy inf",))), ["has 'x@a/toy inf' in its mix"]),
        (of_stages(StageConfig("s", ("x@a/toy 0",))), ["mixes no data set"]),
        (of_stages(StageConfig("s", ("x@a/toy 1",), "steps 1.5")), ["ends until 'steps 1.5'", "whole"]),
        (of_stages(StageConfig("s", ("x@a/toy 1",), "steps 0")), ["ends until 'steps 0'"]),
        (of_stages(StageConfig("s", ("x@a/toy 1",), "steps nan")), ["ends until 'steps nan'"]),
        (of_stages(StageConfig("s", ("x@a/toy 1",), "x@b/toy 2")), ["its mix has no x@b/toy"]),
        (
            of_stages(StageConfig("s", ("x@a/toy 1",)), StageConfig("t", ("x@a/toy 1",))),
            ["stage s has no end", "t would never begin"],
        ),
        (
            of_stages(StageConfig("s", ("x@a/toy 1",), "steps 1"), StageConfig("s", ("x@a/toy 1",))),
            ["the name 's' twice or empty"],
        ),
        (
            of_stages(StageConfig("s", ("x@a/toy 1",), noise=NoiseConfig(typos=-1.0))),
            ["stage s: noise.typos is -1.0; it must be from 0 to 1"],
        ),
        (of_stages(StageConfig("s", ("x@a/toy 1",)), temperature=5.0), ["data.temperature has no effect"]),
        (of_stages(StageConfig("s", ("x@a/toy 1",)), weights=(1.0, 2.0)), ["data.weights has no effect"]),
        ({"data.dataset": "a:de-de"}, ["a:de-de translates from de to itself"]),
        ({"data.dataset": "a:de-en", "data.source_language": ""}, ["a:de-en names a direction, but"]),
        (
            {"data.source_language": "", "data.source_tags": True},
            ["source_tags is True, but a language"],
        ),
        (
            {"data.source_language": "", "data.target_tags": "always"},
            ["tags is always, but a language"],
        ),
        ({"data.dataset": "a:de-en,b:de-french"}, ["'french' cannot be the language of a tag"]),
        ({"data.noise.inline": 0.1}, ["data.noise.inline is 0.1, but data.alignments names no file"]),
        (
            {"model.architecture": "decoder_only", "model.decoder_self_attention": "ssru"},
            ["model.decoder_self_attention is ssru, but a decoder_only model"],
        ),
        ({"optim.optimizer": "muon", "model.scan_layers": True}, ["scan_layers is True; set it to False"]),
        ({"model.attention": "cudnn", "model.dtype": "bfloat16"}, ["model.attention_dropout_rate=0"]),
        (
            {"model.attention": "cudnn", "model.attention_dropout_rate": 0.0},
            ["model.attention cudnn needs model.dtype bfloat16"],
        ),
        ({"vocab.pad_id": 1}, ["four different numbers"]),
        ({"vocab.eos_id": 8000}, ["from 0 to 7999"]),
        ({"vocab.size": 0}, ["vocab.size 0", "vocab.kind is bpe"]),
        ({"vocab.source_size": 9}, ["source_size 9 has no effect with vocab.joint=True"]),
        ({"vocab.joint": False}, ["tying all", "joint is False"]),
        ({"vocab.kind": "char", "vocab.sampling": 0.1}, ["vocab.sampling", "char"]),
        ({"train.average_last": 9}, ["average_last 9", "keep_checkpoints 5"]),
        ({"train.final_checkpoint": "average"}, ["average_last is 0"]),
    ],
)
def test_facts_that_cannot_be_are_refused_with_both_values(case, words):
    with pytest.raises(UserError) as error:
        validate(case if isinstance(case, Config) else Config().replace(case))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("width", [4, 6, 10, 100, 1000])
@pytest.mark.parametrize("heads", [3, 4, 7])
def test_the_width_that_is_proposed_is_accepted(width, heads):
    try:
        validate(Config(model=ModelConfig(model_dim=width, num_heads=heads)))
    except UserError as error:
        proposed = int(re.search(r"the nearest multiple is (\d+)", str(error))[1])
        assert proposed % heads == 0 and abs(proposed - width) < heads
    else:
        assert width % heads == 0


def test_every_field_has_a_comment_of_its_own():
    """A field's comment is its --help; without one, the comment above would be taken for it."""
    bare = []
    source = inspect.getsource(schema)
    lines = source.split("\n")
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            bare += [f for f in fields if not lines[f.lineno - 2].strip().startswith("#")]
    assert not [field.target.id for field in bare]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda cls: cls.__name__)
def test_sections_are_frozen_and_hold_only_json_types(section):
    assert section.__dataclass_params__.frozen
    for hint in typing.get_type_hints(section).values():
        plain = dataclasses.is_dataclass(hint) or hint in (int, float, str, bool)
        assert plain or typing.get_args(hint), hint


def test_guided_alignment_needs_a_file_a_weight_and_a_head_that_exists():
    def problems(weight=0.0, files=(), dataset="toy_de_en", layer=-1, **model):
        guided = GuidedAlignmentConfig(weight=weight, layer=layer)
        data = DataConfig(dataset=dataset, alignments=files)
        config = Config(data=data, model=ModelConfig(alignment=guided, **model))
        try:
            validate(config)
        except UserError as error:
            return str(error)
        return ""

    assert problems() == problems(0.1, ("a",)) == problems(0.1, ("", "a"), "x,y", layer=-6) == ""
    for found, words in (
        (problems(0.0, ("a", "")), ("data.alignments is a,", "model.alignment.weight is 0")),
        (problems(0.1), ("model.alignment.weight is 0.1", "data.alignments names no file")),
        (problems(0.1, ("a", "b"), "x,y,z"), ("2 names for 3 data sets (x,y,z)",)),
        (problems(0.1, ("gs://a/b",)), ("data.alignments", "gs://a/b")),
        (problems(0.1, ("a",), layer=6), ("model.alignment.layer is 6", "6 layers", "from -6 to 5")),
        (problems(0.1, ("a",), architecture="decoder_only"), ("decoder_only", "no cross-attention")),
    ):
        assert all(word in found for word in words), found


def test_a_field_of_earlier_versions_is_passed_over(tmp_path):
    """In a run's config.json, with a digest of its own."""
    values = to_dict(Config())
    values["train"]["prng"] = "rbg"
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values | {"blake2b": files._digest_of(values)}))
    assert read_config(path) == Config()
    with pytest.raises(UserError, match="unknown config field config.model.prng"):
        from_dict({"model": {"prng": "rbg"}})


def fields_of(section: type, where: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, hint in typing.get_type_hints(section, include_extras=True).items():
        kind = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
        inner = dataclasses.is_dataclass(kind)
        found |= fields_of(kind, f"{where}{name}.") if inner else {f"{where}{name}": hint}
    return found


def replace(section, path: str, value):
    name, _, rest = path.partition(".")
    new = replace(getattr(section, name), rest, value) if rest else value
    return dataclasses.replace(section, **{name: new})


def has_number(hint: object) -> bool:
    return hint in (int, float) or any(map(has_number, typing.get_args(hint)))


def test_every_number_has_bounds_and_is_held_to_them():
    hints = fields_of(Config)
    bounds = {
        name: [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Bounds)]
        for name, hint in hints.items()
    }
    assert {name for name, marks in bounds.items() if marks} == set(
        filter(lambda n: has_number(hints[n]), hints)
    )
    for name, marks in bounds.items():
        whole = typing.get_args(hints[name])[:1] in ((int,), (int | None,))
        outside = [math.nan, math.inf, -math.inf, "1", True, *([0.5, 1e30, 10**30] if whole else [])]
        for mark in marks:
            outside += [mark.low if mark.low_open else mark.low - 1]
            outside += [mark.high if mark.high_open else mark.high + 1] if mark.high < math.inf else []
        for value in outside if marks else ():
            wrong = replace(Config(), name, (value,) if name == "data.weights" else value)
            problems = dict(find_wrong_values(wrong))
            assert problems.keys() == {name}, (name, value)
            assert problems[name].startswith(f"{name} is {show_value(value)}; ")
            with pytest.raises(UserError) as error:  # other checks neither fail on the value nor repeat it
                validate(wrong)
            assert str(error.value) == problems[name]


def test_whole_numbers_beyond_all_floats_are_refused():
    """As a file of another system may hold them; Python converts them neither to floats nor to text."""
    for name, value in itertools.product(("model.num_heads", "optim.clip_norm"), (10**400, -(10**5000))):
        ((found, problem),) = find_wrong_values(replace(Config(), name, value))
        assert found == name and f"{name} is a number of {value.bit_length()} bits; it must" in problem


def test_choices_are_checked_as_well():
    with pytest.raises(UserError, match=r"^--method is 'bean'; .* \(allowed: beam, greedy, sample\)$"):
        check_search(SearchConfig(method="bean"), where="--")


def test_values_of_wrong_types_are_named_whoever_made_the_config():
    wrong = {"weights": 2.0, "dataset": 3, "stages": StageConfig(), "alignments": "train.align"} | {
        "source_tags": "yes",
        "clean": None,
    }
    for name, value in wrong.items():
        with pytest.raises(UserError, match=rf"^data\.{name} is ") as caught:
            validate(Config(data=DataConfig(**{name: value})))
        assert "\n" not in str(caught.value), name


def test_a_wrong_value_hides_no_other_problem():
    config = Config(
        data=DataConfig(row_multiple=0, batch_pairs=3),
        model=ModelConfig(num_heads=0, max_positions=100),
        optim=OptimConfig(b2=1.5),
        train=TrainConfig(log_every=0, average_last=9),
    )
    with pytest.raises(UserError) as error:
        validate(config)
    lines = str(error.value).split("\n")
    assert [line.partition(";")[0] for line in lines[:4]] == [
        "data.row_multiple is 0",
        "model.num_heads is 0",
        "optim.b2 is 1.5",
        "train.log_every is 0",
    ]
    assert [line.split()[0] for line in lines[4:]] == ["model.max_positions", "train.average_last"]
