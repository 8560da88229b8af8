"""OpusTrainer's YAML: read as stages of the config, or refused by the name of what is not there."""

import dataclasses

import pytest

from flaxformer_mt.config import Config, NoiseConfig, StageConfig, TypoConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.files import read_config, save_config
from flaxformer_mt.config.stage_mixes import read_stages
from flaxformer_mt.corpus.opustrainer_file import read_curriculum
from flaxformer_mt.errors import FlaxformerWarning, UserError

CURRICULUM = """
datasets:
  clean: corpora/clean.gz     # by its name
  medium: corpora/m/train.tsv.gz
  dirty: parallel_text@web:de-en
stages: [start, mid, end]
start:
- clean 0.8
- medium 0.2
- dirty 0
- until clean 2
mid:
  mix: [clean 0.6, dirty 0.4, until steps 500]
  modifiers: []
end:
  mix:
  - dirty 1
  - until dirty inf
  modifiers:
  - &upper
    - UpperCase: 0.1
  - RemoveEndPunct: 0.2
  - *nothing
modifiers:
- UpperCase: 0.05
- TitleCase: 0.04
- Typos: 0.3
  char_swap: 0.5
num_fields: 2
""".replace("  - *nothing\n", "  - []\n")


def write(folder, text: str) -> str:
    path = folder / "curriculum.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_curriculum_becomes_the_stages_of_a_config(tmp_path):
    start, mid, end = stages = read_curriculum(write(tmp_path, CURRICULUM))
    only_swaps = TypoConfig(*[0.0] * 9)
    only_swaps = dataclasses.replace(only_swaps, char_swap=0.5)
    noise = NoiseConfig(upper_case=0.05, title_case=0.04, typos=0.3, typo_kinds=only_swaps)
    assert start == StageConfig(
        "start", ("clean 0.8", "parallel_text@corpora/m 0.2", "parallel_text@web:de-en 0"), "clean 2", noise
    )
    assert mid == StageConfig("mid", ("clean 0.6", "parallel_text@web:de-en 0.4"), "steps 500", NoiseConfig())
    assert end.until == "parallel_text@web:de-en inf"
    assert end.noise == NoiseConfig(upper_case=0.1, end_punctuation=0.2)
    names = "parallel_text@data/clean,parallel_text@corpora/m,parallel_text@web:de-en"
    config = Config()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dataset=names, stages=stages))
    validate(config)
    read = read_stages(config.data)
    assert [stage.shares for stage in read] == [(0.8, 0.2, 0), (0.6, 0, 0.4), (0, 0, 1)]
    ends = [(one.counted, one.epochs, one.steps) for one in read]
    assert ends == [(0, 2, None), (0, None, 500), (2, None, None)]
    save_config(config, tmp_path / "config.json")  # a run is repeated without the file
    assert read_config(tmp_path / "config.json") == config


def test_without_modifiers_the_noise_is_that_of_the_config(tmp_path):
    text = "datasets: {a: a, b: b}\nstages: [s]\ns: [a 1, until a 1]\nseed: 1111\ntrainer: marian\n"
    with pytest.warns(FlaxformerWarning, match="no effect here: seed and trainer"):
        assert read_curriculum(write(tmp_path, text)) == (StageConfig("s", ("a 1",), "a 1"),)


WRONG = {
    "stages: [start, mid, end]": ("", "no list of stages"),
    "num_fields: 2": ("num_fields: 3", "num_fields 3"),
    "start:\n": ("begin:\n", "has begin, which is neither a stage"),
    "mid:\n": ("mid: 5\nother:\n", "other"),
    "- UpperCase: 0.05": ("- Noise: 0.05", "the modifier Noise; supported are UpperCase, TitleCase"),
    "- TitleCase: 0.04": ("- TitleCase: 1.5", "TitleCase: 1.5; it must be a probability from 0 to 1"),
    "- Typos: 0.3": ("- Typos: yes", "Typos: True"),
    "char_swap: 0.5": ("char_swop: 0.5", "the option char_swop of Typos"),
    "- UpperCase: 0.1\n": ("- UpperCase: 0.1\n      words: 3\n", "the option words of UpperCase"),
    "- RemoveEndPunct: 0.2": ("- UpperCase: 0.2", "the modifier UpperCase twice"),
    "- medium 0.2": ("- medum 0.2", "medum in stage start, which is not a data set (clean,"),
    "- clean 0.8": ("- clean", "'clean' in stage start; write NAME SHARE"),
    "- dirty 0\n": ("- until dirty 1\n", "'until dirty 1' in stage start"),
    "- until clean 2": ("- until clean", "'until clean'"),
    "modifiers: []": ("preprocess: sort", "preprocess in stage mid; a stage has mix and modifiers"),
    "  mix: [clean 0.6, dirty 0.4, until steps 500]\n": ("", "no mix in stage mid"),
    "  clean: corpora/clean.gz": ("  clean: 3", "the data set clean: 3"),
    "datasets:\n": ("datasets: [\n", "is not YAML"),
}


@pytest.mark.parametrize("part", WRONG)
def test_what_cannot_be_done_is_refused_by_name(tmp_path, part):
    assert part in CURRICULUM
    wrong, message = WRONG[part]
    with pytest.raises(UserError) as error:
        read_curriculum(write(tmp_path, CURRICULUM.replace(part, wrong, 1)))
    assert message in str(error.value) and "curriculum.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_none_is_refused(tmp_path):
    for text, message in (("", "is no curriculum"), ("- a", "is no curriculum"), ("a: !x 1", "not YAML")):
        with pytest.raises(UserError, match=message):
            read_curriculum(write(tmp_path, text))
    for path in (tmp_path, tmp_path / "absent.yaml"):
        with pytest.raises(UserError, match=r"data\.stages: .* cannot be read"):
            read_curriculum(path)
